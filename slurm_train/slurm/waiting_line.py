"""The whole queue as one squeue prints it: the jobs that are asked for, and how many wait before each of them.

squeue gets all jobs from the controller as soon as it is asked for more than one, so the whole queue costs the
controller no more than two jobs do; only this machine has more lines to read. Where a site hides the jobs of others,
they are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_train.errors import ClusterError
from slurm_train.slurm.job_id import only_asked
from slurm_train.slurm.reasons import is_in_line
from slurm_train.slurm.records import SQUEUE_FORMAT, JobState, parse_squeue
from slurm_train.slurm.states import Phase, expand_array_id, phase_of

QUEUE_FORMAT = f"%Q|{SQUEUE_FORMAT}"


@dataclass(frozen=True, slots=True)
class Queue:
    """What one squeue said."""

    jobs: Mapping[str, JobState]
    """Those that were asked for, by id."""
    jobs_ahead: Mapping[str, int] = field(default_factory=dict)
    """Of a waiting job: how many jobs of its partition are in line before it; an array's element is a job."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    job_ids: str
    priority: int
    partitions: frozenset[str]

    @property
    def place(self) -> tuple[int, int]:
        """Smaller is earlier: by priority, then by number, which is the order of submission."""
        number = self.job_ids.partition("_")[0].partition("+")[0]
        return -self.priority, int(number) if number.isdigit() else 0


def parse_queue(text: str, *, asked: Iterable[str]) -> Queue:
    """Returns what the output of `squeue -h -t all -o QUEUE_FORMAT` says about jobs.

    Args:
        text: the output, arrays in brackets.
        asked: ids; an array's id means all of its elements.
    """
    wanted = list(asked)
    numbers = {job_id.partition("_")[0] for job_id in wanted}
    rows = [line.partition("|")[::2] for line in text.splitlines()]
    own = "\n".join(rest for _, rest in rows if _number(rest) in numbers)
    jobs = only_asked(wanted, parse_squeue(own))
    return Queue(jobs, _jobs_ahead(jobs, [one for row in rows if (one := _waiting(*row)) is not None]))


def _number(row: str) -> str:
    return row.partition("|")[0].partition("_")[0].partition("+")[0]


def _waiting(priority: str, row: str) -> _Waiting | None:
    """Returns a row as a job in line, None for one that runs, has ended, or waits for something else than nodes."""
    fields = row.split("|")
    if len(fields) != SQUEUE_FORMAT.count("|") + 1 or not priority.isdigit():
        return None
    if phase_of(fields[1]) is not Phase.QUEUED or not is_in_line(fields[2]):
        return None
    return _Waiting(fields[0], int(priority), frozenset(fields[6].split(",")))


def _jobs_ahead(jobs: Mapping[str, JobState], line: list[_Waiting]) -> dict[str, int]:
    own = {_number(one.job_ids): one for one in line}
    in_line = {job_id for job_id, job in jobs.items() if job.phase is Phase.QUEUED and is_in_line(job.reason)}
    # The elements of an array stand in one place, and there may be a thousand of them.
    ahead = {number: _num_before(own[number], line) for number in {_number(one) for one in in_line} & set(own)}
    return {job_id: ahead[_number(job_id)] for job_id in in_line if _number(job_id) in ahead}


def _num_before(own: _Waiting, line: list[_Waiting]) -> int:
    before = (one for one in line if one.place < own.place and one.partitions & own.partitions)
    return sum(_num_jobs(one.job_ids) for one in before)


def _num_jobs(job_ids: str) -> int:
    try:
        return len(expand_array_id(job_ids))
    except ClusterError:
        return 1
