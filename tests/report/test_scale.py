"""Axes: every value stands between the ends, every label is a round value inside them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.report.scale import Scale, fit, wants_log

NUMBERS = st.floats(min_value=-1e90, max_value=1e90, allow_nan=False)


@settings(deadline=None)
@given(st.lists(NUMBERS, max_size=8), st.booleans(), st.booleans(), st.booleans())
def test_an_axis_holds_whatever_there_is(values: list[float], from_zero: bool, is_log: bool, is_padded: bool) -> None:
    scale = fit(values, from_zero=from_zero, is_log=is_log, is_padded=is_padded)
    assert scale.low < scale.high
    assert all(0 <= scale.at(value) <= 1 for value in values)
    ticks = scale.ticks()
    assert all(one < other for one, other in pairwise(ticks))
    assert len(ticks) <= 12
    assert all(-1e-9 <= (tick - scale.low) / (scale.high - scale.low) <= 1 + 1e-9 for tick in ticks)


TICKS = [
    (Scale(0, 10), [0, 2, 4, 6, 8, 10]),
    (Scale(1, 1000, is_log=True), [1, 3, 10, 30, 100, 300, 1000]),
    (Scale(1e-6, 1e6, is_log=True), [1e-6, 1e-4, 1e-2, 1, 1e2, 1e4, 1e6]),
    (Scale(2, 7, is_log=True), [2, 3, 4, 5, 6, 7]),
    (Scale(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
]


@pytest.mark.parametrize(("scale", "ticks"), TICKS, ids=str)
def test_labels_are_round_values(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks() == pytest.approx(ticks)


def test_counts_have_whole_labels_only() -> None:
    assert Scale(-0.5, 1.5).ticks(is_whole=True) == [0, 1]


def test_a_tenfold_is_as_far_anywhere_on_a_log_axis() -> None:
    scale = Scale(1, 1000, is_log=True)
    assert [scale.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert scale.at(0) == scale.at(-5) == 0.0


@pytest.mark.parametrize(
    ("values", "is_wide"), [([1, 100], True), ([1, 2], False), ([0, 1e6], False), ([-1, 1e6], False), ([], False)]
)
def test_powers_of_ten_are_for_wide_ranges_above_zero(values: list[float], is_wide: bool) -> None:
    assert wants_log(values) == is_wide


def test_an_axis_from_zero_begins_there_and_one_value_is_enough() -> None:
    assert fit([5.0], from_zero=True).low == 0.0
    assert fit([], is_padded=False) == Scale(0.0, 1.0)
    assert fit([7.0]).at(7.0) == pytest.approx(0.5)
