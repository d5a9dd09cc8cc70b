"""Waiting in tests: for a condition, with a deadline, never a bare sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], *, within_s: float, what: str, poll_s: float = 0.2) -> T:
    """Returns the first true value of the condition.

    Raises:
        AssertionError: it never became true; names what was waited for and the last value.
    """
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within_s:.0f} s for {what}; last value: {value!r}")
        time.sleep(poll_s)


@contextmanager
def repeating(action: Callable[[], object], *, every_s: float) -> Iterator[None]:
    """Does something again and again in a thread while the body runs."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every_s):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
