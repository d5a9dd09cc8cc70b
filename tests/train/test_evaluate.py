"""Measures of sums: items, never averages of averages."""

from __future__ import annotations

import math

import pytest

from slurm_train.train.evaluate import measures


def test_ranks_weigh_as_much_as_they_have_items() -> None:
    ranks = [{"loss": 30.0, "count": 10.0, "correct": 9.0}, {"loss": 2.0, "count": 2.0, "correct": 0.0}, {}]
    assert measures(ranks, bytes_per_item=None) == {"eval_loss": 32 / 12, "eval_accuracy": 9 / 12}


def test_text_is_measured_in_bits_per_byte() -> None:
    ranks = [{"loss": 4 * math.log(2), "count": 2.0, "correct": 1.0}]
    assert measures(ranks, bytes_per_item=4.0) == pytest.approx(
        {"eval_loss": 2 * math.log(2), "eval_bits_per_byte": 0.5}
    )


def test_sums_of_ones_own_become_means_and_nothing_stays_nothing() -> None:
    assert measures([{"loss": 1.0, "count": 2.0, "distance": 3.0}], bytes_per_item=None) == {
        "eval_loss": 0.5,
        "eval_distance": 1.5,
    }
    assert measures([{}, {}], bytes_per_item=None) == {}
