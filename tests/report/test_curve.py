"""A million points become six hundred, and no spike is lost."""

from __future__ import annotations

from array import array

import pytest

from slurm_train.report.curve import MOST_POINTS, skeleton, thinned


def test_few_points_stay_as_they_are() -> None:
    curve = thinned("loss", [1, 2, 3], [3.0, 2.0, 1.0])
    assert (list(curve.x), list(curve.y), curve.low) == ([1, 2, 3], [3.0, 2.0, 1.0], ())


@pytest.mark.parametrize("spike_at", [0, 1, 617, 50_000, 99_999])
def test_every_spike_is_inside_the_band(spike_at: int) -> None:
    values = array("d", [2.0] * 100_000)
    values[spike_at] = 42.0
    values[spike_at // 2] = -1.0
    curve = thinned("loss", range(100_000), values)
    assert len(curve.x) == len(curve.y) == len(curve.low) == len(curve.high) == MOST_POINTS
    assert max(curve.high) == (42.0 if spike_at else 2.0) and min(curve.low) == -1.0
    place = list(curve.high).index(max(curve.high))
    assert not spike_at or abs(curve.x[place] - spike_at) <= 100_000 / MOST_POINTS


def test_a_curve_ends_where_its_points_end() -> None:
    curve = thinned("loss", range(10_001), [float(value) for value in range(10_001)])
    assert curve.x[-1] == 10_000
    assert curve.y[0] == pytest.approx(8, abs=1)


@pytest.mark.parametrize("num", [0, 1, 5, 99, 100, 101, 4321])
def test_a_skeleton_keeps_both_ends_and_every_spike(num: int) -> None:
    values = [1.0] * num
    if num > 50:
        values[37], values[num - 3] = 9.0, -9.0
    xs, ys = skeleton(range(num), values, most=100)
    assert len(xs) == len(ys) <= min(num, 102)
    assert (min(ys, default=0), max(ys, default=0)) == (min(values, default=0), max(values, default=0))
    assert xs == sorted(xs)
    assert num == 0 or (xs[0], xs[-1]) == (0, num - 1)
