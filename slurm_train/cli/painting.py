"""Tracebacks in colour: what a rank said last is found at a glance. Bytes in, bytes out; only for terminals."""

from __future__ import annotations

from collections.abc import Callable

from slurm_train.standing.tracebacks import HEADLINE

_RED, _BOLD_RED, _FAINT, _PLAIN = b"\x1b[31m", b"\x1b[1;31m", b"\x1b[2m", b"\x1b[0m"
_HEADLINE = HEADLINE.encode()
_ERRORS = (b"error: ", b"srun: error: ", b"slurmstepd: error: ")


class Painter:
    """Colours the tracebacks and the errors in a log that comes in pieces.

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
