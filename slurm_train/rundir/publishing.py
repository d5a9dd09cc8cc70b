"""A checkpoint gets its name, its marker and a last look at the fence in one piece, or the process ends before it.

Threads end a process on their own: one that sees a newer attempt, one whose collective failed. Between the marker of a
checkpoint and the last look at the fence, such an end would leave a commit of an old attempt beside the new one (seen
once in 50 trials).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The same thread may enter again: what a fence does may publish, too.
_under_way = threading.RLock()


@contextmanager
def publishing() -> Iterator[None]:
    """Keeps `end_publishing` waiting while its body runs."""
    with _under_way:
        yield


def end_publishing(*, within_s: float) -> bool:
    """Waits for what is being published, and lets nothing be published after it; for a process that ends now.

    Args:
        within_s: a file system that does not answer must not keep the process alive for longer.

    Returns:
        Whether nothing is under way any more.
    """
    return _under_way.acquire(timeout=within_s)
