"""`status -w`: on a terminal in place, elsewhere line by line, until all has ended."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from slurm_train.cli import status as status_module
from slurm_train.cli.selection import Selection
from slurm_train.cli.status import Screen, watch
from slurm_train.errors import ClusterError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.queue_view import Look, QueueView
from slurm_train.status.run_status import RunState, Survey, Surveyor
from tests.cli.conftest import Shell
from tests.cli.test_status import NOW_S, status, waiting
from tests.cli.test_terminal import Tty
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.run_facts import attempt

TERMINAL = {"TERM": "xterm-256color"}


def nothing() -> None:
    """A look at which nothing happens."""


class Watched:
    """`status -w` of the runs in a shell's folder; each time that it sleeps, the next event happens."""

    def __init__(self, shell: Shell, slurm: FakeSlurmCommands, *events: Callable[[], None], **how: Any) -> None:
        self.now_s, self.slept, self.events = 0.0, list[float](), list(events)
        surveyor = Surveyor(QueueView(slurm, clock=lambda: self.now_s))  # type: ignore[arg-type]  # the fake
        choice = Selection(root=shell.folder / "runs", states=how.pop("states", None))
        shell.capture.readouterr()
        how = {"every_s": 2.0, "as_json": False, "env": {}} | how
        self.code = watch(choice, surveyor, sleep=self.sleep, **how)
        self.out, self.err = shell.capture.readouterr()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)
        if self.events:
            self.events.pop(0)()


def ends(run: RunDirectory, **facts: Any) -> None:
    lines = attempt(0, **({"reason": "failed", "action": "stop", "note": "n"} | facts))
    run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_it_goes_on_until_all_runs_have_ended(shell: Shell) -> None:
    run = shell.has_run(job_ids=("12",), submitted_unix_s=1.0)
    slurm = FakeSlurmCommands([job_state("12", "PENDING", reason="Resources")])

    def starts() -> None:
        slurm.jobs["12"] = job_state("12", "RUNNING", nodelist="node1")

    def fails() -> None:
        ends(run, time_unix_s=time.time())

    watched = Watched(shell, slurm, nothing, starts, nothing, nothing, fails)
    states = [line.split()[2] for line in watched.out.splitlines() if line.startswith("gpt-stdlib/")]
    assert watched.code == 0 and states == ["queued", "running", "failed"], "one table for each change"
    assert "1 run: 1 queued" in watched.out and "waits for free nodes (Resources)" in watched.out


def test_a_controller_that_is_away_ends_nothing(shell: Shell) -> None:
    run = shell.has_run(job_ids=("12",), submitted_unix_s=1.0)
    slurm = FakeSlurmCommands([job_state("12", "PENDING")])
    slurm.error = ClusterError("nobody there", hint="")

    def comes_back() -> None:
        slurm.error = None

    events = [*[nothing] * 10, comes_back, *[nothing] * 20, lambda: ends(run), slurm.jobs.clear]
    watched = Watched(shell, slurm, *events)
    assert watched.code == 0 and len(watched.slept) >= 32
    assert "Slurm does not answer, asked again in 10 s; this is from the files alone" in watched.out


def test_a_moment_without_anything_active_is_not_the_end(shell: Shell) -> None:
    """Between two runs of a sweep on this machine, none is."""
    run = shell.has_run(job_ids=("12",))
    slurm = FakeSlurmCommands()

    def goes_on() -> None:
        slurm.jobs["12"] = job_state("12", "RUNNING")

    def is_over() -> None:
        run.result.write_text("{}")

    watched = Watched(shell, slurm, goes_on, nothing, nothing, is_over, every_s=6.0, as_json=True)
    assert 3.0 <= watched.slept[0] <= 5.0
    states = [json.loads(line)[0]["state"] for line in watched.out.splitlines()]
    assert states == ["not_started", "running", "running", "running", "finished"], "JSON is a line per look"


def test_only_the_chosen_states_are_watched(shell: Shell) -> None:
    shell.has_run("gpt", "aaaa0000", job_ids=("12",), ledger=attempt(0))
    shell.has_run("gpt", "bbbb0000", job_ids=("13",))
    slurm = FakeSlurmCommands([job_state("12"), job_state("13", "PENDING")])

    def starts() -> None:
        slurm.jobs["13"] = job_state("13")

    watched = Watched(shell, slurm, starts, every_s=6.0, states=frozenset({RunState.QUEUED}))
    assert "bbbb0000" in watched.out and "aaaa0000" not in watched.out
    assert watched.code == 0 and "none of 2 runs is in such a state" in watched.err


def test_ctrl_c_leaves_the_runs_alone(shell: Shell) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0))

    def interrupt() -> None:
        raise KeyboardInterrupt

    slurm = FakeSlurmCommands([job_state("12")])
    assert Watched(shell, slurm, interrupt).code == 130 and slurm.cancelled == []


WHERE_TO = [
    (Tty, TERMINAL, 5.0, True),
    (Tty, {**TERMINAL, "NO_COLOR": "1"}, 30.0, False),
    (io.StringIO, TERMINAL, 30.0, False),
]


@pytest.mark.parametrize(("stream", "env", "every_s", "is_live"), WHERE_TO)
def test_a_terminal_is_redrawn_often_and_a_file_seldom(
    stream: Any, env: dict[str, str], every_s: float, is_live: bool, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0))
    slurm = FakeSlurmCommands([job_state("12")])
    monkeypatch.setattr(sys, "stdout", stream())
    watched = Watched(shell, slurm, nothing, slurm.jobs.clear, every_s=None, env=env)
    assert watched.slept[0] == every_s and ("\x1b" in sys.stdout.getvalue()) is is_live  # type: ignore[attr-defined,union-attr]


def test_a_live_table_fits_the_height_and_is_drawn_over_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("COLUMNS", "100")
    finished, failed = waiting(state=RunState.FINISHED, note=""), status("aaaa0000", state=RunState.FAILED)
    screen, drawn = Screen(Tty(), is_live=True), []
    for statuses in ((*[finished] * 30, failed), (failed,)):
        screen._stream = Tty()
        screen.show(Survey(statuses, Look(age_s=0.0)), now_unix_s=NOW_S, of_sweep=False)
        drawn.append(screen._stream.getvalue())
    lines = drawn[0].count("\n")
    assert 8 < lines < 12 and "aaaa0000" in drawn[0] and "31 runs: 30 finished" in drawn[0]
    assert "more; a taller window shows them" in drawn[0]
    assert drawn[1].startswith(f"\r\x1b[{lines}A\x1b[J")


def test_seconds_and_runs_after_w_are_told_apart(shell: Shell) -> None:
    seen = []

    def note_down(choice: Selection, _surveyor: object, *, every_s: float | None, **_how: Any) -> int:
        seen.append((list(choice.words), every_s))
        return 0

    shell.patch.setattr(status_module, "watch", note_down)
    for words in ("-w", "-w 7", "gpt -w 2.5", "-w gpt", "-w 12345678"):
        assert shell.types(f"status {words}").code == 0
    assert seen == [([], None), ([], 7.0), (["gpt"], 2.5), (["gpt"], None), (["12345678"], None)]
