"""What the processes of a second start have otherwise: which names are said, and which differ by their nature."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slurm_train.tools.rehearsal.otherwise import ProgramProcess, other_names, read_process
from tests.support.waiting import wait_for


def process(*words: str, **variables: str) -> ProgramProcess:
    return ProgramProcess(words, {name: hash(value) for name, value in variables.items()})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (process("python", "a.py", RUN_ID="17"), process("python", "a.py", RUN_ID="18"), ["RUN_ID"]),
        (process("python", "a.py", A="1", B="2"), process("python", "a.py", A="1", C="3"), []),
        (process("python", "a.py", "--out", "o/17"), process("python", "a.py", "--out", "o/18"), ["--out of a.py"]),
        (
            process("python", "-u", "a.py", "hydra.run.dir=out/17"),
            process("python", "-u", "a.py", "hydra.run.dir=out/18"),
            ["hydra.run.dir of a.py"],
        ),
        (process("python", "a.py", "o/17"), process("python", "a.py", "o/18"), ["word 2 of a.py"]),
        # Another program, as `git rev-parse` beside `git status`, is not compared.
        (process("git", "status", "17"), process("git", "log", "18"), []),
    ],
)
def test_what_differs_is_said_by_its_name(first: ProgramProcess, second: ProgramProcess, expected: list[str]) -> None:
    assert other_names([first], [second]) == expected


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "SLURM_TRAIN_ATTEMPT", "MASTER_PORT", "TMPDIR", "WANDB_SERVICE", "SSH_AGENT_PID", "_"]
)
def test_what_belongs_to_a_start_by_its_nature_is_left_out(name: str) -> None:
    assert other_names([process("python", "a.py", **{name: "1"})], [process("python", "a.py", **{name: "2"})]) == []


def test_helpers_with_numbers_of_processes_and_files_are_left_out() -> None:
    def spawned(number: str) -> ProgramProcess:
        return process("python", "-c", f"from multiprocessing.spawn import spawn_main; spawn_main({number})", ID=number)

    assert other_names([spawned("7")], [spawned("8")]) == []


def test_ranks_differ_from_each_other_and_count_only_if_none_is_as_before() -> None:
    first = [process("python", "a.py", PLACE=str(rank), RUN_ID="17") for rank in (0, 1)]
    second = [process("python", "a.py", PLACE=str(rank), RUN_ID="18") for rank in (1, 0)]
    assert other_names(first, second) == ["RUN_ID"]


def test_no_value_of_a_variable_is_held() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)", "x"]
    with subprocess.Popen(words, env={**os.environ, "MY_API_KEY": "hidden"}) as running:
        try:
            wait_for(
                lambda: (found := read_process(running.pid)) is not None and "MY_API_KEY" in found.variables,
                within_s=30,
                what="the variables of the process",
            )
            found = read_process(running.pid)
        finally:
            running.kill()
    assert found is not None and found.words == tuple(words)
    assert "hidden" not in repr(found) and "hidden" not in map(str, found.variables.values())
    assert read_process(running.pid) is None
