from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.campaigns.cancel_trials import FORMS, PHASES, Aftermath, plan_trials, what_is_wrong

OBEYED = Aftermath(
    form="scancel",
    state="CANCELLED",
    restarts_then=1,
    restarts=1,
    jobs=("12",),
    attempts_late_s=(-20.0, 2.0),
    step_late_s=1.0,
    status="cancelled",
)
PLANTED: list[tuple[dict[str, Any], str]] = [
    ({"state": "PENDING"}, "the job is PENDING"),
    ({"state": "FAILED"}, "the job is FAILED"),
    ({"form": "scancel --batch", "state": "COMPLETED"}, "the job is COMPLETED"),
    ({"restarts": 2}, "Restarts rose from 1 to 2"),
    ({"jobs": ("12", "13")}, "the run has other jobs: 12, 13"),
    ({"attempts_late_s": (-20.0, 11.0)}, "an attempt began 11.0 s later"),
    ({"step_late_s": 12.0}, "it still trained 12.0 s later"),
    ({"status": "preempted"}, "status calls it 'preempted'"),
    ({"is_finished": True}, "it was finished before it was cancelled"),
]


def test_a_cancel_that_was_obeyed_passes() -> None:
    assert what_is_wrong(OBEYED) == ""
    assert what_is_wrong(replace(OBEYED, form="scancel --batch", state="FAILED", status="failed")) == ""


@pytest.mark.parametrize(("planted", "found"), PLANTED, ids=[found for _, found in PLANTED])
def test_every_planted_violation_is_found(planted: dict[str, Any], found: str) -> None:
    assert what_is_wrong(replace(OBEYED, **planted)) == found


def test_a_plan_is_repeatable_and_has_every_phase_and_form() -> None:
    planned = plan_trials(seed=1, trials=200)
    assert planned == plan_trials(seed=1, trials=200) != plan_trials(seed=2, trials=200)
    assert {trial.phase for trial in planned} == set(PHASES) and {trial.form for trial in planned} == set(FORMS)
    assert all(0 <= trial.delay_s <= PHASES[trial.phase].span_s for trial in planned)
    assert {trial.phase for trial in planned[: len(PHASES)]} == set(PHASES), "a few trials see different phases"
    counts = Counter(trial.phase for trial in planned)
    assert min(counts.values()) >= 10, counts
