"""What a scaling study asks for: its sizes, and the words that a person would type for each of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.config.words import Words, cluster_sizes, split_word
from slurm_train.errors import ConfigError
from slurm_train.scaling.points import Point, plan_points

if TYPE_CHECKING:
    from slurm_train.launch.plan import RunPlan

LOG_EVERY = 8
"""Steps of a line of metrics: the averages of post-local SGD come every so many, so each line has one."""
_OWN_KEYS = ("batch.local_size", "batch.accumulation", "batch.global_size", "run.name", "train.max_steps", "ddp.comm")
_OWN_SIZES = ("run.processes", "cluster.nodes", "cluster.gpus_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The study as it was asked for."""

    flags: Words
    """What was typed, without what each run sets itself."""
    name: str
    nodes: int
    per_node: int
    local_size: int
    comms: tuple[str, ...]
    steps: int
    uses_cluster: bool
    is_named: bool
    """Whether the cluster comes from a file (`+cluster=NAME`, or a primary one), whose other settings count."""
    folder: Path

    @property
    def points(self) -> list[Point]:
        """Its runs."""
        return plan_points(self.nodes, self.per_node, local_size=self.local_size, comms=self.comms)

    def words(self, point: Point, *, after: str = "") -> Words:
        """Returns what a person would type for one run; it begins when another job has ended."""
        size = point.size
        sized = f"+cluster={size}" if self.uses_cluster else f"run.processes={size.per_node}"
        first = [] if self.is_named else [sized]
        own = [f"cluster.nodes={size.nodes}", f"cluster.gpus_per_node={size.per_node}"] if self.is_named else []
        own += [
            f"run.name={self.name}-scaling-{size}",
            f"batch.local_size={point.local_size}",
            f"batch.accumulation={point.accumulation}",
            f"ddp.comm={point.comm}",
            f"train.max_steps={self.steps}",
            f"train.log_every_steps={LOG_EVERY}",
            "train.evaluate=false",
            "train.sample_tokens=0",
            "checkpoint.every_steps=null",
            # Not a divisor of the steps between averages: all kinds of steps get their share.
            "health.pace_every_steps=3",
        ]
        own += ["ddp.comm_start_step=1"] if point.comm != "none" else []
        own += [f"cluster.sbatch.dependency=afterany:{after}"] if after else []
        return replace(self.flags, overrides=[*first, *self.flags.overrides, *own])


def read_series(flags: Words, *, steps: int, env: Mapping[str, str], cwd: Path) -> Series:
    """Returns the study that the words ask for; touches nothing.

    Args:
        flags: the words, with one size and any ways of exchanging.
        steps: optimizer steps of each run.
        env: environment, for counting local GPUs.
        cwd: directory that a relative `run.root` starts from.

    Raises:
        ConfigError: too few steps or ranks, nodes or shares that are not equal, or nothing that the trainer would run.
    """
    if steps < 4 * LOG_EVERY:
        raise ConfigError(f"--steps={steps} is too short to measure", hint=f"give {4 * LOG_EVERY} or more")
    parsed = [(word, *split_word(word)) for word in flags.overrides]
    # Of several ways of exchanging any will do to see whether the rest fits together.
    asked = [word for word, _, key, _ in parsed if key != "ddp.comm"]
    plan = plan_of(replace(flags, overrides=asked), env=env, cwd=cwd)
    _require_something_to_time(plan)
    is_named = plan.config.cluster is not None and not cluster_sizes(flags.overrides)
    own_keys = (*_OWN_KEYS, *_OWN_SIZES, *(() if is_named else ("cluster",)))
    rest = [word for word, _, key, _ in parsed if key not in own_keys]
    name = plan.run.name
    return Series(
        flags=replace(flags, overrides=rest),
        name=name,
        nodes=plan.world.num_nodes,
        per_node=plan.world.ranks_per_node[0],
        local_size=plan.batch.local_size,
        comms=_comms_of([value or "none" for _, _, key, value in parsed if key == "ddp.comm"]),
        steps=-(-steps // LOG_EVERY) * LOG_EVERY,
        # Not by the words: a file may name the cluster, or have one in it.
        uses_cluster=plan.config.cluster is not None,
        is_named=is_named,
        folder=plan.run.path.parent.parent / f"{name}-scaling",
    )


def _require_something_to_time(plan: RunPlan) -> None:
    if not plan.config.trains:
        raise ConfigError("a function or script of your own measures nothing", hint="scaling is for the trainer")
    if not plan.layout.is_replicated:
        raise ConfigError(
            f"scaling times whole replicas, parallel asks for {plan.layout}",
            hint="leave parallel.* out: a cut model does not fit the smallest size, and sends other things",
        )
    if not plan.world.is_even or plan.world.min_nodes is not None:
        raise ConfigError(
            f"scaling compares numbers of equal nodes, the words ask for {plan.world.nodes_in_words}",
            hint="give one number of nodes and one number of GPUs for all of them, e.g. +cluster=4x8",
        )
    if plan.config.batch.shares != "even":
        raise ConfigError(
            "scaling gives all ranks equal shares, batch.shares was set",
            hint="leave batch.shares out: unequal shares would hide what a slow rank costs",
        )
    if plan.world.size == 1:
        raise ConfigError("scaling needs two ranks or more", hint="write +cluster=NxG, e.g. +cluster=4x8")


def _comms_of(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(values[-1].strip("[]").split(",")) if values else ("none",)


def plan_of(flags: Words, *, env: Mapping[str, str], cwd: Path) -> RunPlan:
    """Returns the plan of one run."""
    from slurm_train.config.compose import compose
    from slurm_train.launch.plan import plan_run

    return plan_run(compose(flags), cwd=cwd, env=env)
