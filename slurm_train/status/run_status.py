"""The status of runs: state and reason, progress, heartbeats. Read from their files, and from Slurm with one question.

A result counts whatever Slurm says; an active job counts more than the ledger; the ledger knows better than accounting
why an attempt ended. Where nothing else can decide, a fresh heartbeat does. Nothing here writes.
"""

from __future__ import annotations

import enum
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from slurm_train.errors import ClusterError, ConfigError
from slurm_train.formatting import as_float, plain
from slurm_train.rundir.events import read_events
from slurm_train.rundir.files import change_times, for_each, last_lines, read_json, read_tail, size_of
from slurm_train.rundir.heartbeat import Beat, read_oldest
from slurm_train.rundir.jobs import (
    Holder,
    JobRecord,
    has_stopped,
    jobs_elsewhere,
    left_jobs,
    named,
    number_of,
    process_lives,
    read_holder,
    read_job,
    unknown_elsewhere,
)
from slurm_train.rundir.ledger import Attempt, Reason, read_ledger
from slurm_train.rundir.lookup import is_own
from slurm_train.rundir.paths import SETUP_FAILED, RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.signs import read_remarks
from slurm_train.rundir.sweep import Element
from slurm_train.rundir.timing import newest_window
from slurm_train.slurm.allocation import parse_nodelist
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.queue_view import KnownJobs, QueueView, Wanted
from slurm_train.slurm.records import JobState, Phase, explain_reason, unix_s
from slurm_train.status.activity import (
    is_of_another_run,
    jobs_by_name,
    jobs_by_script,
    names_cluster,
    unread_submission,
)
from slurm_train.status.following import summaries_of
from slurm_train.status.logs import LOG_BYTES, new_begin
from slurm_train.status.printed import Printed, newest_line, newest_printed

SILENT_AFTER_S = 60.0
"""A heartbeat is written twice a second; a network file system may keep it back for half a minute."""
# A job without a time limit counts as a year long in Slurm's forecast for those behind it: nothing is known of them.
_LONGEST_FORECAST_S = 180 * 86400.0


class RunState(enum.Enum):
    """The state of a run; the value is the word in JSON and on the command line."""

    NOT_STARTED = "not_started"
    """No attempt has begun, and no job waits."""
    QUEUED = "queued"
    """The job waits; the reason says for what."""
    RUNNING = "running"
    """An attempt is under way."""
    FINISHING = "finishing"
    """The job gives its nodes back."""
    FINISHED = "finished"
    """It has a result."""
    FAILED = "failed"
    """A rank or the batch script failed, and nothing starts it again."""
    TIMEOUT = "timeout"
    """The time limit ended it."""
    CANCELLED = "cancelled"
    """Somebody cancelled the job."""
    PREEMPTED = "preempted"
    """Another job took its nodes."""
    NODE_FAILURE = "node_failure"
    """A node was lost."""
    ENDED_EARLY = "ended_early"
    """Its program ended with 0 before its end, and nobody had asked it to."""
    OUT_OF_MEMORY = "out_of_memory"
    """It needed more memory than it had."""
    STOPPED = "stopped"
    """It was asked to save and stop."""
    REQUEUED = "requeued"
    """Slurm has put the job back into the queue."""
    LOST = "lost"
    """The batch script was killed, and the next attempt noticed."""
    INTERRUPTED = "interrupted"
    """An attempt began, did not record how it ended, and none of its processes is alive."""
    COMPLETED = "completed"
    """Slurm calls the job completed, but there is no result."""
    UNKNOWN = "unknown"
    """The run saved itself, Slurm uses a word that is not known here, or another cluster has the job."""

    @property
    def label(self) -> str:
        """For people, e.g. "not started"."""
        return self.value.replace("_", " ")


RESUMABLE = tuple(
    state
    for state in RunState
    if state not in (RunState.QUEUED, RunState.RUNNING, RunState.FINISHING, RunState.FINISHED)
)
"""States of runs that `resume` can continue; the first is also called missing."""

_STATES = {state.value: state for state in RunState}
# Reasons of the ledger that are called otherwise here.
_OF_REASON = {
    "done": "completed",
    "time_limit": "timeout",
    "file_system": "failed",
    "signalled": "stopped",
    "growth": "stopped",
}
# Other words that people use for them.
_ALIASES = {"missing": RunState.NOT_STARTED, "time_limit": RunState.TIMEOUT, "pending": RunState.QUEUED}
_CAME_BACK = {
    "preempted": "was preempted",
    "time_limit": "its time limit came",
    "node_failure": "a node was lost",
    "failed": "failed",
    "requeued": "was requeued",
    "signalled": "was signalled to stop",
    "growth": "was requeued for more nodes",
    "file_system": "could not be started: the file system refused",
}
_NOT_RETURNED = (RunState.FAILED, RunState.COMPLETED, RunState.TIMEOUT, RunState.OUT_OF_MEMORY)
"""What Slurm calls a job that it has not put back into the queue."""
_HALTED = {"SUSPENDED": "Slurm has suspended the job", "STOPPED": "the job's processes are stopped"}


def read_states(text: str, *, option: str, of: tuple[RunState, ...] = tuple(RunState)) -> frozenset[RunState]:
    """Returns the states in a list with commas, e.g. "running,failed"; "not started" and "missing" are understood.

    Args:
        text: what was typed.
        option: where, for the message, e.g. "--state".
        of: the states that make sense there.

    Raises:
        ConfigError: a word that is none of them.
    """
    states = {state.value: state for state in of}
    states |= {alias: state for alias, state in _ALIASES.items() if state in of}
    spelled = text.lower().replace("-", "_").split(",")
    words = [word.strip().replace(" ", "_") for word in spelled if word.strip()]
    unknown = [word for word in words if word not in states]
    hint = f"use {', '.join(state.value for state in of)}"
    if not words:
        raise ConfigError(f"{option} {text}: no state is named", hint=hint)
    if unknown:
        raise ConfigError(f"{option} {text}: there is no state {', '.join(map(repr, unknown))}", hint=hint)
    return frozenset(states[word] for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What rank 0 of a program that reports nothing has printed."""

    printed: Printed | None = None
    """Where it is, None where its log does not say."""
    line: str = ""
    """Its newest line, "" for none."""
    written_unix_s: float | None = None
    began_anew: str = ""
    """That it does again what an earlier attempt had done, in words; "" where it does not, or that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What the files of a run say, read once. Wide because each file of a run has its part here."""

    run: RunDirectory
    record: JobRecord | None = None
    """Its jobs."""
    holder: Holder | None = None
    """The job or process that holds its lock."""
    ledger: tuple[Attempt, ...] = ()
    line: Mapping[str, Any] = field(default_factory=dict)
    """The newest line with a training loss, {} before the first."""
    max_steps: int | None = None
    checkpoint_step: int = 0
    """Of the newest checkpoint by name, 0 where there is none; whether it verifies is not checked."""
    is_finished: bool = False
    result_note: str = ""
    """Why a callback has finished it before its last step, or what the supervisor has to say of its end; else ""."""
    runs_here: bool = False
    """Whether a living process of this machine holds the run."""
    oldest_beat: Beat | None = None
    """The oldest heartbeat of the ranks that are at work; None where there is none."""
    slow_because: str = ""
    """What makes the steps of the open attempt longer than they would have to be, and what helps; "" for nothing."""
    log: Log = field(default_factory=lambda: Log())
    """What the newest attempt of a program that reports nothing has printed."""
    loss_problem: str = ""
    """Since when the loss of a program is not finite; "" where it is."""
    unrecorded_jobs: tuple[str, ...] = ()
    """Its jobs that only Slurm knows of: typed by hand, or submitted by somebody who has not learnt the id."""
    jobs_of_others: tuple[str, ...] = ()
    """Recorded jobs whose ids Slurm has given to jobs of other runs since."""
    left_jobs: frozenset[str] = frozenset()
    """Jobs that other runs share, and in which this one does nothing more."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Its jobs of another cluster, each with the cluster's name: Slurm of this machine is not asked about them."""
    lost_answer: str = ""
    """What is not known of its newest submission, and what helps; "" where its job is known."""

    @property
    def job_ids(self) -> list[str]:
        """All jobs that Slurm may be asked about; the one that holds the lock is last, else the newest."""
        recorded = self.record.job_ids if self.record is not None else ()
        holding = [self.holder.job_id] if self.holder is not None and self.holder.job_id is not None else []
        jobs = [job_id for job_id in (*recorded, *self.unrecorded_jobs) if job_id not in holding]
        left_out = {*self.jobs_of_others, *self.elsewhere}
        return [job_id for job_id in (*jobs, *holding) if job_id not in left_out]

    @property
    def unknown_elsewhere(self) -> dict[str, str]:
        """Its jobs that may be queued or running on another cluster, each with the cluster's name."""
        return unknown_elsewhere(self.run, self.record, self.elsewhere, self.ledger)

    @property
    def last_attempt(self) -> Attempt | None:
        """The newest attempt, None before the first."""
        return self.ledger[-1] if self.ledger else None

    @property
    def is_open(self) -> bool:
        """Whether the newest attempt has not recorded how it ended."""
        return bool(self.ledger) and self.ledger[-1].end is None

    @property
    def is_settled(self) -> bool:
        """Whether the files say how the run ended, and that nothing follows."""
        return self.is_finished or has_stopped(self.ledger, self.record)


def read_files(run: RunDirectory) -> RunFiles:
    """Returns what the files of a run say; of files that are torn or missing nothing is known."""
    ledger = tuple(read_ledger(run))
    holder = read_holder(run.lock)
    record = read_job(run)
    is_open = bool(ledger) and ledger[-1].end is None
    attempt = ledger[-1].number if ledger else 0
    lines_with_loss = [line for line in last_lines(run.metrics) if "loss" in line]
    line: Mapping[str, Any] = lines_with_loss[-1] if lines_with_loss else {}
    checkpoints = list_checkpoints(run.checkpoints)
    result = read_json(run.result) or {}
    # The steps of a run of some epochs are counted by its ranks.
    max_steps = line.get("max_steps") or PlanRecord.read(run.plan).max_steps
    return RunFiles(
        run=run,
        record=record,
        holder=holder,
        ledger=ledger,
        line=line,
        max_steps=max_steps,
        log=_read_log(run, ledger) if ledger and not line and max_steps is None else Log(),
        checkpoint_step=name_of(checkpoints[0]).step if checkpoints else 0,
        is_finished=run.result.exists(),
        result_note=str(result.get("ended_early") or result.get("remark") or ""),
        runs_here=holder is not None and holder.job_id is None and process_lives(holder),
        oldest_beat=read_oldest(run, attempt) if is_open else None,
        slow_because=_slow_because(run, attempt) if is_open else "",
        loss_problem=_loss_problem(run, line),
        left_jobs=left_jobs(run, record.packed if record is not None else (), ledger),
    )


def _read_log(run: RunDirectory, ledger: Sequence[Attempt]) -> Log:
    """Returns what rank 0 has printed in the newest attempt."""
    attempts = [attempt.number for attempt in ledger]
    path = run.rank_log(attempts[-1], 0)
    # The first line may be a part of one.
    tail = read_tail(path, LOG_BYTES).split("\n", 1)[-1] if size_of(path) > LOG_BYTES else read_tail(path, LOG_BYTES)
    printed = newest_printed(tail)
    anew = ""
    if printed is not None and len(attempts) > 1 and ledger[-1].end is None:
        begin = new_begin(run, attempts[-1], attempts[-2])
        anew = f"by its log it began anew: {begin}" if begin else ""
    return Log(
        printed=printed,
        line=newest_line(tail)[:_MOST_SHOWN],
        written_unix_s=change_times([path]).get(path),
        began_anew=anew,
    )


def _slow_because(run: RunDirectory, attempt: int) -> str:
    window = newest_window(run)
    sentences: list[str] = []
    if window is not None and window.attempt == attempt:
        sentences += [f"{finding.sentence} ({finding.advice})" for finding in window.findings]
    sentences += read_remarks(run, attempt)
    return "; ".join(sentences)


def _loss_problem(run: RunDirectory, line: Mapping[str, Any]) -> str:
    """Returns since when the loss of a program is not finite, "" where it is. The trainer applies no such step.

    Args:
        run: the run.
        line: its newest line of a step; the loss is null if it is not finite, or was not reported.
    """
    if line.get("loss", 0.0) is not None:
        return ""
    events = [event for event in read_events(run, attempt=line.get("attempt")) if event.get("action") == "none"]
    changes = [event for event in events if event["event"] in ("non_finite", "finite")]
    if not changes or changes[-1]["event"] == "finite":
        return ""
    return f"the loss is {changes[-1]['value']} since step {changes[-1]['step']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run; what is not known is None. docs/watching.md explains what JSON has as well.

    Wide because `status --json` prints it as it is, one key for each field.
    """

    subject: Element
    state: RunState
    note: str
    is_settled: bool
    """Whether the files say that it has ended for good; else Slurm may know more."""
    job: JobState | None
    """What Slurm says about its newest job."""
    job_id: str | None
    other_cluster: str | None
    """The cluster that may have its job, if not the one of this machine: Slurm there knows how it is."""
    step: int
    max_steps: int | None
    printed: str
    """Where a program that reports nothing is by its log, e.g. "epoch 3/10, 40/100"; "" where that is not known."""
    log_line: str
    log_age_s: float | None
    loss: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    step_time_s: float | None
    attempts: int
    heartbeat_age_s: float | None
    heartbeat_rank: int | None
    heartbeat_host: str | None
    nodelist: str | None
    jobs_ahead: int | None
    expected_start_unix_s: float | None
    """When Slurm expects a waiting job to start; None where it has not worked that out."""
    submit_time_unix_s: float | None
    attempt_start_time_unix_s: float | None

    @property
    def run(self) -> RunDirectory:
        """Its directory."""
        return self.subject.run

    @property
    def label(self) -> str:
        """Name and id, e.g. "gpt-stdlib/3f9a1c07"."""
        return f"{self.run.name}/{self.run.run_id}"

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

    def as_json(self) -> dict[str, Any]:
        """Returns a JSON object, always with all keys; numbers that JSON does not have (a loss of NaN) are null."""
        field_values = {
            field_.name: getattr(self, field_.name) for field_ in fields(self) if field_.name not in _NOT_IN_JSON
        }
        job = self.job
        values = field_values | {
            "run": self.label,
            "path": str(self.run.path),
            "index": self.subject.index,
            "overrides": dict(self.subject.overrides),
            "state": self.state.value,
            "is_active": self.is_active,
            "time_left_s": self.time_left_s,
            "expected_start_unix_s": self.expected_start_unix_s,
            "slurm_state": job and job.word,
            "slurm_reason": (job and job.reason) or None,
            "slurm_source": job and job.source,
            "partition": (job and job.partition) or None,
            "followers": [summary.as_json() for summary in summaries_of(self.run)],
        }
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


_NOT_IN_JSON = ("subject", "job", "is_settled")


def status_of(subject: Element, files: RunFiles, look: KnownJobs, *, now_unix_s: float) -> RunStatus:
    """Returns the status of a run.

    Args:
        subject: the run.
        files: what its files say.
        look: what Slurm says.
        now_unix_s: the time.
    """
    last = files.last_attempt
    answers = look.age_s is not None
    # A run may have stopped for good after Slurm was asked; the answer is about its past then.
    is_old = (
        answers
        and last is not None
        and last.end is not None
        and files.is_settled
        and last.end.time_unix_s > now_unix_s - (look.age_s or 0.0)
    )
    job = None if is_old else _newest_job(files, look)
    job_id = None
    if job is not None:
        job_id = job.job_id
    elif files.job_ids:
        job_id = files.job_ids[-1]
    other_cluster = None
    unknown = files.unknown_elsewhere
    if unknown and not files.runs_here and (job is None or not job.is_active):
        job = None
        job_id, other_cluster = list(unknown.items())[-1]
    state, note = infer_state(files, job, now_unix_s=now_unix_s, slurm_answers=answers)
    anew = files.log.began_anew if state is RunState.RUNNING else ""
    note = "; ".join(filter(None, [note, files.loss_problem, anew, files.lost_answer]))
    is_running = state is RunState.RUNNING
    log = files.log
    # What counts within an epoch is no step of the training.
    printed = log.printed if log.printed is not None and log.printed.epoch is None else Printed()
    beat = files.oldest_beat if is_running else None
    nodelist = None
    if is_running:
        by_slurm = "" if job is None else job.nodelist
        nodelist = by_slurm or ",".join(last.start.nodes if last is not None else ()) or None
    return RunStatus(
        subject=subject,
        state=state,
        note=note,
        is_settled=files.is_settled,
        job=job,
        job_id=job_id,
        other_cluster=other_cluster,
        step=max(int(files.line.get("step", 0)), files.checkpoint_step, printed.step or 0),
        max_steps=files.max_steps or printed.max_steps,
        printed="" if log.printed is None else log.printed.words,
        log_line=log.line,
        log_age_s=None if log.written_unix_s is None else max(0.0, now_unix_s - log.written_unix_s),
        **{
            key: as_float(files.line.get(key))
            for key in ("loss", "tokens_per_s", "samples_per_s", "mfu", "step_time_s")
        },
        attempts=len(files.ledger),
        heartbeat_age_s=None if beat is None else max(0.0, now_unix_s - beat.written_unix_s),
        heartbeat_rank=None if beat is None else beat.rank,
        heartbeat_host=None if beat is None else beat.host,
        nodelist=nodelist,
        jobs_ahead=look.jobs_ahead.get(job_id) if job_id is not None else None,
        expected_start_unix_s=_expected_start(job, now_unix_s),
        submit_time_unix_s=files.record.submit_time_unix_s if files.record is not None else None,
        attempt_start_time_unix_s=None if last is None else last.start.time_unix_s,
    )


def _expected_start(job: JobState | None, now_unix_s: float) -> float | None:
    start_unix_s = None if job is None or job.phase is not Phase.QUEUED else unix_s(job.start)
    return None if start_unix_s is None or start_unix_s > now_unix_s + _LONGEST_FORECAST_S else start_unix_s


def newest_job_state(job_ids: Sequence[str], jobs: Mapping[str, JobState]) -> JobState | None:
    """Returns the job that a run's status depends on: the last of its jobs that is active, else the last, if known."""
    active = [jobs[job_id] for job_id in job_ids if job_id in jobs and jobs[job_id].is_active]
    if active:
        return active[-1]
    return jobs.get(job_ids[-1]) if job_ids else None


def _newest_job(files: RunFiles, look: KnownJobs) -> JobState | None:
    job = newest_job_state(files.job_ids, look.jobs)
    # A job that this run has left and that goes on for others says nothing about this run.
    return None if job is not None and job.job_id in files.left_jobs else job


def _without(recorded: Sequence[str], jobs: Iterable[str]) -> list[str]:
    """Returns the jobs that are not recorded, oldest first."""
    return sorted((job_id for job_id in jobs if job_id not in recorded), key=number_of)


def _has_active_job(files: RunFiles, look: KnownJobs) -> bool:
    job = _newest_job(files, look)
    return job is not None and job.is_active


def _lost_answer(run: RunDirectory, *, slurm_answers: bool) -> str:
    """Returns what is not known of a run's newest submission; "" where it is over and its job was recorded."""
    if unread_submission(run) is None:
        return ""
    submitter = read_holder(run.submission_lock)
    if submitter is not None and process_lives(submitter):
        return "it is being submitted"
    if not slurm_answers:
        return "whether Slurm has its last job is not known: sbatch's answer was not understood, squeue does not answer"
    return (
        "sbatch's last answer was not understood, and no job in the queue has its script: "
        f"`resume {run.run_id}` submits it again"
    )


def infer_state(
    files: RunFiles, job: JobState | None, *, now_unix_s: float, slurm_answers: bool
) -> tuple[RunState, str]:
    """Returns the state of a run, and why it waits, is slow, or has ended; "" where there is nothing to say.

    Args:
        files: what its files say.
        job: what Slurm says about its newest job; None where it does not know it, or was not asked.
        now_unix_s: the time.
        slurm_answers: whether Slurm was asked and answered at all.
    """
    if files.is_finished:
        return RunState.FINISHED, files.result_note
    last = files.last_attempt
    resume = f"`resume {files.run.run_id}`"
    is_to_return = last is not None and last.comes_back
    end = None if last is None else last.end
    reason = Reason.UNKNOWN if end is None else end.reason
    by_slurm = None if job is None else _STATES[job.phase.value.replace(" ", "_")]
    if job is not None and by_slurm is not None and (job.is_active or last is None):
        if by_slurm is RunState.QUEUED:
            waits = "its nodes are made ready" if job.word == "CONFIGURING" else explain_reason(job.reason)
            # Not for a run that somebody has submitted again.
            again = _CAME_BACK.get(reason, "") if is_to_return else ""
            return by_slurm, "; ".join(filter(None, [again, waits]))
        if by_slurm is RunState.RUNNING:
            return by_slurm, _HALTED.get(job.word, files.slow_because)
        if last is None:
            return by_slurm, never_began(files, job) if by_slurm is RunState.FAILED else ""
    elif files.runs_here:
        return RunState.RUNNING, files.slow_because
    beat = files.oldest_beat
    is_beating = beat is not None and abs(now_unix_s - beat.written_unix_s) < SILENT_AFTER_S
    if job is None and files.unknown_elsewhere:
        where = f"{named(files.unknown_elsewhere)}: `status` on a login node there says more"
        state = RunState.RUNNING if is_beating else RunState.UNKNOWN
        return state, "; ".join(filter(None, [files.slow_because, where]))
    if job is not None and by_slurm is not None and _ended_without_attempt(files, job):
        # The newest attempt is that of an earlier job.
        return by_slurm, never_began(files, job)
    if end is not None:
        if by_slurm is RunState.CANCELLED and is_to_return:
            # No process was there to record it.
            return by_slurm, f"the job was cancelled while it waited to come back; {resume} continues"
        ended = _STATES.get(_OF_REASON.get(reason, reason), RunState.UNKNOWN)
        note = end.note
        if job is not None and by_slurm in _NOT_RETURNED and is_to_return:
            # The supervisor was ended before it could record what became of its request.
            note = f"{reason.replace('_', ' ')}; Slurm did not requeue the job ({job.word}); {resume} continues"
        return by_slurm if by_slurm is RunState.FINISHING else ended, note
    if not slurm_answers and job is None and is_beating:
        return RunState.RUNNING, files.slow_because
    if last is None:
        if files.record is None:
            return RunState.NOT_STARTED, ""
        job_id = files.record.job_id
        gone = f"Slurm does not know job {job_id} any more; {resume} submits it again"
        return RunState.NOT_STARTED, gone if slurm_answers else f"job {job_id} was submitted"
    return by_slurm or RunState.INTERRUPTED, _not_recorded(files, job, slurm_answers=slurm_answers)


def _not_recorded(files: RunFiles, job: JobState | None, *, slurm_answers: bool) -> str:
    """Returns why the supervisor did not live to record how an attempt ended; "" where the state says it."""
    continues = f"; `resume {files.run.run_id}` continues"
    if job is not None and job.phase in (Phase.PREEMPTED, Phase.NODE_FAIL):
        return ""
    if job is not None and job.is_active:
        # Slurm calls a job so as soon as it is cancelled, while the ranks still save.
        return "its job is ending"
    if files.record is None:
        return f"its process is gone{continues}"
    if job is None and not slurm_answers:
        return "no recent heartbeat from its ranks, and Slurm does not answer or is not installed here"
    if job is not None and job.phase is Phase.FAILED:
        words = _last_words(files, job)
        if _HINT in words:
            # An error of ours, which says what to do: the run directory was moved, say.
            return words
    by_slurm = "" if job is None else f" (Slurm: {job.word})"
    return f"the batch script was killed{by_slurm}{continues}"


# Ends of a job that say more than those of the attempts before it.
_WITHOUT_ATTEMPT = (Phase.FAILED, Phase.TIMEOUT, Phase.OUT_OF_MEMORY, Phase.NODE_FAIL)
# Slurm's times are whole seconds of the controller's clock, those of the log are the file server's.
_CLOCKS_DIFFER_S = 5.0
_LAST_WORDS_BYTES = 1 << 14
_MOST_SHOWN = 300
_OF_EARLIER_JOBS = ("slurm_train: ", "slurmstepd", "srun: ")
_HINT = "; hint: "
_NO_PYTHON = re.compile(r"line \d+: (?:exec: )?[^:]*\bpython[\d.]*: (?:cannot execute: )?(?:No such|Permission)")
# bash names the copy of the script in slurmd's own folder.
_FOLDER_OF_SCRIPT = re.compile(r"^/\S*/(?=slurm_script: |submit\.sh: )")


def _ended_without_attempt(files: RunFiles, job: JobState) -> bool:
    """Returns whether the newest job, or its newest start, has failed after the newest attempt and opened none."""
    last = files.last_attempt
    is_newest = files.job_ids[-1:] == [job.job_id]
    if last is None or not is_newest or job.phase not in _WITHOUT_ATTEMPT:
        return False
    if last.start.job_id == job.job_id:
        start_unix_s = unix_s(job.start)
        return not files.is_open and start_unix_s is not None and start_unix_s > last.last_unix_s
    end_unix_s = unix_s(job.end)
    return end_unix_s is None or end_unix_s > last.last_unix_s - _CLOCKS_DIFFER_S


def never_began(files: RunFiles, job: JobState) -> str:
    """Returns why a job ended before its attempt began: what its script said last, or that its log was not opened."""
    words = _last_words(files, job)
    if words:
        advice = "; cluster.python=PATH names the Python of the job, e.g. the wrapper of a container"
        return f"ended before it began: {words}{advice if _NO_PYTHON.search(words) else ''}"
    if not job.nodelist:
        # Slurm fails a job that waits, e.g. where it finds that a constraint cannot be met.
        return f"ended before it had nodes: {explain_reason(job.reason) or 'Slurm has no reason on record'}"
    code = job.exit_code.partition(":")[0]
    if job.reason == "NonZeroExitCode" or code not in ("", "0"):
        # The script ran, so its log was opened.
        with_code = f" with exit code {code}" if code not in ("", "0") else ""
        return f"ended before it began{with_code}, and its script said nothing: see cluster.setup in submit.sh"
    planned = PlanRecord.read(files.run.plan).path
    if planned and not os.path.lexists(planned):
        moved = f"its run directory was moved from {planned} while it waited"
        return f"ended before it began: {moved}; `resume {files.run.run_id}` submits it for the present place"
    host = parse_nodelist(job.nodelist)[0]
    return f"ended before it began: does {host} see the run directory? (run.root=/shared/path)"


def _last_words(files: RunFiles, job: JobState) -> str:
    """Returns the last line that a job's script has written into the batch log, "" where it has written none.

    Where that is our line about `cluster.setup`, or the hint of an error of ours, what was said comes before it.
    """
    log = files.run.logs / "batch.log"
    start_unix_s = unix_s(job.start)
    written_unix_s = change_times([log]).get(log)
    if written_unix_s is None or start_unix_s is None:
        return ""
    # Earlier jobs write into the same file.
    is_of_job = written_unix_s >= start_unix_s - _CLOCKS_DIFFER_S
    last = files.last_attempt
    if not is_of_job or (last is not None and written_unix_s <= last.last_unix_s + 1.0):
        return ""
    lines = [line.strip() for line in plain(read_tail(log, _LAST_WORDS_BYTES)).splitlines() if line.strip()]
    words = lines[-1:]
    if words and words[0].startswith(SETUP_FAILED):
        words = [line for line in lines[-2:] if not line.startswith(_OF_EARLIER_JOBS)]
    elif words and words[0].startswith("hint: "):
        words = [line.removeprefix("error: ") for line in lines[-2:] if line.startswith(("error: ", "hint: "))]
    texts = ("".join(character for character in line if character.isprintable()) for line in words)
    return "; ".join(_FOLDER_OF_SCRIPT.sub("", text) for text in texts)[:_MOST_SHOWN]


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at some runs has found."""

    statuses: tuple[RunStatus, ...]
    look: KnownJobs
    """What Slurm said, and how old that is."""

    @property
    def is_settled(self) -> bool:
        """Whether the files of all of them say that they have ended for good."""
        return all(status.is_settled and not status.is_active for status in self.statuses)

    @property
    def is_over(self) -> bool:
        """Whether all of them have ended; without an answer of Slurm, a run that it may know counts as active."""
        if any(status.is_active or status.other_cluster for status in self.statuses):
            return False
        is_answered = self.look.age_s is not None and not self.look.problem
        may_be_known = any(status.job_id is not None and not status.is_settled for status in self.statuses)
        return is_answered or not may_be_known


# Pause between two looks, as a multiple of the time that reading the files took: a slow file system gets more rest.
_REST = 4.0
# When nothing is active any more, the runs are looked at once more after this time, or with Slurm's next answer.
_SURE_AFTER_S = 3.0
_LONGEST_DOUBT_S = 30.0


def until_over(look: Callable[[], Survey], *, every_s: float, sleep: Callable[[float], None]) -> Iterator[Survey]:
    """Yields what a look at some runs finds, again and again, until all of them have ended.

    Args:
        look: looks at them.
        every_s: seconds between two looks.
        sleep: waits so many seconds.
    """
    seems_over = False
    while True:
        start_s = time.monotonic()
        survey = look()
        yield survey
        if survey.is_settled or (survey.is_over and seems_over):
            return
        # Between two runs of a sweep on this machine, and between two attempts, nothing is active for a moment.
        seems_over = survey.is_over
        sure_s = min(_LONGEST_DOUBT_S, max(_SURE_AFTER_S, survey.look.is_due_in_s))
        sleep(sure_s if seems_over else max(every_s, _REST * (time.monotonic() - start_s)))


class Surveyor:
    """Reads the status of runs again and again; the files of a run that has ended are not read twice.

    Args:
        view: the queue.
        now: the time in seconds since 1970.
    """

    def __init__(self, view: QueueView, *, now: Callable[[], float] = time.time) -> None:
        self._view = view
        self._now = now
        self._ended: dict[RunDirectory, tuple[dict[Path, float], RunFiles]] = {}

    def look(self, subjects: Sequence[Element]) -> Survey:
        """Returns the status of runs now; Slurm is asked once about all of them."""
        files = self._with_clusters(for_each(self.read, [subject.run for subject in subjects]))
        look = self._view.look(wanted_of(files))
        if not look.problem:
            files = self._without_jobs_of_others(files, look)
            files = self._with_unrecorded_jobs(files, look)
            if any(file.unrecorded_jobs for file in files):
                look = self._view.look(wanted_of(files))
        now_unix_s = self._now()
        statuses = []
        for subject, run_files in zip(subjects, files, strict=True):
            statuses.append(status_of(subject, run_files, look, now_unix_s=now_unix_s))
        return Survey(tuple(statuses), look)

    def _with_clusters(self, files: Sequence[RunFiles]) -> list[RunFiles]:
        """Returns the files of runs; which of their jobs another cluster has is found out."""
        cluster = self._view.cluster() if any(names_cluster(file.record, file.holder) for file in files) else ""
        if not cluster:
            return list(files)
        return [replace(file, elsewhere=jobs_elsewhere(file.record, file.holder, cluster=cluster)) for file in files]

    def _without_jobs_of_others(self, files: Sequence[RunFiles], look: KnownJobs) -> list[RunFiles]:
        """Returns the files of runs; those that have stopped for good lose ids which Slurm has given out again."""
        doubtful = {file.run for file in files if file.is_settled and _has_active_job(file, look)}
        if not doubtful:
            return list(files)
        # Where Slurm does not answer, no script is known, and nothing is left out.
        nothing: Mapping[str, str] = {}
        scripts = self._view.search(lambda _, scripts: scripts, nothing=nothing) or nothing
        checked = []
        for file in files:
            foreign: list[str] = []
            if file.run in doubtful:
                foreign = [job_id for job_id in file.job_ids if is_of_another_run(scripts.get(job_id, ""), file.run)]
            checked.append(replace(file, jobs_of_others=tuple(foreign)))
        return checked

    def _with_unrecorded_jobs(self, files: Sequence[RunFiles], look: KnownJobs) -> list[RunFiles]:
        """Returns the files of runs; runs without an active job get the jobs that Slurm has for them."""
        idle = [file for file in files if not (file.is_finished or file.runs_here or _has_active_job(file, look))]
        if not idle:
            return list(files)

        def find(commands: SlurmCommands, scripts: Mapping[str, str]) -> dict[RunDirectory, list[str]]:
            by_script = jobs_by_script([file.run for file in idle], scripts)
            jobs = {file.run: _without(file.job_ids, by_script.get(file.run, ())) for file in idle}
            by_name = jobs_by_name([run for run in jobs if not jobs[run]], commands, scripts)
            return jobs | by_name

        without_slurm: dict[RunDirectory, list[str]] = {}
        jobs = self._view.search(find, nothing=without_slurm)
        completed = {}
        for file in idle:
            unrecorded = tuple((jobs or {}).get(file.run, ()))
            lost = "" if unrecorded else _lost_answer(file.run, slurm_answers=jobs is not None)
            completed[file.run] = replace(file, unrecorded_jobs=unrecorded, lost_answer=lost)
        return [completed.get(file.run, file) for file in files]

    def read(self, run: RunDirectory) -> RunFiles:
        """Returns what the files of a run say now."""
        signature = change_times([run.attempts, run.job, run.result])
        cached = self._ended.get(run)
        if cached is not None and cached[0] == signature:
            return cached[1]
        files = read_files(run) if is_own(run) else _read_files_of_another(run)
        if files.is_settled:
            self._ended[run] = signature, files
        return files


def _read_files_of_another(run: RunDirectory) -> RunFiles:
    """Returns what `read_files` does; where a status cannot be made of it, nothing is known of the run."""
    try:
        files = read_files(run)
        status = status_of(Element(run=run), files, KnownJobs(), now_unix_s=time.time())
        json.dumps([status.as_json(), int(files.max_steps or 0)])
    except Exception:  # files that another user writes may hold anything
        return RunFiles(run=run)
    return files


def wanted_of(files: Sequence[RunFiles]) -> Wanted:
    """Returns what Slurm is to be asked: all jobs of all runs without a result; accounting about the newest only."""
    open_files = [file for file in files if file.job_ids and not file.is_finished]
    return Wanted(
        job_ids=[job_id for file in open_files for job_id in file.job_ids],
        may_wait=any(not file.is_settled and not file.is_open for file in open_files),
        settled=[job_id for file in open_files for job_id in file.job_ids[: None if file.is_settled else -1]],
    )


def read_statuses(subjects: Sequence[Element], commands: SlurmCommands) -> list[RunStatus]:
    """Returns the status of runs for somebody who acts upon it, so an answer from the files alone is not enough.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    survey = Surveyor(QueueView(commands)).look(subjects)
    if survey.look.problem:
        raise ClusterError(survey.look.problem, hint="try again when Slurm answers: `sinfo` shows that")
    return list(survey.statuses)
