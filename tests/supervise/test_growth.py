from __future__ import annotations

import math
from typing import Any

import pytest

from slurm_train.rundir.ledger import Attempt
from slurm_train.supervise.growth import (
    Prospect,
    Seconds,
    assess,
    newest_growth_unix_s,
    restart_seconds,
    step_seconds,
    wait_seconds,
)
from tests.support.ledgers import attempt_of

NODES = ["node1", "node2", "node3", "node4"]


def prospect(**facts: Any) -> Prospect:
    """A run on three nodes that could have four: a step is a quarter shorter there, a restart takes a minute."""
    values: dict[str, Any] = {
        "nodes": 3,
        "larger": 4,
        "step": Seconds(seconds=2.0),
        "larger_step": Seconds(seconds=1.5, is_estimate=True),
        "restart": Seconds(seconds=60.0),
        "steps_left": 10_000,
        "time_left_s": 36_000.0,
    }
    return Prospect(**values | facts)


@pytest.mark.parametrize(
    ("facts", "is_worth_it"),
    [
        pytest.param({}, True, id="hours are left"),
        # 480 s x (1 / 1.5 - 1 / 2) are 80 steps; a restart costs 40 at the larger pace.
        pytest.param({"steps_left": 240}, True, id="twice the cost is gained"),
        pytest.param({"steps_left": 238}, False, id="less than twice the cost"),
        pytest.param({"time_left_s": 470.0}, False, id="the time limit brings a requeue anyway"),
        pytest.param({"time_left_s": -5.0}, False, id="over the limit"),
        pytest.param({"steps_left": None, "time_left_s": None}, True, id="no end is known"),
        pytest.param({"larger_step": Seconds(seconds=2.0)}, False, id="measured: more nodes are not faster"),
        pytest.param({"larger_step": Seconds(seconds=2.5)}, False, id="measured: more nodes are slower"),
        pytest.param({"restart": Seconds(seconds=5000.0)}, False, id="a restart takes hours"),
    ],
)
def test_a_requeue_must_bring_twice_its_cost(facts: dict[str, Any], is_worth_it: bool) -> None:
    assert assess(prospect(**facts)).is_worth_it is is_worth_it


def test_the_arithmetic_can_be_read() -> None:
    growth = assess(prospect())
    assert growth.sentence == (
        "4 nodes instead of 3: a step takes 1.5 s (estimated) instead of 2 s, which in the next 5 h 33 min are "
        "3,333 steps more; a restart takes 1 min (measured), 40 steps"
    )
    # 60 s are 30 steps at the old pace; a second on four nodes brings a sixth of a step more.
    assert (growth.nodes, growth.pays_after_s) == (4, 180.0)
    assert assess(prospect(larger_step=Seconds(seconds=2.5))).pays_after_s == math.inf


def attempt(nodes: int, begin_unix_s: float, end_unix_s: float | None = None, **facts: Any) -> Attempt:
    """An attempt on so many nodes."""
    end = {} if end_unix_s is None else {"end_time_unix_s": end_unix_s, "action": "relaunch", "reason": "node_failure"}
    return attempt_of(**{"nodes": NODES[:nodes], "time_unix_s": begin_unix_s, **end, **facts})


def growth(nodes: int, begin_unix_s: float, end_unix_s: float) -> Attempt:
    """An attempt that ended for the sake of four nodes, which pay after 100 s."""
    facts = {"reason": "growth", "action": "requeue", "grow_to": 4, "pays_after_s": 100.0}
    return attempt(nodes, begin_unix_s, end_unix_s, **facts)


@pytest.mark.parametrize(
    ("ledger", "factor"),
    [
        pytest.param([], 1, id="nothing was tried"),
        pytest.param([attempt(4, 0, 50), attempt(3, 50, 90)], 1, id="nodes were lost without a growth"),
        pytest.param([growth(3, 0, 50)], 1, id="the requeued job waits"),
        pytest.param([growth(3, 0, 50), attempt(3, 60, 90)], 2, id="it got no more than before"),
        pytest.param([growth(3, 0, 50), attempt(4, 60, 90), attempt(3, 90, 95)], 2, id="it lost them soon"),
        pytest.param([growth(3, 0, 50), attempt(4, 60, 200), attempt(3, 200, 210)], 1, id="it paid first"),
        pytest.param(
            [growth(3, 0, 50), attempt(4, 60, 120), attempt(4, 120, 180), attempt(3, 200, 210)],
            1,
            id="a failure in between takes no node away",
        ),
        pytest.param(
            [growth(3, 0, 50), growth(3, 60, 90), growth(3, 100, 110), attempt(3, 120)], 8, id="three times in a row"
        ),
        pytest.param(
            [growth(3, 0, 50), growth(3, 60, 90), attempt(4, 100, 250), growth(3, 260, 300), attempt(3, 310)],
            2,
            id="one that paid ends the row",
        ),
    ],
)
def test_each_failed_growth_doubles_the_wait(ledger: list[Attempt], factor: int) -> None:
    assert wait_seconds(ledger, every_s=60.0) == 60.0 * factor


def test_the_wait_has_a_longest() -> None:
    ledger = [growth(3, 10.0 * number, 10.0 * number + 5) for number in range(50)]
    assert wait_seconds(ledger, every_s=60.0) == 60.0 * 1024


def test_a_restart_costs_what_it_took_last() -> None:
    startup = {"start_s": 10.0, "rendezvous_s": 2.0, "load_s": 3.0, "compile_s": 5.0}
    requeued = attempt(3, 0, 100, action="requeue", reason="preempted", end_s=4.0)
    lost = attempt(3, 0, 100, action="requeue", reason="node_failure", end_s=40.0)
    assert restart_seconds([requeued, attempt(4, 130, **startup)], delay_s=5, save_s=2) == Seconds(seconds=56.0)
    assert restart_seconds([lost, attempt(4, 130, **startup)], delay_s=5, save_s=2) == Seconds(seconds=52.0)
    # One that waited for 800 s, before three short ones.
    starts = [attempt(4, at, at + 100, action="requeue", reason="preempted", **startup) for at in (0, 900, 1030, 1160)]
    newest = [*starts, attempt(4, 1290, **startup)]
    assert restart_seconds(newest[:2], delay_s=5, save_s=2) == Seconds(seconds=822.0)
    assert restart_seconds(newest, delay_s=5, save_s=2) == Seconds(seconds=52.0)
    # Ranks that are started again in the same allocation say nothing of a requeue.
    relaunched = [attempt(4, 0, 100, end_s=4.0), attempt(3, 101, **startup)]
    assert restart_seconds(relaunched, delay_s=5, save_s=2) == Seconds(seconds=57.0, is_estimate=True)
    assert restart_seconds([], delay_s=120, save_s=2).is_estimate


def test_a_pace_is_measured_where_the_run_has_had_so_many_nodes() -> None:
    steps = {"first_step": 10, "last_step": 30, "step_s": 38.0, "data_wait_s": 2.0}
    ledger = [
        attempt(4, 0, 100, first_step=0, last_step=10, step_s=15.0, data_wait_s=0.0),
        attempt(4, 100, 110, first_step=10, last_step=11, step_s=9.0, data_wait_s=0.0),
        attempt(2, 110, **steps),
    ]
    assert step_seconds(ledger, nodes=2, larger=4) == (Seconds(seconds=2.0), Seconds(seconds=1.5))
    assert step_seconds(ledger, nodes=2, larger=3) == (
        Seconds(seconds=2.0),
        Seconds(seconds=4.0 / 3.0, is_estimate=True),
    )
    assert step_seconds(ledger, nodes=3, larger=4) is None


def test_the_newest_growth_is_found() -> None:
    assert newest_growth_unix_s([growth(3, 0, 50), attempt(4, 60, 90)]) == 50
    assert newest_growth_unix_s([attempt(4, 60, 90)]) == 0
