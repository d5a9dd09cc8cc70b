"""`status [RUN ... | SWEEP]`: state and reason of runs, from one squeue where it answers, else sacct, else the files.

Once, or again and again with -w until all of them have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from slurm_train.cli.selection import Selection, build_surveyor, look_once, read_selection
from slurm_train.cli.status_table import build_view, render, summary
from slurm_train.cli.terminal import build_console, note, width_of
from slurm_train.errors import ConfigError
from slurm_train.formatting import table
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import read_events
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import list_sweeps, read_table
from slurm_train.rundir.timing import goodput, held_s
from slurm_train.status.run_status import RunStatus
from slurm_train.verbs import parse

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
_MOST_SWEEPS, _MOST_ATTEMPTS = 3, 5


def main(words: Sequence[str]) -> int:
    """Prints the table to stdout and returns 0."""
    arguments = parse("status", words)
    every_s, runs = _read_watch(arguments)
    selection = read_selection(arguments, runs)
    if arguments.watch is not None:
        from slurm_train.cli.watch import watch

        surveyor = build_surveyor(os.environ)
        return watch(selection, surveyor, every_s=every_s, as_json=arguments.json, env=os.environ)
    found = look_once(selection.subjects(), os.environ)
    statuses = [one for one in found if selection.keeps(one)]
    if not statuses:
        note(selection.nothing_found(num_runs=len(found)))
    if arguments.json:
        print(json.dumps([one.as_json() for one in statuses], indent=2))
    elif statuses:
        _print_table(statuses, selection, os.environ)
    return 0


def _read_watch(arguments: argparse.Namespace) -> tuple[float | None, list[str]]:
    """Returns the seconds between two looks, None for the default, and the runs; `-w RUN` names a run."""
    text = arguments.watch
    if not text:
        return None, arguments.runs
    if not re.fullmatch(r"\d{1,3}(?:\.\d+)?", text):
        return None, [text, *arguments.runs]
    if float(text) < 1:
        raise ConfigError(f"--watch must be at least 1 s, got {text}", hint="Slurm is asked less often than that")
    return float(text), arguments.runs


def _print_table(statuses: Sequence[RunStatus], selection: Selection, env: Mapping[str, str]) -> None:
    sweep, after = selection.sweep(), list[str]()
    if sweep is not None:
        after = [summary(statuses), str(sweep.path)]
    elif len(statuses) == 1:
        run = statuses[0].run
        after = [str(run.path), *_goodput_lines(run), *([] if statuses[0].is_finished else _attempt_lines(run))]
    view = build_view(statuses, now_unix_s=time.time(), width=width_of(sys.stdout), of_sweep=sweep is not None)
    if sys.stdout.isatty():
        build_console(sys.stdout, env).print(render(view))
    else:
        print(table(view.header, view.rows))
    # The terminal breaks them where it must; a path that is copied stays whole.
    for line in after:
        print(line)
    if sweep is None and len(statuses) > 1:
        # The table of a sweep also has what each run was given.
        runs = {one.run for one in statuses}
        for other in list_sweeps(selection.root)[:_MOST_SWEEPS]:
            if (num := len({one.run for one in read_table(other)} & runs)) > 1:
                note(f"{num} of them are a sweep: `status {other.sweep_id}` shows the values of each")


def _attempt_lines(run: RunDirectory) -> list[str]:
    """Returns how the last attempts of a run ended that has had several: what the newest state does not say."""
    ledger, stopped = read_ledger(run), {event.get("attempt"): event["step"] for event in read_events(run, "stop")}
    ended = [one for one in ledger if "end_time_unix_s" in one] if len(ledger) > 1 else []
    lines = []
    for one in ended[-_MOST_ATTEMPTS:]:
        reason = str(one.get("reason", "unknown"))
        why = f": {one.get('note', '')}" if reason == "failed" else ""
        end = "finished" if reason == "done" else reason.replace("_", " ")
        # The steps of a script of the user's own are not counted.
        last_step = stopped.get(one["attempt"], one.get("last_step"))
        step = f", step {last_step}" if last_step else ""
        lines.append(f"attempt {one['attempt']}: {end} after {held_s(one):,.0f} s{step}{why}")
    return lines


def _goodput_lines(run: RunDirectory) -> list[str]:
    measured = goodput(read_ledger(run))
    if measured.productive_s <= 0:
        return []
    cause, seconds = next(iter(measured.losses_s.items()), ("", 0.0))
    loss = f"; most was lost to {_LOSSES.get(cause, cause)}: {seconds:,.0f} s" if seconds > 0 else ""
    return [
        f"goodput {measured.share:.0%}: {measured.productive_s:,.0f} s of steps that count "
        f"in {measured.allocated_s:,.0f} s of allocation (attempts that have ended){loss}"
    ]
