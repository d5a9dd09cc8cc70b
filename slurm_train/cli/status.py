"""`status [RUN ... | SWEEP]`: how runs stand and why, from one squeue where it answers, else sacct, else the files.

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

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.choice import Choice, add_filters, read_choice
from slurm_train.cli.display import note, table
from slurm_train.cli.status_table import build_view, summary
from slurm_train.cli.survey import build_surveyor, look_once
from slurm_train.cli.terminal import build_console, is_terminal, width_of
from slurm_train.errors import ConfigError
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import read_events
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import list_sweeps, read_table
from slurm_train.rundir.timing import Goodput, goodput, held_s
from slurm_train.standing.facts import Standing
from slurm_train.standing.schema import as_mapping

_EXAMPLES = """\
examples:
  python -m slurm_train status
  python -m slurm_train status gpt-stdlib        all runs of that name
  python -m slurm_train status 9b1c44e0          a sweep: its runs with the values that differ
  python -m slurm_train status -w                goes on until all have ended; Ctrl-C leaves them alone
  python -m slurm_train status 9b1c44e0 -w 30    looks every 30 s
  python -m slurm_train status --state running,failed --since 2d
  python -m slurm_train status --where optim.lr=3e-4 --last 5
  python -m slurm_train status 3f9a1c07 --json   numbers for programs; docs/watching.md has the keys
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
_SWEEPS_TOLD, _ATTEMPTS_TOLD = 3, 5
_SECONDS = re.compile(r"\d{1,3}(?:\.\d+)?")


def main(words: Sequence[str]) -> int:
    """Prints the table to stdout and returns 0."""
    arguments = _parser().parse_args(list(words))
    every_s, runs = _read_watch(arguments)
    choice = read_choice(arguments, runs)
    if arguments.watch is not None:
        from slurm_train.cli.watch import watch

        surveyor = build_surveyor(os.environ)
        return watch(choice, surveyor, every_s=every_s, as_json=arguments.json, env=os.environ)
    found = look_once(choice.subjects(), os.environ)
    standings = [one for one in found if choice.keeps(one)]
    if not standings:
        note(choice.nothing_found(num_runs=len(found)))
    if arguments.json:
        print(json.dumps([as_mapping(one) for one in standings], indent=2))
    elif standings:
        _print_table(standings, choice, os.environ)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = build_run_parser("status", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUN_HELP}, or a sweep; default: all")
    watch_help = "look again every so many seconds (default: 5 on a terminal, else 30) until all have ended"
    parser.add_argument("-w", "--watch", nargs="?", const="", metavar="SECONDS", help=watch_help)
    add_filters(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; with -w one line per look")
    return parser


def _read_watch(arguments: argparse.Namespace) -> tuple[float | None, list[str]]:
    """Returns the seconds between two looks, None for the default, and the runs; `-w RUN` names a run."""
    text = arguments.watch
    if not text:
        return None, arguments.runs
    if not _SECONDS.fullmatch(text):
        return None, [text, *arguments.runs]
    if float(text) < 1:
        raise ConfigError(f"--watch {text} looks too often", hint="write 1 or more seconds; Slurm is asked less often")
    return float(text), arguments.runs


def _print_table(standings: Sequence[Standing], choice: Choice, env: Mapping[str, str]) -> None:
    sweep, after = choice.sweep(), list[str]()
    if sweep is not None:
        after = [summary(standings), str(sweep.path)]
    elif len(standings) == 1:
        run = standings[0].run
        after = [str(run.path), *_goodput_lines(run), *([] if standings[0].is_finished else _attempt_lines(run))]
    width = width_of(sys.stdout)
    view = build_view(standings, now_unix_s=time.time(), width=width, of_sweep=sweep is not None)
    if is_terminal(sys.stdout):
        from slurm_train.cli.status_screen import render

        build_console(sys.stdout, env).print(render(view))
    else:
        print(table(view.header, view.rows))
    # The terminal breaks them where it must; a path that is copied stays whole.
    for line in after:
        print(line)
    if sweep is None and len(standings) > 1:
        _tell_of_sweeps([one.run for one in standings], choice)


def _tell_of_sweeps(runs: Sequence[RunDirectory], choice: Choice) -> None:
    """Says which of the runs are a sweep, whose own table has what each was given."""
    for sweep in list_sweeps(choice.root)[:_SWEEPS_TOLD]:
        if (num := len({one.run for one in read_table(sweep)}.intersection(runs))) > 1:
            note(f"{num} of them are a sweep: `status {sweep.sweep_id}` shows what each was given")


def _attempt_lines(run: RunDirectory) -> list[str]:
    """Returns how the last attempts of a run ended that has had several: what the newest state does not say."""
    ledger, stopped = read_ledger(run), {event.get("attempt"): event["step"] for event in read_events(run, "stop")}
    ended = [one for one in ledger if "end_time_unix_s" in one] if len(ledger) > 1 else []
    lines = []
    for one in ended[-_ATTEMPTS_TOLD:]:
        reason = str(one.get("reason", "unknown"))
        why = f": {one.get('note', '')}" if reason == "failed" else ""
        end = "finished" if reason == "done" else reason.replace("_", " ")
        # A script of the user's own has steps that nobody else counts.
        last_step = stopped.get(one["attempt"], one.get("last_step"))
        step = f", step {last_step}" if last_step else ""
        lines.append(f"attempt {one['attempt']}: {end} after {held_s(one):,.0f} s{step}{why}")
    return lines


def _goodput_lines(run: RunDirectory) -> list[str]:
    measured = goodput(read_ledger(run))
    if measured.productive_s <= 0:
        return []
    return [
        f"goodput {measured.share:.0%}: {measured.productive_s:,.0f} s of steps that count "
        f"in {measured.allocated_s:,.0f} s of allocation (attempts that have ended){_biggest_loss(measured)}"
    ]


def _biggest_loss(measured: Goodput) -> str:
    cause, seconds = next(iter(measured.losses_s.items()), ("", 0.0))
    return f"; most was lost to {_LOSSES.get(cause, cause)}: {seconds:,.0f} s" if seconds > 0 else ""
