"""`logs RUN [-f]`: prints a run's log, of the newest attempt unless asked otherwise, and follows it across attempts.

Of an attempt that failed it says which rank was the first, and shows that rank's traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_train.cli.selection import parse_runs
from slurm_train.cli.terminal import BOLD_RED, Painter, note, painted, takes_escapes
from slurm_train.errors import RunError
from slurm_train.rundir.jobs import has_ended, jobs_elsewhere, read_job
from slurm_train.rundir.ledger import Action, read_attempt
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.queue_view import QueueView, Wanted
from slurm_train.slurm.records import explain_reason
from slurm_train.status.failure import find_failure, first_failed_rank
from slurm_train.status.logs import ChosenLog, choose_log, is_closed
from slurm_train.status.run_status import never_began, newest_job_state, read_files
from slurm_train.trust import open_to_read

_CHUNK_BYTES = 1 << 16
_POLL_S = 0.3


def main(words: Sequence[str]) -> int:
    """Prints the log to stdout; with -f goes on until the run is finished or Ctrl-C."""
    arguments = parse_runs("logs", words)
    run = find_run(arguments.root, arguments.run)
    attempt = arguments.attempt
    rank = arguments.rank
    printer = LogPrinter(run, rank, attempt=attempt, env=os.environ)
    log = choose_log(run, attempt=attempt, rank=rank)
    if arguments.follow:
        if log is None:
            wait_for_log(run, QueueView(SlurmCommands(os.environ)), rank=rank)
        printer.follow(
            lambda: choose_log(run, attempt=attempt, rank=rank),
            until=lambda: has_ended(run) or (attempt is not None and is_closed(run, attempt)),
        )
    elif log is not None:
        if rank >= 0 and log.path != run.rank_log(log.attempt, rank):
            note(f"rank {rank} has no log of its own in attempt {log.attempt}; this is {log.path}")
        printer.print_all(log)
    else:
        newest = max(existing_attempts(run), default=0) if attempt is None else attempt
        if printer.print_end(newest):
            return 0
        last = read_attempt(run, newest)
        if last is not None and last.action is Action.FINISH:
            note(f"attempt {newest}: {last.note}; its rank 0 wrote to the terminal")
            return 0
        raise RunError(
            f"{run.path} has no log yet",
            hint="-f waits for one; rank 0 of a run on this machine writes to its terminal, other ranks have a log",
        )
    return 0


def wait_for_log(run: RunDirectory, view: QueueView, *, rank: int) -> None:
    """Waits until there is a log, saying what the job waits for whenever that changes.

    Raises:
        RunError: the job ended without one.
    """
    shown_text = ""
    while choose_log(run, attempt=None, rank=rank) is None:
        record = read_job(run)
        elsewhere = jobs_elsewhere(record, None, cluster=view.cluster())
        job_ids = [job_id for job_id in (record.job_ids if record is not None else ()) if job_id not in elsewhere]
        look = view.look(Wanted(job_ids=job_ids, settled=job_ids[:-1]))
        job = newest_job_state(job_ids, look.jobs)
        text = ""
        if job is not None:
            # A log that came meanwhile counts.
            if not job.is_active and choose_log(run, attempt=None, rank=rank) is None:
                raise RunError(f"job {job.job_id} has no log", hint=never_began(read_files(run), job))
            text = ": ".join(filter(None, [f"job {job.job_id} is {job.phase.value}", explain_reason(job.reason)]))
        if look.problem:
            text = f"Slurm does not answer: {look.problem}"
        if text and text != shown_text:
            note(f"{text}; Ctrl-C does not end it")
            shown_text = text
        time.sleep(max(_POLL_S, min(look.is_due_in_s, 5.0)))


class LogPrinter:
    """Prints logs of one run, and what is known about failures.

    Args:
        run: the run.
        rank: the rank whose logs are printed; -1: the batch script.
        attempt: the one attempt that is printed; None: the newest.
        env: environment of the caller.
    """

    def __init__(self, run: RunDirectory, rank: int, *, attempt: int | None, env: Mapping[str, str]) -> None:
        self._for_terminal = sys.stdout.isatty()
        self._in_colour = takes_escapes(sys.stdout, env)
        self._alert = BOLD_RED if takes_escapes(sys.stderr, env) else ""
        self._painter = Painter(for_terminal=self._for_terminal, in_colour=self._in_colour, is_cause=self._may_be_cause)
        self._run = run
        self._rank = rank
        self._attempt = attempt

    def _may_be_cause(self) -> bool:
        """Returns whether a traceback of the rank that is printed may be the first of its attempt."""
        attempt = max(existing_attempts(self._run), default=0) if self._attempt is None else self._attempt
        return first_failed_rank(self._run, attempt) in (None, self._rank)

    def print_all(self, log: ChosenLog) -> None:
        """Prints a log as it is, and how its attempt ended."""
        self._print_rest(log.path, 0)
        self.print_end(log.attempt)

    def print_end(self, attempt: int) -> bool:
        """Prints how an attempt failed, or why it comes back; returns whether it did one of them."""
        failure = find_failure(self._run, attempt)
        if failure is None:
            last = read_attempt(self._run, attempt)
            if last is None or not (last.comes_back or last.action is Action.RELAUNCH):
                return False
            note(f"attempt {attempt}: {last.note}")
            return True
        for line in failure.lines(rank_shown=self._rank):
            note(painted(line, self._alert))
        if failure.kind and not failure.is_in_log_of(self._rank):
            excerpt = Painter(for_terminal=self._for_terminal, in_colour=self._in_colour)
            _write(excerpt.paint(failure.excerpt.encode() + b"\n") + excerpt.rest())
        return True

    def follow(self, choose: Callable[[], ChosenLog | None], *, until: Callable[[], bool]) -> None:
        """Prints what is appended to the chosen file; starts over when the choice changes (a new attempt).

        Args:
            choose: gives the log to show now, None where there is none yet.
            until: whether nothing more will be written.
        """
        current: ChosenLog | None = None
        position = 0
        finished = set[int]()

        def finish(log: ChosenLog) -> None:
            self._print_rest(log.path, position)
            if log.attempt not in finished:
                finished.add(log.attempt)
                self.print_end(log.attempt)

        while True:
            # Asked before the log is read: what was written before the end is shown before the end is reported.
            has_ended = until()
            is_current_closed = current is not None and is_closed(self._run, current.attempt)
            chosen = choose()
            if chosen is not None and chosen != current:
                if current is not None and chosen.attempt != current.attempt:
                    finish(current)
                elif current is not None:
                    self._print_rest(current.path, position)
                note(f"==> {chosen.path} <==")
                current = chosen
                position = 0
                is_current_closed = False
            if current is not None:
                position = self._print_from(current.path, position)
                if is_current_closed or has_ended:
                    finish(current)
            if has_ended:
                return
            time.sleep(_POLL_S)

    def _print_from(self, path: Path, position: int) -> int:
        """Prints a log from a position on and returns the position after it."""
        with open(open_to_read(path), "rb") as file:  # noqa: PTH123  # a descriptor
            file.seek(position)
            # Bytes as they are: a character may be cut in two where a chunk or the file ends for now.
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                sys.stdout.buffer.write(self._painter.paint(chunk))
            sys.stdout.buffer.flush()
            return file.tell()

    def _print_rest(self, path: Path, position: int) -> None:
        self._print_from(path, position)
        _write(self._painter.rest())


def _write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
