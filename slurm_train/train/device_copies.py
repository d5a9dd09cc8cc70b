"""Micro-batches on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from slurm_train.data.batches import MicroBatch
from slurm_train.data.source import Batch, map_tensors


class Pinning:
    """Puts the tensors of a micro-batch into pinned memory, from which a GPU copies by itself.

    For the thread that reads ahead: pinning is a copy on the host, which the training thread would have to wait for.

    Args:
        device: the GPU that they will be copied to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_entered = False

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Returns the micro-batch in pinned memory; only one thread calls it."""
        if not self._has_entered:
            # A thread begins on GPU 0, and whatever touches CUDA there takes half a GB of it.
            torch.cuda.set_device(self._device)
            self._has_entered = True
        return batch._replace(tensors=map_tensors(_pinned, batch.tensors))


class DeviceCopies:
    """Copies micro-batches to a GPU on a stream of their own, beside what it computes.

    On the stream of the computation a copy would begin when all that was launched before it is done.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    def copy(self, batch: Batch, *, image_format: torch.memory_format | None = None) -> Batch:
        """Returns copies, images in this format; what is launched from now on waits for them, and the host does not."""
        with torch.cuda.stream(self._stream):
            copies = to_device(batch, self._device, image_format=image_format)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)

        def keep(tensor: Tensor) -> Tensor:
            # Their memory belongs to the other stream, which may not give it away while it is computed with.
            tensor.record_stream(computing)
            return tensor

        return map_tensors(keep, copies)


def to_device(batch: Batch, device: torch.device, *, image_format: torch.memory_format | None = None) -> Batch:
    """Returns copies on a GPU, made while it works; on the CPU the tensors themselves.

    Args:
        batch: in host memory.
        device: where the copies are to be.
        image_format: how images are laid out there; None: as they come.
    """
    if device.type != "cpu":
        batch = map_tensors(lambda tensor: _pinned(tensor).to(device, non_blocking=True), batch)
    # By the device: the host would take longer for it than for the copy.
    return batch if image_format is None else in_format(batch, image_format)


def in_format(batch: Batch, image_format: torch.memory_format) -> Batch:
    """Returns a batch with its images, floating-point tensors of four dimensions, laid out in a format."""

    def lay_out(tensor: Tensor) -> Tensor:
        is_image = tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.to(memory_format=image_format) if is_image else tensor

    return map_tensors(lay_out, batch)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()
