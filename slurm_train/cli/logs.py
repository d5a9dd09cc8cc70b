"""`logs RUN [-f]`: prints a run's log, newest attempt first asked, and follows it across attempts.

Of an attempt that failed it says which rank was the first, and shows that rank's traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.display import note
from slurm_train.cli.failure_lines import failure_lines
from slurm_train.cli.following import follow, print_from, wait_for_log
from slurm_train.cli.log_choice import ChosenLog, choose_log
from slurm_train.cli.painting import Painter, emphasised
from slurm_train.cli.terminal import takes_escapes
from slurm_train.errors import RunError
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.jobs import has_ended, read_job
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.lookup import find_run
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.queue_view import QueueView
from slurm_train.standing.failure import Failure, find_failure, first_failed_rank

_EXAMPLES = """\
examples:
  python -m slurm_train logs -f                     the newest run, as it goes on
  python -m slurm_train logs 3f9a1c07 --rank 5
  python -m slurm_train logs 3f9a1c07 --rank -1 --attempt 0
"""


def main(words: Sequence[str]) -> int:
    """Prints the log to stdout; with -f goes on until the run is finished or Ctrl-C."""
    arguments = _parser().parse_args(list(words))
    run = find_run(Path(arguments.root), arguments.run)
    shown = Shown(run, arguments.rank, attempt=arguments.attempt, env=os.environ)
    chosen = choose_log(run, attempt=arguments.attempt, rank=arguments.rank)
    if not arguments.follow:
        if chosen is None:
            newest = max(existing_attempts(run), default=0)
            if shown.print_failure(newest if arguments.attempt is None else arguments.attempt):
                return 0
            raise RunError(f"{run.path} has no log yet", hint=_where_the_log_is(run))
        shown.print_all(chosen)
        return 0

    def choose() -> ChosenLog | None:
        return choose_log(run, attempt=arguments.attempt, rank=arguments.rank)

    if chosen is None:
        wait_for_log(run, QueueView(SlurmCommands(os.environ)), choose)
    follow(
        choose,
        until=lambda: has_ended(run) or (arguments.attempt is not None and _is_past(run, arguments.attempt)),
        painter=shown.painter,
        is_closed=lambda attempt: _is_past(run, attempt),
        at_end_of=shown.tell_end,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = build_run_parser("logs", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("run", nargs="?", metavar="RUN", help=f"{RUN_HELP}; default: the newest")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing as the log grows")
    parser.add_argument("--rank", type=int, default=0, help="which rank (default: 0); -1: the batch script")
    parser.add_argument("--attempt", type=int, default=None, help="which attempt (default: the newest)")
    return parser


def _where_the_log_is(run: RunDirectory) -> str:
    if read_job(run) is None and existing_attempts(run):
        curves = f"`report {run.run_id}` draws its curves"
        return f"rank 0 of a run on this machine writes to its terminal; {curves}, --rank 1 shows another rank"
    return "`status` says whether it waits; -f waits for the log"


def _is_past(run: RunDirectory, attempt: int) -> bool:
    """Returns whether the ledger says how an attempt ended."""
    return any(entry["attempt"] == attempt and "end_time_unix_s" in entry for entry in read_ledger(run))


class Shown:
    """Prints logs of one run.

    Args:
        run: the run.
        rank: the rank whose logs are printed; -1: the batch script.
        attempt: the one attempt that is printed; None: the newest.
        env: environment of the caller.
    """

    def __init__(self, run: RunDirectory, rank: int, *, attempt: int | None, env: Mapping[str, str]) -> None:
        self._in_colour = takes_escapes(sys.stdout, env)
        self._notes_in_colour = takes_escapes(sys.stderr, env)
        self.painter = Painter(in_colour=self._in_colour, is_cause=self._may_be_cause)
        self._run, self._rank, self._attempt = run, rank, attempt

    def print_all(self, log: ChosenLog) -> None:
        """Prints a log as it is, and how its attempt failed, or that an earlier one did."""
        print_from(log.path, 0, self.painter)
        sys.stdout.buffer.write(self.painter.rest())
        sys.stdout.buffer.flush()
        if not self.print_failure(log.attempt):
            self._point_to_earlier(log.attempt)
            self._tell_return(log.attempt)

    def print_failure(self, attempt: int) -> bool:
        """Prints how an attempt failed; returns whether it did."""
        failure = find_failure(self._run, attempt)
        if failure is None:
            return False
        for line in failure_lines(failure, rank_shown=self._rank):
            note(emphasised(line, in_colour=self._notes_in_colour))
        if not failure.kind and read_job(self._run) is None:
            note(_where_the_log_is(self._run))
        if failure.kind and not self._is_in_log(failure):
            excerpt = Painter(in_colour=self._in_colour)
            text = excerpt.paint(failure.excerpt.encode() + b"\n") + excerpt.rest()
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        return True

    def tell_end(self, attempt: int) -> None:
        """Prints how an attempt ended that was followed, where the run goes on after it or the attempt failed."""
        if not self.print_failure(attempt):
            self._tell_return(attempt)

    def _tell_return(self, attempt: int) -> None:
        entry = next((one for one in read_ledger(self._run) if one["attempt"] == attempt), {})
        if entry.get("action") in ("requeue", "leave", "relaunch"):
            note(f"attempt {attempt}: {entry.get('note', '')}")

    def _may_be_cause(self) -> bool:
        """Returns whether a traceback of the rank that is printed may be the first of its attempt."""
        attempt = max(existing_attempts(self._run), default=0) if self._attempt is None else self._attempt
        return first_failed_rank(self._run, attempt) in (None, self._rank)

    def _is_in_log(self, failure: Failure) -> bool:
        """Returns whether what the rank said was printed already."""
        return failure.rank == self._rank and failure.kind != "stacks"

    def _point_to_earlier(self, attempt: int) -> None:
        failed = [
            entry for entry in read_ledger(self._run) if entry["attempt"] < attempt and entry.get("reason") == "failed"
        ]
        if failed:
            number, text = failed[-1]["attempt"], failed[-1].get("note", "")
            note(f"attempt {number} failed: {text}; `logs {self._run.run_id} --attempt {number}` shows it")
