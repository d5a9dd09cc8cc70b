"""Numbers as people read them: durations, sizes, shares, moments, values in four digits."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def number(value: float | None, *, digits: int = 4) -> str:
    """Returns a value in so many digits: "2.386", "12,345", "3e-05"; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1e15:
        return f"{value:.{digits}g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def short(value: float) -> str:
    """Returns a value for an axis: "40k", "2.5M", "0.01", "1e-05"."""
    for size, letter in _SI if abs(value) < 1e15 else ():
        if abs(value) >= size * (10 if letter == "k" else 1):
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Returns "2 d 3 h", "1 h 24 min", "3 min 12 s", "12.3 s", "85 ms" or "12 us"; "-" for none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return _small_duration(seconds)
    whole = round(seconds)
    for size, name, part_size, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part_size
            return f"{whole // size:,} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{whole} s"


def _small_duration(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def hours(seconds: float) -> str:
    """Returns what devices were held for: "1,234 h" however many days it is; less than an hour as a duration."""
    return (
        f"{seconds / 3600:,.4g} h"
        if 3600 <= seconds < 3.6e7
        else duration(seconds)
        if seconds < 3600
        else f"{seconds / 3600:,.0f} h"
    )


def byte_size(num: float) -> str:
    """Returns "1.55 MiB"."""
    power = 0
    while num >= 1024 and power < len(_BINARY) - 1:
        num, power = num / 1024, power + 1
    return f"{num:.3g} {_BINARY[power]}" if power else f"{num:.0f} B"


def share(part: float) -> str:
    """Returns "94 %", "0.3 %"."""
    percent = 100 * part
    if 0 < percent < 0.05:
        return "< 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def moment(unix_s: float | None) -> str:
    """Returns a moment in the time of this machine, e.g. "2026-11-21 13:41:07 +0100"; "-" for none."""
    if unix_s is None:
        return "-"
    try:
        return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (ValueError, OverflowError, OSError):
        return "-"


def setting(value: Any) -> str:
    """Returns the value of a setting as it is typed: null, true, text, list."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(setting, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_float(value: Any) -> float | None:
    """Returns a number that is one, None for anything else, and for what is not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
