"""The moments of a run at which the campaign `cancel` cancels, the ways it does so, and what it looks at afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.timing import newest_training_line

STEP_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Where in its life a run is cancelled: a random moment within `span_s` after `is_there`.

    Args:
        share: of the trials, relative to the other phases.
        span_s: seconds.
        is_there: asked of the run and its Restarts.
        words: what the run is given.
        fault: what is done to it once it trains: "kill" (a rank), "warn" (as before a time limit), "preempt", "".
        is_light: its ranks run a script without torch, so that it is the supervisor that is tried.
    """

    share: int
    span_s: float
    is_there: Callable[[RunDirectory], bool] = lambda _: True
    words: tuple[str, ...] = ()
    fault: str = ""
    after_restart: bool = False
    is_light: bool = False


def _has_begun(run: RunDirectory) -> bool:
    return bool(existing_attempts(run))


def _all_beat(run: RunDirectory) -> bool:
    return len(read_beats(run, 0)) == 2


def trains(run: RunDirectory) -> bool:
    """Returns whether the run has done steps (or a script without torch says so)."""
    if (newest_training_line(run.metrics) or {}).get("step", 0) >= 2:
        return True
    attempts = existing_attempts(run)
    log = run.rank_log(attempts[-1], 0) if attempts else None
    return log is not None and log.exists() and b"trains" in log.read_bytes()


def _is_saving(run: RunDirectory) -> bool:
    return any(run.checkpoints.glob("*.tmp"))


PHASES: dict[str, Phase] = {
    "pending": Phase(share=2, span_s=1.0, words=("cluster.sbatch.begin=now+3600",)),
    "just submitted": Phase(share=4, span_s=1.5),
    "importing": Phase(share=3, span_s=2.0, is_there=_has_begun),
    "rendezvous": Phase(share=3, span_s=5.0, is_there=_all_beat, words=("cluster.gpus_per_node=2",)),
    "training": Phase(share=3, span_s=1.0, is_there=trains),
    "saving": Phase(share=3, span_s=0.2, is_there=_is_saving, words=("checkpoint.every_steps=1", "model.width=1024")),
    "relaunch": Phase(share=4, span_s=4.0, is_there=trains, fault="kill"),
    "in the requeue": Phase(share=4, span_s=1.5, is_there=trains, fault="warn", is_light=True),
    "saving for the requeue": Phase(share=2, span_s=2.0, is_there=trains, fault="warn"),
    "requeued": Phase(share=4, span_s=13.0, is_there=trains, fault="warn", after_restart=True, is_light=True),
    "preempted": Phase(share=2, span_s=2.5, is_there=trains, fault="preempt", is_light=True),
}

FORMS: dict[str, tuple[str, ...]] = {
    "scancel": ("scancel",),
    "scancel twice": ("scancel",),
    "cancel RUN": (),
    "scancel --full": ("scancel", "--full"),
    "scancel --signal=KILL": ("scancel", "--signal=KILL"),
    "scancel --full --signal=KILL": ("scancel", "--full", "--signal=KILL"),
    "scancel --batch": ("scancel", "--batch"),
}
"""How it is cancelled. `scancel --batch` kills the batch script alone: Slurm calls such a job FAILED."""
_FORM_WEIGHTS = (8, 3, 3, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run and when and how it is cancelled."""

    number: int
    phase: str
    delay_s: float
    form: str

    def __str__(self) -> str:
        return f"trial {self.number} ({self.phase} + {self.delay_s:.2f} s, {self.form})"


def plan_trials(*, seed: int, trials: int) -> list[Trial]:
    """Returns the trials: every phase by its share, moments and forms at random."""
    chance = random.Random(seed)
    names = [name for name, phase in PHASES.items() for _ in range(phase.share)]
    # A few trials are to see different phases, so the list is gone through in an even mixture.
    chance.shuffle(names)
    ordered = sorted(range(len(names)), key=lambda index: (names[:index].count(names[index]), index))
    planned = []
    for number in range(trials):
        phase = names[ordered[number % len(names)]]
        # A job without a batch script has none to kill; what is not running cannot be sent a signal.
        early = phase in ("pending", "just submitted", "requeued")
        forms, weights = (list(FORMS)[:3], _FORM_WEIGHTS[:3]) if early else (list(FORMS), _FORM_WEIGHTS)
        form = chance.choices(forms, weights)[0]
        delay_s = chance.uniform(0.0, PHASES[phase].span_s)
        planned.append(Trial(number=number, phase=phase, delay_s=delay_s, form=form))
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What there is to see of a cancelled run, later than a requeue would take."""

    form: str
    state: str
    """Slurm's word for the job."""
    restarts_then: int
    """Right after the cancel."""
    restarts: int
    jobs: tuple[str, ...]
    """All jobs that the run has ever had, or that have its name."""
    attempts_late_s: tuple[float, ...] = field(default=())
    """Begins of attempts, in seconds after the cancel."""
    step_late_s: float = 0.0
    """Newest step, in seconds after the cancel."""
    status: str
    """What `status` calls the run."""
    is_finished: bool = False


LATE_S = 10.0
"""A cancelled job has KillWait (5 s here) to end in; nothing may happen to the run after that."""


def what_is_wrong(seen: Aftermath) -> str:
    """Returns how the cancel was not obeyed, "" if it was."""
    wanted = ("FAILED", "CANCELLED") if seen.form == "scancel --batch" else ("CANCELLED",)
    found = []
    if seen.state not in wanted:
        found.append(f"the job is {seen.state}")
    if seen.restarts > seen.restarts_then:
        found.append(f"Restarts rose from {seen.restarts_then} to {seen.restarts}")
    if len(seen.jobs) > 1:
        found.append(f"the run has other jobs: {', '.join(seen.jobs)}")
    if any(late > LATE_S for late in seen.attempts_late_s):
        found.append(f"an attempt began {max(seen.attempts_late_s):.1f} s later")
    if seen.step_late_s > LATE_S:
        found.append(f"it still trained {seen.step_late_s:.1f} s later")
    if seen.status not in (word.lower() for word in wanted):
        found.append(f"status calls it {seen.status!r}")
    if seen.is_finished:
        found.append("it was finished before it was cancelled")
    return "; ".join(found)
