"""What is printed for people: notes on stderr, so that stdout stays data; colours only on terminals."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from slurm_train.status.failure import HEADLINE

if TYPE_CHECKING:
    from rich.console import Console

_RED, _BOLD_RED, _FAINT, _PLAIN = b"\x1b[31m", b"\x1b[1;31m", b"\x1b[2m", b"\x1b[0m"
_HEADLINE = HEADLINE.encode()
_ERRORS = (b"error: ", b"srun: error: ", b"slurmstepd: error: ")


def note(text: str) -> None:
    """Prints a line to stderr."""
    print(text, file=sys.stderr)


def takes_escapes(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Returns whether escape codes may be written: no pipe, no TERM=dumb, no NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM", "dumb") not in ("dumb", "unknown", "")


def width_of(stream: TextIO) -> int | None:
    """Returns the characters of a line, None where lines are not cut: in a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def build_console(stream: TextIO, env: Mapping[str, str]) -> Console:
    """Returns a console of rich's for a stream; where no escape codes may be written it writes none."""
    from rich.console import Console

    plain = not takes_escapes(stream, env)
    return Console(
        file=stream,
        force_terminal=not plain,
        color_system=None if plain else "auto",
        width=width_of(stream) if plain else None,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={**env},
    )


class Painter:
    """Colours the tracebacks and the errors in a log that comes in pieces. Bytes in, bytes out.

    Args:
        in_colour: False passes everything on as it is.
        is_cause: asked at each traceback whether it may be the first of its attempt; others are faint.
    """

    def __init__(self, *, in_colour: bool, is_cause: Callable[[], bool] = lambda: True) -> None:
        self._in_colour, self._is_cause = in_colour, is_cause
        self._inner, self._outer = _RED, _BOLD_RED
        self._in_traceback = False
        self._held = b""

    def paint(self, piece: bytes) -> bytes:
        """Returns what can be shown of the log so far; half a line waits for its other half."""
        if not self._in_colour:
            return piece
        lines = (self._held + piece).split(b"\n")
        self._held = lines.pop()
        return b"".join(self._line(line) + b"\n" for line in lines)

    def rest(self) -> bytes:
        """Returns the line that was never ended."""
        held, self._held = self._held, b""
        return self._line(held) if held else b""

    def _line(self, line: bytes) -> bytes:
        if line == _HEADLINE:
            self._in_traceback = True
            self._inner, self._outer = (_RED, _BOLD_RED) if self._is_cause() else (_FAINT, _FAINT)
            return self._outer + line + _PLAIN
        if self._in_traceback:
            if line[:1] in (b" ", b"\t"):
                return self._inner + line + _PLAIN
            self._in_traceback = False
            return self._outer + line + _PLAIN if line else line
        return _BOLD_RED + line + _PLAIN if line.startswith(_ERRORS) else line


def emphasised(text: str, *, in_colour: bool) -> str:
    """Returns a line that is not to be missed."""
    return f"{_BOLD_RED.decode()}{text}{_PLAIN.decode()}" if in_colour else text
