"""What Slurm says about jobs, asked again and again without being a burden: one squeue per look, and not every time.

What ended longer ago than the controller remembers is asked of sacct, once: an end does not change. Between two
questions, and while nobody answers, the last answer counts; its age is told with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.pace import Pace
from slurm_train.slurm.records import JobState

# Accounting answers slowly, and what it does not know now it seldom knows soon.
_ACCOUNT_EVERY_S = 60.0
# One word of a command line takes 128 KiB on Linux; beyond this many ids the whole queue is the shorter question.
_MOST_NAMED = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which jobs somebody wants to know about."""

    job_ids: Collection[str] = ()
    may_wait: bool = False
    """Whether one of them may be waiting; then its place in the queue is wanted, too."""
    settled: Collection[str] = ()
    """Those whose end is known from elsewhere: sacct is not asked about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known about them."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    jobs_ahead: Mapping[str, int] = field(default_factory=dict)
    """Of a waiting job, how many are in line before it."""
    age_s: float | None = None
    """Seconds since Slurm last answered; None: it never has, or was never asked."""
    problem: str = ""
    """Why it does not answer now; "" if it does, or is not here."""
    is_due_in_s: float = 0.0
    """Seconds until it is asked again."""


class QueueView:
    """Looks at the queue.

    Args:
        commands: Slurm.
        clock: seconds that never run backwards.
    """

    def __init__(self, commands: SlurmCommands, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._commands, self._clock = commands, clock
        self._pace = Pace()
        self._account_pace = Pace(least_s=_ACCOUNT_EVERY_S)
        self._jobs: dict[str, JobState] = {}
        self._accounted: dict[str, JobState] = {}
        self._ahead: Mapping[str, int] = {}
        self._answered_s: float | None = None
        self._problem = ""

    def look(self, wanted: Wanted) -> Look:
        """Returns what is known now; Slurm is asked if it is time to."""
        if wanted.job_ids and self._pace.is_due(self._clock()) and self._commands.is_available():
            self._ask(wanted)
        now_s = self._clock()
        return Look(
            jobs={**self._accounted, **self._jobs},
            jobs_ahead=self._ahead,
            age_s=None if self._answered_s is None else now_s - self._answered_s,
            problem=self._problem,
            is_due_in_s=max(0.0, self._pace.due_s - now_s),
        )

    def _ask(self, wanted: Wanted) -> None:
        start_s, unsettled = self._clock(), set(wanted.job_ids) - set(wanted.settled)
        try:
            is_whole = wanted.may_wait or len(wanted.job_ids) > _MOST_NAMED
            queue = self._commands.queue(wanted.job_ids, whole=is_whole)
        except ClusterError as err:
            self._pace.unanswered(self._clock())
            self._problem = "" if self._ask_accounting(unsettled) else err.message
            return
        self._pace.answered(self._clock(), took_s=self._clock() - start_s)
        self._jobs, self._ahead, self._problem = dict(queue.jobs), queue.jobs_ahead, ""
        self._answered_s = self._clock()
        # What the queue has is alive, whatever was on account of its last end.
        self._accounted = {job_id: job for job_id, job in self._accounted.items() if job_id not in self._jobs}
        self._ask_accounting({one for one in unsettled - set(self._jobs) if not self._is_over(one)})

    def _is_over(self, job_id: str) -> bool:
        job = self._accounted.get(job_id)
        return job is not None and not job.is_active

    def _ask_accounting(self, job_ids: Collection[str]) -> bool:
        """Asks sacct if it is time to, and returns whether it answered."""
        now_s = self._clock()
        if not job_ids or not self._account_pace.is_due(now_s):
            return False
        try:
            found = self._commands.accounted(sorted(job_ids))
        except ClusterError:
            self._account_pace.unanswered(self._clock())
            return False
        self._account_pace.answered(self._clock(), took_s=self._clock() - now_s)
        self._accounted |= found
        self._jobs = {job_id: job for job_id, job in self._jobs.items() if job_id not in found}
        return True
