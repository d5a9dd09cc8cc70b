"""`status -w`: on a terminal in place, elsewhere line by line, until all has ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from slurm_train.cli.status import watch
from slurm_train.errors import ClusterError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.queue_view import QueueView
from slurm_train.status.run_status import Surveyor
from slurm_train.status.selection import Selection
from tests.cli.conftest import Shell
from tests.cli.test_terminal import Tty
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.run_facts import attempt


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

    def breaks() -> None:
        slurm.error = ClusterError("nobody there", hint="")

    def starts() -> None:
        slurm.error = None
        slurm.jobs["12"] = job_state("12", "RUNNING", nodelist="node1")

    def fails() -> None:
        ends(run, time_unix_s=time.time())

    watched = Watched(shell, slurm, breaks, *[nothing] * 10, starts, *[nothing] * 10, fails)
    states = [line.split()[2] for line in watched.out.splitlines() if line.startswith("gpt-stdlib/")]
    assert watched.code == 0 and states == ["queued", "queued", "running", "failed"], "one table for each change"
    assert "Slurm does not answer, asked again in" in watched.out, "a controller that is away ends nothing"
    assert "1 run: 1 queued" in watched.out and "waits for free nodes (Resources)" in watched.out


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


def test_a_terminal_is_redrawn_often_and_in_place(shell: Shell) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0))
    slurm, terminal = FakeSlurmCommands([job_state("12")]), Tty()
    shell.patch.setattr(sys, "stdout", terminal)
    watched = Watched(shell, slurm, nothing, slurm.jobs.clear, every_s=None, env={"TERM": "xterm"})
    assert watched.slept[0] == 5.0 and "\x1b[J" in terminal.getvalue()


def test_ctrl_c_leaves_the_runs_alone(shell: Shell) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0))

    def interrupt() -> None:
        raise KeyboardInterrupt

    slurm = FakeSlurmCommands([job_state("12")])
    assert Watched(shell, slurm, interrupt).code == 130 and slurm.cancelled == []
