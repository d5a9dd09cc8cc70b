"""The rank's side of the watch over a script or function: starts its watcher, and answers its requests.

The watcher is a small separate process (`watcher.py`), so it can watch a rank that is stopped, blocked in a driver, or
not Python at all. It requests the main thread's stack by a signal, which faulthandler answers whatever holds the
interpreter. It requests the stacks of all threads and the flight record by a byte through a pipe, which a thread
answers. The answers go to unnamed files that the two processes share, so a rank that hangs writes to no file system.
Imports no torch.

The signal's handler must not read other threads: it does not hold the interpreter's lock, and a thread that runs
meanwhile frees the frames that are read. A program with two busy threads died of that at the second to fifth signal
(3.11); with only its own thread read, it survived 8,000 signals.
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
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a user's script imports this file, and needs neither
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.paths import RunDirectory

ASK = signal.SIGRTMIN + 11
"""Requests the stacks. Its default action would end a process, so it is sent only to a process that catches it."""
_LONGEST_MESSAGE = 200
_ended_threads: list[str] = []
"""Threads that an exception has ended, with its words."""
_DESCRIPTORS = "SLURM_TRAIN_WATCH"
_WATCHER = Path(__file__).with_name("watcher.py")


def start_watcher(
    run: RunDirectory, *, attempt: int, place: RankPlace, env: Mapping[str, str], limit_s: float
) -> dict[str, str]:
    """Starts the watcher of this process, and returns the variable by which the script can answer it.

    The script may replace this process by exec. The watcher is no child of it, since a script may wait for its
    children.

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
    requests, request_writer = os.pipe()
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
        "descriptors": [stacks, threads, flight, request_writer],
    }
    command = [sys.executable, str(_WATCHER), json.dumps(facts)]
    nothing = subprocess.DEVNULL
    # It forks at once, and its parent ends. If it fails, the run goes on without a watcher.
    with contextlib.suppress(OSError):
        subprocess.run(
            command,
            pass_fds=(stacks, threads, flight, request_writer),
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            check=False,
        )
    os.close(request_writer)
    for descriptor in (stacks, threads, flight, requests):
        os.set_inheritable(descriptor, True)
    return {_DESCRIPTORS: f"{stacks},{threads},{flight},{requests}"}


def answer_watcher(env: MutableMapping[str, str]) -> None:
    """Makes this process answer its watcher from now on; does nothing if it has no watcher.

    Args:
        env: with the variable from `start_watcher`, which is removed, since it is not for child processes.
    """
    descriptors = env.pop(_DESCRIPTORS, "")
    if not descriptors:
        return
    stacks, threads, flight, requests = map(int, descriptors.split(","))
    for descriptor in (stacks, threads, flight, requests):
        os.set_inheritable(descriptor, False)
    _remember_ended_threads()
    faulthandler.register(ASK, file=stacks, all_threads=False, chain=False)
    main = threading.main_thread().ident or 0
    os.pwrite(stacks, f"main thread {main:#018x}\n".encode(), 0)
    answers = threading.Thread(target=_answer, args=(requests, threads, flight), name="slurm_train watch", daemon=True)
    answers.start()


def _answer(requests: int, threads: int, flight: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(requests, 1):
            os.ftruncate(threads, 0)
            os.lseek(threads, 0, os.SEEK_SET)
            # This thread holds the interpreter's lock, so no other thread runs meanwhile.
            faulthandler.dump_traceback(threads, all_threads=True)
            os.write(threads, _failures().encode(errors="replace"))
            record = _newest_collectives()
            os.ftruncate(flight, 0)
            os.pwrite(flight, record, 0)


def _remember_ended_threads() -> None:
    """Notes which exception ends a thread: the others may wait for ever for what it was to bring."""
    show = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread is not None else "of no name"
            # Its words only: the exception would keep the tensors of its frames.
            with contextlib.suppress(Exception):
                _ended_threads.append(f"{name}: {_words_of(args.exc_value)}")
        show(args)

    threading.excepthook = note


def _words_of(err: BaseException) -> str:
    from slurm_train.config.secrets import redact
    from slurm_train.rundir.events import message_of

    return redact(message_of(err))[:_LONGEST_MESSAGE]


def _failures() -> str:
    """Returns the lines that follow the stacks: what has ended a thread, and which exception the main thread handles.

    A rank that has failed may never say so: `destroy_process_group` in `finally:` waits for its peers.
    """
    try:
        from slurm_train.config.secrets import redact
        from slurm_train.supervise.silence import ENDED_THREAD, HANDLES

        current: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
        # A tuple of the type, the exception and its traceback before 3.12.
        err = current[1] if isinstance(current, tuple) else current
        text = f"\n{ENDED_THREAD}{_ended_threads[-1]}\n" if _ended_threads else ""
        if isinstance(err, BaseException):
            text += f"\n{HANDLES}{_words_of(err)}\n{redact(''.join(traceback.format_exception(err)))}"
        return text
    except Exception:  # the stacks are worth more
        return ""


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
