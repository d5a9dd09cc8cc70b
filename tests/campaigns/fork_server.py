"""Starts ranks in milliseconds: a process that has imported torch once and forks a worker for each order.

    python -m tests.campaigns.fork_server FOLDER MODULE...     (talks JSON lines on stdin and stdout)

The forked child runs `slurm_train worker RUN_DIR` as `python -m slurm_train` would have; nothing in it is replaced. It
notes what it is doing (see `moments`) in memory that it shares with the server, and may carry an order to kill itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.campaigns.moments import Moment, Note, note_phases
from tests.support.command_line import REPOSITORY

_WARM = (
    "encodings.idna",
    "numpy.random",
    "torch",
    # The first optimizer of a process imports it, half a second of a life that lasts one.
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.nn.parallel",
    "slurm_train.cli.worker",
    "slurm_train.checkpoint.export",
    "slurm_train.checkpoint.load",
    "slurm_train.checkpoint.save",
    "slurm_train.checkpoint.state",
    "slurm_train.checkpoint.tensors",
    "slurm_train.config.frozen",
    "slurm_train.launch.meeting",
    "slurm_train.supervise.monitor",
    "slurm_train.rundir.events",
    "slurm_train.train.trainer",
)


class ForkServer:
    """The caller's side; its methods may be called by several threads.

    Args:
        folder: where the ranks find a run's own modules.
        modules: those of them that are imported before the first fork.
        log: what the server itself prints.
    """

    def __init__(self, folder: Path, *, modules: Sequence[str] = (), log: Path) -> None:
        self.folder = folder
        argv = [sys.executable, "-m", "tests.campaigns.fork_server", str(folder), *modules]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                argv, cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._lock = threading.Lock()

    def fork(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, moment: Moment | None, cold: bool = False
    ) -> ForkedRank:
        """Starts a rank.

        Args:
            argv: the worker's command line.
            env: all of its environment.
            log: its stdout and stderr, appended to.
            moment: when it kills itself; None: it does not.
            cold: a fresh interpreter, which imports everything itself.
        """
        order = {"argv": list(argv), "env": dict(env), "log": str(log), "cold": cold}
        order["moment"] = None if moment is None else asdict(moment)
        return ForkedRank(server=self, pid=int(self.ask(fork=order)["pid"]))

    def ask(self, **order: Any) -> dict[str, Any]:
        """Sends an order and returns the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the fork server has ended with {self._process.wait()}"
        loaded: dict[str, Any] = json.loads(answer)
        return loaded

    def close(self) -> None:
        """Ends the server; its ranks end with it, since they look after their parent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass(slots=True)
class ForkedRank:
    """What `LocalRanks` wants of a process, and what the rank noted about itself."""

    server: ForkServer
    pid: int
    returncode: int | None = None
    note: Note | None = field(default=None)
    """What it was at when it ended."""
    _pidfd: int = -1

    def __post_init__(self) -> None:
        # The server reaps it only when it is asked, so the number is still this rank's.
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Returns the exit code (minus the signal), None while it runs."""
        return self.wait(timeout=0.0, raises=False)

    def wait(self, timeout: float, *, raises: bool = True) -> int | None:
        """Waits for the end.

        Raises:
            TimeoutExpired: it runs still.
        """
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                if raises:
                    raise subprocess.TimeoutExpired("rank", timeout)
                return None
            answer = self.server.ask(reap=self.pid)
            self.returncode, self.note = answer["code"], Note(**answer["note"])
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)


def serve(words: Sequence[str]) -> None:
    """The server's side: answers orders until stdin ends."""
    import mmap

    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, words[0])
    for name in (*_WARM, *words[1:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    notes: dict[int, mmap.mmap] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "fork" in order:
            memory = mmap.mmap(-1, Note.SIZE)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _become_rank(order["fork"], memory)
            notes[pid] = memory
            answer: dict[str, Any] = {"pid": pid}
        else:
            _, status = os.waitpid(order["reap"], 0)
            memory = notes.pop(order["reap"])
            answer = {"code": os.waitstatus_to_exitcode(status), "note": asdict(Note.read(memory))}
            memory.close()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _become_rank(order: Mapping[str, Any], memory: Any) -> NoReturn:
    try:
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if order["cold"]:
            Note.write(memory, phase="cold")
            os.execve(order["argv"][0], order["argv"], order["env"])
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv = order["argv"]
        moment = None if order["moment"] is None else Moment(**order["moment"])
        note_phases(memory, moment=moment, run=Path(order["argv"][-1]))
        from slurm_train.cli.worker import main

        main([order["argv"][-1]])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(70)


if __name__ == "__main__":
    # Without this a process that is killed with the server's terminal would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1:])
