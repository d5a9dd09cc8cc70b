"""What a run says of itself: throughput and step belong together, and what is too little says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.heartbeat import BeatSource, Heartbeat
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.pace import Pace
from slurm_train.scaling.measure import WARM_UP_LINES, measure
from slurm_train.scaling.points import Point, Size

POINT = Point(Size(1, 2), local_size=4, accumulation=1, comm="none", modes=("local",))
WARM_UP: list[dict[str, Any]] = [{"step_time_s": 9.0, "samples_per_s": 1.0, "attempt": 0}] * WARM_UP_LINES


def run_with(folder: Path, *step_times_s: float) -> RunDirectory:
    """A run of two ranks with eight samples a step; rank 1 waits a tenth of a second longer than rank 0."""
    run = RunDirectory(folder)
    (run.epochs).mkdir(parents=True)
    (run.epochs / "attempt_0").touch()
    lines = [{"step_time_s": one, "samples_per_s": 8 / one, "attempt": 0} for one in step_times_s]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*WARM_UP, *lines]))
    for rank in range(2):
        heart = Heartbeat()
        heart.pace = Pace().plus(own_s=0.3 - 0.1 * rank, wait_s=0.1 + 0.1 * rank, data_s=0.05)
        heart.start(run, 0, BeatSource(rank=rank, host="node1", pid=1), limits=None)
        heart.stop()
    return run


def test_the_speed_is_that_of_the_step_however_few_lines_there_are(tmp_path: Path) -> None:
    found = measure(run_with(tmp_path, 0.1, 0.3), POINT)
    assert found is not None
    assert (found.step_s, found.per_s) == (pytest.approx(0.2), pytest.approx(8 / 0.2))
    assert (found.comm_s, found.uneven_s) == (pytest.approx(0.1), pytest.approx(0.05))
    assert (found.compute_s, found.data_s) == (pytest.approx(0.2), pytest.approx(0.05))


def test_nothing_but_the_warm_up_says_nothing(tmp_path: Path) -> None:
    assert measure(run_with(tmp_path), POINT) is None
