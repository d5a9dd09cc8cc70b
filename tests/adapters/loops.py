"""Trains with a library in this process, undisturbed and stopped, and compares what the runs have reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_train.metrics import read_metrics
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.joined import JoinedSession
from slurm_train.session.signals import StopFlag
from tests.support.joined_runs import joined, new_run

Train = Callable[[JoinedSession, Callable[[int], None]], Any]
"""A start of a program; it calls its second argument at each step."""


def losses(run: RunDirectory) -> dict[int, float]:
    """Returns the reported losses by step."""
    return {line["step"]: line["loss"] for line in read_metrics(run.metrics) if line.get("loss") is not None}


def start(run: RunDirectory, train: Train, *, stop_at: int | None = None) -> int:
    """Starts a program in a run; returns its exit code."""
    stop = StopFlag()

    def at_step(step: int) -> None:
        if step == stop_at:
            stop.request("TERM")

    try:
        with joined(run, stop) as session:
            train(session, at_step)
    except SystemExit as end:
        return int(str(end.code))
    return 0


def undisturbed_and_stopped(folder: Path, train: Train, *, stop_at: int) -> tuple[RunDirectory, RunDirectory]:
    """Returns the run of an undisturbed training, and one that was stopped and started again."""
    undisturbed = new_run(folder / "undisturbed")
    assert start(undisturbed, train) == 0
    stopped = new_run(folder / "stopped")
    assert start(stopped, train, stop_at=stop_at) == 75
    assert start(stopped, train) == 0
    return undisturbed, stopped
