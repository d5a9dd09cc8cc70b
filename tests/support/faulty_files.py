"""A file system that kills, fails or loses power at the n-th call."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

CALLS = ("open", "write", "fsync", "fchmod", "close", "rename", "replace", "unlink", "mkdir", "rmdir")
FILE_CALLS = ("write", "flush", "close", "read", "readinto")

Fault = Callable[[str, str], None]
Watch = Callable[[str, tuple[Any, ...], Any], None]


class FaultyFiles:
    """Counts the calls of `os`, of `open` and of the files that it gives, and does something at the n-th.

    What torch writes through file objects counts as well. A buffered write is a call although its bytes reach the
    kernel later: killed after it, a process leaves fewer bytes.

    fault: called as fault(when, name) with when "before" or "after" at call number `at`.
    watch: called after every call as watch(name, args, result); its own calls do not count.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_watching = False
        self.lock = threading.RLock()
        self.names: list[str] = []
        self._at = 0
        self._fault: Fault | None = None
        self._watch: Watch | None = None

    @contextmanager
    def installed(
        self, *, at: int = 0, fault: Fault | None = None, watch: Watch | None = None
    ) -> Iterator[FaultyFiles]:
        self._at, self._fault, self._watch = at, fault, watch
        calls = {name: self._counting(name, getattr(os, name)) for name in CALLS}
        with patched(calls, self._counting_files(io.open)):
            yield self

    def _counting_files(self, real: Callable[..., Any]) -> Callable[..., Any]:
        counted = self._counting("open_file", real)

        def open_file(*args: Any, **kwargs: Any) -> Any:
            return real(*args, **kwargs) if self.is_watching else CountedFile(counted(*args, **kwargs), self._counting)

        return open_file

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.lock:  # files are hashed by several threads
                return real(*args, **kwargs) if self.is_watching else self._call(name, real, args, kwargs)

        return call

    def _call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        self.names.append(name)
        fault = self._fault if self.num_calls == self._at else None
        if fault is not None and name != "close":  # a close that reports an error has closed all the same
            fault("before", name)
        try:
            result = real(*args, **kwargs)
        except OSError:  # a file that is not there: the call is over all the same
            if fault is not None:
                fault("after", name)
            raise
        if self._watch is not None:
            self.is_watching = True
            in_folder = kwargs.get("dir_fd")
            self._watch(name, args if in_folder is None else (whole_path(args[0], in_folder), *args[1:]), result)
            self.is_watching = False
        if fault is not None:
            if name == "close":
                fault("before", name)
            fault("after", name)
        return result


@contextmanager
def patched(calls: Mapping[str, Callable[..., Any]], open_file: Callable[..., Any]) -> Iterator[None]:
    """Puts calls in the place of those of `os`, and of `open`."""
    with ExitStack() as patches:
        for owner in (io, builtins):
            patches.enter_context(mock.patch.object(owner, "open", open_file))
        accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10 keeps its own references
        for name, call in calls.items():
            patches.enter_context(mock.patch.object(os, name, call))
            if accessor is not None and hasattr(accessor, name):
                kept = staticmethod(open_file if name == "open" else call)
                patches.enter_context(mock.patch.object(type(accessor), name, kept))
        yield


def whole_path(name: str, folder: int) -> Path:
    """Returns the path of a name in an open folder."""
    return Path(f"/proc/self/fd/{folder}").readlink() / name


class CountedFile:
    """A file object whose reads and writes count."""

    def __init__(self, file: Any, counting: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._file, self._counting = file, counting

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        return self._counting(name, value) if name in FILE_CALLS else value

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def count_calls(work: Callable[[], Any]) -> int:
    """Returns how many calls the work makes."""
    with FaultyFiles().installed() as files:
        work()
    return files.num_calls


def fork(work: Callable[[], object], *, at: int, fault: Fault) -> int:
    """Does the work in a forked child, with a fault at that call; returns the child."""
    child = os.fork()
    if child == 0:
        try:
            with FaultyFiles().installed(at=at, fault=fault):
                work()
        finally:
            os._exit(0)
    return child


def run_killed(work: Callable[[], Any], *, at: int, when: str) -> bool:
    """Runs the work in a forked child that is killed at that call; says whether it was killed."""

    def kill(moment: str, name: str) -> None:
        if moment == when:
            os.kill(os.getpid(), signal.SIGKILL)

    return os.WIFSIGNALED(os.waitpid(fork(work, at=at, fault=kill), 0)[1])


def run_failing(work: Callable[[], Any], *, at: int, number: int) -> tuple[Any, BaseException | None]:
    """Runs the work with an OSError at that call; gives its result or its error."""

    def fail(moment: str, name: str) -> None:
        if moment == "before":
            raise OSError(number, os.strerror(number), name)

    with FaultyFiles().installed(at=at, fault=fail):
        try:
            return work(), None
        except Exception as err:
            return None, err


class PowerCut:
    """Follows which bytes and which directory entries were made durable, and rebuilds what a power cut leaves.

    Everything that is there at the start counts as durable.
    """

    def __init__(self, root: Path) -> None:
        self.root_inode = root.stat().st_ino
        self.content: dict[int, bytes] = {}
        self.entries: dict[int, dict[str, int]] = {}
        for path in [root, *root.rglob("*")]:
            self._remember(path)

    def watch(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Takes note of a call that was made."""
        if name == "fsync":
            self._remember(Path(f"/proc/self/fd/{args[0]}").readlink())
        elif name == "mkdir":
            self.entries[Path(args[0]).stat().st_ino] = {}
        elif name in ("open", "open_file"):
            # Empty: just made or just emptied. Inode numbers are used again.
            status = os.fstat(result if name == "open" else result.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size == 0:
                self.content[status.st_ino] = b""

    def rebuild(self, live: Path, target: Path, *, durable_names_only: bool) -> None:
        """Writes what is left: durable bytes, under durable names only or under all names that were given."""
        if durable_names_only:
            self._rebuild_from(self.root_inode, target)
            return
        for path in [live, *sorted(live.rglob("*"))]:
            copy = target / path.relative_to(live)
            if path.is_dir():
                copy.mkdir()
            else:
                copy.write_bytes(self.content.get(path.stat().st_ino, b""))

    def _rebuild_from(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, child in self.entries[inode].items():
            if child in self.entries:
                self._rebuild_from(child, target / name)
            else:
                (target / name).write_bytes(self.content.get(child, b""))

    def _remember(self, path: Path) -> None:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            self.entries[status.st_ino] = {child.name: child.stat().st_ino for child in path.iterdir()}
        else:
            self.content[status.st_ino] = path.read_bytes()
