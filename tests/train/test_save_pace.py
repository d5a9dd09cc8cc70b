"""When saves are due: fixed, never, or as often as pays off."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from slurm_train.train.saving import SavePace, failure_every_s, interval_steps

DAY_S = 86400.0


@dataclass
class Costs:
    blocked_s: float = 0.0
    last_save_s: float | None = None


def due_steps(pace: SavePace, last: int) -> list[int]:
    return [step for step in range(1, last + 1) if pace.is_due(step)]


def test_a_number_saves_at_its_multiples_and_none_never() -> None:
    assert due_steps(SavePace(4, start_step=3), 13) == [4, 8, 12]
    assert due_steps(SavePace(None), 100) == []
    assert SavePace(4).saved(4, Costs()) is None


@pytest.mark.parametrize(
    ("cost_s", "save_s", "step_s", "failure_s", "expected"),
    [
        (0.1, 1.0, 1.0, DAY_S, 132),  # sqrt(2 * 0.1 * 86400) = 131.5
        (0.1, 1.0, 0.1, DAY_S, 1315),
        (10.0, 10.0, 1.0, 3600.0, 269),
        (0.0, 0.0, 1.0, DAY_S, 42),  # as if a save cost 10 ms
        (0.1, 300.0, 1.0, DAY_S, 600),  # twice as long as the disk needs
        (0.1, 1.0, 1000.0, DAY_S, 1),
    ],
)
def test_the_interval_follows_young_and_daly(cost_s, save_s, step_s, failure_s, expected) -> None:
    assert interval_steps(cost_s=cost_s, save_s=save_s, step_s=step_s, failure_every_s=failure_s) == expected


def test_no_other_interval_loses_less() -> None:
    cost_s, failure_s = 2.0, 7200.0

    def lost(seconds: float) -> float:
        return cost_s / seconds + seconds / (2 * failure_s)

    best = interval_steps(cost_s=cost_s, save_s=0.0, step_s=1.0, failure_every_s=failure_s)
    assert all(lost(best) <= lost(other) + 1e-5 for other in range(1, 4 * best))


def test_the_ledger_corrects_what_was_expected() -> None:
    attempts = [
        {"time_unix_s": 0.0, "end_time_unix_s": 600.0},
        {"time_unix_s": 700.0, "end_time_unix_s": 1300.0},
        {"time_unix_s": 1400.0},
    ]
    assert failure_every_s([], expected_s=DAY_S) == DAY_S
    assert failure_every_s(attempts, expected_s=DAY_S) == (DAY_S + 1200) / 3


def test_auto_measures_from_its_first_save_on(group_of_one: None) -> None:
    now = [0.0]
    pace, costs = SavePace("auto", start_step=100, failure_every_s=DAY_S, clock=lambda: now[0]), Costs()
    due, news = [], []
    for step in range(101, 700):
        now[0] += 30.0 if step == 101 else 0.5  # the first step compiles
        if pace.is_due(step):
            due.append(step)
            costs.blocked_s += 0.1
            costs.last_save_s = 2.0
            now[0] += 0.1
            news.append(pace.saved(step, costs))
    interval = math.ceil(math.sqrt(2 * 0.1 * DAY_S) / 0.5)
    assert due == [110, 110 + interval, 110 + 2 * interval]
    assert news[0] == f"the next checkpoint is due in {interval} steps: a save takes 0.10 s of training"
    assert news[1:] == [None, None]
