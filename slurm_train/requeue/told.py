"""Says in the batch log what the preflight has found, as soon as rank 0 has written it down."""

from __future__ import annotations

from collections.abc import Callable

from slurm_train.requeue.monitor import Task
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.preflight import finding_lines, read_record

_EVERY_S = 1.0


def findings_relay(run: RunDirectory, attempt: int, *, say: Callable[[str], None]) -> Task:
    """Returns the task that says each finding of an attempt once.

    Args:
        run: the run.
        attempt: number of the attempt.
        say: gets a line.
    """
    said = set[str]()

    def look() -> None:
        for line in finding_lines(read_record(run, attempt)):
            if line not in said:
                said.add(line)
                say(line)

    return Task(name="the preflight's findings", every_s=_EVERY_S, look=look, end=look)
