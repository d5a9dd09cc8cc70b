"""`status [RUN ... | SWEEP]`: one table of runs, from squeue where it answers, else sacct, else the files alone."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.display import note, table
from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lock import process_lives, read_holder
from slurm_train.rundir.lookup import find_runs, read_job
from slurm_train.rundir.progress import newest_training_line
from slurm_train.rundir.stragglers import newest_window
from slurm_train.rundir.sweep import find_sweep
from slurm_train.rundir.timing import Goodput, goodput
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.nodelist import parse_nodelist
from slurm_train.slurm.records import JobState
from slurm_train.slurm.states import Phase

_EXAMPLES = """\
examples:
  python -m slurm_train status
  python -m slurm_train status gpt-stdlib        all runs of that name
  python -m slurm_train status 3f9a1c07 --json
  python -m slurm_train status 9b1c44e0          a sweep: its runs with the values that differ
"""


_LOSSES = {
    "start_s": "starting processes",
    "rendezvous_s": "ranks waiting for each other at the start",
    "load_s": "loading checkpoints",
    "compile_s": "the pass before the first step",
    "data_wait_s": "waiting for data",
    "checkpoint_stall_s": "saving",
    "evaluate_s": "evaluations",
    "lost_work_s": "steps done again",
    "end_s": "ending",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run in the table."""

    run: str
    job: str
    state: str
    step: str
    loss: str
    speed: str
    eta: str
    attempts: str
    note: str
    path: str


def main(words: Sequence[str]) -> int:
    """Prints the table to stdout and returns 0."""
    arguments = _parser().parse_args(list(words))
    if len(arguments.runs) == 1 and (sweep := find_sweep(Path(arguments.root), arguments.runs[0])) is not None:
        from slurm_train.cli.sweep_status import print_sweep

        return print_sweep(sweep, os.environ, as_json=arguments.json)
    runs = find_runs(Path(arguments.root), arguments.runs)
    if not runs:
        note(f"no run below {Path(arguments.root).resolve()}; `python -m slurm_train` starts one")
        return 0
    jobs = ask_slurm(runs, os.environ)
    rows = [read_row(run, jobs) for run in runs]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        shown = [name for name in asdict(rows[0]) if name != "path"]
        print(table([name.upper() for name in shown], [[asdict(row)[name] for name in shown] for row in rows]))
        if len(rows) == 1:
            print(rows[0].path)
            _print_goodput(runs[0])
    return 0


def _print_goodput(run: RunDirectory) -> None:
    measured = goodput(read_ledger(run))
    if measured.productive_s > 0:
        print(
            f"goodput {measured.share:.0%}: {measured.productive_s:,.0f} s of steps that count "
            f"in {measured.allocated_s:,.0f} s of allocation (attempts that have ended){_biggest_loss(measured)}"
        )


def _biggest_loss(measured: Goodput) -> str:
    cause, seconds = next(iter(measured.losses_s.items()), ("", 0.0))
    return f"; most was lost to {_LOSSES.get(cause, cause)}: {seconds:,.0f} s" if seconds > 0 else ""


def _parser() -> argparse.ArgumentParser:
    parser = build_run_parser("status", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUN_HELP}; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def ask_slurm(runs: Sequence[RunDirectory], env: Mapping[str, str]) -> dict[str, JobState]:
    """Returns what Slurm says about the jobs of unfinished runs, from one squeue; nothing where it does not answer."""
    ids = [record.job_id for run in runs if not run.result.exists() and (record := read_job(run))]
    commands = SlurmCommands(env, timeout_s=10.0)
    if not ids or not commands.is_available():
        return {}
    try:
        return commands.job_states(ids)
    except ClusterError as err:
        note(f"Slurm does not answer, so this is from the files alone: {err.message}")
        return {}


def read_row(run: RunDirectory, jobs: Mapping[str, JobState]) -> Row:
    """Returns a run's row from its files and what Slurm said about its job."""
    record = read_job(run)
    job = jobs.get(record.job_id) if record else None
    ledger = read_ledger(run)
    line = newest_training_line(run.metrics) or {}
    total = (read_json(run.plan) or {}).get("max_steps") or 0
    step = max(line.get("step", 0), newest_checkpoint_step(run))
    state = _state(run, job, ledger)
    return Row(
        run=f"{run.name}/{run.run_id}",
        job=record.job_id if record else "-",
        state=state,
        step=f"{step}/{total}" if total else "-",
        loss=f"{line['loss']:.4f}" if "loss" in line else "-",
        speed=_speed(line),
        eta=_eta(line, total) if state == "running" else "-",
        attempts=str(len(ledger)),
        note=_note(run, job, ledger, state),
        path=str(run.path),
    )


def newest_checkpoint_step(run: RunDirectory) -> int:
    """Returns the step of the newest checkpoint by name, 0 where there is none; whether it verifies is not asked."""
    names = (path.name for path in run.checkpoints.glob("checkpoint_*")) if run.checkpoints.is_dir() else ()
    return max((int(name[11:]) for name in names if name[11:].isdigit()), default=0)


def _state(run: RunDirectory, job: JobState | None, ledger: Sequence[Mapping[str, object]]) -> str:
    if run.result.exists():
        return "finished"
    if job is not None and (job.is_active or not ledger):
        return job.phase.value
    holder = read_holder(run)
    if holder is not None and holder.job_id is None and process_lives(holder):
        return "running"
    if ledger and "end_time_unix_s" in ledger[-1]:
        if is_cancelled_since(job, ledger[-1]):
            return "cancelled"
        return str(ledger[-1].get("reason", "ended"))
    if job is not None:
        return job.phase.value
    return "interrupted" if ledger else "not started"


def _note(run: RunDirectory, job: JobState | None, ledger: Sequence[Mapping[str, object]], state: str) -> str:
    if state == "queued" and job is not None:
        return f"waits: {job.reason}" + (f", expected start {job.start}" if job.start else "")
    if state == "failed" and not ledger and job is not None:
        return never_began(job)
    if state == "running":
        return "; ".join(filter(None, [job.nodelist if job is not None else "", slow_because(run, ledger)]))
    if state in ("finished", "running", "not started"):
        return ""
    if ledger and is_cancelled_since(job, ledger[-1]):
        return f"the job was cancelled while it waited to come back; `resume {run.run_id}` continues"
    if ledger and "end_time_unix_s" not in ledger[-1]:
        return without_end(run, job)
    return str(ledger[-1].get("note", "")) if ledger else ""


def slow_because(run: RunDirectory, ledger: Sequence[Mapping[str, object]]) -> str:
    """Returns what makes the steps of a running attempt longer than they would have to be, "" where nothing does."""
    window = newest_window(run)
    if window is None or not ledger or window.attempt != ledger[-1].get("attempt"):
        return ""
    return "; ".join(f"{finding.sentence} ({finding.advice})" for finding in window.findings)


def is_cancelled_since(job: JobState | None, entry: Mapping[str, object]) -> bool:
    """Whether a job that was to come back after an attempt was cancelled before it could; nobody was there to note."""
    return job is not None and job.phase is Phase.CANCELLED and entry.get("action") in ("requeue", "leave")


def without_end(run: RunDirectory, job: JobState | None) -> str:
    """Returns what is known of a run whose supervisor did not live to write how it ended."""
    if job is not None and job.phase.may_return:
        return ""
    slurm_says = f" (Slurm: {job.word})" if job is not None else ""
    return f"the batch script was killed{slurm_says}; `resume {run.run_id}` continues"


def never_began(job: JobState) -> str:
    """Returns why a job may have failed before its first line of output: Slurm could not open the log there."""
    host = parse_nodelist(job.nodelist)[0] if job.nodelist else "its first node"
    return f"ended before it began: does {host} see the run directory? (run.root=/shared/path)"


def _speed(line: Mapping[str, object]) -> str:
    for key, unit in (("tokens_per_s", "tok/s"), ("samples_per_s", "samples/s")):
        value = line.get(key)
        if isinstance(value, (int, float)):
            return f"{value:,.0f} {unit}"
    return "-"


def _eta(line: Mapping[str, object], total: int) -> str:
    step, step_time = line.get("step"), line.get("step_time_s")
    if not isinstance(step, int) or not isinstance(step_time, (int, float)):
        return "-"
    left_s = max(0, total - step) * step_time
    return time.strftime("%H:%M:%S", time.gmtime(left_s)) if left_s < 86400 else f"{left_s / 86400:.1f} days"
