"""The checks of the campaigns find what they are to find."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.campaigns.latency import Stop
from tests.campaigns.lost_work import judge, lost_before
from tests.campaigns.on_slurm import Seen, Tally, lost_commits, lost_steps, spans
from tests.campaigns.storm import held_problems, storm_problems


def lines(attempt: int, first: int, last: int) -> list[dict[str, int]]:
    return [{"attempt": attempt, "step": step} for step in range(first, last + 1)]


def test_a_run_that_resumes_where_it_committed_lost_nothing() -> None:
    steps = spans([*lines(0, 1, 13), *lines(2, 9, 20), *lines(3, 17, 30)])
    assert steps == {0: (0, 13), 2: (8, 20), 3: (16, 30)}
    assert lost_commits([Seen(0, 8), Seen(1, 8), Seen(2, 16)], steps) == []


@pytest.mark.parametrize(
    ("seen", "attempts"),
    [
        pytest.param([Seen(0, 16)], [(0, 1, 20), (1, 9, 30)], id="resumed-from-an-older-one"),
        pytest.param([Seen(0, 16)], [(0, 1, 20), (2, 1, 30)], id="began-anew-two-attempts-later"),
        pytest.param([Seen(0, 16), Seen(1, 8)], [(0, 1, 20)], id="removed-the-newest"),
    ],
)
def test_a_lost_commit_is_found(seen: list[Seen], attempts: list[tuple[int, int, int]]) -> None:
    steps = spans([line for attempt in attempts for line in lines(*attempt)])
    assert len(lost_commits(seen, steps)) == 1


def test_steps_done_again_are_counted() -> None:
    steps = spans([*lines(0, 1, 13), *lines(2, 9, 20)])
    assert lost_steps(steps, 0) == 5
    assert lost_steps(steps, 2) is None
    assert lost_steps(steps, 1) is None


def test_a_tally_goes_on_after_a_problem() -> None:
    tally = Tally()
    tally.add("first")
    tally.add("second", ["lost step 8"], trials=3)
    tally.add("third")
    result = tally.result({"runs": "3"})
    assert (result.trials, result.held, result.is_kept) == (5, 2, False)
    assert result.problems == ("3 trials: second: lost step 8",)


def test_a_storm_that_costs_budget_is_found() -> None:
    good = [
        {"attempt": 0, "reason": "preempted"},
        {"attempt": 1, "reason": "requeued"},
        {"attempt": 2, "reason": "done"},
    ]
    assert storm_problems(good) == []
    assert len(storm_problems([*good[:2], {"attempt": 2, "reason": "failed", "action": "stop"}])) == 1
    assert len(storm_problems([*good[:2], {"attempt": 2}])) == 1


def test_a_run_that_is_held_too_late_or_without_a_word_is_found() -> None:
    note = "3 failures in a row without a new checkpoint: RuntimeError: no"
    assert held_problems([{}, {}, {"note": note}]) == []
    assert len(held_problems([{}, {}, {}, {"note": note}])) == 1
    assert len(held_problems([{}, {}, {"note": f"{note}\n  File x"}])) == 1
    assert len(held_problems([{}, {"note": "failed"}])) == 2


def test_lost_work_counts_what_was_done_before_the_successor_began() -> None:
    done = [line | {"time_unix_s": float(line["step"])} for line in lines(0, 1, 40)]
    again = [line | {"time_unix_s": 35.5 + line["step"]} for line in lines(1, 26, 30)]
    assert lost_before([*done, *again], 0, until_unix_s=34.5) == 9
    tally, lost = Tally(), defaultdict(list)
    judge(tally, "preempted, grace", 1, lost)
    judge(tally, "rank killed", 9, lost)
    assert (tally.held, len(tally.problems)) == (1, 1)


@pytest.mark.parametrize(
    ("stopped_s", "stopped_at", "num_problems"), [(0.29, 11, 0), (0.59, 12, 0), (0.9, 12, 1), (0.59, 13, 1)]
)
def test_a_stop_that_takes_more_than_the_step_under_way_and_one_is_found(
    stopped_s: float, stopped_at: int, num_problems: int
) -> None:
    stop = Stop(stopped_s=stopped_s, durable_s=stopped_s + 0.05, was_at=10, stopped_at=stopped_at)
    assert len(stop.problems()) == num_problems
