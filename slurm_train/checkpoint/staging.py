"""Memory that a training state is copied into before it is written, used again by every save.

Fresh memory costs several times the copy, since the kernel clears each page when it is first touched; so the buffers
are made once, touched before they are needed, and kept. From a GPU the copy runs on a stream of its own into pinned
memory: training goes on beside it, and only the next change of the tensors has to wait.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Kind(NamedTuple):
    """What makes two buffers interchangeable."""

    shape: torch.Size
    dtype: torch.dtype
    pinned: bool


class StagingBuffers:
    """Copies of a nested state in host memory; a new copy takes the place of the one before.

    Args:
        device: where the training's tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_remote = device.type == "cuda"
        """The tensors are on a GPU, so a save reads copies in any case."""
        self._device = device
        self._can_pin = self.is_remote and can_pin()
        self._buffers: defaultdict[_Kind, list[Tensor]] = defaultdict(list)
        self._stream = torch.cuda.Stream(device) if self._can_pin else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(buffer.nbytes for of_kind in self._buffers.values() for buffer in of_kind)

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Makes and touches the buffers that such tensors will need; not while a copy is in use."""
        self._enter_device()
        for tensor in tensors:
            kind = self._kind_of(_local(tensor))
            self._buffers[kind].append(self._new_buffer(kind).zero_())

    def stage(self, state: Any) -> Any:
        """Returns a copy of a nested state of dictionaries, lists and tensors; the copy before it is gone.

        From a GPU the bytes arrive later: a reader calls `wait_for_copy` first, and who changes the tensors calls
        `hold_changes`.
        """
        unused = {kind: iter(buffers) for kind, buffers in self._buffers.items()}
        if self._stream is None:
            return self._copy(state, unused)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            staged = self._copy(state, unused)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says no types here
            self._copied.record(self._stream)
        return staged

    def wait_for_copy(self) -> None:
        """Returns when the bytes are there; for the thread that reads them."""
        self._enter_device()
        if self._copied is not None:
            self._copied.synchronize()

    def hold_changes(self) -> None:
        """Makes the GPU's later work wait for the copy; the host goes on. Nothing to do on a CPU."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def _enter_device(self) -> None:
        # A thread begins on GPU 0, and whatever touches CUDA there takes half a GB of it, for every rank of a node.
        if self.is_remote:
            torch.cuda.set_device(self._device)

    def _copy(self, value: Any, unused: dict[_Kind, Any]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, unused)
        if isinstance(value, dict):
            return {key: self._copy(item, unused) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item, unused) for item in value)
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, unused: dict[_Kind, Any]) -> Tensor:
        local = _local(tensor)
        kind = self._kind_of(local)
        buffer = next(unused.get(kind, iter(())), None)
        if buffer is None:
            buffer = self._new_buffer(kind)
            self._buffers[kind].append(buffer)
        buffer.copy_(local.detach(), non_blocking=kind.pinned)
        return buffer if local is tensor else _as_sharded(buffer, tensor)

    def _kind_of(self, tensor: Tensor) -> _Kind:
        return _Kind(tensor.shape, tensor.dtype, self._can_pin and tensor.is_cuda)

    def _new_buffer(self, kind: _Kind) -> Tensor:
        return torch.empty(kind.shape, dtype=kind.dtype, pin_memory=kind.pinned)


def can_pin() -> bool:
    """Says whether pinned host memory can be had here; containers and memory limits refuse it at times."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


def _local(tensor: Tensor) -> Tensor:
    """Returns the part that this rank holds: of a DTensor its shard, else the tensor itself."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _as_sharded(buffer: Tensor, tensor: Any) -> Tensor:
    """Returns the buffer as the same shard of the same whole; from_local would move it to the mesh's device."""
    from torch.distributed.tensor import DTensor

    build: Any = DTensor
    sharded: Tensor = build(buffer, tensor._spec, requires_grad=False)
    return sharded
