"""The JSON of `status --json`: one object per run, always with the same keys, numbers in the units of their names."""

from __future__ import annotations

import math
from typing import Any

from slurm_train.standing.facts import Standing

KEYS = {
    "run": 'name and id, e.g. "gpt-stdlib/3f9a1c07"',
    "path": "the run directory",
    "index": "its number in the sweep; null for a run that was not asked for by its sweep",
    "overrides": "what the sweep gave to it, empty for such a run",
    "state": "one of the words above",
    "note": 'why it waits, is slow, or ended, in words; "" where there is nothing to say',
    "is_active": "queued, running, or giving its nodes back",
    "job_id": 'its newest job, e.g. "12" or "12_3"',
    "slurm_state": 'Slurm\'s own word, e.g. "PENDING"',
    "slurm_reason": 'Slurm\'s own word, e.g. "Resources"',
    "slurm_source": 'who said so: "squeue" or "sacct"',
    "partition": "of the job",
    "nodelist": 'nodes of a running attempt, e.g. "node[1-4]"',
    "jobs_ahead": "of a waiting job: jobs in line before it in its partition",
    "expected_start_unix_s": "of a waiting job, where Slurm has worked it out",
    "submit_time_unix_s": "when the newest job was submitted",
    "attempt_start_time_unix_s": "when the newest attempt began",
    "attempts": "how many attempts were begun",
    "step": "of the newest line that was logged, or of the newest checkpoint",
    "max_steps": "steps of the whole run",
    "loss": "of that line",
    "tokens_per_s": "over all ranks",
    "samples_per_s": "over all ranks, where the data has no tokens",
    "mfu": "share of the GPUs' peak that the model uses, from 0 to 1, where the peak is known",
    "step_time_s": "seconds per step",
    "time_left_s": "seconds of training that are left, while it runs",
    "heartbeat_age_s": "since the most silent rank wrote its heartbeat, while it runs",
    "heartbeat_rank": "that rank",
    "heartbeat_host": "its node",
}
"""Key -> meaning; what is not known is null."""


def as_mapping(standing: Standing) -> dict[str, Any]:
    """Returns a standing as a JSON object; numbers that JSON does not have (a loss that is not a number) are null."""
    job = standing.job
    values = {
        "run": f"{standing.run.name}/{standing.run.run_id}",
        "path": str(standing.run.path),
        "index": standing.subject.index,
        "overrides": dict(standing.subject.overrides),
        "state": standing.state.value,
        "note": standing.note,
        "is_active": standing.is_active,
        "job_id": standing.job_id,
        "slurm_state": job.word if job is not None else None,
        "slurm_reason": (job.reason or None) if job is not None else None,
        "slurm_source": job.source if job is not None else None,
        "partition": (job.partition or None) if job is not None else None,
        "nodelist": standing.nodelist or None,
        "jobs_ahead": standing.jobs_ahead,
        "expected_start_unix_s": standing.expected_start_unix_s,
        "submit_time_unix_s": standing.submit_unix_s,
        "attempt_start_time_unix_s": standing.attempt_start_unix_s,
        "attempts": standing.attempts,
        "step": standing.step,
        "max_steps": standing.max_steps,
        "loss": standing.loss,
        "tokens_per_s": standing.tokens_per_s,
        "samples_per_s": standing.samples_per_s,
        "mfu": standing.mfu,
        "step_time_s": standing.step_time_s,
        "time_left_s": standing.time_left_s,
        "heartbeat_age_s": standing.beat_age_s,
        "heartbeat_rank": standing.beat_rank,
        "heartbeat_host": standing.beat_host,
    }
    return {key: _finite(value) for key, value in values.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
