"""`logs -f`: waits for a log, prints what is appended to it, and goes over to the next attempt's when there is one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurm_train.cli.display import note
from slurm_train.cli.log_choice import ChosenLog
from slurm_train.cli.painting import Painter
from slurm_train.errors import RunError
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.queue_view import QueueView, Wanted
from slurm_train.slurm.reasons import explain_reason
from slurm_train.standing.facts import job_of
from slurm_train.standing.verdict import never_began

_CHUNK_BYTES = 1 << 16
_POLL_S = 0.3

Choose = Callable[[], ChosenLog | None]


def wait_for_log(run: RunDirectory, view: QueueView, choose: Choose) -> None:
    """Waits until there is a log, saying what the job waits for whenever that changes.

    Raises:
        RunError: the job ended without one.
    """
    said = ""
    while choose() is None:
        record = read_job(run)
        job_ids = record.job_ids if record is not None else ()
        look = view.look(Wanted(job_ids=job_ids, settled=job_ids[:-1]))
        state = job_of(job_ids, look.jobs)
        if state is not None and not state.is_active and choose() is None:
            raise RunError(f"job {state.job_id} has no log", hint=never_began(state))
        text = "" if state is None else f"job {state.job_id} is {state.phase.value}"
        if state is not None and (reason := explain_reason(state.reason)):
            text += f": {reason}"
        if look.problem:
            text = f"Slurm does not answer: {look.problem}"
        if text and text != said:
            note(f"{text}; Ctrl-C leaves it alone")
            said = text
        time.sleep(max(_POLL_S, min(look.is_due_in_s, 5.0)))


def follow(
    choose: Choose,
    *,
    until: Callable[[], bool],
    painter: Painter,
    is_closed: Callable[[int], bool] = lambda _attempt: False,
    at_end_of: Callable[[int], object] = lambda _attempt: None,
) -> None:
    """Prints what is appended to the chosen file; starts over when the choice changes (a new attempt).

    Args:
        choose: the log to show now.
        until: whether nothing more will be written.
        painter: colours it.
        is_closed: whether the ledger says how an attempt ended.
        at_end_of: called once with each attempt that has ended, when its log has been shown.
    """
    current: ChosenLog | None = None
    position, told = 0, set[int]()

    def finish(log: ChosenLog) -> None:
        _print_rest(log.path, position, painter)
        if log.attempt not in told:
            told.add(log.attempt)
            at_end_of(log.attempt)

    while True:
        # Asked before the log is read: what was written before the end is shown before the end is told.
        ended = until()
        closed = current is not None and is_closed(current.attempt)
        chosen = choose()
        if chosen is not None and chosen != current:
            if current is not None and chosen.attempt != current.attempt:
                finish(current)
            elif current is not None:
                _print_rest(current.path, position, painter)
            note(f"==> {chosen.path} <==")
            current, position, closed = chosen, 0, False
        if current is not None:
            position = print_from(current.path, position, painter)
            if closed or ended:
                finish(current)
        if ended:
            return
        time.sleep(_POLL_S)


def print_from(path: Path, position: int, painter: Painter) -> int:
    """Prints a log from a position on and returns the position after it."""
    with path.open("rb") as file:
        file.seek(position)
        # Bytes as they are: a character may be cut in two where a chunk or the file ends for now.
        while chunk := file.read(_CHUNK_BYTES):
            sys.stdout.buffer.write(painter.paint(chunk))
        sys.stdout.buffer.flush()
        return file.tell()


def _print_rest(path: Path, position: int, painter: Painter) -> None:
    print_from(path, position, painter)
    sys.stdout.buffer.write(painter.rest())
    sys.stdout.buffer.flush()
