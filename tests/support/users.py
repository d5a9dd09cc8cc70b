"""Several users on one machine, as processes of this one that have given up root's rights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

NOBODY_ELSES = "becoming another user needs root"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason=NOBODY_ELSES)

ME, STRANGER = 65531, 65533


@contextlib.contextmanager
def shared_root(mode: int, *, group: int = -1) -> Iterator[Path]:
    """Yields an empty folder `runs` that every user can reach; it is removed afterwards.

    Args:
        mode: its permissions, e.g. 0o1777: everybody may make folders in it.
        group: its group; -1: that of the caller.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)  # noqa: PTH101
        root = Path(name) / "runs"
        root.mkdir()
        os.chown(root, -1, group)
        root.chmod(mode)
        yield root


class UserWork:
    """A piece of work in a process of a user.

    Args:
        uid: the user, whose group has the same number.
        work: what the process does; what it returns must be JSON.
        groups: further groups.
    """

    def __init__(self, uid: int, work: Callable[[], Any], *, groups: Sequence[int] = ()) -> None:
        self.uid = uid
        self._receiver, sender = Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            self._receiver.close()
            self._work(sender, work, groups)
        sender.close()

    def _work(self, sender: Connection, work: Callable[[], Any], groups: Sequence[int]) -> None:
        try:
            os.setgroups(list(groups))
            os.setgid(self.uid)
            os.setuid(self.uid)
            answer = (json.dumps(work()), "")
        except BaseException as err:  # whatever it is, whoever asked is told
            answer = ("null", f"uid {self.uid}: {type(err).__name__}: {err} {traceback.format_exc(limit=-3)}")
        sender.send(answer)
        os._exit(0)

    def result(self, *, within_s: float = 60.0) -> Any:
        """Returns what the work has returned, and ends the process.

        Raises:
            TimeoutError: it has not returned in time.
            AssertionError: it has raised.
        """
        try:
            if not self._receiver.poll(within_s):
                raise TimeoutError(f"uid {self.uid} is still at work after {within_s:g} s")
            value, problem = self._receiver.recv()
        finally:
            self.end()
        assert not problem, problem
        return json.loads(value)

    def has_ended(self) -> bool:
        """Returns whether the work has returned or raised."""
        return self._receiver.poll()

    def end(self) -> None:
        """Ends the process; once is enough."""
        if not self._receiver.closed:
            self._receiver.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def as_user(uid: int, work: Callable[[], Any], *, groups: Sequence[int] = (), within_s: float = 60.0) -> Any:
    """Returns what a piece of work returns in a process of a user, see `UserWork.result`."""
    return UserWork(uid, work, groups=groups).result(within_s=within_s)
