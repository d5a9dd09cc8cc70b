"""What the files of a run say about how it stands; Slurm is not asked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import read_json
from slurm_train.rundir.heartbeat import Beat, read_beats
from slurm_train.rundir.jobs import JobRecord, has_stopped, process_lives, read_holder, read_job
from slurm_train.rundir.layout import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.step_times import newest_window
from slurm_train.rundir.timing import newest_training_line


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A run's files, read once."""

    run: RunDirectory
    record: JobRecord | None
    """Its jobs."""
    holder_job: str | None
    """The job that holds its lock."""
    ledger: tuple[Mapping[str, Any], ...]
    line: Mapping[str, Any]
    """The newest line with a training loss, {} before the first."""
    max_steps: int | None
    checkpoint_step: int
    is_finished: bool
    lives_here: bool
    """Whether a living process of this machine holds the run."""
    weakest_beat: Beat | None
    """The oldest heartbeat of the ranks that are at work; None where nobody keeps one."""
    slow_because: str
    """What makes the steps of the open attempt longer than they would have to be, and what helps; "" for nothing."""

    @property
    def job_ids(self) -> list[str]:
        """All jobs that may be active; the one that holds the lock is last, else the newest."""
        recorded = self.record.job_ids if self.record is not None else ()
        held = [self.holder_job] if self.holder_job is not None else []
        return [*(job_id for job_id in recorded if job_id not in held), *held]

    @property
    def is_open(self) -> bool:
        """Whether the last attempt has not said how it ended."""
        return bool(self.ledger) and "end_time_unix_s" not in self.ledger[-1]

    @property
    def is_settled(self) -> bool:
        """Whether the files say how the run ended, and that nothing follows."""
        return self.is_finished or has_stopped(self.ledger, self.record)


def read_files(run: RunDirectory) -> RunFiles:
    """Returns what the files of a run say; files that are torn or missing say nothing."""
    ledger = tuple(read_ledger(run))
    holder = read_holder(run)
    is_open = bool(ledger) and "end_time_unix_s" not in ledger[-1]
    return RunFiles(
        run=run,
        record=read_job(run),
        holder_job=holder.job_id if holder is not None else None,
        ledger=ledger,
        line=newest_training_line(run.metrics) or {},
        max_steps=(read_json(run.plan) or {}).get("max_steps") or None,
        checkpoint_step=newest_checkpoint_step(run),
        is_finished=run.result.exists(),
        lives_here=holder is not None and holder.job_id is None and process_lives(holder),
        weakest_beat=_weakest_beat(run, int(ledger[-1]["attempt"])) if is_open else None,
        slow_because=_slow_because(run, int(ledger[-1]["attempt"])) if is_open else "",
    )


def newest_checkpoint_step(run: RunDirectory) -> int:
    """Returns the step of the newest checkpoint by name, 0 where there is none; whether it verifies is not asked."""
    return next((name_of(path).step for path in list_checkpoints(run.checkpoints)), 0)


def _weakest_beat(run: RunDirectory, attempt: int) -> Beat | None:
    beats = read_beats(run, attempt).values()
    # A rank that has saved for the last time stops beating while others may still be at it.
    at_work = [beat for beat in beats if beat.phase != "end"]
    return min(at_work or beats, key=lambda beat: beat.written_unix_s, default=None)


def _slow_because(run: RunDirectory, attempt: int) -> str:
    window = newest_window(run)
    if window is None or window.attempt != attempt:
        return ""
    return "; ".join(f"{finding.sentence} ({finding.advice})" for finding in window.findings)


class FilesReader:
    """Reads the files of runs again and again; those of a run that has ended are not read twice."""

    def __init__(self) -> None:
        self._ended: dict[RunDirectory, tuple[tuple[int, ...], RunFiles]] = {}

    def read(self, run: RunDirectory) -> RunFiles:
        """Returns what the files of a run say now."""
        signature = tuple(_changed_ns(path) for path in (run.attempts, run.job, run.result))
        known = self._ended.get(run)
        if known is not None and known[0] == signature:
            return known[1]
        files = read_files(run)
        if files.is_settled:
            self._ended[run] = signature, files
        return files


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
