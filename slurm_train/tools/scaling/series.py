"""The runs of a scaling study: what a person would type for each, and what cannot be measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_train.config.compose import compose
from slurm_train.config.words import Words, split_word
from slurm_train.errors import ConfigError, require_all
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.tools.scaling.model import Size, StudyPoint, plan_points

LOG_EVERY = 8
"""Steps of a line of metrics: the mean of several steps is steadier than one."""
_OWN_KEYS = (
    *("batch.local_size", "batch.accumulation", "batch.global_size", "run.name", "train.max_steps", "ddp.comm"),
    *("train.max_epochs", "run.processes", "cluster.nodes", "cluster.gpus_per_node"),
)
"""Keys that each run sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """The study as it was asked for."""

    flags: Words
    """What was typed, without what each run sets itself."""
    plan: RunPlan
    """The run at full size."""
    comms: tuple[str, ...]
    steps: int

    @property
    def name(self) -> str:
        """Of the study, which its runs share."""
        return f"{self.plan.run.name}-scaling"

    @property
    def size(self) -> Size:
        """The largest size."""
        return Size(self.plan.world.num_nodes, self.plan.world.ranks_per_node[0])

    @property
    def uses_cluster(self) -> bool:
        """Whether its runs are jobs. Not by the words: a file may name the cluster, or have one in it."""
        return self.plan.config.uses_cluster

    @property
    def points(self) -> list[StudyPoint]:
        """Its runs."""
        return plan_points(self.size, local_size=self.plan.batch.local_size, comms=self.comms)

    def words(self, point: StudyPoint, *, after: str = "") -> Words:
        """Returns what a person would type for one run; it begins when another job has ended."""
        size = point.size
        on_cluster = [f"cluster.nodes={size.nodes}", f"cluster.gpus_per_node={size.per_node}"]
        overrides = [
            *(on_cluster if self.uses_cluster else [f"run.processes={size.per_node}"]),
            f"run.name={self.name}-{size}",
            f"batch.local_size={point.local_size}",
            f"batch.accumulation={point.accumulation}",
            f"ddp.comm={point.comm}",
            f"train.max_steps={self.steps}",
            f"train.log_every_steps={LOG_EVERY}",
            "train.evaluate=false",
            "train.sample_tokens=0",
            # These few steps are timed, and may be fewer than a warm-up has.
            "optim.warmup_samples=null",
            "optim.decay_samples=null",
            "checkpoint.every_steps=null",
            "health.pace_every_steps=3",
        ]
        overrides += [f"cluster.sbatch.dependency=afterany:{after}"] if after else []
        return replace(self.flags, overrides=[*self.flags.overrides, *overrides])


def read_series(flags: Words, *, steps: int, env: Mapping[str, str], cwd: Path) -> StudyPlan:
    """Returns the study that the command line describes; touches nothing.

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
    keys = {word: split_word(word)[1:] for word in flags.overrides}
    comms = [value for key, value in keys.values() if key == "ddp.comm" and value]
    # Of several ways of exchanging any will do to see whether the rest fits together.
    plan = plan_of(
        replace(flags, overrides=[word for word, (key, _) in keys.items() if key != "ddp.comm"]), env=env, cwd=cwd
    )
    _require_something_to_time(plan)
    return StudyPlan(
        flags=replace(flags, overrides=[word for word, (key, _) in keys.items() if key not in _OWN_KEYS]),
        plan=plan,
        comms=tuple(["none", *comms][-1].strip("[]").split(",")),
        steps=-(-steps // LOG_EVERY) * LOG_EVERY,
    )


def _require_something_to_time(plan: RunPlan) -> None:
    require_all(
        [
            (
                not plan.program.is_planned,
                "a function or script of your own measures nothing",
                "scaling is for the trainer",
            ),
            (
                not plan.layout.is_replicated,
                f"scaling times whole replicas, parallel asks for {plan.layout}",
                "leave parallel.* out: a cut model does not fit the smallest size, and sends other things",
            ),
            (
                not plan.world.is_even or bool(plan.world.node_counts),
                f"scaling compares numbers of equal nodes, the command line asks for {plan.world.nodes_in_words}",
                "give one number of nodes and one number of GPUs for all of them, e.g. +cluster=4x8",
            ),
            (
                plan.config.batch.shares != "even",
                "scaling gives all ranks equal shares, batch.shares was set",
                "leave batch.shares out: unequal shares would hide what a slow rank costs",
            ),
            (plan.world.num_ranks == 1, "scaling needs two ranks or more", "write +cluster=NxG, e.g. +cluster=4x8"),
        ]
    )


def plan_of(flags: Words, *, env: Mapping[str, str], cwd: Path) -> RunPlan:
    """Returns the plan of one run."""
    return plan_run(compose(flags), cwd=cwd, env=env, settle=settle_parallel)
