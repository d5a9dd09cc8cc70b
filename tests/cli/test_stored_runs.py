"""Runs of this version and of earlier ones, stored as they lay on disk: every later version reads the same from them.

Slurm 22.05 and this machine ran them: ends of every kind, an evaluation, the runs of a sweep, a script. Only small
files are kept, so there is no code, no checkpoint and no heartbeat. `read.txt` is what must be read of each.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.report.run import read_attempts, time_by_cause
from tests.cli.conftest import Shell

STORED = Path(__file__).with_name("stored_runs")


@pytest.fixture
def stored(shell: Shell) -> Shell:
    """A person whose folder has all of them."""
    shutil.copytree(STORED / "runs", shell.folder / "runs")
    return shell


def reading(shell: Shell, run: RunDirectory) -> Iterator[str]:
    """Yields what `status`, `logs` and `report` read of a run."""
    yield f"== {run.path.relative_to(shell.folder / 'runs')}"
    yield from shell.types("status", str(run.path)).out.splitlines()
    yield from shell.types("logs", str(run.path)).err.splitlines()
    attempts = read_attempts(run, until_unix_s=None)
    for entry in attempts:
        lost_s = entry["seconds"].get("lost_work_s", 0)
        where = f"job {entry['job_id']} on {entry['nodes']}"
        yield f"attempt {entry['attempt']}: {entry['reason']}, {where}, {lost_s} s lost"
    times = time_by_cause(attempts)
    yield f"{times['held_device_s']:.3f} device seconds, goodput {times['goodput']}"


def test_what_is_read_of_each_run_is_what_it_was(stored: Shell) -> None:
    root = stored.folder / "runs"
    folders = sorted(folder.parent for folder in root.rglob("config.yaml"))
    lines = [line for folder in folders for line in reading(stored, RunDirectory(folder))]
    for words in (
        "status d9a90d74",
        "collate d9a90d74",
        "diff runs/of-2b21648/ff49af5b4315 runs/requeued/74f16e979924",
    ):
        lines += [f"== {words}", *stored.types(words).out.splitlines()]
    read = "\n".join(lines).replace(str(root), "/runs") + "\n"
    assert read == (STORED / "read.txt").read_text()


def test_a_stored_run_is_resumed(stored: Shell) -> None:
    done = stored.types("resume", "script-failed")
    assert done.job_and_run[1].run_id == "2114ec08c603", done
    assert "ranks    1 = 1 node x 1" in done.err
