"""What a run may lose at worst: the steps since the last checkpoint that outlives what happened.

Pure but for what the run itself has measured, which is read from its directory.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.notice import read_measured, warning_lead_s
from slurm_train.slurm.preemption import Preemption


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstLoss:
    """Steps that have to be done again, at worst."""

    interval_steps: int | None
    """Between checkpoints that outlive a lost node; None where that is not a number of steps."""
    step_s: float | None
    save_s: float | None
    """Longest save so far."""
    notice_s: float | None
    """From the first signal of a preemption to the end; None where nobody preempts, or it is not known."""
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
        """Steps that go with a lost node: an interval, and what is done while the newest save is being written."""
        if self.interval_steps is None or not self.step_s or not self.save_s:
            return self.interval_steps
        return self.interval_steps + math.ceil(self.save_s / self.step_s)

    @property
    def in_words(self) -> str:
        """One line: a lost node, a preemption, the time limit."""
        at_limit = f"nothing at the time limit (asked {self.warning_s} s before)"
        return f"{self._node()} with a lost node; {self._preempted()}; {at_limit}"

    def _node(self) -> str:
        if self.node_loss_steps is None:
            return self.rhythm
        text = f"{self.node_loss_steps} steps"
        return f"{text} (about {duration(self.node_loss_steps * self.step_s)})" if self.step_s else text

    def _preempted(self) -> str:
        if self.preemption in ("never", "suspended"):
            return "nothing by preemption"
        if self.notice_s is None:
            return "a preemption depends on its grace, which is not known"
        if self.save_s is None:
            return f"as much by preemption, or nothing if a save takes less than {self.notice_s:.0f} s"
        if self.save_s < self.notice_s:
            return f"nothing by preemption: {self.notice_s:.0f} s to save in, {self.save_s:.1f} s needed so far"
        return f"as much by preemption: {self.notice_s:.0f} s to save in, {self.save_s:.1f} s needed so far"


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
    # What lies on a node's own disk goes with the node.
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


def duration(seconds: float) -> str:
    """Returns a time for people, e.g. "45 s", "3 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
