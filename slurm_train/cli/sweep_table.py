"""The runs of a sweep as they stand, for the verbs that do something with some of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from slurm_train.rundir.sweep import Element
from slurm_train.slurm.queue_view import Look
from slurm_train.slurm.records import JobState
from slurm_train.standing.conditions import choose
from slurm_train.standing.facts import Standing, standing_of, subjects_of
from slurm_train.standing.files import read_files
from slurm_train.standing.states import RunState

RESUMABLE = tuple(
    state
    for state in RunState
    if state not in (RunState.QUEUED, RunState.RUNNING, RunState.FINISHING, RunState.FINISHED)
)
"""What --only takes; the first is also called missing."""


def read_rows(elements: Sequence[Element], jobs: Mapping[str, JobState]) -> list[Standing]:
    """Returns how the runs of a sweep stand.

    Args:
        elements: its table.
        jobs: what Slurm says about their jobs.
    """
    look, now_unix_s = Look(jobs=jobs, age_s=0.0), time.time()
    subjects = subjects_of(elements)
    return [standing_of(subject, read_files(subject.run), look, now_unix_s=now_unix_s) for subject in subjects]


def chosen(rows: Sequence[Standing], conditions: Sequence[str]) -> list[Standing]:
    """Returns the rows for which every condition holds, e.g. ["optim.lr=1e-3", "seed=2"].

    Raises:
        ConfigError: a condition is not KEY=VALUE, or no run has such a key.
    """
    kept = {subject.run for subject in choose([row.subject for row in rows], conditions)}
    return [row for row in rows if row.run in kept]
