"""What the rules know of a training: what was handed over, and what they remember of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from slurm_train.checkpoint.replicas import digest
from slurm_train.checkpoint.rules.optimizer_steps import OptimizerSteps
from slurm_train.checkpoint.rules.unsaved import UnsavedState
from slurm_train.checkpoint.state import sharded_modules
from slurm_train.checkpoint.tree import encode


@dataclass(slots=True, kw_only=True)
class Watched:
    """A training as the rules see it."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    objects: Mapping[str, Any]
    """What is saved besides by its `state_dict`, by name."""
    generators: frozenset[str] = frozenset()
    """Those of them that are generators of random numbers."""
    sharded: list[Any] = field(init=False)
    """Modules of the model that FSDP2 shards."""
    steps: OptimizerSteps = field(init=False)
    unsaved: UnsavedState = field(init=False)
    """What no checkpoint has, as it was before the first step."""
    streams: dict[str, str] = field(init=False)
    """Digests of the states of streams before the first step, by name."""
    own_state: set[str] = field(default_factory=set)
    """Full names of what optimizers keep under one name, each rank another part of it."""
    said: set[str] = field(default_factory=set)
    """What notes have named already."""
    is_resumed: bool = False
    """Whether a checkpoint was loaded."""
    has_order: bool = True
    """Whether the samples follow from the step."""
    has_pass: bool = False
    """Whether a loader of torch gives them, whose first batch is compared."""
    has_model_of_first_step: bool = True
    """Whether the model has not been put back since, as after an evaluation, which looks like a change."""
    num_steps: int | None = None
    """Steps of this attempt, as the next save is to say; None before the first save."""

    def __post_init__(self) -> None:
        self.sharded = sharded_modules(self.model)
        self.steps = OptimizerSteps(self.model, self.optimizers, list(self.objects.values()))

    def free_gathered(self) -> None:
        """Gives the model its shards again as parameters, which a program's evaluation may have replaced."""
        for module in self.sharded:
            module.reshard()

    def begin(self) -> None:
        """Remembers the present state as that before the first step."""
        self.unsaved = UnsavedState(self.model, dict(self.others()))
        self.streams = {
            name: digest(encode(part.state_dict())) for name, part in self.objects.items() if _is_stream(part)
        }

    def others(self) -> Iterator[tuple[str, Any]]:
        """Yields the objects that are no generators, with their names."""
        return ((name, part) for name, part in self.objects.items() if name not in self.generators)


def _is_stream(part: Any) -> bool:
    return isinstance(part, IterableDataset)
