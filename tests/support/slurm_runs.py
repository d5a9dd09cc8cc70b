"""What the tests on a real Slurm look at: metrics, ledger, job states."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from slurm_train.metrics.writer import read_metrics
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.paths import RunDirectory
from tests.support.waiting import wait_for

# Two cores import torch for every rank of every test.
PATIENCE_S = 150.0


def wait_until_finished(run: RunDirectory, *, within_s: float = PATIENCE_S) -> dict[str, Any]:
    """Returns `result.json` once it is there; an attempt that stops for good meanwhile is a failure with its logs."""
    ended_before = {entry["attempt"] for entry in read_ledger(run) if "action" in entry}

    def finished() -> bool:
        ended = [entry for entry in read_ledger(run) if entry.get("action") == "stop"]
        assert {entry["attempt"] for entry in ended} <= ended_before, f"stopped: {ended[-1]}"
        # The result comes before the ledger's end line; a reader of both waits for both.
        ledger = read_ledger(run)
        return run.result.exists() and bool(ledger) and "action" in ledger[-1]

    try:
        wait_for(finished, within_s=within_s, what=f"{run.result}")
    except AssertionError as err:
        raise AssertionError(f"{err}\n{all_logs(run)}") from None
    result: dict[str, Any] = json.loads(run.result.read_text())
    return result


def wait_until_step(run: RunDirectory, step: int, *, within_s: float = PATIENCE_S) -> None:
    """Returns when the run has logged this step."""
    wait_for(lambda: max(losses(run), default=0) >= step, within_s=within_s, what=f"step {step} of {run.path}")


def losses(run: RunDirectory) -> dict[int, float]:
    """Returns the training loss of each logged step."""
    return {int(line["step"]): line["loss"] for line in read_metrics(run.metrics) if "loss" in line}


def job_state(job_id: str) -> str:
    """Returns Slurm's own word for a job's state, e.g. "CANCELLED"."""
    text = subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True, check=False).stdout
    return text.partition("JobState=")[2].split()[0] if "JobState=" in text else ""


def all_logs(run: RunDirectory) -> str:
    """Returns the end of every log of a run, for failure messages."""
    parts = [f"== {path}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(run.logs.rglob("*.log"))]
    return "\n".join(parts)
