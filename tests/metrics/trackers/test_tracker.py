"""Which numbers of a line are curves, and where a run goes back."""

from __future__ import annotations

import math

from slurm_train.metrics.trackers.tracker import Rewinds, numbers_of
from tests.support.tracked_runs import step_line


def test_numbers_are_curves_and_facts_are_not() -> None:
    line = step_line(3, eval_loss=2, note="x", done=True, bad=math.nan, samples_digest=77)
    assert numbers_of(line) == {"loss": 3.0, "eval_loss": 2.0}


def rewinds(*lines: tuple[str, int]) -> list[bool]:
    seen = Rewinds()
    return [seen.is_rewind({"step": step, kind: 1.0}) for kind, step in lines]


def test_going_on_is_no_rewind_and_an_evaluation_belongs_to_its_step() -> None:
    assert rewinds(("loss", 1), ("loss", 2), ("eval_loss", 2), ("loss", 3)) == [False] * 4


def test_a_step_that_comes_again_is_a_rewind() -> None:
    assert rewinds(("loss", 1), ("loss", 2), ("loss", 2), ("loss", 3)) == [False, False, True, False]
    assert rewinds(("loss", 4), ("eval_loss", 4), ("eval_loss", 2), ("loss", 3)) == [False, False, True, True]


def test_repeating_an_evaluation_is_none() -> None:
    assert rewinds(("loss", 4), ("eval_loss", 4), ("eval_loss", 4), ("loss", 5)) == [False] * 4
