from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli.status_table import build_view, note_of, render, summary
from slurm_train.formatting import table
from slurm_train.rundir.paths import RunDirectory
from slurm_train.status.run_status import RunState, RunStatus, Subject
from tests.fakes.slurm_commands import job_state

NOW_S = 1_800_000_000.0


def status(run_id: str = "3f9a1c07", tmp: str = "/runs/gpt-stdlib", **facts: Any) -> RunStatus:
    values: dict[str, Any] = {
        "subject": Subject(RunDirectory(Path(tmp) / run_id)),
        "state": RunState.RUNNING,
        "note": "",
        "is_settled": False,
        "job": None,
        "job_id": "12",
        "step": 120,
        "max_steps": 400,
        "loss": 1.23456,
        "tokens_per_s": 51234.5,
        "samples_per_s": None,
        "mfu": None,
        "step_time_s": 0.5,
        "attempts": 2,
        "heartbeat_age_s": 2.0,
        "heartbeat_rank": 3,
        "heartbeat_host": "node2",
        "nodelist": "node[1-4]",
        "jobs_ahead": None,
        "submit_time_unix_s": 1.0,
        "attempt_start_time_unix_s": 2.0,
    }
    return RunStatus(**(values | facts))


def waiting(**facts: Any) -> RunStatus:
    values: dict[str, Any] = {"state": RunState.QUEUED, "note": "other jobs come first (Priority)", "loss": None}
    values |= {"tokens_per_s": None, "heartbeat_age_s": None, "nodelist": None, "step": 0, "attempts": 0}
    return status("77aa0000", **(values | facts))


def lines_of(*statuses: RunStatus, width: int | None) -> list[str]:
    view = build_view(statuses, now_unix_s=NOW_S, width=width)
    text = [line.rstrip() for line in table(view.header, view.rows).splitlines()]
    return [*text, *(f"{name}: {note}" for name, note in view.notes_below)]


def test_a_file_gets_every_column_that_has_a_value() -> None:
    assert lines_of(status(), waiting(jobs_ahead=2), width=None) == [
        "RUN                  JOB  STATE    STEP     LOSS    SPEED         ETA       ATTEMPTS  HEARTBEAT  NODES"
        "      NOTE",
        "gpt-stdlib/3f9a1c07  12   running  120/400  1.2346  51,234 tok/s  00:02:20  2         2 s ago    node[1-4]",
        "gpt-stdlib/77aa0000  12   queued   0/400    -       -             -         0         -          -"
        "          other jobs come first (Priority); 2 jobs ahead",
    ]
    header = build_view([status(mfu=0.412)], now_unix_s=NOW_S, width=None).header
    assert "MFU" in header and "HEARTBEAT" not in build_view([waiting()], now_unix_s=NOW_S, width=None).header


def test_a_narrow_terminal_loses_the_least_important_columns_first() -> None:
    found = {width: " ".join(lines_of(status(mfu=0.4), width=width)[0].split()) for width in (200, 90, 70, 50, 30)}
    assert found == {
        200: "RUN JOB STATE STEP LOSS SPEED MFU ETA ATTEMPTS HEARTBEAT NODES",
        90: "RUN JOB STATE STEP LOSS SPEED ETA NODES",
        70: "RUN STATE STEP LOSS SPEED ETA",
        50: "RUN STATE STEP ETA",
        30: "RUN STATE STEP",
    }


def test_a_reason_goes_below_before_the_numbers_are_lost() -> None:
    wide = lines_of(status(), waiting(), width=120)
    assert wide[0].endswith("NOTE") and wide[2].endswith("other jobs come first (Priority)")
    narrow = lines_of(status(), waiting(), width=80)
    assert "NOTE" not in narrow[0] and narrow[0].split()[-3:] == ["LOSS", "SPEED", "ETA"]
    assert narrow[3:] == ["gpt-stdlib/77aa0000: other jobs come first (Priority)"]


@pytest.mark.parametrize("width", range(40, 200, 7))
@pytest.mark.parametrize("is_long", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, is_long: bool) -> None:
    from rich.console import Console

    note = "rank 3 on node2: ZeroDivisionError: division by zero in a place that takes many words to tell" * is_long
    view = build_view([status(), waiting(note=note)], now_unix_s=NOW_S, width=width)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(view, lines_after=["/a/path"]))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    assert "…" not in words and all(word in words for word in ("gpt-stdlib/3f9a1c07", "running", "120/400"))


NOTES = [
    ({"jobs_ahead": 0}, "other jobs come first (Priority); next in line"),
    ({"jobs_ahead": 1}, "other jobs come first (Priority); 1 job ahead"),
    (
        {"job": job_state("12", "PENDING", start="2027-01-15T10:00:00"), "jobs_ahead": 3},
        "other jobs come first (Priority); 3 jobs ahead; expected start Fri 15 Jan 10:00",
    ),
    ({"note": "", "heartbeat_age_s": 59.0}, ""),
    ({"note": "", "heartbeat_age_s": 185.0}, "no heartbeat of rank 3 on node2 for 3 min 5 s"),
]


@pytest.mark.parametrize(("facts", "words"), NOTES)
def test_what_is_said_about_a_run(facts: dict[str, Any], words: str) -> None:
    note = note_of(waiting(**facts), now_unix_s=datetime(2027, 1, 10).timestamp())
    assert note.startswith(words) and len(note) < len(words) + 20


def test_an_expected_start_is_told_with_the_time_until_then() -> None:
    one = waiting(job=job_state("12", "PENDING", start="2027-01-15T10:00:00"))
    note = note_of(one, now_unix_s=datetime(2027, 1, 15, 7, 50).timestamp())
    assert note.endswith("; expected start 10:00, in 2 h 10 min")
    late = note_of(one, now_unix_s=datetime(2027, 1, 15, 10, 5).timestamp())
    assert late.endswith("; expected start 10:00"), "an estimate that has passed"


def test_a_sweep_has_its_numbers_and_values_in_front() -> None:
    rows = [
        replace(status(), subject=Subject(RunDirectory(status().run.path), index, {"optim.lr": value}))
        for index, value in enumerate(("0.1", "0.01"))
    ]
    view = build_view(rows, now_unix_s=NOW_S, width=None, of_sweep=True)
    assert view.header[:4] == ("#", "optim.lr", "RUN", "JOB")
    assert [row[:3] for row in view.rows] == [("0", "0.1", "3f9a1c07"), ("1", "0.01", "3f9a1c07")]


def test_the_summary_counts_states() -> None:
    rows = [status(), status(), waiting()]
    assert summary(rows) == "3 runs: 2 running, 1 queued"
    assert summary(rows[:1]) == "1 run: 1 running" and summary([]) == "no runs"


def test_states_that_need_a_person_are_red() -> None:
    from rich.console import Console

    rows = [status(state=state) for state in (RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.RUNNING)]
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    console.print(render(build_view(rows, now_unix_s=NOW_S, width=None)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\x1b[1;31mfailed" in shown and "\x1b[1;31mout of memory" in shown and "\x1b[32mrunning" in shown
