"""Says in the batch log what the preflight has found, as soon as rank 0 has written it down."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.preflight import finding_lines, read_record

_EVERY_S = 1.0


@contextlib.contextmanager
def telling(run: RunDirectory, attempt: int, *, say: Callable[[str], None]) -> Iterator[None]:
    """Says each finding of an attempt once while the body waits for its ranks.

    Args:
        run: the run.
        attempt: number of the attempt.
        say: gets a line.
    """
    done, told = threading.Event(), set[str]()

    def tell() -> None:
        for line in finding_lines(read_record(run, attempt)):
            if line not in told:
                told.add(line)
                say(line)

    def follow() -> None:
        while not done.wait(_EVERY_S):
            with contextlib.suppress(OSError):
                tell()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            tell()
