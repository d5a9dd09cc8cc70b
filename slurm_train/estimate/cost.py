"""What a run costs and what it may lose at worst: GPU hours, and steps since a checkpoint that survives.

Hours for the steps that are left are an estimate from measured step times. Reads run directories, writes nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import SlurmTrainError
from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.files import last_lines, read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lookup import list_runs
from slurm_train.rundir.timing import read_measured, warning_lead_s
from slurm_train.slurm.policy import Preemption

_MOST_RUNS = 20
_MOST_LINES = 50


@dataclass(frozen=True, slots=True)
class Speed:
    """A measured step time."""

    step_s: float
    source: str
    """The run it was measured in, e.g. "gpt-stdlib/5d2030c7"."""


def measured_speed(plan: RunPlan) -> Speed | None:
    """Returns the step time of this run, else of the newest one that trains the same model in the same world."""
    others = (run for run in list_runs(plan.run.path.parent.parent) if run.name == plan.run.name)
    for run in [plan.run, *list(others)[:_MOST_RUNS]]:
        lines = [line for line in last_lines(run.metrics) if "step_time_s" in line][-_MOST_LINES:]
        times = [float(line["step_time_s"]) for line in lines if line.get("world_size") == plan.world.size]
        if times and _does_same_work(run, plan):
            return Speed(median(times), f"{run.name}/{run.run_id}")
    return None


def _does_same_work(run: RunDirectory, plan: RunPlan) -> bool:
    try:
        other = load_config(run.config)
    except SlurmTrainError:
        return False
    batch = (read_json(run.plan) or {}).get("batch")
    return _work(other) == _work(plan.config) and batch == plan.as_json()["batch"]


def _work(config: RunConfig) -> tuple[Any, ...]:
    """Returns what decides how long a step takes."""
    return config.model, config.data, config.task, config.script, config.train.precision, config.train.compile


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Hours of GPUs (of ranks, where there are none)."""

    per_attempt_h: float | None
    """Up to the time limit; None where there is none, or it is not known."""
    limit_min: int | None
    left_h: float | None
    """Estimate for the steps that are left; None where no speed was measured."""
    left_steps: int | None
    speed: Speed | None

    @property
    def in_words(self) -> str:
        """One line, e.g. "at most 256 per attempt (480 min); about 37 for 300 steps (estimate: ...)"."""
        parts = []
        if self.per_attempt_h is not None:
            parts.append(f"at most {hours_in_words(self.per_attempt_h)} per attempt ({self.limit_min} min)")
        if self.left_h is not None and self.speed is not None:
            measured = f"{self.speed.step_s:.3g} s a step in {self.speed.source}"
            parts.append(f"about {hours_in_words(self.left_h)} for {self.left_steps} steps (estimate: {measured})")
        return "; ".join(parts) or "not known: no time limit is set, and no run like it was measured"


def estimate_cost(plan: RunPlan, *, limit_min: int | None) -> Cost:
    """Returns what a run may cost.

    Args:
        plan: the run.
        limit_min: time limit of an attempt, its own or the partition's; None if unlimited or not known.
    """
    speed, left_steps, left_h = measured_speed(plan), None, None
    if plan.config.trains:
        done = max((int(line.get("step", 0)) for line in last_lines(plan.run.metrics)), default=0)
        left_steps = plan.config.train.max_steps - done
    if speed is not None and left_steps is not None:
        left_h = max(left_steps, 0) * speed.step_s * plan.world.size / 3600
    return Cost(
        per_attempt_h=None if limit_min is None else plan.world.size * limit_min / 60,
        limit_min=limit_min,
        left_h=left_h,
        left_steps=left_steps,
        speed=speed,
    )


def hours_in_words(number: float) -> str:
    """Returns e.g. "256" or "0.37"."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstLoss:
    """Steps that have to be done again, at worst."""

    interval_steps: int | None
    """Between checkpoints that survive a lost node; None where that is not a number of steps."""
    step_s: float | None
    save_s: float | None
    """Longest save so far."""
    notice_s: float | None
    """From the first signal of a preemption to the end; None where nothing preempts the run, or it is not known."""
    preemption: str
    """never, requeued, cancelled, suspended; "" where it is not known."""
    warning_s: int
    """How long before its time limit a run is asked to save."""
    rhythm: str
    """When checkpoints are written, in words, where that is no number of steps."""

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan --json` prints."""
        return asdict(self) | {"node_loss_steps": self.node_loss_steps}

    @property
    def node_loss_steps(self) -> int | None:
        """Steps that are lost with a node: an interval, and those done while the newest save is being written."""
        if self.interval_steps is None or not self.step_s or not self.save_s:
            return self.interval_steps
        return self.interval_steps + math.ceil(self.save_s / self.step_s)

    @property
    def in_words(self) -> str:
        """One line: a lost node, a preemption, the time limit."""
        node = self.rhythm if self.node_loss_steps is None else f"{self.node_loss_steps} steps"
        if self.node_loss_steps is not None and self.step_s:
            node += f" (about {_duration(self.node_loss_steps * self.step_s)})"
        at_limit = f"nothing at the time limit (asked {self.warning_s} s before)"
        return f"{node} with a lost node; {self._preempted()}; {at_limit}"

    def _preempted(self) -> str:
        if self.preemption in ("never", "suspended"):
            return "nothing by preemption"
        if self.notice_s is None:
            return "a preemption depends on its grace, which is not known"
        if self.save_s is None:
            return f"as much by preemption, or nothing if a save takes less than {self.notice_s:.0f} s"
        loss = "nothing" if self.save_s < self.notice_s else "as much"
        return f"{loss} by preemption: {self.notice_s:.0f} s to save in, {self.save_s:.1f} s needed so far"


def worst_loss(
    plan: RunPlan, *, preemption: Preemption | None, step_s: float | None, limit_min: int | None
) -> WorstLoss:
    """Returns what a run may lose.

    Args:
        plan: the run.
        preemption: how its site preempts it; None where that is not known.
        step_s: a measured step time.
        limit_min: time limit of an attempt.
    """
    settings, measured = plan.config.checkpoint, read_measured(plan.run)
    # What lies on a node's own disk is lost with the node.
    reach = settings.copy_every if settings.local_dir else 1
    every = settings.every_steps
    ends = preemption is not None and preemption.outcome in ("requeued", "cancelled")
    limit_s = None if limit_min is None else 60.0 * limit_min
    return WorstLoss(
        interval_steps=min(every * reach, plan.config.train.max_steps) if isinstance(every, int) else None,
        step_s=step_s,
        save_s=None if measured is None else measured.save_s,
        notice_s=preemption.grace_s + (preemption.kill_wait_s or 0.0) if ends and preemption is not None else None,
        preemption="" if preemption is None else preemption.outcome,
        warning_s=warning_lead_s(plan.config.requeue.warn_before_limit_s, plan.run, limit_s=limit_s),
        rhythm="what was done since the last checkpoint" if every == "auto" else "everything since the start",
    )


def _duration(seconds: float) -> str:
    """Returns a time for people, e.g. "45 s", "3 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
