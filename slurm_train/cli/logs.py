"""`logs RUN [-f]`: prints a run's log, newest attempt first asked, and follows it across attempts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.status import never_began
from slurm_train.errors import RunError
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.lookup import find_run, read_job
from slurm_train.slurm.commands import SlurmCommands

_CHUNK_BYTES = 1 << 16
_POLL_S = 0.3
# A waiting job is asked about rarely: the controller is everybody's.
_ASK_S = 5.0
# A supervisor that was killed closes nothing; then this is long enough.
_LAST_WORDS_S = 60.0

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
    attempt = arguments.attempt
    path = choose_log(run, attempt=attempt, rank=arguments.rank)
    if not arguments.follow:
        if path is None:
            raise RunError(f"{run.path} has no log yet", hint=_where_the_log_is(run))
        _print_from(path, 0)
        return 0
    if path is None:
        wait_for_log(run, SlurmCommands(os.environ), lambda: choose_log(run, attempt=attempt, rank=arguments.rank))
    follow(lambda: choose_log(run, attempt=attempt, rank=arguments.rank), until=lambda: has_ended(run))
    return 0


def _where_the_log_is(run: RunDirectory) -> str:
    if read_job(run) is None and existing_attempts(run):
        return "rank 0 of a run on this machine writes to its terminal; --rank 1 shows another rank"
    return "`status` says whether it waits; -f waits for the log"


def _parser() -> argparse.ArgumentParser:
    parser = build_run_parser("logs", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("run", nargs="?", metavar="RUN", help=f"{RUN_HELP}; default: the newest")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing as the log grows")
    parser.add_argument("--rank", type=int, default=0, help="which rank (default: 0); -1: the batch script")
    parser.add_argument("--attempt", type=int, default=None, help="which attempt (default: the newest)")
    return parser


def choose_log(run: RunDirectory, *, attempt: int | None, rank: int) -> Path | None:
    """Returns the log to show: the rank's, or the batch script's while the rank has not written any.

    Raises:
        RunError: there was no such attempt.
    """
    attempts = existing_attempts(run)
    if attempt is not None and attempt not in attempts:
        known = ", ".join(map(str, attempts)) or "none yet"
        raise RunError(f"{run.path} has no attempt {attempt}", hint=f"attempts: {known}")
    number = attempt if attempt is not None else max(attempts, default=0)
    batch_logs = [run.attempt_logs(number) / "batch.log", run.logs / "batch.log"]
    wanted = batch_logs if rank < 0 else [run.rank_log(number, rank), *batch_logs]
    return next((path for path in wanted if path.is_file() and path.stat().st_size > 0), None)


def wait_for_log(run: RunDirectory, commands: SlurmCommands, choose: Callable[[], Path | None]) -> None:
    """Waits until there is a log, saying once what the job waits for.

    Raises:
        RunError: the job ended without one.
    """
    record = read_job(run)
    said = False
    while choose() is None:
        state = commands.job_states([record.job_id]).get(record.job_id) if record is not None else None
        if state is not None and not state.is_active and choose() is None:
            raise RunError(f"job {state.job_id} has no log", hint=never_began(state))
        if state is not None and not said:
            print(f"job {state.job_id} is {state.phase.value} {state.reason}; Ctrl-C leaves it alone", file=sys.stderr)
            said = True
        time.sleep(_ASK_S)


def has_ended(run: RunDirectory) -> bool:
    """Returns whether nothing more will be written: the run is finished, or its last attempt has stopped for good."""
    from slurm_train.rundir.attempts import read_ledger

    ledger = read_ledger(run)
    if run.result.exists():
        # Rank 0 says its last words after the result; the supervisor closes the attempt after those.
        is_closed = bool(ledger) and "action" in ledger[-1]
        return is_closed or time.time() - run.result.stat().st_mtime > _LAST_WORDS_S
    if not ledger or ledger[-1].get("action") != "stop":
        return False
    record = read_job(run)
    # A job that was submitted after the last attempt's end will open another one.
    return record is None or record.submit_time_unix_s < float(ledger[-1]["end_time_unix_s"])


def follow(choose: Callable[[], Path | None], *, until: Callable[[], bool]) -> None:
    """Prints what is appended to the chosen file; starts over when the choice changes (a new attempt)."""
    current: Path | None = None
    position = 0
    while True:
        ended = until()
        chosen = choose()
        if chosen is not None and chosen != current:
            if current is not None:
                _print_from(current, position)
            print(f"==> {chosen} <==", file=sys.stderr)
            current, position = chosen, 0
        if current is not None:
            position = _print_from(current, position)
        if ended:
            return
        time.sleep(_POLL_S)


def _print_from(path: Path, position: int) -> int:
    with path.open("rb") as file:
        file.seek(position)
        # Bytes as they are: a character may be cut in two where a chunk or the file ends for now.
        while chunk := file.read(_CHUNK_BYTES):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return file.tell()
