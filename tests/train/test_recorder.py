from __future__ import annotations

import io
from itertools import count

from slurm_train.metrics.progress import LineDisplay
from slurm_train.train.recorder import Recorder, RunFacts
from slurm_train.train.step import StepFacts, StepResult
from slurm_train.train.summary import _printable


def result(step: int) -> StepResult:
    return StepResult(StepFacts(step, 4 * step, 0.1), False, 4, 1.0 / step, 0, 0.5)


def test_the_display_ends_at_the_newest_step() -> None:
    stream = io.StringIO()
    clock = count(0.0, 1.0).__next__
    facts = RunFacts(attempt=0, world_size=1, num_samples=64, unit="samples", flops_per_item=None, peak_flops=None)
    recorder = Recorder(
        facts, writers=[], display=LineDisplay(stream, max_steps=3, every_s=1e9, clock=clock), clock=clock
    )
    for step in (1, 2, 3):
        recorder.count(result(step))
    recorder.close()
    assert stream.getvalue().splitlines()[-1].startswith("step 3/3  loss 0.3333")


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert _printable("a\x1b[2J\n\tb\x00\u00e9") == "a\ufffd[2J\n\tb\ufffd\u00e9"
