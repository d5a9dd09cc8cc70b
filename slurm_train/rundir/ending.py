"""Whether a run has ended for good: it has a result, or its last attempt stopped and nothing was submitted since."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import change_times
from slurm_train.rundir.jobs import JobRecord, read_job
from slurm_train.rundir.layout import RunDirectory

# A supervisor that was killed closes nothing; then this is long enough for rank 0's last words.
_LAST_WORDS_S = 60.0


def has_stopped(ledger: Sequence[Mapping[str, Any]], record: JobRecord | None) -> bool:
    """Returns whether the last attempt has stopped for good, and no job that was submitted later will open another.

    Args:
        ledger: of the run.
        record: its newest job.
    """
    if not ledger or ledger[-1].get("action") != "stop":
        return False
    return record is None or record.submit_time_unix_s < float(ledger[-1]["end_time_unix_s"])


def has_ended(run: RunDirectory) -> bool:
    """Returns whether nothing more will be written, last words included."""
    ledger = read_ledger(run)
    if written := change_times([run.result]):
        # Rank 0 says its last words after the result; the supervisor closes the attempt after those.
        is_closed = bool(ledger) and "action" in ledger[-1]
        return is_closed or time.time() - written[run.result] > _LAST_WORDS_S
    return has_stopped(ledger, read_job(run))
