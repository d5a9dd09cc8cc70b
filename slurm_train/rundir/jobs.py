"""The jobs of a run, and the STOP file that keeps jobs from beginning.

Every job has an entry of its own, `jobs/<job id>`. Submitters and jobs on several machines add theirs at the same time,
and none of them can overwrite another's. `job.json` is the same as one list, for people and for programs; what it lacks
because two have written it at once is in the entries.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The jobs of a run."""

    job_ids: tuple[str, ...]
    """All of them, e.g. ("12", "13_4"), in the order in which they were recorded."""
    submit_time_unix_s: float
    """When the newest was submitted."""
    continues: dict[str, str] = field(default_factory=dict)
    """By job: the one that it takes over from when that one has ended."""

    @property
    def job_id(self) -> str:
        """The newest."""
        return self.job_ids[-1]


def read_job(run: RunDirectory) -> JobRecord | None:
    """Returns the jobs of a run, or None for one that never was submitted."""
    listed = read_json(run.job) or {}
    job_ids = [str(job_id) for job_id in listed.get("job_ids", ())]
    submit_unix_s, continues = float(listed.get("submit_time_unix_s", 0.0)), dict(listed.get("continues", {}))
    for job_id, entry in _unlisted(run, job_ids):
        job_ids.append(job_id)
        submit_unix_s = entry["submit_time_unix_s"]
        continues |= {job_id: entry["continues"]} if "continues" in entry else {}
    return JobRecord(job_ids=tuple(job_ids), submit_time_unix_s=submit_unix_s, continues=continues) if job_ids else None


def _unlisted(run: RunDirectory, listed: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the entries that are not in `job.json`, oldest first."""
    try:
        names = {name for name in os.listdir(run.jobs) if name[0].isdigit()} - set(listed)  # noqa: PTH208  # 10x
    except FileNotFoundError:
        return []
    found = [(name, entry) for name in names if (entry := read_json(run.jobs / name)) is not None]
    return sorted(found, key=lambda one: float(one[1]["submit_time_unix_s"]))


def record_job(run: RunDirectory, job_id: str, *, continues: str | None = None, durable: bool = True) -> None:
    """Adds a job to those of a run; one that is recorded already stays as it is.

    Args:
        run: the run.
        job_id: the job.
        continues: the job that it takes over from; such a job does not start if that one was cancelled.
        durable: fsync it; False where the id is kept elsewhere as well.
    """
    before = read_job(run)
    if before is not None and job_id in before.job_ids:
        return
    run.jobs.mkdir(mode=0o700, exist_ok=True)
    entry = {"submit_time_unix_s": time.time(), **({"continues": continues} if continues else {})}
    write_atomic(run.jobs / job_id, json.dumps(entry) + "\n", durable=durable)
    now = read_job(run)
    assert now is not None
    facts: dict[str, Any] = {"job_ids": list(now.job_ids), "submit_time_unix_s": now.submit_time_unix_s}
    facts |= {"continues": now.continues} if now.continues else {}
    write_atomic(run.job, json.dumps(facts) + "\n", durable=durable)


def ask_to_stop(run: RunDirectory, job_ids: Iterable[str], *, newest_job: int | None, durable: bool = True) -> None:
    """Writes STOP for jobs that are about to be cancelled.

    Args:
        run: the run.
        job_ids: these jobs.
        newest_job: a number that every job has at most which Slurm knows by now; None: that of the newest of these.
        durable: fsync it.
    """
    write_atomic(run.stop_file, _stop_text(job_ids, newest_job), durable=durable)


def _stop_text(job_ids: Iterable[str], newest_job: int | None) -> str:
    ids = sorted(job_ids)
    return json.dumps({"jobs": ids, "newest_job": max([newest_job or 0, *map(number_of, ids)])}) + "\n"


def number_of(job_id: str) -> int:
    """Returns the number by which Slurm counts submissions: 12 for "12", "12_3" and "12_[0-3]"; 0 for none."""
    digits = re.match(r"[0-9]+", job_id)
    return int(digits[0]) if digits is not None else 0


def obey_stop(
    run: RunDirectory, job_id: str | None, *, continues: str | None, newest_job: Callable[[], int | None]
) -> str:
    """Returns why a job may not begin, "" where it may. Called with the run's lock held.

    Slurm numbers jobs in the order of submission, so no clocks are compared: a job that was submitted before the stop
    has at most the number in the file. One with a higher number was submitted by a person afterwards; it removes the
    file. A job that takes over from another one counts as that one.

    Args:
        run: the run.
        job_id: this job; None without Slurm.
        continues: the job that it takes over from.
        newest_job: see `complete_stop`.
    """
    if not run.stop_file.exists():
        return ""
    asked = read_json(run.stop_file)
    if asked is not None and job_id is not None and number_of(continues or job_id) > int(asked.get("newest_job", 0)):
        run.stop_file.unlink(missing_ok=True)
        return ""
    if job_id is not None:
        complete_stop(run, job_id, newest_job=newest_job)
    return f"{run.stop_file} is there, so nothing is started; `resume {run.run_id}` continues the run"


def complete_stop(run: RunDirectory, job_id: str, *, newest_job: Callable[[], int | None]) -> None:
    """Adds to a STOP that a person made with `touch` which jobs it is about: those that Slurm knows by now.

    A job that the person submits later may begin then. The file is written through a descriptor of the one that is
    there: where somebody removes it meanwhile it stays removed.

    Args:
        run: the run.
        job_id: the job that has obeyed the file.
        newest_job: asks Slurm for the highest number of this user's jobs; None where it does not answer.
    """
    # Where the file cannot be written, later jobs do not begin until somebody removes it: nothing is lost by that.
    with contextlib.suppress(OSError):
        if not run.stop_file.exists() or read_json(run.stop_file) is not None:
            return
        text = _stop_text([job_id], newest_job())
        descriptor = os.open(run.stop_file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
