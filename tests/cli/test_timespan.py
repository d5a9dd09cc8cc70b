from __future__ import annotations

from datetime import datetime

import pytest

from slurm_train.cli.timespan import as_clock, read_since, span_in_words
from slurm_train.errors import ConfigError


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (119, "119 s"),
        (180, "3 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (7800, "2 h 10 min"),
        (172800, "2 days"),
    ],
)
def test_a_span_in_words(seconds: float, words: str) -> None:
    assert span_in_words(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00:00"), (140, "00:02:20"), (86399, "23:59:59"), (1440000, "16.7 days")]
)
def test_a_span_as_a_clock(seconds: float, text: str) -> None:
    assert as_clock(seconds) == text


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("12h", 43200), ("1.5 d", 129600), ("1w", 604800)])
def test_since_a_span_ago(text: str, seconds: float) -> None:
    assert read_since(text, now_unix_s=1e9) == 1e9 - seconds


def test_since_a_date() -> None:
    assert read_since("2026-01-31T09:00", now_unix_s=0.0) == datetime(2026, 1, 31, 9).timestamp()


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match="--since yesterday: that is neither a span of time nor a date"):
        read_since("yesterday", now_unix_s=0.0)
