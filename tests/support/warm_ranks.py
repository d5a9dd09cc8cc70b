"""Ranks without the seconds that importing torch takes: one process imports it and forks each rank.

What a rank does after that is what it would have done: it runs the same program with the same words. That a cold
interpreter gets there as well is seen wherever a test starts a run through the command line.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.ports import rank_environments

_WARM = (
    "encodings.idna",
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "slurm_train.worker.rank",
    "slurm_train.checkpoint.load",
    "slurm_train.checkpoint.tensors",
    "slurm_train.train.build",
)


class WarmRank:
    """A forked rank, with those methods of `subprocess.Popen` that tests use; `communicate` returns its stderr.

    Args:
        server: the process that is its parent.
        pid: its number; the server reaps it only when it is asked, so it stays its own.
        said: the file that it prints into.
    """

    def __init__(self, server: _Server, pid: int, said: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server, self._said = server, said
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Returns the exit code (minus the signal), None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self._reap()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            TimeoutExpired: it runs still.
        """
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            self._reap()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Waits for the end and returns what it printed."""
        self.wait(timeout)
        return None, self._said.read_text()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        self.returncode = int(self._server.ask(reap=self.pid)["code"])
        os.close(self._pidfd)


def start_rank(program: Path, *words: str, env: Mapping[str, str], log: Path | None = None) -> WarmRank:
    """Starts `python PROGRAM WORDS...` and returns at once.

    Args:
        program: what is run as `__main__`; its folder is where it finds modules first.
        words: its command line.
        env: all of its environment.
        log: what it prints is appended there; None: to a file of its own.
    """
    server = _running_server()
    said = log or Path(server.folder.name) / f"{next(server.count)}.log"
    order = {"argv": [str(program), *words], "env": dict(env), "log": str(said)}
    return WarmRank(server, int(server.ask(fork=order)["pid"]), said)


def run_pair(folder: Path, program: str, *words: str) -> list[Any]:
    """Runs the program as rank 0 and as rank 1 and returns what each has left as JSON in the file OUT names.

    Args:
        folder: where the program and the two files are put.
        program: Python source; it opens the process group itself and ends with `os._exit(0)`.
        words: its command line.
    """
    path = folder / "program.py"
    path.write_text(program)
    outs = [folder / f"rank_{rank}.json" for rank in range(2)]
    environments = zip(rank_environments(2), outs, strict=True)
    ranks = [start_rank(path, *words, env={**env, "OUT": str(out)}) for env, out in environments]
    texts = [rank.communicate(timeout=240.0)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(texts)
    return [json.loads(out.read_text()) for out in outs]


class _Server:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="warm-ranks-")
        self.count = itertools.count()
        self.lock = threading.Lock()
        argv = [sys.executable, "-m", "tests.support.warm_ranks"]
        repository = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(
            argv, cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )

        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders, self.answers = self.process.stdin, self.process.stdout

    def ask(self, **order: Any) -> dict[str, Any]:
        with self.lock:
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()
            line = self.answers.readline()
        assert line, f"the process that forks ranks has ended with {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.orders.close()
        self.answers.close()
        self.process.wait()
        self.folder.cleanup()


_SERVERS: list[_Server] = []
_STARTING = threading.Lock()


def _running_server() -> _Server:
    with _STARTING:
        if not _SERVERS:
            _SERVERS.append(_Server())
            atexit.register(_SERVERS[0].close)
    return _SERVERS[0]


def serve() -> None:
    """The server's side: answers orders until stdin ends."""
    import torch

    torch.set_num_threads(1)
    for name in _WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if "fork" in order:
            answer = {"pid": os.fork()}
            if answer["pid"] == 0:
                _become_rank(order["fork"])
        else:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _become_rank(order: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(order["env"])
        argv: Sequence[str] = order["argv"]
        sys.argv[:] = argv
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else int(err.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
