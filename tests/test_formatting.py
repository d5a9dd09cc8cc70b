from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from slurm_train import formatting
from slurm_train.cli.terminal import BOLD, BOLD_RED, FAINT, RED, painted

CASES: list[tuple[Callable[[Any], str], Any, str]] = [
    (formatting.number, None, "-"),
    (formatting.number, 0.00012345, "0.000123"),
    (formatting.duration, 0.0851, "85.1 ms"),
    (formatting.duration, 86399.9, "1 d"),
    (formatting.duration, 200000, "2 d 7 h"),
    (formatting.clock, -3, "00:00:00"),
    (formatting.clock, 1440000, "16.7 days"),
    (formatting.byte_size, 1624251, "1.5 MiB"),
    (lambda value: str(formatting.as_float(value)), 3, "3.0"),
    (lambda value: str(formatting.as_float(value)), -(10**400), "None"),
    (lambda value: str(formatting.as_float(value)), float("nan"), "None"),
    (lambda value: str(formatting.as_float(value)), True, "None"),
    (formatting.exit_code, 3, "3"),
    (formatting.exit_code, 128, "128"),
    (formatting.exit_code, 152, "152 (as of signal 24, CPU time limit exceeded)"),
    (formatting.exit_code, 255, "255"),
    (formatting.percent, 0.0001, "< 0.1 %"),
    (formatting.percent, 0.94, "94 %"),
    (formatting.ranges, [5, 0, 2, 1, 9, 10, 5], "0-2,5,9-10"),
    (formatting.ranges, [], ""),
    (formatting.shorten, "abcdefg", "a, b, c, d, e, and 2 more"),
]


@pytest.mark.parametrize(("function", "value", "text"), CASES)
def test_values_as_people_read_them(function: Callable[[Any], str], value: Any, text: str) -> None:
    assert function(value) == text


def test_counts_and_tables() -> None:
    assert [formatting.count(num, "run") for num in (0, 1, 1200)] == ["0 runs", "1 run", "1,200 runs"]
    assert formatting.table(("A", "LONG"), [("first", "x"), ("b", "")]) == "A      LONG\nfirst  x\nb"


TEXTS = [
    ("caf\u00e9 \U0001f600\u3000\u00a0a\tb\n", "caf\u00e9 \U0001f600\u3000\u00a0a\tb\n"),
    ("\x1b]52;c;cm0gLXJm\x07", "\\x1b]52;c;cm0gLXJm\\x07"),
    ("\x9b2J\x7f\r\x08\u202e\u2028\udc80", "\\x9b2J\\x7f\\r\\x08\\u202e\\u2028\\udc80"),
    ("\x1b[2K\x1b[8mhidden\x1b[1A", "\\x1b[2K\\x1b[8mhidden\\x1b[1A"),
]


@pytest.mark.parametrize(("text", "shown"), TEXTS)
def test_what_is_printed_does_nothing_to_a_terminal(text: str, shown: str) -> None:
    out = io.StringIO()
    stream = formatting.PrintableStream(out)
    assert formatting.printable(text) == shown
    assert print(text, end="", file=stream) is None and out.getvalue() == shown  # type: ignore[func-returns-value]


def test_the_styles_of_verbs_are_printed_and_put_in_nothing_else() -> None:
    out = io.StringIO()
    for style in (BOLD, BOLD_RED, FAINT, RED, "32", "1;32", "33", "35", "36"):
        formatting.PrintableStream(out).write(painted("x", style))
    assert out.getvalue().count("\x1b") == 18 and "\\x1b" not in out.getvalue()
    with formatting.printing_safely():
        assert formatting.unfiltered(sys.stdout) is not sys.stdout
