"""The plan of a sweep: its runs, each planned as if it were typed alone, and the directory that holds its table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.errors import ConfigError
from slurm_train.launch.plan import RunPlan, plan_run
from slurm_train.rundir.sweep import Element, SweepDirectory

if TYPE_CHECKING:
    from slurm_train.config.compose import Composed, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """A sweep as it would be carried out."""

    sweep: SweepDirectory
    elements: tuple[Element, ...]
    plans: tuple[RunPlan, ...]
    """The plan of each element."""
    max_parallel: int | None

    @property
    def uses_cluster(self) -> bool:
        """Whether the runs go through Slurm."""
        return self.plans[0].config.cluster is not None

    @property
    def keys(self) -> list[str]:
        """The keys that the sweep sets, in the order of the words."""
        return list(self.elements[0].overrides)


def plan_sweep(
    points: Sequence[Point], composed: Iterator[Composed], *, cwd: Path, env: Mapping[str, str]
) -> SweepPlan:
    """Returns the plan of a sweep; touches nothing.

    Args:
        points: what each run is given.
        composed: the configuration of each point, composed as it is taken.
        cwd: directory that a relative `run.root` starts from.
        env: environment, for counting local GPUs.

    Raises:
        ConfigError: a point that is no possible run (with its number and values), two points that are the same run,
            or runs that cannot be in one sweep.
    """
    plans = []
    for index, point in enumerate(points):
        with _naming(index, point):
            plans.append(plan_run(next(composed), cwd=cwd, env=env))
    _refuse_same_runs(points, plans)
    _refuse_mixture(plans)
    root = plans[0].run.path.parent.parent
    sweep = SweepDirectory(root / "sweeps" / sweep_id(plans))
    elements = (
        Element(index=index, run=plan.run, overrides=point.values)
        for index, (point, plan) in enumerate(zip(points, plans, strict=True))
    )
    return SweepPlan(
        sweep=sweep,
        elements=tuple(elements),
        plans=tuple(plans),
        max_parallel=plans[0].config.sweep.max_parallel,
    )


def sweep_id(plans: Sequence[RunPlan]) -> str:
    """Returns the sweep's name on disk: a hash of which runs it has, in whatever order they were typed."""
    names = sorted(f"{plan.run.name}/{plan.run.run_id}" for plan in plans)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]


def describe(point: Mapping[str, str]) -> str:
    """Returns a point as a person would type it, e.g. "optim.lr=0.001 seed=3"."""
    return " ".join(f"{key}={value}" for key, value in point.items())


@contextmanager
def _naming(index: int, point: Point) -> Iterator[None]:
    """Puts the run's number and values in front of what is wrong with it."""
    try:
        yield
    except ConfigError as err:
        if not point.values:
            raise
        raise type(err)(f"run {index} ({describe(point.values)}): {err.message}", hint=err.hint) from err


def _refuse_same_runs(points: Sequence[Point], plans: Sequence[RunPlan]) -> None:
    seen: dict[Path, int] = {}
    for index, plan in enumerate(plans):
        first = seen.setdefault(plan.run.path, index)
        if first != index and plans[first].config_hash != plan.config_hash:
            raise ConfigError(
                f"runs {first} and {index} of the sweep have the same id by chance, {plan.run.run_id}: "
                f"{describe(points[first].values)}, and {describe(points[index].values)}",
                hint="sweep run.name as well, or leave one of them to a sweep of its own with another run.name",
            )
        if first != index:
            raise ConfigError(
                f"runs {first} and {index} of the sweep train the same: "
                f"{describe(points[first].values)}, and {describe(points[index].values)}",
                hint="a key that says where or how a run is carried out makes no other run; drop it, "
                "or sweep run.name as well",
            )


def _refuse_mixture(plans: Sequence[RunPlan]) -> None:
    roots = {plan.config.run.root for plan in plans}
    if len(roots) > 1:
        raise ConfigError(f"the runs of one sweep have several roots: {', '.join(sorted(roots))}", hint="drop run.root")
    if len({plan.config.cluster is None for plan in plans}) > 1:
        raise ConfigError(
            "some runs of the sweep ask for a cluster and some do not", hint="sweep sizes, e.g. +cluster=1x8,2x8"
        )
    uneven = next((plan for plan in plans if not plan.world.is_even), None)
    if uneven is not None:
        raise ConfigError(
            f"cluster.gpus_per_node={list(uneven.world.ranks_per_node)}: a sweep is a job array, and Slurm has no "
            "arrays of heterogeneous jobs",
            hint="give one number of GPUs for all nodes, or submit the runs one by one",
        )
    limits = {plan.config.sweep.max_parallel for plan in plans}
    if len(limits) > 1:
        raise ConfigError("sweep.max_parallel differs between the runs of one sweep", hint="give it one value")
