"""A file system that refuses writes: the n-th call that changes something below a folder fails, or all from it on."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.faulty_files import CountedFile, patched, whole_path

_CHANGES = ("mkdir", "rename", "replace", "link", "unlink", "chmod", "write", "pwrite", "fsync", "fdatasync")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FailingWrites:
    """Counts the calls that make or change something below a folder, and lets them fail.

    Args:
        root: the folder; standard error counts as a file in it.
        at: number of the first call that fails; 0: none does.
        number: the error.
        onward: whether all calls after it fail as well.
        counted: file in which the number of calls is kept.
    """

    def __init__(self, root: Path, *, at: int, number: int, onward: bool, counted: Path) -> None:
        self._root, self._at, self._number, self._onward = str(root), at, number, onward
        self._calls, self._lock = 0, threading.Lock()
        self._counted = os.open(counted, os.O_WRONLY | os.O_CREAT, 0o600)
        self._pwrite = os.pwrite

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes the place of `os` and `open` for a while."""
        calls = {name: self._meeting(getattr(os, name)) for name in _CHANGES} | {"open": self._opening(os.open)}
        with patched(calls, self._opening_file(io.open)):
            yield

    def _meet(self, target: Any) -> None:
        """Counts a call for a path or a descriptor, if it is below the folder, and fails if it is its turn."""
        with suppress(OSError):
            target = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
        text = "" if isinstance(target, int) else os.fsdecode(target)
        if not text.startswith(self._root):
            return
        with self._lock:
            self._calls += 1
            number = self._calls
            self._pwrite(self._counted, str(number).encode(), 0)
        if self._at and (number == self._at or (self._onward and number > self._at)):
            raise OSError(self._number, os.strerror(self._number), text)

    def _meeting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            self._meet(whole_path(target, kwargs["dir_fd"]) if kwargs.get("dir_fd") is not None else target)
            return real(target, *args, **kwargs)

        return call

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & _WRITES:
                self._meet(path)
            return real(path, flags, *args, **kwargs)

        return call

    def _opening_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not any(letter in mode for letter in "wax+"):
                return real(path, mode, *args, **kwargs)
            self._meet(path)
            file = real(path, mode, *args, **kwargs)

            def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
                changes = self._meeting(lambda _, *args: method(*args))
                return partial(changes, file.fileno()) if name in ("write", "flush") else method

            return CountedFile(file, counting)

        return call
