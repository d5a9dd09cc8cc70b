"""Ranks without the seconds that importing torch takes: one process imports it and forks each rank.

What a rank does after that is what it would have done: it runs the same program with the same words. That a cold
interpreter gets there as well is seen wherever a test starts a run through the command line.
"""

from __future__ import annotations

import atexit
import faulthandler
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
from typing import IO, Any, NoReturn

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


# The Hub's variables are read when these are imported, so not for ranks that are to have others.
LLAMA = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")


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


def start_rank(
    program: Path,
    *words: str,
    env: Mapping[str, str],
    log: Path | None = None,
    errors: Path | None = None,
    imports: Sequence[str] = (),
) -> WarmRank:
    """Starts `python PROGRAM WORDS...` and returns at once.

    Args:
        program: what is run as `__main__`; its folder is where it finds modules first.
        words: its command line.
        env: all of its environment.
        log: what it prints is appended there; None: to a file of its own.
        errors: where its stderr is appended, if not to the log.
        imports: modules that it finds imported as well, see `LLAMA`.
    """
    server = _running_server(tuple(imports))
    said = log or Path(server.folder) / f"{next(server.count)}.log"
    order = {"argv": [str(program), *words], "env": dict(env), "log": str(said), "errors": str(errors or said)}
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


def run_alone(folder: Path, program: str, *words: str, timeout_s: float = 240.0) -> str:
    """Runs a program that needs torch in one process and returns its last line, once it has ended well.

    Args:
        folder: where the program is put.
        program: Python source.
        words: its command line.
        timeout_s: for all of it.
    """
    path = folder / "program.py"
    path.write_text(program)
    process = start_rank(path, *words, env=os.environ)
    _, text = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, text
    return text.rpartition("\n")[0].rpartition("\n")[2]


def fork_server() -> None:
    """Gives this process, which a server has forked, a server of its own: it forks what this process starts."""
    order_reader, order_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(order_writer)
        os.close(answer_reader)
        with os.fdopen(order_reader) as orders, os.fdopen(answer_writer, "w") as answers:
            _answer(orders, answers)
        os._exit(0)
    os.close(order_reader)
    os.close(answer_writer)
    # This process gives all logs a name.
    _FORKED[:] = [_Server(os.fdopen(order_writer, "w"), os.fdopen(answer_reader), folder="")]


class _Server:
    """The process that forks, as seen by who asks it.

    Args:
        orders: what it reads.
        answers: what it writes.
        folder: where logs without a name are put.
    """

    def __init__(self, orders: IO[str], answers: IO[str], *, folder: str) -> None:
        self.orders = orders
        self.answers = answers
        self.folder = folder
        self.count = itertools.count()
        self.lock = threading.Lock()

    def ask(self, **order: Any) -> dict[str, Any]:
        with self.lock:
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()
            line = self.answers.readline()
        assert line, "the process that forks ranks has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


# By what they have imported beside `_WARM`.
_SERVERS: dict[tuple[str, ...], _Server] = {}
_FORKED: list[_Server] = []
_STARTING = threading.Lock()


def _running_server(imports: tuple[str, ...]) -> _Server:
    if _FORKED:
        return _FORKED[0]
    with _STARTING:
        if imports not in _SERVERS:
            _SERVERS[imports] = _start_server(imports)
    return _SERVERS[imports]


def _start_server(imports: Sequence[str]) -> _Server:
    argv = [sys.executable, "-m", "tests.support.warm_ranks", *imports]
    repository = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        argv, cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    orders, answers = process.stdin, process.stdout
    assert orders is not None and answers is not None
    folder = tempfile.TemporaryDirectory(prefix="warm-ranks-")

    def close() -> None:
        # Processes that a test forked, such as workers of a loader, may still hold the end that `orders` closes.
        process.kill()
        orders.close()
        answers.close()
        process.wait()
        folder.cleanup()

    atexit.register(close)
    return _Server(orders, answers, folder=folder.name)


def serve() -> None:
    """The server's side: imports what ranks need and answers orders until stdin ends."""
    import torch

    torch.set_num_threads(1)
    for name in (*_WARM, *sys.argv[1:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _answer(sys.stdin, sys.stdout)


def _answer(orders: IO[str], answers: IO[str]) -> None:
    for line in orders:
        order = json.loads(line)
        if "fork" in order:
            answer = {"pid": os.fork()}
            if answer["pid"] == 0:
                _become_rank(order["fork"])
        else:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _become_rank(order: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "log"), (2, "errors")):
            os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        # As the worker does: a segmentation fault shows where it was.
        faulthandler.enable()
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
