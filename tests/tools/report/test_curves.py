"""A million points become six hundred, no spike is lost, and the curves of a plot share their x."""

from __future__ import annotations

from array import array

import pytest

from slurm_train.tools.report.page import MOST_POINTS, Curve, plot, skeleton, thinned


@pytest.mark.parametrize("spike_at", [1, 617, 50_000, 99_999])
def test_every_spike_is_inside_the_band(spike_at: int) -> None:
    values = array("d", [2.0] * 100_000)
    values[spike_at] = 42.0
    curve = thinned("loss", range(100_000), values)
    assert len(curve.x) == len(curve.y) == len(curve.low) == len(curve.high) == MOST_POINTS
    assert (max(curve.high), min(curve.low), curve.x[-1]) == (42.0, 2.0, 99_999)
    assert abs(curve.x[list(curve.high).index(42.0)] - spike_at) <= 100_000 / MOST_POINTS


@pytest.mark.parametrize("num", [0, 1, 5, 99, 100, 101, 4321])
def test_a_skeleton_keeps_every_spike(num: int) -> None:
    values = [1.0] * num
    if num > 50:
        values[37], values[num - 3] = 9.0, -9.0
    xs, ys = skeleton(range(num), values, most=100)
    assert len(xs) == len(ys) <= min(num, 102) and xs == sorted(set(xs))
    assert (min(ys, default=0), max(ys, default=0)) == (min(values, default=0), max(values, default=0))


def test_skeletons_of_runs_of_any_length_share_their_places() -> None:
    lengths = range(2000, 4000, 10)
    shared = {x for num in lengths for x in skeleton(range(num), list(map(float, range(num))), most=100)[0]}
    assert len(shared) < 400


def test_curves_share_x_and_are_none_where_they_have_no_point() -> None:
    block = plot("a", "A", [Curve(name="a", x=[1, 3], y=[1 / 3, 2.0]), Curve(name="b", x=[2, 3], y=[5.0, 6.0])])
    assert block["x"] == [1, 2, 3]
    assert [curve["y"] for curve in block["curves"]] == [[0.333333, None, 2], [None, 5, 6]]


@pytest.mark.parametrize(
    ("values", "scales"),
    [
        ([4.0, 2.0, 1.0], ["linear", "log"]),
        ([400.0, 2.0, 1.0], ["log", "linear"]),
        ([4.0, 0.0, 1.0], ["linear"]),
        ([2.0, 2.0, 2.0], ["linear"]),
    ],
)
def test_two_scales_are_offered_where_both_make_sense(values: list[float], scales: list[str]) -> None:
    assert plot("a", "A", [Curve(name="a", x=[1, 2, 3], y=values)])["scales"] == scales
