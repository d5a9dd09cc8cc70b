"""What a run was planned as: `plan.json`, read and written as a record."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.rundir.files import fields_of, read_json

_STATED_IF_ANY = ("num_nodes", "chosen", "cpus_per_rank", "shares")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorld:
    """The ranks of a run."""

    size: int = 1
    ranks_per_node: tuple[int, ...] = ()
    num_nodes: tuple[int, ...] = ()
    """How many nodes Slurm may grant; () for as many as `ranks_per_node` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """How the global batch is divided."""

    ranks: int = 1
    global_size: int
    local_size: int = 1
    accumulation: int = 1
    shares: tuple[int, ...] = ()
    """Of each rank, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRate:
    """The peak learning rate."""

    planned: float
    configured: float
    retune: str
    tuned_for_global_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What a run was planned as; what is not on record has its default here."""

    config_hash: str = ""
    """Of what is trained; the run id is its beginning."""
    directory: str = ""
    """Submitting directory, which relative paths in a user's code start from."""
    path: str = ""
    """The run directory as it was spelled; runs of earlier versions have none."""
    world: PlannedWorld = PlannedWorld()
    layout: Mapping[str, int] = field(default_factory=dict)
    chosen: str = ""
    """What `parallel.dp_shard=auto` has chosen and why."""
    cpus_per_rank: int | None = None
    batch: PlannedBatch | None = None
    lr: PlannedRate | None = None
    max_steps: int | None = None
    """None where only the ranks know it."""
    samples: int | None = None
    requeue: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, *, writers: Collection[int] | None = None) -> PlanRecord:
        """Returns the record of a run; where its file is missing or torn, an empty one.

        Args:
            path: `plan` of the run.
            writers: see `trust.open_to_read`.
        """
        return cls(**fields_of(cls, read_json(path, writers=writers) or {}))

    def as_json(self) -> dict[str, Any]:
        """Returns the content of the file."""
        return _stated(asdict(self))


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for key, value in values.items():
        if value or key not in _STATED_IF_ANY:
            stated[key] = _stated(value) if isinstance(value, dict) else value
            if isinstance(value, tuple):
                stated[key] = list(value)
    return stated
