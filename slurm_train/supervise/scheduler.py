"""Asks Slurm again while its controller is away: a restart of slurmctld must not cost a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TypeVar

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import ControllerAway, SlurmCommands
from slurm_train.slurm.records import restarts_of
from slurm_train.supervise.decision import is_over_its_limit

T = TypeVar("T")

_PATIENCE_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
_CONFIRM_LOOKS = 5
_WRITTEN_AFTER_S = 7.0
"""slurmctld writes what has changed into its files within 5 s; until then a crash undoes it."""


def with_patience(ask: Callable[[], T], *, limit_s: float = _PATIENCE_S, sleep: Callable[[float], None]) -> T:
    """Returns the first answer; waits longer from one try to the next while nobody answers.

    Args:
        ask: raises ControllerAway while nobody answers; anything else it raises is final.
        limit_s: seconds after which the last ControllerAway is let through; tries themselves take time as well.
        sleep: waits so many seconds.

    Raises:
        ControllerAway: nobody answered in time.
    """
    deadline, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except ControllerAway:
            if time.monotonic() + pause_s > deadline:
                raise
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def bring_back(
    job_id: str,
    commands: SlurmCommands,
    *,
    restart_count: int,
    is_over: bool = False,
    limit_s: float = _PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeues a job and returns whether Slurm says that it was restarted; asks again while nobody answers.

    An answer may be lost although the requeue happened, and meanwhile somebody may have cancelled the job, so its
    record is read before every try. The plain form, which would bring a cancelled job back, is used only right after
    the record said that the limit has ended this very start.

    Args:
        job_id: array-safe id.
        commands: Slurm.
        restart_count: how often the job had been restarted when this attempt began.
        is_over: the job is over its time limit, where the careful form of the call does nothing.
        limit_s: seconds to go on for.
        sleep: waits so many seconds.

    Raises:
        ClusterError: Slurm refused, or did not answer in time.
    """

    def ask() -> bool:
        job = commands.show_job(job_id)
        if restarts_of(job) > restart_count:
            return True
        if is_over and not is_over_its_limit(job):
            return False
        try:
            commands.requeue(job_id, is_over=is_over)
        except ControllerAway:
            raise
        except ClusterError:
            # --no-requeue, or the site's default: the owner may allow it afterwards.
            commands.allow_requeue(job_id)
            commands.requeue(job_id, is_over=is_over)
        for _ in range(_CONFIRM_LOOKS):
            if commands.restarts(job_id) > restart_count:
                return True
            sleep(0.5)
        return False

    return with_patience(ask, limit_s=limit_s, sleep=sleep)


def wait_for_the_end(
    comes_back: Callable[[], bool],
    *,
    limit_s: float = 60.0,
    written_after_s: float = _WRITTEN_AFTER_S,
    pause_s: float = 2.0,
) -> None:
    """Waits until Slurm kills this process, or the requeue is surely in Slurm's own files.

    A script that ends before Slurm has requeued the job is booked as finished. And a slurmctld that is killed right
    after it requeued the job comes back with the job running, as it has it in its files: then it is asked once more,
    for as long as this process lives, which is KillWait after the requeue.

    Args:
        comes_back: whether Slurm says that the job is restarted; requeues it where it says that it is not.
        limit_s: seconds after which this is given up.
        written_after_s: seconds that Slurm must have said so.
        pause_s: seconds between two looks.
    """
    begin_s = time.monotonic()
    sure_s = begin_s + written_after_s
    while time.monotonic() < begin_s + limit_s:
        signal.sigtimedwait([signal.SIGINT], min(pause_s, limit_s))
        asked_s = time.monotonic()
        answer = comes_back()
        if answer and asked_s >= sure_s:
            return
        if not answer:
            sure_s = time.monotonic() + written_after_s
