"""The rank's side of the watch over a script or function: starts its watcher, and answers it.

The watcher is a small process of its own (`watcher.py`), so it sees a rank that is stopped, blocked in a driver, or no
Python at all. It asks for the main thread's stack with a signal that faulthandler answers, whatever holds the
interpreter, and for the stacks of all threads and the flight record with a byte through a pipe, which a thread answers.
Answers go to files without a name that the two processes share: a rank that hangs writes to no file system. Imports no
torch.

The signal's handler must not look at other threads: it does not hold the interpreter's lock, and a thread that runs
meanwhile frees the frames that are read. A program with two busy threads died of it at the second to fifth signal
(3.11); with its own thread alone it took 8,000.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a user's script imports this file, and needs neither
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.paths import RunDirectory

ASK = signal.SIGRTMIN + 11
"""Asks for the stacks. Its default action would end a process, so it is sent only to one that catches it."""
_DESCRIPTORS = "SLURM_TRAIN_WATCH"
_WATCHER = Path(__file__).with_name("watcher.py")


def start_watcher(
    run: RunDirectory, *, attempt: int, place: RankPlace, env: Mapping[str, str], limit_s: float
) -> dict[str, str]:
    """Starts the watcher of this process, and returns the variable by which what this process becomes can answer it.

    The watcher is no child of this process, which may wait for its children.

    Args:
        run: the run.
        attempt: number of the attempt.
        place: this rank.
        env: its environment.
        limit_s: how long ranks may be silent.
    """
    stacks = _unnamed()
    threads = _unnamed()
    flight = _unnamed()
    asked, ask = os.pipe()
    job = env.get("SLURM_JOB_ID", "")
    step = env.get("SLURM_STEP_ID", "")
    facts = {
        "run": str(run.path),
        "attempt": attempt,
        "rank": place.rank,
        "local_rank": place.local_rank,
        "host": place.host,
        "pid": os.getpid(),
        "step_id": f"{job}.{step}" if job and step else "",
        "limit_s": limit_s,
        "descriptors": [stacks, threads, flight, ask],
    }
    command = [sys.executable, str(_WATCHER), json.dumps(facts)]
    nothing = subprocess.DEVNULL
    # It forks at once, and its parent ends; an error of its own costs the watch, not the run.
    with contextlib.suppress(OSError):
        subprocess.run(
            command, pass_fds=(stacks, threads, flight, ask), stdin=nothing, stdout=nothing, stderr=nothing, check=False
        )
    os.close(ask)
    for descriptor in (stacks, threads, flight, asked):
        os.set_inheritable(descriptor, True)
    return {_DESCRIPTORS: f"{stacks},{threads},{flight},{asked}"}


def answer_watcher(env: MutableMapping[str, str]) -> None:
    """Has this process answer its watcher from now on; nothing happens where it has none.

    Args:
        env: with the variable that `start_watcher` gave, which is taken out: child processes have no part in this.
    """
    descriptors = env.pop(_DESCRIPTORS, "")
    if not descriptors:
        return
    stacks, threads, flight, asked = map(int, descriptors.split(","))
    for descriptor in (stacks, threads, flight, asked):
        os.set_inheritable(descriptor, False)
    faulthandler.register(ASK, file=stacks, all_threads=False, chain=False)
    main = threading.main_thread().ident or 0
    os.pwrite(stacks, f"main thread {main:#018x}\n".encode(), 0)
    answers = threading.Thread(target=_answer, args=(asked, threads, flight), name="slurm_train watch", daemon=True)
    answers.start()


def _answer(asked: int, threads: int, flight: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(asked, 1):
            os.ftruncate(threads, 0)
            os.lseek(threads, 0, os.SEEK_SET)
            # With the interpreter's lock, so no thread runs meanwhile.
            faulthandler.dump_traceback(threads, all_threads=True)
            record = _newest_collectives()
            os.ftruncate(flight, 0)
            os.pwrite(flight, record, 0)


def _newest_collectives() -> bytes:
    if "torch.distributed" not in sys.modules:
        return b""
    try:
        from slurm_train.distributed.group import newest_collectives

        return newest_collectives() or b""
    except Exception:  # a private interface of torch, or one that is only half imported yet
        return b""


def _unnamed() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
