from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.campaigns.hang_trials import PHASES, STEPS, Seen, plan_trials, what_is_wrong

SENTENCE = "rank 1 on node2 does not run (stopped or lost), in step at step 7 since 8 s; 1 rank waits for it"
FIRST = {"attempt": 0, "reason": "failed", "action": "relaunch"}
KEPT = Seen(
    rank=1,
    host="node2",
    limit_s=8.0,
    ended_s=11.0,
    events=[{"ranks": [1], "sentence": SENTENCE}],
    stacks=[0],
    ledger=[FIRST, {"attempt": 1, "reason": "done", "action": "finish"}],
    steps=range(1, STEPS + 1),
)
PLANTED: list[tuple[dict[str, Any], str]] = [
    ({"ended_s": 18.5}, "ended after 18.5 s, the time-out is 8 s"),
    ({"events": []}, "0 hangs on record"),
    ({"events": KEPT.events * 2}, "2 hangs on record"),
    ({"events": [{"ranks": [0], "sentence": "rank 0 is late"}]}, "said 'rank 0 is late'"),
    ({"host": "node1"}, f"said {SENTENCE!r}"),
    ({"stacks": [1]}, "no stacks of rank 0"),
    ({"ledger": [FIRST]}, "the ledger says [('failed', 'relaunch')]"),
    ({"steps": [1, 2, 2]}, "its steps are [1, 2, 2]"),
]


def test_a_hang_that_was_treated_as_promised_passes() -> None:
    assert what_is_wrong(KEPT) == ""


@pytest.mark.parametrize(("planted", "found"), PLANTED, ids=[found[:40] for _, found in PLANTED])
def test_every_planted_violation_is_found(planted: dict[str, Any], found: str) -> None:
    assert what_is_wrong(replace(KEPT, **planted)) == found


def test_a_plan_is_repeatable_and_has_every_phase_and_both_ranks() -> None:
    planned = plan_trials(seed=1, trials=20)
    assert planned == plan_trials(seed=1, trials=20) != plan_trials(seed=2, trials=20)
    assert {trial.phase for trial in planned} == set(PHASES)
    assert {trial.rank for trial in planned} == {0, 1} and {trial.nodes for trial in planned} == {1, 2}
