from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_train import formatting

CASES: list[tuple[Callable[[Any], str], Any, str]] = [
    (formatting.number, None, "-"),
    (formatting.number, 0.00012345, "0.000123"),
    (formatting.duration, 0.0851, "85.1 ms"),
    (formatting.duration, 86399.9, "1 d"),
    (formatting.duration, 200000, "2 d 7 h"),
    (formatting.clock, -3, "00:00:00"),
    (formatting.clock, 1440000, "16.7 days"),
    (formatting.byte_size, 1624251, "1.5 MiB"),
    (formatting.share, 0.0001, "< 0.1 %"),
    (formatting.share, 0.94, "94 %"),
    (formatting.shorten, "abcdefg", "a, b, c, d, e, and 2 more"),
]


@pytest.mark.parametrize(("function", "value", "text"), CASES)
def test_values_as_people_read_them(function: Callable[[Any], str], value: Any, text: str) -> None:
    assert function(value) == text


def test_counts_and_tables() -> None:
    assert [formatting.count(num, "run") for num in (0, 1, 1200)] == ["0 runs", "1 run", "1,200 runs"]
    assert formatting.table(("A", "LONG"), [("first", "x"), ("b", "")]) == "A      LONG\nfirst  x\nb"
