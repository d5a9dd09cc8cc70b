"""Finds the processes of a job by what they are, and kills them for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slurm_train.rundir.paths import RunDirectory
from tests.support.waiting import wait_for


def rank_pid(run: RunDirectory, rank: int, *, attempt: int = 0) -> int:
    """Returns the process of one rank of a run, which trains or is a script."""

    def is_rank(words: list[str], env: dict[str, str]) -> bool:
        trains = words[-2:] == ["worker", str(run.path)]
        is_script = str(run.path) in words and words[2].endswith("script_main.py")
        place = {"SLURM_PROCID": str(rank), "SLURM_TRAIN_ATTEMPT": str(attempt)}
        return (trains or is_script) and "SLURM_STEP_ID" in env and place.items() <= env.items()

    pids = _find(is_rank)
    # Workers of its loaders look alike.
    ranks = [pid for pid in pids if int(_state_and_parent(pid)[1]) not in pids]
    return _only(ranks, f"rank {rank} of {run.path}")


def srun_pid(run: RunDirectory) -> int:
    """Returns the srun that holds the ranks."""
    # srun forks a child that cleans up after it; killing the parent is what a person or the kernel would do.
    return min(_find(lambda words, _env: Path(words[0]).name == "srun" and words[-1] == str(run.path)))


def supervisor_pid(run: RunDirectory) -> int:
    """Returns the batch script, which has become the supervisor."""
    return _only(_find(lambda words, _env: words[3:5] == ["supervise", str(run.path)]), f"supervisor of {run.path}")


def stepd_pid(run: RunDirectory, *, attempt: int = 0) -> int:
    """Returns the slurmstepd that holds rank 0."""
    return int(_state_and_parent(rank_pid(run, 0, attempt=attempt))[1])


def kill(pid: int) -> None:
    """Kills a process as the kernel would."""
    os.kill(pid, signal.SIGKILL)


def wait_until_gone(pid: int, *, within_s: float) -> None:
    """Returns when the process has ended."""
    wait_for(lambda: not is_alive(pid), within_s=within_s, what=f"the end of process {pid}", poll_s=0.1)


def is_alive(pid: int) -> bool:
    """Returns whether a process is there and no zombie."""
    with suppress(OSError):
        return _state_and_parent(pid)[0] not in "ZX"
    return False


def _state_and_parent(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]


def _only(pids: list[int], what: str) -> int:
    assert len(pids) == 1, f"{what}: {len(pids)} processes"
    return pids[0]


def _find(matches: Callable[[list[str], dict[str, str]], bool]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if not entry.name.isdecimal():
                continue
            words = [word.decode(errors="replace") for word in (entry / "cmdline").read_bytes().split(b"\0")[:-1]]
            pairs = (entry / "environ").read_bytes().split(b"\0")
            env = dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)
            if words and matches(words, env):
                found.append(int(entry.name))
    return found
