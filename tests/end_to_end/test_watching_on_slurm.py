"""Watching on a real Slurm: a run that waits behind another, runs, and fails on one rank, seen from a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import PATIENCE_S, all_logs
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full]

FRAGILE = """
from slurm_train import session

def choose_layer(name):
    raise ValueError(f"no such layer: {name}")

run = session.join()
if run.rank == 1:
    choose_layer("attention_17")
run.should_stop()
"""
WORDS = (
    "script=[fragile.py]",
    "preflight.enabled=false",
    "requeue.max_failures_without_progress=1",
    "cluster.time_limit_min=5",
)


@pytest.fixture(autouse=True)
def fragile(person: Person) -> None:
    (person.folder / "fragile.py").write_text(FRAGILE)


@pytest.fixture
def no_room(person: Person) -> Iterator[str]:
    """A job that holds all nodes until it is cancelled."""
    nodes = person.runs("sinfo", "-h", "-o", "%D").out.strip()
    words = (f"--nodes={nodes}", "--exclusive", "--time=10", "--output=/dev/null", "--wrap=sleep 600")
    job = person.runs("sbatch", "--parsable", *words).out.strip()
    yield job
    person.runs("scancel", job)


@pytest.fixture
def held(person: Person) -> Iterator[RunDirectory]:
    """A run whose job is held."""
    job, run = person.types("+cluster=1x1", *WORDS, "run.name=held", "cluster.sbatch.hold=true").job_and_run
    yield run
    person.runs("scancel", job)


class Terminal:
    """A command that runs in a pseudo-terminal, and all that it writes there."""

    def __init__(self, person: Person, *words: str, env: dict[str, str]) -> None:
        self.written = b""
        ours, theirs = pty.openpty()
        environment = {name: value for name, value in person.environment().items() if name != "NO_COLOR"} | env
        command = [sys.executable, "-m", "slurm_train", *words]
        self.process = subprocess.Popen(
            command, cwd=person.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,))
        self._reader.start()

    def _read(self, ours: int) -> None:
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                piece = b""
            if not piece:
                os.close(ours)
                return
            self.written += piece

    def waits_for(self, text: str) -> None:
        """Waits until it has written this."""
        wait_for(lambda: text.encode() in self.written, within_s=30, what=text)

    def ends(self) -> tuple[int, str]:
        """Waits for its end and returns its exit code and what it wrote."""
        code = self.process.wait(timeout=PATIENCE_S)
        self._reader.join(timeout=10)
        return code, self.written.decode()


def facts(person: Person, run: RunDirectory) -> dict[str, Any]:
    """Returns what `status --json` says about a run."""
    (row,) = json.loads(person.types("status", str(run.path), "--json").out)
    return dict(row)


def test_a_run_is_watched_from_the_queue_to_its_first_failing_rank(
    person: Person, no_room: str, held: RunDirectory
) -> None:
    _, first = person.types("+cluster=2x1", *WORDS).job_and_run
    wait_for(lambda: facts(person, first)["slurm_reason"] == "Resources", within_s=60, what="a reason to wait")
    waiting = person.types("status", str(first.path))
    assert "waits for free nodes (Resources); 0 jobs ahead" in waiting.out
    assert "held by its user" in person.types("status", str(held.path)).out
    # Wide enough that no message is broken into lines.
    env = {"TERM": "xterm-256color", "COLUMNS": "300"}
    live = Terminal(person, "status", "-w", "2", str(first.path), env=env)
    plain = Terminal(person, "status", "-w", "2", str(first.path), env={**env, "NO_COLOR": "1"})
    following = Terminal(person, "logs", "-f", str(first.path), env=env)
    for terminal in (live, plain):
        terminal.waits_for("queued")
    person.runs("scancel", no_room)
    for terminal in (live, plain):
        code, written = terminal.ends()
        assert code == 0, written
        assert "queued" in written and "failed" in written and "ValueError: no such layer" in written, all_logs(first)
        assert ("\x1b" in written) is (terminal is live)
    code, written = following.ends()
    node = ledger_lines(first)[0]["nodes"][1]
    assert code == 0 and f"rank 1 on {node} failed first" in written
    assert "\x1b[1;31mValueError: no such layer: attention_17\x1b[0m" in written
    shown = person.types("logs", str(first.path))
    assert shown.out.rstrip().endswith("ValueError: no such layer: attention_17")
    assert "\x1b" not in shown.out + shown.err
    assert "in choose_layer" in shown.out and "attempt 0 failed: " in shown.err
    ended = facts(person, first)
    assert (ended["state"], ended["is_active"], ended["heartbeat_age_s"]) == ("failed", False, None)
