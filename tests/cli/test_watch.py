"""`status -w`: on a terminal in place, elsewhere line by line, and gently."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from slurm_train.cli import watch as watch_module
from slurm_train.cli.selection import Selection
from slurm_train.cli.watch import LineScreen, LiveScreen, Picture, watch
from slurm_train.errors import ClusterError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.queue_view import Look, QueueView
from slurm_train.status.run_status import RunState, Survey, Surveyor
from tests.cli.test_status_table import NOW_S, status, waiting
from tests.cli.test_terminal import Tty
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.run_facts import attempt

TERMINAL = {"TERM": "xterm-256color"}


class Days:
    """A clock that goes on when somebody sleeps, and what happens meanwhile."""

    def __init__(self, *events: Callable[[], None]) -> None:
        self.now_s, self.slept, self.events = 0.0, list[float](), list(events)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)
        if self.events:
            self.events.pop(0)()


def watched(shell: Any, slurm: FakeSlurmCommands, days: Days, *, every_s: float = 2.0, **how: Any) -> int:
    surveyor = Surveyor(QueueView(slurm, clock=lambda: days.now_s))
    choice = Selection(root=shell.folder / "runs", **how.pop("choice", {}))
    how = {"as_json": False, "env": {}} | how
    return watch(choice, surveyor, every_s=every_s, sleep=days.sleep, **how)


def ends(run: RunDirectory, **facts: Any) -> None:
    lines = attempt(0, **({"reason": "failed", "action": "stop", "note": "n"} | facts))
    run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_it_goes_on_until_all_runs_have_ended(shell: Any) -> None:
    run = shell.has_run(job_ids=("12",), submitted_unix_s=1.0)
    slurm = FakeSlurmCommands([job_state("12", "PENDING", reason="Resources")])

    def starts() -> None:
        slurm.jobs["12"] = job_state("12", "RUNNING", nodelist="node1")

    def fails() -> None:
        ends(run, time_unix_s=time.time())

    days = Days(lambda: None, starts, lambda: None, lambda: None, fails)
    shell.capture.readouterr()
    assert watched(shell, slurm, days) == 0
    printed = shell.capture.readouterr().out
    states = [line.split()[2] for line in printed.splitlines() if line.startswith("gpt-stdlib/")]
    assert states == ["queued", "running", "failed"], "one table for each change"
    assert "1 run: 1 queued" in printed and "waits for free nodes (Resources)" in printed


def test_slurm_is_not_asked_more_often_than_every_five_seconds(shell: Any) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0))
    asked = []

    class Slurm(FakeSlurmCommands):
        def queue(self, job_ids: Any, *, whole: bool = False) -> Any:
            asked.append(days.now_s)
            return super().queue(job_ids, whole=whole)

    slurm = Slurm([job_state("12")])
    days = Days(*[lambda: None] * 30, slurm.jobs.clear)
    watched(shell, slurm, days, every_s=1.0)
    assert days.slept[:30] == [1.0] * 30
    gaps = [late - early for early, late in pairwise(asked)]
    assert min(gaps) >= 5.0 and len(asked) < 10


def test_a_controller_that_is_away_ends_nothing(shell: Any) -> None:
    run = shell.has_run(job_ids=("12",), submitted_unix_s=1.0)
    slurm = FakeSlurmCommands([job_state("12", "PENDING")])
    slurm.error = ClusterError("nobody there")

    def comes_back() -> None:
        slurm.error = None

    days = Days(*[lambda: None] * 10, comes_back, *[lambda: None] * 20, lambda: ends(run), slurm.jobs.clear)
    shell.capture.readouterr()
    assert watched(shell, slurm, days) == 0
    printed = shell.capture.readouterr().out
    assert "Slurm does not answer, asked again in 10 s; this is from the files alone" in printed
    assert len(days.slept) >= 32


def test_a_moment_without_anything_active_is_not_the_end(shell: Any) -> None:
    """Between two runs of a sweep on this machine, none is."""
    run = shell.has_run(job_ids=("12",))
    slurm = FakeSlurmCommands()

    def goes_on() -> None:
        slurm.jobs["12"] = job_state("12", "RUNNING")

    def is_over() -> None:
        run.result.write_text("{}")

    days = Days(goes_on, lambda: None, lambda: None, is_over)
    assert watched(shell, slurm, days, every_s=6.0) == 0
    assert 3.0 <= days.slept[0] <= 5.0 and len(days.slept) == 4


def test_json_is_one_line_per_look(shell: Any) -> None:
    run = shell.has_run(job_ids=("12",), ledger=attempt(0))
    days = Days(lambda: None, lambda: run.result.write_text("{}") and None)
    shell.capture.readouterr()
    watched(shell, FakeSlurmCommands([job_state("12")]), days, as_json=True)
    lines = [json.loads(line) for line in shell.capture.readouterr().out.splitlines()]
    assert [line[0]["state"] for line in lines] == ["running", "running", "finished"]


def test_only_the_chosen_states_are_watched(shell: Any) -> None:
    shell.has_run("gpt", "aaaa0000", job_ids=("12",), ledger=attempt(0))
    shell.has_run("gpt", "bbbb0000", job_ids=("13",))
    slurm = FakeSlurmCommands([job_state("12"), job_state("13", "PENDING")])

    def starts() -> None:
        slurm.jobs["13"] = job_state("13")

    shell.capture.readouterr()
    choice = {"states": frozenset({RunState.QUEUED})}
    assert watched(shell, slurm, Days(starts), every_s=6.0, choice=choice) == 0
    captured = shell.capture.readouterr()
    assert "bbbb0000" in captured.out and "aaaa0000" not in captured.out
    assert "none of 2 runs is in such a state" in captured.err


def test_ctrl_c_leaves_the_runs_alone(shell: Any) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0))

    def interrupt() -> None:
        raise KeyboardInterrupt

    slurm = FakeSlurmCommands([job_state("12")])
    assert watched(shell, slurm, Days(interrupt)) == 130
    assert shell.capture.readouterr().err == "no longer watching; the runs go on\n" and slurm.cancelled == []


def test_by_default_a_terminal_is_redrawn_often_and_a_file_seldom(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0))
    slept = {}
    for env, stream in ((TERMINAL, Tty()), ({**TERMINAL, "NO_COLOR": "1"}, Tty()), (TERMINAL, io.StringIO())):
        monkeypatch.setattr(sys, "stdout", stream)
        slurm = FakeSlurmCommands([job_state("12")])
        days = Days(slurm.jobs.clear)
        watch(
            Selection(root=shell.folder / "runs"),
            Surveyor(QueueView(slurm, clock=lambda days=days: days.now_s)),
            every_s=None,
            as_json=False,
            env=env,
            sleep=days.sleep,
        )
        slept[type(stream).__name__, "NO_COLOR" in env] = (days.slept[0], "\x1b" in stream.getvalue())
    assert slept == {("Tty", False): (5.0, True), ("Tty", True): (30.0, False), ("StringIO", False): (30.0, False)}


def picture(*statuses: Any) -> Picture:
    return Picture(survey=Survey(statuses, Look(age_s=0.0)), now_unix_s=NOW_S, of_sweep=False)


def test_a_live_table_fits_the_height_and_shows_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "12")
    stream = Tty()
    screen = LiveScreen(stream, {**TERMINAL, "LINES": "12", "COLUMNS": "100"})
    finished = waiting(state=RunState.FINISHED, note="")
    screen.show(picture(*[finished] * 30, status("aaaa0000", state=RunState.FAILED)))
    shown = stream.getvalue()
    screen.close()
    assert "aaaa0000" in shown and "more; a taller window shows them" in shown and "31 runs: 30 finished" in shown
    assert len(shown.splitlines()) <= 12


def test_lines_come_again_only_when_something_has_changed() -> None:
    stream = io.StringIO()
    screen = LineScreen(stream)
    for one in (status(step=1), status(step=1, heartbeat_age_s=9.0), status(step=2)):
        screen.show(picture(one))
    assert stream.getvalue().count("RUN") == 2 and "\x1b" not in stream.getvalue()


def test_seconds_and_runs_after_w_are_told_apart(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note_down(choice: Selection, _surveyor: object, *, every_s: float | None, **_how: Any) -> int:
        seen.append((choice.words, every_s))
        return 0

    monkeypatch.setattr(watch_module, "watch", note_down)
    for words in (["-w"], ["-w", "7"], ["gpt", "-w", "2.5"], ["-w", "gpt"], ["-w", "12345678"], ["-w", "3f9a1c07"]):
        assert shell.types("status", *words).code == 0
    assert seen == [
        ((), None),
        ((), 7.0),
        (("gpt",), 2.5),
        (("gpt",), None),
        (("12345678",), None),
        (("3f9a1c07",), None),
    ]
