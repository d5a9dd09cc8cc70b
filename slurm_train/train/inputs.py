"""How batches get to this rank's model: which positions, in which memory format, computed in which precision."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.config.parallel import ParallelLayout
from slurm_train.data.source import Batch, map_tensors
from slurm_train.distributed.parallelize import has_own_loss, leave_inputs
from slurm_train.distributed.sequence import SequencePart
from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import has_lists
from slurm_train.models.own_loss import LABELS
from slurm_train.train.device_copies import to_device


class ModelInputs:
    """The way of a batch to the model, for training, evaluation and trials alike.

    Args:
        device: where the model is.
        autocast: type of the matrix products, None for the parameters' own.
        sequence_part: this rank's positions of each sequence; None for all.
        gathers_half: whether shards are gathered in bfloat16.
        casts_shards: whether their inputs are then cast, too, unless a batch has floats (`keep_floats`).
        is_stage: whether the model is a part of a pipeline, whose stages go on to cast what they get.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
        sequence_part: SequencePart | None = None,
        gathers_half: bool = False,
        casts_shards: bool = False,
        is_stage: bool = False,
    ) -> None:
        self.sequence_part = sequence_part
        self.casts_shards = casts_shards
        self.image_format: torch.memory_format | None = None
        """How images are laid out on the device, None: as they come; `convolutions.tune_convolutions` chooses."""
        self._device = device
        self._may_keep_floats = gathers_half and not is_stage
        self._autocast = torch.bfloat16 if gathers_half else autocast

    def in_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a forward pass: on top of inputs that are cast, autocast would only cast again."""
        autocast = None if self.casts_shards else self._autocast
        return torch.autocast(self._device.type, dtype=autocast, enabled=autocast is not None)

    def own_part(self, batch: Any) -> Any:
        """Returns this rank's positions of a batch."""
        return batch if self.sequence_part is None else self.sequence_part.cut(batch)

    def on_device(self, batch: Batch) -> Batch:
        """Returns this rank's positions of a batch on the device."""
        return to_device(self.own_part(batch), self._device, image_format=self.image_format)

    def keep_floats(self, model: nn.Module, batch: Batch) -> None:
        """Has shards in bfloat16 compute with autocast, and without a cast of inputs, where a batch has float inputs.

        To be called before the first forward pass of a training or an evaluation, on all ranks alike. A clock or a
        coordinate would be rounded (526 to 528) that whole replicas see as it is. Models of whole numbers, texts,
        compute in bfloat16 throughout, which takes less memory than autocast. A model of float64, which autocast leaves
        alone, goes on to cast what it gets, and so do the stages of a pipeline.

        Args:
            model: this rank's part.
            batch: (inputs, ...), or tensors by name.

        Raises:
            ConfigError: shards would round lists of float64 tensors, targets too.
        """
        if not self._may_keep_floats:
            return
        # Targets beside the inputs do not go into the model, and a loss of its own takes a batch of names apart itself.
        is_apart = has_own_loss(model)
        inputs: Any = batch[:1] if isinstance(batch, tuple) else batch
        if isinstance(batch, dict) and is_apart:
            inputs = {name: part for name, part in batch.items() if name != LABELS}
        are_floats: list[bool] = []

        def note(tensor: Tensor) -> Tensor:
            are_floats.append(tensor.is_floating_point() and tensor.dtype != torch.float64)
            return tensor

        map_tensors(note, batch if has_lists(batch) else inputs)
        if any(are_floats):
            leave_inputs(model)
            self.casts_shards = False
        elif has_lists(batch) and self.casts_shards:
            raise ConfigError(
                "a batch has lists of float64 tensors, and shards that are gathered in bfloat16 round all inputs, "
                "targets too",
                hint="give float32, set parallel.gather_dtype=float32, or define training_loss(batch) on the model",
            )


def require_cuttable(batch: Batch, layout: ParallelLayout) -> None:
    """Checks that a layout can cut such batches into stages' micro-batches and parts of sequences.

    Raises:
        ConfigError: it cannot.
    """
    if layout.pp * layout.cp == 1:
        return
    if isinstance(batch, dict):
        raise ConfigError(
            f"batches are dicts ({', '.join(batch)}), which a layout of {layout} cannot cut",
            hint="let the data set give tuples (inputs, targets), or leave parallel.pp and parallel.cp at 1",
        )
    if layout.cp > 1 and len(batch) > 2:
        raise ConfigError(
            f"the samples say where documents begin, and parallel.cp={layout.cp} cuts sequences into parts whose "
            "attention has no document mask",
            hint="set data.document_mask=false, or leave parallel.cp at 1",
        )
    if has_lists(batch):
        raise ConfigError(
            f"a batch has lists of tensors, which a layout of {layout} cannot cut",
            hint="leave parallel.pp and parallel.cp at 1",
        )
