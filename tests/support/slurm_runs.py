"""What the tests on a real Slurm use: somebody who submits, Slurm's commands, waits for metrics, ledger and jobs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slurm_train.metrics import read_metrics
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import Person, new_project
from tests.support.ledgers import ledger_lines
from tests.support.waiting import wait_for

# Two cores import torch for every rank of every test.
PATIENCE_S = 150.0


@contextmanager
def at_work(folder: Path) -> Iterator[Person]:
    """Gives somebody in a folder with the tiny model; their jobs are cancelled at the end, whatever happened."""
    person = Person(new_project(folder / "project"))
    try:
        yield person
    finally:
        cancel_all(person)


def cancel_all(person: Person) -> None:
    """Cancels every job that runs in somebody's folder have ever had."""
    jobs = [(read_json(path) or {}).get("job_ids", ()) for path in person.folder.glob("runs/*/*/job.json")]
    with suppress(subprocess.TimeoutExpired):
        person.runs("scancel", "--quiet", *(str(job_id) for ids in jobs for job_id in ids))


def command(*argv: str, must: bool = True) -> str:
    """Runs a command and returns what it printed; with `must` it is an AssertionError that it failed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or not must, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def wait_until_finished(run: RunDirectory, *, within_s: float = PATIENCE_S) -> dict[str, Any]:
    """Returns `result.json` once it is there; an attempt that stops for good meanwhile is a failure with its logs."""
    ended_before = {entry["attempt"] for entry in ledger_lines(run) if "action" in entry}

    def finished() -> bool:
        ended = [entry for entry in ledger_lines(run) if entry.get("action") == "stop"]
        assert {entry["attempt"] for entry in ended} <= ended_before, f"stopped: {ended[-1]}"
        # The result comes before the ledger's end line; a reader of both waits for both.
        ledger = ledger_lines(run)
        return run.result.exists() and bool(ledger) and "action" in ledger[-1]

    try:
        wait_for(finished, within_s=within_s, what=f"{run.result}")
    except AssertionError as err:
        raise AssertionError(f"{err}\n{all_logs(run)}") from None
    result: dict[str, Any] = json.loads(run.result.read_text())
    return result


def wait_until_ended(run: RunDirectory, *, within_s: float = 60.0) -> list[dict[str, Any]]:
    """Returns the ledger once its newest attempt has ended."""
    wait_for(lambda: "reason" in (ledger_lines(run) or [{}])[-1], within_s=within_s, what=f"an end line of {run.path}")
    return list(ledger_lines(run))


def wait_until_step(run: RunDirectory, step: int, *, within_s: float = PATIENCE_S) -> None:
    """Returns when the run has logged this step."""
    wait_for(lambda: max(losses(run), default=0) >= step, within_s=within_s, what=f"step {step} of {run.path}")


def step_lines(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns the lines of metrics of the steps that count."""
    return [line for line in read_metrics(run.metrics) if "loss" in line]


def losses(run: RunDirectory) -> dict[int, float]:
    """Returns the training loss of each logged step."""
    return {int(line["step"]): line["loss"] for line in step_lines(run)}


def job_state(job_id: str) -> str:
    """Returns Slurm's own word for a job's state, e.g. "CANCELLED"."""
    text = command("scontrol", "show", "job", job_id, must=False)
    return text.partition("JobState=")[2].split()[0] if "JobState=" in text else ""


def wait_for_state(job_id: str, *states: str, within_s: float = 60.0) -> None:
    """Returns when a job is in one of these states."""
    wait_for(lambda: job_state(job_id) in states, within_s=within_s, what=f"job {job_id} to be {' or '.join(states)}")


def all_logs(run: RunDirectory) -> str:
    """Returns the end of every log of a run, for failure messages."""
    parts = [f"== {path}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(run.logs.rglob("*.log"))]
    return "\n".join(parts)
