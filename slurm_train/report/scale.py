"""An axis: where a value stands between two ends, linear or logarithmic, and which values get a label."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_PADDING = 0.04
# A range of so many times is easier to read in powers of ten.
_LOG_ABOVE = 8.0
# Less is 0 for a picture; quotients stay finite.
_TINY = 1e-100


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis between two different ends."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Returns where a value stands, from 0 at the low end to 1; what lies outside stands at the nearer end."""
        if self.is_log:
            if value <= self.low:
                return 0.0
            place = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, place))

    def ticks(self, most: int = 6, *, is_whole: bool = False) -> list[float]:
        """Returns round values inside the ends, ascending, about so many; only whole numbers where asked."""
        found = self._ticks(most)
        return [value for value in found if value == round(value)] if is_whole else found

    def _ticks(self, most: int) -> list[float]:
        if self.is_log and self.high / self.low >= 10:
            found = _log_ticks(self.low, self.high, most)
            if len(found) >= 2:
                return found
        return _linear_ticks(self.low, self.high, most)


def fit(values: Iterable[float], *, from_zero: bool = False, is_log: bool = False, is_padded: bool = True) -> Scale:
    """Returns the axis that holds all values.

    Args:
        values: finite; where there are none, the axis is from 0 to 1.
        from_zero: the low end is 0 unless a value is below; not for powers of ten.
        is_log: in powers of ten; values that are not above 0 stand at the low end.
        is_padded: with a little room at both ends.
    """
    kept = [value if abs(value) > _TINY else 0.0 for value in values if not is_log or value > _TINY]
    low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
    if is_log and kept:
        return _log_fit(low, high)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (low - abs(low) / 2 or -0.5, high + abs(high) / 2 or 0.5) if not from_zero else (0.0, 1.0)
    room = (high - low) * _PADDING if is_padded else 0.0
    return Scale(low if from_zero and low == 0 else low - room, high + room)


def wants_log(values: Iterable[float]) -> bool:
    """Returns whether values are easier to read in powers of ten: none is below 0, and they span a wide range."""
    kept = list(values)
    return bool(kept) and min(kept) > _TINY and max(kept) / min(kept) > _LOG_ABOVE


def _log_fit(low: float, high: float) -> Scale:
    if low == high:
        return Scale(low / 2, high * 2, is_log=True)
    room = (high / low) ** _PADDING
    return Scale(low / room, high * room, is_log=True)


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 5), ((1,), 10), ((1,), 50)):
        powers = range(first - first % every, last + 1, every)
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if low <= value <= high]
        if len(found) <= most + 1:
            return found
    return []


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor((high - low) / step + 1e-9) + 1
    found = [(first + index) * step for index in range(count)]
    return [0.0 if abs(value) < step / 1e6 else value for value in found if low <= value <= high * (1 + 1e-12) + 1e-300]
