"""At the start of each attempt: what it runs on is written down, and packages that have changed are named.

The code of a run is its own copy, but packages are where they are installed; whoever upgrades one between two attempts
changes the run. Done beside the start of the ranks, which wait for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_train.launch.code_index import shorten
from slurm_train.launch.provenance import record_environment
from slurm_train.rundir.events import append_event
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise.monitor import say


def note_surroundings(run: RunDirectory, attempt: int, *, slurm: Callable[[], str | None]) -> threading.Thread:
    """Begins to write an attempt's `environment.json`, in a thread that nobody has to wait for.

    Args:
        run: the run.
        attempt: its attempt.
        slurm: gives Slurm's version.
    """
    thread = threading.Thread(target=_note, args=(run, attempt, slurm), name="surroundings", daemon=True)
    thread.start()
    return thread


def _note(run: RunDirectory, attempt: int, slurm: Callable[[], str | None]) -> None:
    try:
        changes = record_environment(run, attempt, slurm=slurm())
        if changes:
            append_event(run, "environment", attempt=attempt, changes=changes)
    except OSError as err:
        say(f"what the attempt runs on could not be written down: {err}")
        return
    if changes:
        say(f"installed packages are not what they were: {shorten(changes)}")
