"""Numbers, durations, bytes, counts and tables as text for people: the same wherever something is printed.

What is printed comes from files that others may have written as well, and a terminal obeys some characters: one
sequence writes the clipboard. So all that verbs print goes through a `PrintableStream`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

_LARGEST = sys.float_info.max
_UNUSUAL = re.compile(r"[^\n\t -~]")
_SEPARATORS = "\u2028\u2029"
# The colours and weights that verbs paint with; the worst that somebody else's text can do with them is to be red.
_STYLED = re.compile(r"(\x1b\[(?:0|2|1(?:;3[1-6])?|3[1-6])m)|[^\n\t -~]")

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")
COMMAND = "python -m slurm_train"
"""How this package is called in what it tells people to type."""


def as_float(value: Any) -> float | None:
    """Returns a finite number as float; None for anything else, an integer that no float can hold as well."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A comparison takes integers of any size, `math.isfinite` does not.
    return float(value) if is_number and abs(value) <= _LARGEST else None


def printable(text: str) -> str:
    """Returns a text with what a terminal would obey, or could not print, written out: "\\x1b" for an escape.

    Line breaks, tabs and spaces of all kinds stay; marks that turn the writing direction do not.
    """
    return _UNUSUAL.sub(lambda match: _written_out(match[0]), text)


def plain(text: str) -> str:
    """Returns a text without what is only for terminals: colours and other escape sequences, carriage returns, tabs."""
    return _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n").expandtabs()


def _written_out(char: str) -> str:
    is_space = char.isspace() and char > "\x9f" and char not in _SEPARATORS
    return char if char.isprintable() or is_space else ascii(char)[1:-1]


class PrintableStream:
    """A text stream that writes `printable` texts to another one; the styles of this package stay.

    Args:
        stream: where to write.
        command: how the reader types commands of this package, where they are shown.
    """

    def __init__(self, stream: TextIO, *, command: str = COMMAND) -> None:
        self.stream = stream
        self._command = command

    def write(self, text: str) -> int:
        """Writes a text, and returns its length."""
        typed = text.replace(f"{COMMAND} ", f"{self._command} ")
        self.stream.write(_STYLED.sub(lambda match: match[1] or _written_out(match[0]), typed))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printing_safely(*, command: str = COMMAND) -> Iterator[None]:
    """Makes stdout and stderr `PrintableStream`s while the body runs; `command` is shown on stderr, data has none."""
    streams: Any = (PrintableStream(sys.stdout), PrintableStream(sys.stderr, command=command))
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield


def unfiltered(stream: TextIO) -> TextIO:
    """Returns the stream behind a `PrintableStream`, for escape codes; any other one as it is."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


def number(value: float | None, digits: int = 3) -> str:
    """Returns "12,345", "2.31" or "0.00037": so many significant digits, whole numbers in full; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1e15:
        return f"{value:.{digits}g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """Returns "2 d 3 h", "1 h 24 min", "3 min 12 s", "12.3 s", "85 ms" or "12 us"; "-" for none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        size, unit = next((unit for unit in ((1.0, "s"), (1e-3, "ms")) if abs(seconds) >= unit[0]), (1e-6, "us"))
        return f"{seconds / size:.3g} {unit}" if seconds else "0 s"
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, unit, part_size, part = next(unit for unit in units if whole >= unit[0])
    num_parts = whole % size // part_size
    return f"{whole // size:,} {unit}" + (f" {num_parts} {part}" if num_parts else "")


def clock(seconds: float) -> str:
    """Returns a time that counts down: "01:23:45", or "1.5 days"."""
    whole = int(max(0.0, seconds))
    if whole >= 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def byte_size(num: float) -> str:
    """Returns "512 B", "4.8 MiB" or "120 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num < 1024:
            break
        num = num / 1024
        unit = "PiB"
    return f"{num:.0f} {unit}" if unit == "B" or num >= 100 else f"{num:.1f} {unit}"


def exit_code(code: int) -> str:
    """Returns "3", or "152 (as of signal 24, CPU time limit exceeded)": a shell ends so when its program was ended."""
    number = code - 128
    words = signal.strsignal(number) if 0 < number < signal.SIGRTMIN else None
    return f"{code} (as of signal {number}, {words})" if words else str(code)


def percent(part: float) -> str:
    """Returns "94 %", "0.3 %"."""
    percent = 100 * part
    if 0 < percent < 0.05:
        return "< 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def count(num: int, noun: str) -> str:
    """Returns "1 run", "3 runs"."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Returns numbers in short: [0, 1, 2, 5] -> "0-2,5"."""
    parts = []
    # Numbers in a row differ from their places by the same number.
    for _, group in itertools.groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0]):
        row = [number for _, number in group]
        parts.append(str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}")
    return ",".join(parts)


def shorten(items: Iterable[str], most: int = 5, *, separator: str = ", ") -> str:
    """Returns a list in one line, cut after a few: "a, b, c, d, e, and 7 more"."""
    texts = list(items)
    shown = texts[:most]
    if len(texts) > most:
        shown.append(f"and {len(texts) - most} more")
    return separator.join(shown)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """Returns rows as aligned columns under a header; `right` aligns all columns but the first to the right."""
    return columns([header, *rows], right=right)


def columns(rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """Returns rows as aligned columns, see `table`."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    justify = [str.rjust if right and place else str.ljust for place in range(len(widths))]
    lines = (
        "  ".join(put(cell, width) for put, cell, width in zip(justify, row, widths, strict=True)) for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
