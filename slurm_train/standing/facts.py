"""How a run stands, as numbers: everything that `status` shows, prints as JSON, or chooses runs by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import Element
from slurm_train.slurm.queue_view import Look, Wanted
from slurm_train.slurm.records import JobState, Phase, unix_s
from slurm_train.standing.files import RunFiles
from slurm_train.standing.states import RunState
from slurm_train.standing.verdict import explain, judge


@dataclass(frozen=True, slots=True)
class Subject:
    """A run that is looked at, and what its sweep gave to it where it is part of one."""

    run: RunDirectory
    index: int | None = None
    """Its number in the sweep."""
    overrides: Mapping[str, str] = field(default_factory=dict)


def subjects_of(elements: Sequence[Element]) -> list[Subject]:
    """Returns the runs of a sweep."""
    return [Subject(element.run, element.index, element.overrides) for element in elements]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a run stands."""

    subject: Subject
    state: RunState
    note: str
    """Why it waits, is slow, or ended, in words."""
    is_settled: bool
    """Whether the files say that it has ended for good; else Slurm may know more."""
    job: JobState | None
    """What Slurm says about its newest job."""
    job_id: str | None
    """Its newest job, e.g. "12" or "12_3"."""
    step: int
    """Of the newest line that was logged, or of the newest checkpoint."""
    max_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    step_time_s: float | None
    attempts: int
    beat_age_s: float | None
    """Since the most silent rank of a running attempt wrote its heartbeat."""
    beat_rank: int | None
    beat_host: str | None
    nodelist: str
    """Nodes of a running attempt, e.g. "node[1-4]"."""
    jobs_ahead: int | None
    submit_unix_s: float | None
    attempt_start_unix_s: float | None
    """When the newest attempt began."""

    @property
    def run(self) -> RunDirectory:
        """Its directory."""
        return self.subject.run

    @property
    def is_finished(self) -> bool:
        """Whether it has a result."""
        return self.state is RunState.FINISHED

    @property
    def is_active(self) -> bool:
        """Queued, running, or giving its nodes back."""
        if self.is_finished:
            return False
        return self.state is RunState.RUNNING or (self.job is not None and self.job.is_active)

    @property
    def time_left_s(self) -> float | None:
        """Seconds of training that are left, from the newest steps; only while it runs."""
        if self.state is not RunState.RUNNING or self.max_steps is None or self.step_time_s is None:
            return None
        return max(0, self.max_steps - self.step) * self.step_time_s

    @property
    def expected_start_unix_s(self) -> float | None:
        """When Slurm expects a waiting job to start; None where it has not worked that out."""
        return unix_s(self.job.start) if self.job is not None and self.job.phase is Phase.QUEUED else None


def wanted_of(files: Sequence[RunFiles]) -> Wanted:
    """Returns what Slurm is to be asked: all jobs of all runs without a result; accounting about the newest only."""
    open_ones = [one for one in files if one.job_ids and not one.is_finished]
    return Wanted(
        job_ids=[job_id for one in open_ones for job_id in one.job_ids],
        may_wait=any(not one.is_settled and not one.is_open for one in open_ones),
        settled=[job_id for one in open_ones for job_id in one.job_ids[: None if one.is_settled else -1]],
    )


def job_of(job_ids: Sequence[str], jobs: Mapping[str, JobState]) -> JobState | None:
    """Returns the job that a run stands by: the last of its jobs that is active, else the last, as far as known."""
    active = [jobs[job_id] for job_id in job_ids if job_id in jobs and jobs[job_id].is_active]
    return active[-1] if active else jobs.get(job_ids[-1]) if job_ids else None


def standing_of(subject: Subject, files: RunFiles, look: Look, *, now_unix_s: float) -> Standing:
    """Returns how a run stands.

    Args:
        subject: the run.
        files: what its files say.
        look: what Slurm says.
        now_unix_s: the time.
    """
    record, line = files.record, files.line
    is_old = look.age_s is not None and _has_stopped_since(files, now_unix_s - look.age_s)
    job = job_of(files.job_ids, look.jobs) if not is_old else None
    job_id = job.job_id if job is not None else files.job_ids[-1] if files.job_ids else None
    answers = look.age_s is not None
    state = judge(files, job, now_unix_s=now_unix_s, slurm_answers=answers)
    beat = files.weakest_beat if state is RunState.RUNNING else None
    last: Mapping[str, Any] = files.ledger[-1] if files.ledger else {}
    return Standing(
        subject=subject,
        state=state,
        note=explain(files, job, state, slurm_answers=answers),
        is_settled=files.is_settled,
        job=job,
        job_id=job_id,
        step=max(int(line.get("step", 0)), files.checkpoint_step),
        max_steps=files.max_steps,
        loss=_number(line, "loss"),
        tokens_per_s=_number(line, "tokens_per_s"),
        samples_per_s=_number(line, "samples_per_s"),
        mfu=_number(line, "mfu"),
        step_time_s=_number(line, "step_time_s"),
        attempts=len(files.ledger),
        beat_age_s=None if beat is None else max(0.0, now_unix_s - beat.written_unix_s),
        beat_rank=None if beat is None else beat.source.rank,
        beat_host=None if beat is None else beat.source.host,
        nodelist=_nodes(job, last) if state is RunState.RUNNING else "",
        jobs_ahead=look.jobs_ahead.get(job_id) if job_id is not None else None,
        submit_unix_s=record.submit_time_unix_s if record is not None else None,
        attempt_start_unix_s=_number(last, "time_unix_s"),
    )


def _has_stopped_since(files: RunFiles, time_unix_s: float) -> bool:
    """Returns whether a run has stopped for good after Slurm was asked, so that the answer is about its past."""
    return (
        bool(files.ledger)
        and files.is_settled
        and float(files.ledger[-1].get("end_time_unix_s", time_unix_s)) > time_unix_s
    )


def _nodes(job: JobState | None, last: Mapping[str, Any]) -> str:
    return job.nodelist if job is not None and job.nodelist else ",".join(map(str, last.get("nodes") or ()))


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
