"""Spans of time as people say and type them: "3 min", "2 h 10 min"; "12h", "2d", or a date."""

from __future__ import annotations

import re
from datetime import datetime

from slurm_train.errors import ConfigError

_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)")


def span_in_words(seconds: float) -> str:
    """Returns a span in at most two units, e.g. "5 s", "3 min", "2 h 10 min", "4 days"."""
    whole = int(max(0.0, seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172800:
        minutes = whole % 3600 // 60
        return f"{whole // 3600} h {minutes} min" if minutes else f"{whole // 3600} h"
    return f"{whole // 86400} days"


def as_clock(seconds: float) -> str:
    """Returns a span as "01:23:45", or in days."""
    whole = int(max(0.0, seconds))
    if whole >= 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def read_since(text: str, *, now_unix_s: float) -> float:
    """Returns the moment that is meant by "90m", "12h", "2d", "1w" ago, or by "2026-01-31" or "2026-01-31T09:00".

    Raises:
        ConfigError: it is none of these.
    """
    if match := _SPAN.fullmatch(text.strip()):
        return now_unix_s - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        hint = "write 90m, 12h, 2d, 1w, or a date such as 2026-01-31 or 2026-01-31T09:00"
        raise ConfigError(f"--since {text}: that is neither a span of time nor a date", hint=hint) from None
