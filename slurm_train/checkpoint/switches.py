"""What a training freezes, unfreezes, or puts into another mode; a checkpoint of weights does not have it.

Only what has changed since the start of the training is saved, so a setting that a person changes in the program before
the next start takes effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slurm_train.checkpoint.state import plain_names, structure_of


class Switches:
    """The switches of a model: `requires_grad` of parameters, `training` of modules, `track_running_stats` of norms.

    Args:
        model: as the program has made it, at the start of the training.
        has_modes: whether `training` counts; not where the library itself sets it at each step.
    """

    def __init__(self, model: nn.Module, *, has_modes: bool) -> None:
        self._model = model
        self._has_modes = has_modes
        self.at_start: Mapping[str, bool] = self._read()
        """All switches at the start."""

    def changed(self) -> dict[str, bool]:
        """Returns the switches that have changed since the start, e.g. {"backbone.weight.requires_grad": True}."""
        return {name: value for name, value in self._read().items() if self.at_start.get(name) != value}

    def set(self, changed: Mapping[str, bool]) -> None:
        """Sets switches that `changed` returned; those of parameters and modules that the model lacks are ignored."""
        plain = plain_names(self._model)
        parts: dict[str, Any] = {
            # What is within a wrapper comes after it.
            **{plain(f"{name}.").removesuffix("."): module for name, module in self._model.named_modules()},
            **{plain(name): weight for name, weight in self._model.named_parameters()},
        }
        for path, value in changed.items():
            name, _, switch = path.rpartition(".")
            if name in parts:
                setattr(parts[name], switch, value)

    def _read(self) -> dict[str, bool]:
        structure = structure_of(self._model)
        switches = {f"{name}.requires_grad": weight.requires_grad for name, weight in structure.parameters.items()}
        for prefix, part in structure.modules.items():
            name = structure.plain(f"{prefix}.").removesuffix(".")
            if self._has_modes:
                switches[f"{name}.training"] = part.training
            if isinstance(part, _BatchNorm):
                switches[f"{name}.track_running_stats"] = part.track_running_stats
        return switches
