"""Micro-batches that are read ahead by a thread while the training computes.

The thread only runs ahead: what it has read and the optimizer has not used yet is read again after a restart, since
positions are counted at the optimizer. An error of reading comes up where its batch would have been used.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_LOOK_EVERY_S = 0.5


class Prefetch(Generic[T]):
    """An iterator over what another one gives, so many items of it read ahead.

    Only for reading that draws nothing from the random generators of this process: they belong to the training.

    Args:
        items: what to read; only the thread touches it from now on.
        depth: items that are read ahead, at least 1.
    """

    def __init__(self, items: Iterator[T], *, depth: int) -> None:
        assert depth >= 1
        self._items = items
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._over: BaseException | None = None
        # A daemon: the process may end in the middle of reading, and nothing is lost by it.
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._over is not None:
            raise self._over
        item, error = self._ready.get()
        if error is not None:
            self._over = error
            raise error
        return item  # type: ignore[return-value]  # there is an item where there is no error

    def close(self) -> None:
        """Ends the thread; what it has read is dropped."""
        self._closed.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._closed.is_set():
            try:
                entry: tuple[T | None, BaseException | None] = (next(self._items), None)
            except BaseException as err:
                entry = (None, err)
            self._put(entry)
            if entry[1] is not None:
                return

    def _put(self, entry: tuple[T | None, BaseException | None]) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(entry, timeout=_LOOK_EVERY_S)
                return
            except queue.Full:
                continue
