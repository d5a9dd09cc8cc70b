"""Ranks that have imported torch and wait, on a real Slurm: the attempt after a failure starts in them."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import TINY, Person
from tests.support.process_faults import is_alive, kill, rank_pid
from tests.support.slurm_runs import losses, step_lines, wait_until_ended, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign]

LONG_S = 300.0
RUN = ("+cluster=1x2", *TINY, "train.max_steps=150", "model.step_s=0.3")
WARM = "requeue.warm_ranks=true"
# The number of the system call.
_READ = "0" if platform.machine() == "x86_64" else "63"


def wait_for_waiting(run: RunDirectory, attempt: int) -> list[int]:
    """Returns the processes of both ranks of an attempt that has not begun, once they have imported torch."""
    found: dict[int, int] = {}

    def are_loaded() -> bool:
        for rank in (0, 1):
            with suppress(AssertionError):
                found[rank] = found.get(rank) or rank_pid(run, rank, attempt=attempt)
        return len(found) == 2 and all(is_loaded(pid) for pid in found.values())

    wait_for(are_loaded, within_s=120, what=f"the ranks in waiting for attempt {attempt}")
    return list(found.values())


def is_loaded(pid: int) -> bool:
    """Returns whether a process has imported what it needs: it reads its stdin."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/syscall").read_text().split()[:2] == [_READ, "0x0"]
    return False


def back_after_s(run: RunDirectory, attempt: int) -> float:
    """Returns the seconds from the end of the attempt before, as the supervisor saw it, to the first new step."""
    ended_unix_s = wait_until_ended(run)[attempt - 1]["end_time_unix_s"]
    line = next(line for line in step_lines(run) if line["attempt"] == attempt)
    return float(line["time_unix_s"]) - float(ended_unix_s)


def test_ranks_in_waiting_take_over_from_failed_ones(person: Person) -> None:
    _, cold = person.types(*RUN, "run.name=cold").job_and_run
    wait_until_step(cold, 6, within_s=LONG_S)
    kill(rank_pid(cold, 1))
    wait_until_finished(cold, within_s=LONG_S)
    job, warm = person.types(*RUN, WARM, "run.name=warm").job_and_run
    wait_until_step(warm, 6, within_s=LONG_S)
    waiting = wait_for_waiting(warm, attempt=1)
    kill(rank_pid(warm, 1))
    third = wait_for_waiting(warm, attempt=2)
    assert all(is_alive(pid) for pid in waiting), "the second attempt runs in the processes that had waited"
    wait_until_finished(warm, within_s=LONG_S)
    first, last = wait_until_ended(warm)
    assert (first["reason"], first["action"], last["reason"]) == ("failed", "relaunch", "done")
    assert first["note"].startswith("rank 1 on ") and first["job_id"] == last["job_id"] == job
    assert losses(warm) == losses(cold)
    for pid in third:
        wait_for(lambda pid=pid: not is_alive(pid), within_s=60, what=f"the end of process {pid}")  # type: ignore[misc]
    wait_for(lambda: not list(warm.logs.glob("waiting_*")), within_s=60, what="the end of the supervisor")
    assert warm.rank_log(1, 0).stat().st_size > 0
    print(f"seconds from the end of the failed ranks to the next step: {back_after_s(cold, 1):.1f} s")
    print(f"the same with ranks in waiting: {back_after_s(warm, 1):.1f} s")
    assert back_after_s(warm, 1) < back_after_s(cold, 1)
