"""`status [RUN ... | SWEEP]`: state and reason of runs, from one squeue where it answers, else sacct, else the files.

Once, or with -w again and again until all of them have ended or Ctrl-C. The files are read at every look; Slurm is
asked at its own pace, however short the interval. On a terminal the table is redrawn in place; elsewhere it is printed
anew when something has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

from slurm_train.checkpoint.verify import find_kept
from slurm_train.cli.selection import find_root, look_once, read_selection
from slurm_train.cli.terminal import BOLD, BOLD_RED, FAINT, note, painted, redraw, takes_escapes, width_of
from slurm_train.errors import ClusterError, ConfigError
from slurm_train.explained import address_of
from slurm_train.formatting import clock, count, duration, table
from slurm_train.rundir.events import read_events
from slurm_train.rundir.ledger import Reason, read_ledger
from slurm_train.rundir.lookup import is_own, known_roots, list_runs, newest_runs, owner_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, list_sweeps, read_table
from slurm_train.rundir.timing import goodput
from slurm_train.slurm.records import waits_for_limit
from slurm_train.status.following import summaries_of
from slurm_train.status.run_status import SILENT_AFTER_S, RunState, RunStatus, Survey, Surveyor, until_over
from slurm_train.status.selection import Selection, build_surveyor, summary
from slurm_train.verbs import DEFAULT_ROOT, parse

_MOST_SWEEPS = 3
_MOST_ATTEMPTS = 5
_MOST_ELSEWHERE = 10
_EVERY_ON_TERMINAL_S = 5.0
_EVERY_ELSEWHERE_S = 30.0
_EXIT_INTERRUPTED = 130
# Blanks between two columns of a table.
_GAP = 2

# Columns that are left out where the terminal is too narrow, in this order; notes are then printed below the table.
_LEAST_IMPORTANT = ("NOTE", "ATTEMPTS", "MFU", "HEARTBEAT", "NODES", "JOB", "SPEED", "LOSS", "ETA")
# Runs that are left out where the terminal has too few lines, in this order.
_LEAST_INTERESTING = (RunState.FINISHED, RunState.NOT_STARTED, RunState.CANCELLED, RunState.QUEUED)
_GREEN = "32"
_YELLOW = "33"
_MAGENTA = "35"
_STYLES = {
    RunState.RUNNING: _GREEN,
    RunState.FINISHING: _GREEN,
    RunState.FINISHED: f"{BOLD};{_GREEN}",
    RunState.QUEUED: _YELLOW,
    RunState.REQUEUED: _YELLOW,
    RunState.PREEMPTED: _YELLOW,
    RunState.NOT_STARTED: FAINT,
    RunState.CANCELLED: _MAGENTA,
    RunState.STOPPED: _MAGENTA,
}
# Every other state needs a person.
_STYLE_OF_TROUBLE = BOLD_RED


def main(words: Sequence[str]) -> int:
    """Prints the table to stdout and returns 0."""
    arguments = parse("status", words)
    every_s, arguments.runs = _read_watch(arguments)
    find_root(arguments)
    runs = arguments.runs
    if not runs and arguments.root == Path(DEFAULT_ROOT) and not list_runs(Path(DEFAULT_ROOT)):
        runs = [str(run.path) for run in newest_runs(known_roots(os.environ), arguments.last or _MOST_ELSEWHERE)]
        if runs:
            note(f"no run below {Path(DEFAULT_ROOT).resolve()}; your newest runs elsewhere:")
    selection = read_selection(arguments, runs)
    if arguments.watch is not None:
        surveyor = build_surveyor(os.environ)
        return watch(selection, surveyor, every_s=every_s, as_json=arguments.json, env=os.environ)
    all_statuses = look_once(selection.subjects(), os.environ)
    statuses = [status for status in all_statuses if selection.keeps(status)]
    if not statuses:
        _note_nothing(selection, num_runs=len(all_statuses))
    statuses = _with_owners(statuses, os.environ)
    if arguments.json:
        print(json.dumps([status.as_json() for status in statuses], indent=2))
    elif statuses:
        _print_table(statuses, selection, os.environ)
    return 0


def _with_owners(statuses: Sequence[RunStatus], env: Mapping[str, str]) -> list[RunStatus]:
    """Returns statuses in which a job that will never start names the owner of the limit.

    Slurm's reason names none, and is the same where other jobs have to end first. Its commands are called only where a
    job waits for a limit.
    """
    waiting = [
        status.run
        for status in statuses
        if status.state is RunState.QUEUED and status.job is not None and waits_for_limit(status.job.reason)
    ]
    if not waiting:
        return list(statuses)
    # To import them takes longer than to read a hundred runs.
    from slurm_train.slurm.commands import SlurmCommands
    from slurm_train.slurm.job_limits import demand_of, obstacles
    from slurm_train.slurm.job_request import JobRequest
    from slurm_train.slurm.site import Site

    facts = None
    named = []
    for status in statuses:
        if status.run in waiting:
            with contextlib.suppress(OSError, ValueError, ClusterError):
                facts = facts or Site(SlurmCommands(env)).facts()
                request = JobRequest.read(status.run.submit_script)
                found = [obstacles(facts, demand_of(flags)) for flags in request.components]
                obstacle = next((of_component[0] for of_component in found if of_component), None)
                if obstacle is not None:
                    status = replace(status, note=f"{status.note}; {obstacle.what}: {obstacle.todo}")
        named.append(status)
    return named


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


def _note_nothing(selection: Selection, *, num_runs: int) -> None:
    """Prints why there is nothing to show.

    Args:
        selection: what was asked for.
        num_runs: how many runs it names, in whatever state.
    """
    if num_runs:
        note(f"none of {num_runs} runs is in such a state")
    else:
        note(f"no such run below {selection.root.resolve()}; `python -m slurm_train` starts one")


# --- the table ---


def table_lines(
    statuses: Sequence[RunStatus],
    *,
    now_unix_s: float,
    width: int | None,
    of_sweep: bool = False,
    in_colour: bool = False,
) -> list[str]:
    """Returns the lines of the table. A column without a value in any row is left out.

    Args:
        statuses: its rows.
        now_unix_s: the time, for what is relative to it.
        width: characters of a line; None: as wide as it gets, e.g. in a file.
        of_sweep: the runs are those of one sweep: with their numbers and values in front.
        in_colour: paint headings and states.
    """
    swept_keys: list[str] = []
    if of_sweep:
        swept_keys = list(dict.fromkeys(key for status in statuses for key in status.subject.overrides))
    rows = [_cells(status, swept_keys, now_unix_s=now_unix_s, of_sweep=of_sweep) for status in statuses]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in [*_LEAST_IMPORTANT, "RUN", *swept_keys] if of_sweep else _LEAST_IMPORTANT:
        if width is None or _begin_of(None, columns, widths) - _GAP <= width:
            break
        if name in columns:
            columns.remove(name)
    cells = [[row[name] or "-" for name in columns] for row in rows]
    lines = [line[:width] for line in table(columns, cells).splitlines()]
    if in_colour:
        lines[0] = painted(lines[0], BOLD)
        begin = _begin_of("STATE", columns, widths)
        for number, status in enumerate(statuses, start=1):
            line = lines[number]
            end = begin + len(status.state.label)
            style = _STYLES.get(status.state, _STYLE_OF_TROUBLE)
            lines[number] = line[:begin] + painted(line[begin:end], style) + line[end:]
    if "NOTE" not in columns:
        for status, row in zip(statuses, rows, strict=True):
            if row["NOTE"]:
                name = f"run {status.subject.index}" if of_sweep else status.label
                lines += _wrapped(f"  {name}: {row['NOTE']}", width)
    return lines


def _begin_of(column: str | None, columns: Sequence[str], widths: Mapping[str, int]) -> int:
    """Returns the number of characters in front of a column; None: of the one that would come behind the last."""
    before = columns if column is None else columns[: columns.index(column)]
    return sum(widths[name] + _GAP for name in before)


def _wrapped(text: str, width: int | None) -> list[str]:
    return [text] if width is None else textwrap.wrap(text, width, subsequent_indent="    ")


def _cells(status: RunStatus, keys: Sequence[str], *, now_unix_s: float, of_sweep: bool) -> dict[str, str]:
    """Returns the texts of a row by column, "" for what is not known."""
    speed = ""
    if status.tokens_per_s is not None:
        speed = f"{status.tokens_per_s:,.0f} tok/s"
    elif status.samples_per_s is not None:
        speed = f"{status.samples_per_s:,.0f} samples/s"
    front = {"RUN": status.label}
    if of_sweep:
        values = {key: status.subject.overrides.get(key, "") for key in keys}
        front = {"#": str(status.subject.index), **values, "RUN": status.run.run_id}
    return front | {
        "JOB": status.job_id or "",
        "STATE": status.state.label,
        "STEP": _step_of(status),
        "LOSS": "" if status.loss is None else f"{status.loss:.4f}",
        "SPEED": speed,
        "MFU": "" if status.mfu is None else f"{status.mfu:.1%}",
        "ETA": "" if status.time_left_s is None else clock(status.time_left_s),
        "ATTEMPTS": str(status.attempts),
        "HEARTBEAT": "" if status.heartbeat_age_s is None else f"{duration(int(status.heartbeat_age_s))} ago",
        "NODES": status.nodelist or "",
        "OWNER": "" if is_own(status.run) else owner_of(status.run.path),
        "NOTE": note_of(status, now_unix_s=now_unix_s),
    }


def _step_of(status: RunStatus) -> str:
    if status.max_steps:
        return f"{status.step}/{status.max_steps}"
    return status.printed or (str(status.step) if status.step else "")


def note_of(status: RunStatus, *, now_unix_s: float) -> str:
    """Returns why a run waits or ended, its place in the queue, and which rank is silent; "" for none of these."""
    parts = [status.note]
    if status.jobs_ahead is not None:
        parts.append(f"{count(status.jobs_ahead, 'job')} ahead")
    if status.expected_start_unix_s is not None:
        left_s = status.expected_start_unix_s - now_unix_s
        form = "%H:%M" if left_s < 43200 else "%a %d %b %H:%M"
        in_time = f", in {duration(int(left_s))}" if left_s > 0 else ""
        parts.append(f"expected start {datetime.fromtimestamp(status.expected_start_unix_s):{form}}{in_time}")
    if status.heartbeat_age_s is not None and status.heartbeat_age_s > SILENT_AFTER_S:
        age = duration(int(status.heartbeat_age_s))
        parts.append(f"no heartbeat of rank {status.heartbeat_rank} on {status.heartbeat_host} for {age}")
    return "; ".join(filter(None, parts))


def _print_table(statuses: Sequence[RunStatus], selection: Selection, env: Mapping[str, str]) -> None:
    sweep = selection.sweep()
    lines = table_lines(
        statuses,
        now_unix_s=time.time(),
        width=width_of(sys.stdout),
        of_sweep=sweep is not None,
        in_colour=takes_escapes(sys.stdout, env),
    )
    if sweep is not None:
        lines += [summary(statuses), str(sweep.path)]
    elif len(statuses) == 1:
        run = statuses[0].run
        address = address_of(statuses[0].note)
        lines += [f"see {address}"] if address else []
        lines.append(str(run.path))
        lines += _log_lines(statuses[0])
        lines += [f"{kept}: {kept.path.name}" for kept in find_kept(run.checkpoints)]
        lines += _follower_lines(run, env)
        lines += _goodput_lines(run)
        if not statuses[0].is_finished:
            lines += _attempt_lines(run)
    print("\n".join(lines))
    if sweep is None and len(statuses) > 1:
        # The table of a sweep also has what each run was given.
        runs = {status.run for status in statuses}
        for other in list_sweeps(selection.root)[:_MOST_SWEEPS]:
            num_shown = len({element.run for element in read_table(other)} & runs)
            if num_shown > 1:
                note(f"{num_shown} of them are a sweep: `status {other.sweep_id}` shows the values of each")


def _log_lines(status: RunStatus) -> list[str]:
    """Returns the newest line of the log of a program that reports nothing, and its age, while it runs."""
    if status.state is not RunState.RUNNING or not status.log_line or status.log_age_s is None:
        return []
    return [f"log, {duration(int(status.log_age_s))} ago: {status.log_line}"]


def _follower_lines(run: RunDirectory, env: Mapping[str, str]) -> list[str]:
    """Returns what evaluators that follow a run are doing, and what they have scored; one line each."""
    summaries = summaries_of(run)
    subjects = [Element(run=summary.follower) for summary in summaries]
    statuses = look_once(subjects, env) if subjects else []
    lines = []
    for evaluator, status in zip(summaries, statuses, strict=True):
        where = f" (job {status.job_id} of cluster {status.other_cluster})" if status.other_cluster else ""
        lines.append(f"follower {evaluator.follower.run_id}: {status.state.label}{where}, {evaluator.words}")
    return lines


def _attempt_lines(run: RunDirectory) -> list[str]:
    """Returns how the last attempts ended, one line each; of a run with one attempt its state says it."""
    ledger = read_ledger(run)
    if len(ledger) < 2:
        return []
    stop_steps = {event.get("attempt"): event["step"] for event in read_events(run, "stop")}
    ended = [(attempt, attempt.end) for attempt in ledger if attempt.end is not None]
    lines: list[str] = []
    for attempt, end in ended[-_MOST_ATTEMPTS:]:
        how = "finished" if end.reason is Reason.DONE else end.reason.replace("_", " ")
        line = f"attempt {attempt.number}: {how} after {attempt.held_s:,.0f} s"
        # The steps of a script of the user's own are not counted.
        last_step = stop_steps.get(attempt.number, end.last_step)
        if last_step:
            line += f", step {last_step}"
        if end.reason is Reason.FAILED:
            line += f": {end.note}"
        lines.append(line)
    return lines


def _goodput_lines(run: RunDirectory) -> list[str]:
    measured = goodput(read_ledger(run))
    if measured.productive_s <= 0:
        return []
    line = (
        f"goodput {measured.share:.0%}: {measured.productive_s:,.0f} s of steps that count "
        f"in {measured.allocated_s:,.0f} s of allocation (attempts that have ended)"
    )
    # Largest first; docs/report.md names the causes, e.g. "data_wait_s".
    for part, seconds in [*measured.losses_s.items()][:1]:
        if seconds > 0:
            line += f"; most was lost to {part.removesuffix('_s').replace('_', ' ')}: {seconds:,.0f} s"
    return [line]


# --- again and again ---


def watch(
    selection: Selection,
    surveyor: Surveyor,
    *,
    every_s: float | None,
    as_json: bool,
    env: Mapping[str, str],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Shows the status of the chosen runs until all have ended; returns 0, or 130 after Ctrl-C, which ends no run.

    Args:
        selection: which runs.
        surveyor: reads their status.
        every_s: seconds between two looks; None: depends on where it is shown.
        as_json: one line of JSON per look.
        env: environment of the caller.
        sleep: waits.
    """
    is_live = takes_escapes(sys.stdout, env) and not as_json
    every_s = every_s or (_EVERY_ON_TERMINAL_S if is_live else _EVERY_ELSEWHERE_S)
    screen = Screen(sys.stdout, is_live=is_live)
    num_runs = 0

    def look() -> Survey:
        nonlocal num_runs
        survey = surveyor.look(selection.subjects())
        num_runs = len(survey.statuses)
        return Survey(tuple(status for status in survey.statuses if selection.keeps(status)), survey.look)

    try:
        for kept in until_over(look, every_s=every_s, sleep=sleep):
            if not kept.statuses:
                _note_nothing(selection, num_runs=num_runs)
            elif as_json:
                print(json.dumps([status.as_json() for status in kept.statuses]), flush=True)
            else:
                screen.show(kept, now_unix_s=time.time(), of_sweep=selection.sweep() is not None)
        return 0
    except KeyboardInterrupt:
        note("no longer watching; the runs go on")
        return _EXIT_INTERRUPTED


class Screen:
    """Shows one survey after the other.

    Args:
        stream: where to print.
        is_live: redraw a table in place; else print one under the time when something in it has changed.
    """

    def __init__(self, stream: TextIO, *, is_live: bool) -> None:
        self._stream = stream
        self._is_live = is_live
        self._num_drawn = 0
        self._shown: list[object] = []

    def show(self, survey: Survey, *, now_unix_s: float, of_sweep: bool) -> None:
        """Shows the newest."""
        statuses = survey.statuses
        width = width_of(self._stream)
        headline = _headline(survey, now_unix_s)

        def lines_of(kept: Sequence[RunStatus]) -> list[str]:
            return table_lines(kept, now_unix_s=now_unix_s, width=width, of_sweep=of_sweep, in_colour=self._is_live)

        if self._is_live:
            lines = [*_fitted(statuses, lines_of), "", *_wrapped(headline, width)]
            redraw(self._stream, "\n".join(lines), num_lines=self._num_drawn)
            self._num_drawn = len(lines)
            return
        facts: list[object] = [
            (status.run, status.state, status.step, status.printed, status.attempts, status.note) for status in statuses
        ]
        facts.append(bool(survey.look.problem))
        if facts != self._shown:
            self._shown = facts
            print("\n".join([headline, *lines_of(statuses)]), file=self._stream, flush=True)


def _headline(survey: Survey, now_unix_s: float) -> str:
    """Returns the time, the number of runs in each state, and how old Slurm's answer is where that matters."""
    text = f"{datetime.fromtimestamp(now_unix_s):%H:%M:%S}  {summary(survey.statuses)}"
    look = survey.look
    if not look.problem:
        return text
    age = "this is from the files alone"
    if look.age_s is not None:
        age = f"its last answer is {duration(int(look.age_s))} old"
    return f"{text}; Slurm does not answer, asked again in {duration(int(look.is_due_in_s))}; {age}"


def _fitted(statuses: Sequence[RunStatus], lines_of: Callable[[Sequence[RunStatus]], list[str]]) -> list[str]:
    """Returns the lines of as many runs as the terminal has room for, in their order; see `_LEAST_INTERESTING`."""
    most_interesting_first = sorted(range(len(statuses)), key=lambda index: _dullness(statuses[index].state))
    # The rest is for an empty line, the headline, which may take two, and the cursor's.
    max_lines = shutil.get_terminal_size().lines - 4
    num_shown = len(statuses)
    while True:
        shown = sorted(most_interesting_first[:num_shown])
        lines = lines_of([statuses[index] for index in shown])
        num_hidden = len(statuses) - num_shown
        if num_hidden:
            lines.append(f"... and {num_hidden} more; a taller window shows them")
        num_excess = len(lines) - max_lines
        if num_excess <= 0 or num_shown == 1:
            return lines
        num_shown = max(1, num_shown - num_excess)


def _dullness(state: RunState) -> int:
    """Returns 0 for states that are always shown, and more the earlier a state is left out."""
    if state not in _LEAST_INTERESTING:
        return 0
    return len(_LEAST_INTERESTING) - _LEAST_INTERESTING.index(state)
