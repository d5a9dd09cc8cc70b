"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from slurm_train.report import quantity

CASES: list[tuple[Callable[..., str], object, str]] = [
    (quantity.number, None, "-"),
    (quantity.number, math.nan, "-"),
    (quantity.number, 2.38572, "2.386"),
    (quantity.number, 12345.6, "12,346"),
    (quantity.number, 100000, "100,000"),
    (quantity.number, 1e30, "1e+30"),
    (quantity.number, 3e-5, "3e-05"),
    (quantity.short, 200000, "200k"),
    (quantity.short, 2500, "2500"),
    (quantity.short, 1e6, "1M"),
    (quantity.short, 1e20, "1e+20"),
    (quantity.short, 0.003, "0.003"),
    (quantity.duration, None, "-"),
    (quantity.duration, 0, "0 s"),
    (quantity.duration, 12e-6, "12 us"),
    (quantity.duration, 0.0851, "85.1 ms"),
    (quantity.duration, 12.34, "12.3 s"),
    (quantity.duration, 192, "3 min 12 s"),
    (quantity.duration, 3600, "1 h"),
    (quantity.duration, 5040, "1 h 24 min"),
    (quantity.duration, 86399.9, "1 d"),
    (quantity.duration, 200000, "2 d 7 h"),
    (quantity.hours, 30, "30 s"),
    (quantity.hours, 7200, "2 h"),
    (quantity.hours, 4.4e6, "1,222 h"),
    (quantity.hours, 3.6e9, "1,000,000 h"),
    (quantity.byte_size, 0, "0 B"),
    (quantity.byte_size, 1624251, "1.55 MiB"),
    (quantity.byte_size, 1.6e13, "14.6 TiB"),
    (quantity.share, 0, "0 %"),
    (quantity.share, 0.0001, "< 0.1 %"),
    (quantity.share, 0.034, "3.4 %"),
    (quantity.share, 0.942, "94 %"),
    (quantity.setting, None, "null"),
    (quantity.setting, True, "true"),
    (quantity.setting, [0.9, 0.95], "[0.9, 0.95]"),
    (quantity.setting, 0.003, "0.003"),
    (quantity.moment, None, "-"),
    (quantity.moment, 1e40, "-"),
]


@pytest.mark.parametrize(("say", "value", "text"), CASES, ids=str)
def test_a_quantity_in_words(say: Callable[..., str], value: object, text: str) -> None:
    assert say(value) == text


@pytest.mark.parametrize("value", ["1", None, True, math.nan, math.inf, [1]])
def test_what_is_no_number_is_none(value: object) -> None:
    assert quantity.as_float(value) is None
