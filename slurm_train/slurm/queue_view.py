"""The state of jobs, asked of Slurm again and again without being a burden: the controller is everybody's.

One squeue per look, never sooner than a few seconds after the last answer, later where the answer took long, and ever
later while there is none; a job that was not asked about yet is not put off. What ended longer ago than the controller
remembers is asked of sacct, once: an end does not change. Between two questions, and while there is no answer, the last
answer counts; its age comes with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.records import JobState

Found = TypeVar("Found")
_ASK_EVERY_S = 5.0
# Accounting answers slowly, and a record that it lacks now seldom appears soon.
_ACCOUNT_EVERY_S = 60.0
_LONGEST_PAUSE_S = 300.0
# A command that takes a second keeps the controller busy for one; then it has this many for others.
_REST = 20.0
# One word of a command line takes 128 KiB on Linux; beyond this many ids the whole queue is the shorter question.
_MOST_NAMED = 5000


class _Pace:
    """When the next question is due."""

    def __init__(self, least_s: float) -> None:
        self.due_s = float("-inf")
        self._least_s = least_s
        self._unanswered_s = least_s
        """Pause after the next question without an answer, before it is doubled."""

    def answered(self, now_s: float, *, took_s: float) -> None:
        self._unanswered_s = self._least_s
        self.due_s = now_s + min(_LONGEST_PAUSE_S, max(self._least_s, _REST * took_s))

    def unanswered(self, now_s: float) -> None:
        self._unanswered_s = min(_LONGEST_PAUSE_S, 2 * self._unanswered_s)
        self.due_s = now_s + self._unanswered_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The jobs that somebody asks about."""

    job_ids: Collection[str] = ()
    may_wait: bool = False
    """Whether one of them may be waiting; then its place in the queue is looked up, too."""
    settled: Collection[str] = ()
    """Those whose end is known from elsewhere: sacct is not asked about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJobs:
    """What is known about jobs."""

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
        self._commands = commands
        self._clock = clock
        self._pace = _Pace(_ASK_EVERY_S)
        self._account_pace = _Pace(_ACCOUNT_EVERY_S)
        self._jobs: dict[str, JobState] = {}
        self._accounted: dict[str, JobState] = {}
        self._ahead: Mapping[str, int] = {}
        self._answered_s: float | None = None
        self._problem = ""
        self._asked: set[str] = set()
        self._script_pace = _Pace(_ASK_EVERY_S)
        self._scripts: Mapping[str, str] | None = None

    def look(self, wanted: Wanted) -> KnownJobs:
        """Returns what is known now; Slurm is asked if it is time to."""
        is_new = not self._problem and not self._asked.issuperset(wanted.job_ids)
        is_due = is_new or self._clock() >= self._pace.due_s
        if wanted.job_ids and is_due and self._commands.is_available():
            self._asked.update(wanted.job_ids)
            self._ask(wanted)
        now_s = self._clock()
        return KnownJobs(
            jobs={**self._accounted, **self._jobs},
            jobs_ahead=self._ahead,
            age_s=None if self._answered_s is None else now_s - self._answered_s,
            problem=self._problem,
            is_due_in_s=max(0.0, self._pace.due_s - now_s),
        )

    def cluster(self) -> str:
        """Returns the name of the cluster that is asked; "" where there is no Slurm, or no answer now."""
        if self._commands.is_available():
            with contextlib.suppress(ClusterError):
                return self._commands.cluster
        return ""

    def search(self, find: Callable[[SlurmCommands, Mapping[str, str]], Found], *, nothing: Found) -> Found | None:
        """Returns what is found among the scripts of this user's jobs.

        Args:
            find: looks among them (see `SlurmCommands.own_scripts`); it may ask Slurm more.
            nothing: the answer where there is no Slurm.

        Returns:
            None where Slurm does not answer.
        """
        if not self._commands.is_available():
            return nothing
        start_s = self._clock()
        try:
            if self._clock() >= self._script_pace.due_s:
                self._scripts = self._commands.own_scripts()
                self._script_pace.answered(self._clock(), took_s=self._clock() - start_s)
            return None if self._scripts is None else find(self._commands, self._scripts)
        except ClusterError:
            self._script_pace.unanswered(self._clock())
            self._scripts = None
            return None

    def _ask(self, wanted: Wanted) -> None:
        start_s = self._clock()
        unsettled = set(wanted.job_ids) - set(wanted.settled)
        is_whole = wanted.may_wait or len(wanted.job_ids) > _MOST_NAMED
        try:
            self._jobs, self._ahead = self._commands.queue(wanted.job_ids, whole=is_whole)
        except ClusterError as err:
            self._pace.unanswered(self._clock())
            self._problem = "" if self._ask_accounting(unsettled) else err.message
            return
        self._answered_s = self._clock()
        self._problem = ""
        self._pace.answered(self._answered_s, took_s=self._answered_s - start_s)
        # A job in the queue is active, whatever accounting has recorded about the end of its last start.
        self._accounted = {job_id: job for job_id, job in self._accounted.items() if job_id not in self._jobs}
        ended = {job_id for job_id, job in self._accounted.items() if not job.is_active}
        self._ask_accounting(unsettled - set(self._jobs) - ended)

    def _ask_accounting(self, job_ids: Collection[str]) -> bool:
        """Asks sacct if it is time to, and returns whether it answered."""
        now_s = self._clock()
        if not job_ids or now_s < self._account_pace.due_s:
            return False
        try:
            jobs = self._commands.accounted(sorted(job_ids))
        except ClusterError:
            self._account_pace.unanswered(self._clock())
            return False
        self._account_pace.answered(self._clock(), took_s=self._clock() - now_s)
        self._accounted |= jobs
        self._jobs = {job_id: job for job_id, job in self._jobs.items() if job_id not in jobs}
        return True
