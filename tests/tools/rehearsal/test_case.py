"""Processes of a start, with real ones; and what is quoted of a start that failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slurm_train
from slurm_train.processes import descendants
from slurm_train.tools.rehearsal.case import RanksHere, end_supervisor, error_line, of_program
from tests.support.waiting import wait_for

_RANK = "SLURM_TRAIN_ATTEMPT=0 RANK=0"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def supervisor_of() -> Iterator[Start]:
    """Gives what starts a shell in a supervisor's place; none of its processes outlives the test."""
    with contextlib.ExitStack() as stack:

        def start(script: str, *words: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(["sh", "-c", script, "sh", *words]))
            stack.callback(kill_all, process.pid)
            return process

        yield start


def kill_all(pid: int) -> None:
    """Kills what a process has started, which is all that a shell waits for."""
    for below in descendants(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(below, signal.SIGKILL)


def test_a_child_that_ends_after_the_signal_and_before_its_rank_is_known(supervisor_of: Start, tmp_path: Path) -> None:
    is_ready = tmp_path / "ready"
    rank = f"trap 'kill $child; sleep 2; exit' TERM; sleep 61 & child=$!; touch {is_ready}; wait"
    supervisor = supervisor_of(f'{_RANK} sh -c "$1" & wait', rank)
    ranks = RanksHere(supervisor)

    def has_child() -> bool:
        ranks.look()
        return is_ready.exists() and "sleep 61" in ranks.running_below().values()

    def have_ended() -> bool:
        ranks.look()
        return ranks.have_ended()

    wait_for(has_child, within_s=60, what="the rank and its child")
    ranks.send("TERM")
    wait_for(have_ended, within_s=60, what="the end of the rank")
    assert ranks.ended_before() == ["sleep 61"]
    assert ranks.end_survivors(within_s=0.1) == []
    supervisor.wait(60)


def test_the_time_that_ranks_and_their_children_compute_is_known_and_what_lasts_is_read(
    supervisor_of: Start,
) -> None:
    # A shell that waits for a child that computes.
    supervisor = supervisor_of(f'{_RANK} RUN_ID=7 sh -c "$1" & wait', "sh -c 'while :; do :; done' & wait")
    ranks = RanksHere(supervisor)

    def has_computed() -> bool:
        ranks.look()
        return (ranks.cpu_s() or 0.0) > 0.3 and len(ranks.processes()) == 2

    wait_for(has_computed, within_s=60, what="a child that computes")
    assert all("RUN_ID" in process.variables and process.is_shell for process in ranks.processes())
    ranks.send("KILL")
    assert ranks.end_survivors(within_s=0.1) != []
    supervisor.wait(60)


def test_what_this_package_starts_beside_a_rank_is_not_said_to_outlive_it(supervisor_of: Start, tmp_path: Path) -> None:
    watcher = Path(slurm_train.__file__).parent / "worker/watcher.py"
    sleeps = tmp_path / "slurm_train/worker" / watcher.name
    sleeps.parent.mkdir(parents=True)
    sleeps.write_text("import time; time.sleep(63)")
    own, other = f"{sys.executable} {sleeps} &", "sleep 64 &"
    assert watcher.exists()
    supervisor = supervisor_of(f"{_RANK} sh -c '{own} {other} wait' & wait")
    ranks = RanksHere(supervisor)

    def has_both() -> bool:
        ranks.look()
        return sorted(ranks.running_below().values()) == ["", "sleep 64"]

    wait_for(has_both, within_s=60, what="the rank and what it starts")
    ranks.send("KILL")
    assert ranks.end_survivors(within_s=0.1) == ["sleep 64"]
    supervisor.wait(60)


def test_a_rank_that_is_started_at_the_end_of_a_case_is_ended_too(supervisor_of: Start) -> None:
    supervisor = supervisor_of(f"sleep 1; {_RANK} sleep 62 & wait; exit 3")
    ranks = RanksHere(supervisor)
    end_supervisor(supervisor, ranks)
    assert ranks.have_ended()
    assert supervisor.returncode == 3


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("  File x.py\nKeyError: 'a'\n", "KeyError: 'a'"),
        (
            "RuntimeError: internal error\nslurm_train: attempt 1: rank 0 on node-2: RuntimeError: internal error\n",
            "RuntimeError: internal error",
        ),
        ("slurm_train.errors.RunError: each of the 2 ranks\n", "each of the 2 ranks"),
        ("torch.OutOfMemoryError: CUDA\nslurm_train: ended\n", "torch.OutOfMemoryError: CUDA"),
        ("step 3 loss 0.5\n", ""),
    ],
)
def test_an_error_is_quoted_by_its_own_words(log: str, expected: str) -> None:
    assert error_line(log) == expected


def test_lines_of_this_package_are_no_words_of_the_program() -> None:
    assert of_program("  run    /r/a/1f\n  ranks  1 = this machine\nloading\nslurm_train: ended\n") == "loading"
    assert of_program("  run    /r/a/1f\n  ranks  1 = this machine\n") == ""
