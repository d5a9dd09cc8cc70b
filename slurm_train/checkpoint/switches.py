"""What a training freezes, unfreezes, or puts into another mode; a checkpoint of weights does not have it.

Only what has changed since the start of the training is saved, so a setting that a person changes in the program before
the next start takes effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slurm_train.checkpoint.state import Structure, structure_of


class Switches:
    """The switches of a model: `requires_grad` of parameters, `training` of modules, `track_running_stats` of norms.

    Args:
        model: as the program has made it, at the start of the training.
        has_modes: whether `training` counts; not where the library itself sets it at each step.
    """

    def __init__(self, model: nn.Module, *, has_modes: bool) -> None:
        self._model = model
        self._has_modes = has_modes
        self.at_start: Mapping[str, bool] = self._read(structure_of(model))
        """All switches at the start."""

    def changed(self, structure: Structure | None = None) -> dict[str, bool]:
        """Returns the switches that have changed since the start, e.g. {"backbone.weight.requires_grad": True}.

        Args:
            structure: what `structure_of` gives of the model at this moment, if it is known.
        """
        switches = self._read(structure or structure_of(self._model))
        return {name: value for name, value in switches.items() if self.at_start.get(name) != value}

    def set(self, changed: Mapping[str, bool]) -> None:
        """Sets switches that `changed` returned; those of parameters and modules that the model lacks are ignored."""
        structure = structure_of(self._model)
        parts = {**structure.modules, **structure.parameters}
        for path, value in changed.items():
            name, _, switch = path.rpartition(".")
            if name in parts:
                setattr(parts[name], switch, value)

    def _read(self, structure: Structure) -> dict[str, bool]:
        switches = {f"{name}.requires_grad": weight.requires_grad for name, weight in structure.parameters.items()}
        for name, part in structure.modules.items():
            if self._has_modes:
                switches[f"{name}.training"] = part.training
            if isinstance(part, _BatchNorm):
                switches[f"{name}.track_running_stats"] = part.track_running_stats
        return switches
