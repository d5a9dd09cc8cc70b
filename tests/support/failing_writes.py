"""A file system that refuses writes: the n-th call that changes something below a folder fails, or all from it on."""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

_BY_NAME = ("mkdir", "rename", "replace", "link", "unlink", "chmod")
_BY_DESCRIPTOR = ("write", "pwrite", "fsync", "fdatasync")
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
        with ExitStack() as patches:
            for name in _BY_NAME:
                patches.enter_context(mock.patch.object(os, name, self._by_name(getattr(os, name))))
            for name in _BY_DESCRIPTOR:
                patches.enter_context(mock.patch.object(os, name, self._by_descriptor(getattr(os, name))))
            patches.enter_context(mock.patch.object(os, "open", self._opening(os.open)))
            opened = self._opening_file(io.open)
            for owner in (io, builtins):
                patches.enter_context(mock.patch.object(owner, "open", opened))
            yield

    def _meet(self, path: object) -> None:
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if not text.startswith(self._root):
            return
        with self._lock:
            self._calls += 1
            number = self._calls
            self._pwrite(self._counted, str(number).encode(), 0)
        if self._at and (number == self._at or (self._onward and number > self._at)):
            raise OSError(self._number, os.strerror(self._number), text)

    def _by_name(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._meet(path)
            return real(path, *args, **kwargs)

        return call

    def _by_descriptor(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *args: Any) -> Any:
            self._meet(_path_of(descriptor))
            return real(descriptor, *args)

        return call

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & _WRITES:
                self._meet(path)
            return real(path, flags, *args, **kwargs)

        return call

    def _opening_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = any(letter in mode for letter in "wax+")
            if writes:
                self._meet(_path_of(path) if isinstance(path, int) else path)
            file = real(path, mode, *args, **kwargs)
            return _File(file, self._meet) if writes else file

        return call


class _File:
    """A file object whose writes and flushes count."""

    def __init__(self, file: Any, meet: Callable[[object], None]) -> None:
        self._file, self._meet = file, meet

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        if name not in ("write", "flush"):
            return value

        def call(*args: Any) -> Any:
            self._meet(_path_of(self._file.fileno()))
            return value(*args)

        return call

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _path_of(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
