"""What a job is called: "123", or "123_4" for an element of an array."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from slurm_train.errors import ClusterError

T = TypeVar("T")

_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")
_STEP_ID = re.compile(r"[0-9]+(_[0-9]+)?\.[0-9]+")


def is_job_id(text: str) -> bool:
    """Returns whether the text is one job or one array element: "123" or "123_4"."""
    return _JOB_ID.fullmatch(text) is not None


def is_step_id(text: str) -> bool:
    """Returns whether the text is a numbered step of a job: "123.0"."""
    return _STEP_ID.fullmatch(text) is not None


def checked_ids(job_ids: Iterable[str]) -> list[str]:
    """Returns ids without repetitions.

    Raises:
        ClusterError: one of them is none.
    """
    checked = list(dict.fromkeys(job_ids))
    for job_id in checked:
        if not is_job_id(job_id):
            raise ClusterError(f"{job_id!r} is not a job id", hint='write "123", or "123_4" for an array element')
    return checked


def by_array(job_ids: Sequence[str]) -> list[str]:
    """Returns what to ask for: the id of an array where several of its elements are meant, else the ids as they are."""
    num_asked = Counter(job_id.partition("_")[0] for job_id in job_ids if "_" in job_id)
    short = (job_id.partition("_")[0] if num_asked[job_id.partition("_")[0]] > 1 else job_id for job_id in job_ids)
    return list(dict.fromkeys(short))


def only_asked(asked: Sequence[str], found: Mapping[str, T]) -> dict[str, T]:
    """Returns what is known of the jobs that were asked for, be it by the id of their array."""
    wanted = set(asked)
    return {key: job for key, job in found.items() if key in wanted or key.partition("_")[0] in wanted}
