"""What a rank's steps are spent on: sums that can be taken apart again; its own unevenness is told from everybody's."""

from __future__ import annotations

import random
import struct

import pytest

from slurm_train.rundir.heartbeat import Pace, pace_from


def summed(*steps: tuple[float, float]) -> Pace:
    pace = Pace()
    for own_s, wait_s in steps:
        pace = pace.plus(own_s=own_s, wait_s=wait_s, data_s=0.25 * own_s)
    return pace


def test_sums_of_later_steps_are_what_was_added_since() -> None:
    first, both = summed((1.0, 0.5)), summed((1.0, 0.5), (3.0, 0.25))
    assert both.since(first) == summed((3.0, 0.25))
    assert both.since(both) == Pace()


def test_the_bytes_of_a_pace_give_it_back() -> None:
    pace = summed((1.5, 0.5), (2.0, 0.0))
    assert pace_from(b"12345678" + pace.as_bytes(), 8) == pace
    with pytest.raises(struct.error):
        pace_from(b"short", 0)


def test_only_what_is_long_for_one_rank_alone_counts_as_uneven() -> None:
    chance = random.Random(1)
    mine = [chance.gauss(1.0, 0.1) for _ in range(4000)]
    together = summed(*((own_s, 0.2) for own_s in mine))
    alone = summed(*((own_s, 2.0 - own_s) for own_s in mine))
    assert together.uneven_s == pytest.approx(0.0, abs=1e-6)
    assert alone.uneven_s == pytest.approx(0.1, rel=0.05)
    assert summed((1.0, 1.0)).uneven_s == 0.0
