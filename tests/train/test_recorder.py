from __future__ import annotations

import io
from itertools import count
from pathlib import Path
from typing import Any

from slurm_train.metrics.progress import LineDisplay
from slurm_train.rundir.timing import Spent
from slurm_train.train.metrics import Recorder, printable
from slurm_train.train.step import StepFacts, StepResult
from tests.support.ranks import make_rank


def result(step: int) -> StepResult:
    return StepResult(StepFacts(step, 4 * step, 0.1), False, 4, 1.0 / step, 0, 0.5)


def test_the_display_ends_at_the_newest_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    clock = count(0.0, 1.0).__next__
    display = LineDisplay(stream, max_steps=3, every_s=1e9, clock=clock)
    source: Any = range(64)
    spent = Spent(begin_unix_s=0.0)
    recorder = Recorder(
        make_rank(tmp_path), display=display, source=source, spent=spent, flops_per_token=0.0, clock=clock
    )
    for step in (1, 2, 3):
        recorder.count(result(step))
    recorder.close()
    assert stream.getvalue().splitlines()[-1].startswith("step 3/3  loss 0.3333")


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2J\n\tb\x00\u00e9") == "a\ufffd[2J\n\tb\ufffd\u00e9"
