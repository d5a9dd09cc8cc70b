"""Who holds the others up: windows of readings, outliers among few and many, and what is not said of noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from slurm_train.rundir.heartbeat import Beat, Pace
from slurm_train.rundir.timing import PaceWindow, RankPace, Slowdown
from slurm_train.supervise.stragglers import (
    WINDOWS_IN_A_ROW,
    WindowCutter,
    WindowJudge,
    explain_stragglers,
    outliers,
    slow_ranks,
)

EXCESS = 0.1


def beat(rank: int, *, samples: int, own_s: float = 0.1, wait_s: float = 0.01, step: int = 5) -> Beat:
    place = {"rank": rank, "host": f"node{rank // 2 + 1}", "pid": 1}
    pace = Pace(samples, samples * own_s, samples * own_s**2, samples * own_s * wait_s, samples * wait_s, 0.0)
    return Beat(**place, step=step, marks=1, phase="step", settled=True, beats=1, pace=pace)


def ranks(own_s: Sequence[float], *, per_node: int = 2, comm_s: float = 0.005, **facts: float) -> list[RankPace]:
    """Returns what each rank does in synchronous training: whoever is quicker than the slowest waits for it."""
    slowest = max(own_s)
    return [
        RankPace(
            rank=rank,
            host=f"node{rank // per_node + 1}",
            own_s=seconds,
            wait_s=slowest - seconds + comm_s,
            data_s=facts.get("data_s", 0.0),
            uneven_s=facts.get("uneven_s", 0.0),
        )
        for rank, seconds in enumerate(own_s)
    ]


def window(paces: Sequence[RankPace]) -> PaceWindow:
    return PaceWindow(
        attempt=0, begin_unix_s=0.0, end_unix_s=5.0, from_step=1, to_step=50, samples=10, ranks=tuple(paces)
    )


def judged(make: Callable[[int], Sequence[RankPace]], windows: int) -> list[tuple[Slowdown, ...]]:
    judge = WindowJudge(excess=EXCESS)
    return [judge.judge(window(make(number))).findings for number in range(windows)]


def test_a_window_holds_the_steps_between_two_readings() -> None:
    cutter = WindowCutter(0, world_size=2, first_s=5.0)
    assert cutter.look({0: beat(0, samples=4), 1: beat(1, samples=4)}, 100.0) is None
    later = {0: beat(0, samples=20, step=60), 1: beat(1, samples=24, step=61)}
    assert cutter.look(later, 103.0) is None, "it is too short yet"
    cut = cutter.look(later, 106.0)
    assert cut is not None
    assert (cut.begin_unix_s, cut.end_unix_s, cut.from_step, cut.to_step, cut.samples) == (100.0, 106.0, 5, 60, 16)
    assert [(rank.rank, rank.host) for rank in cut.ranks] == [(0, "node1"), (1, "node1")]
    assert cut.ranks[1].own_s == pytest.approx(0.1) and cut.ranks[1].wait_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0], set()),
        ([1.0, 1.2], set()),
        ([1.0, 1.3], {1}),
        ([1.0, 1.0, 1.0, 1.26], {3}),
        ([1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 0.98, 1.12], {7}),
        ([1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 0.98, 1.08], set()),
        ([1.0, 1.2, 0.8, 1.1, 0.9, 1.05, 0.95, 1.4], set()),
        ([1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 2.0, 2.0], {6, 7}),
        ([0.0] * 8, set()),
    ],
)
def test_outliers_lie_far_above_the_others_by_their_own_spread(values: list[float], expected: set[int]) -> None:
    assert outliers(dict(enumerate(values)), excess=EXCESS) == expected


def test_the_cause_is_named_not_its_victims() -> None:
    paces = ranks([0.10, 0.10, 0.10, 0.10, 0.10, 0.16, 0.10, 0.10])
    assert slow_ranks(paces, excess=EXCESS) == [5]
    step_times = {rank.own_s + rank.wait_s for rank in paces}
    assert max(step_times) - min(step_times) < 1e-9, "the step times tell nothing"
    finding = explain_stragglers(paces, [5])
    assert finding.sentence.startswith("rank 5 on node3: 1.60x as slow as the others: 160 ms of own time per step")
    assert finding.advice.endswith("cluster.exclude=node3 keeps the run off it")
    of_one_node = ranks([0.10, 0.11, 0.09, 0.10, 0.15, 0.16, 0.15, 0.14], per_node=4)
    assert slow_ranks(of_one_node, excess=EXCESS) == [4, 5, 6, 7], "half of all ranks, but one of two nodes"
    assert explain_stragglers(of_one_node, [4, 5, 6, 7]).sentence.startswith("all 4 ranks on node2: 1.50x as slow")


def test_data_that_come_late_are_told_from_slow_computing() -> None:
    paces = ranks([0.10, 0.10, 0.10, 0.30])
    paces[3] = paces[3]._replace(data_s=0.19)
    finding = explain_stragglers(paces, [3])
    assert "because data come late (190 ms of it)" in finding.sentence
    assert finding.advice.startswith("read ahead with more workers") and "node2" in finding.advice


def test_a_straggler_is_said_once_it_lasts() -> None:
    found = judged(lambda _: ranks([0.1, 0.1, 0.1, 0.1, 0.1, 0.2]), 5)
    assert [len(findings) for findings in found] == [0] * (WINDOWS_IN_A_ROW - 1) + [1, 1, 1]
    assert found[-1][0].ranks == (5,)


@pytest.mark.parametrize("world", [2, 8])
def test_noise_raises_no_alarm_in_a_thousand_windows(world: int) -> None:
    chance = random.Random(world)

    def noisy(_: int) -> list[RankPace]:
        # Means of windows: a tenth of spread between ranks, and now and then one that was disturbed.
        own = [0.1 * chance.gauss(1.0, 0.05) for _ in range(world)]
        if chance.random() < 0.1:
            own[chance.randrange(world)] *= 2
        return ranks(own)

    assert not any(finding.kind == "straggler" for findings in judged(noisy, 1000) for finding in findings)
