"""Ranks that are threads of this process, for exchanges without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slurm_train.checkpoint.agreement import Peers

Result = TypeVar("Result")


class ThreadPeers(Peers):
    """One of several ranks; what they pass meets in a list."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self._rank, self._barrier, self._box = rank, barrier, box

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._box)

    def gather_values(self, value: Any) -> list[Any]:
        self._box[self._rank] = value
        self._barrier.wait(30)
        values = list(self._box)
        self._barrier.wait(30)
        return values


def on_threads(size: int, work: Callable[[ThreadPeers], Result]) -> list[Result | Exception]:
    """Runs the work on so many ranks at the same time; returns what each gives, or what it raises."""
    barrier, box = threading.Barrier(size), [None] * size

    def run(rank: int) -> Result | Exception:
        try:
            return work(ThreadPeers(rank, barrier, box))
        except Exception as err:
            return err

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
