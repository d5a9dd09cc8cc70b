"""What is printed for people: notes on stderr, so that stdout stays data; colours only on terminals."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from slurm_train.formatting import printable, unfiltered
from slurm_train.status.failure import HEADLINE

RED = "31"
BOLD_RED = "1;31"
FAINT = "2"
BOLD = "1"
"""Parameters of SGR escape sequences, as are "32" (green), "33" (yellow), "35" (magenta) and "36" (cyan)."""
_HEADLINE = HEADLINE.encode()
# Of a log: first what a terminal may obey, colours and carriage returns; second everything else, in runs.
_OBEYED_OR_TEXT = re.compile(r"(\x1b\[[0-9;:]*m|\r)|([^\x1b\r]+|\x1b)")
_ERRORS = (b"error: ", b"srun: error: ", b"slurmstepd: error: ")


def working_folder(env: Mapping[str, str]) -> Path:
    """Returns the current folder as the shell spells it: entered through a link, it has the link in its path.

    The kernel knows the folder without links, which may lead elsewhere on the nodes (automounted homes).
    """
    here = Path.cwd()
    spelled = env.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(spelled) and os.path.normpath(spelled) == spelled and here.samefile(spelled):  # noqa: PTH117
            return Path(spelled)
    return here


_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Makes `note` and `answer` print nothing while the body runs, in this thread alone."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def note(text: str) -> None:
    """Prints a line to stderr."""
    if not _is_quiet.get():
        print(text, file=sys.stderr)


def answer(text: str) -> None:
    """Prints a line of data to stdout."""
    if not _is_quiet.get():
        print(text, flush=True)


def takes_escapes(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Returns whether escape codes may be written: no pipe, no TERM=dumb, no NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM", "dumb") not in ("dumb", "unknown", "")


def width_of(stream: TextIO) -> int | None:
    """Returns the characters of a line, None where lines are not cut: in a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def painted(text: str, style: str) -> str:
    """Returns a text in a style, e.g. `BOLD`; as it is for ""."""
    return f"\x1b[{style}m{text}\x1b[0m" if style else text


def redraw(stream: TextIO, text: str, *, num_lines: int) -> None:
    """Writes a text in the place of so many lines above the cursor, and of all below them."""
    up = f"\x1b[{num_lines}A" if num_lines else ""
    unfiltered(stream).write(f"\r{up}\x1b[J")
    print(text, file=stream, flush=True)


class Painter:
    """Prepares a log that comes in pieces for a terminal. Bytes in, bytes out.

    Characters that a terminal would obey are written out, except for a program's own colours, tabs and carriage returns
    (progress bars). Tracebacks and errors are coloured.

    Args:
        for_terminal: False passes everything on as it is.
        in_colour: colour tracebacks and errors.
        is_cause: returns at each traceback whether it may be the first of its attempt; other tracebacks are faint.
    """

    def __init__(self, *, for_terminal: bool, in_colour: bool, is_cause: Callable[[], bool] = lambda: True) -> None:
        self._for_terminal = for_terminal
        self._in_colour = in_colour
        self._is_cause = is_cause
        self._frames = RED
        self._message = BOLD_RED
        self._in_traceback = False
        self._held = b""

    def paint(self, piece: bytes) -> bytes:
        """Returns what can be shown of the log so far; half a line waits for its other half."""
        if not self._for_terminal:
            return piece
        lines = (self._held + piece).split(b"\n")
        self._held = lines.pop()
        return b"".join(self._line(line) + b"\n" for line in lines)

    def rest(self) -> bytes:
        """Returns the line that was never ended."""
        held = self._held
        self._held = b""
        return self._line(held)

    def _line(self, line: bytes) -> bytes:
        text = line.decode(errors="backslashreplace")
        line = _OBEYED_OR_TEXT.sub(lambda match: match[1] or printable(match[2]), text).encode()
        if not self._in_colour:
            return line
        style = self._style_of(line)
        return b"\x1b[%sm%s\x1b[0m" % (style.encode(), line) if line and style else line

    def _style_of(self, line: bytes) -> str:
        """Returns the style of the next line; remembers whether it is in a traceback."""
        if line == _HEADLINE:
            is_cause = self._is_cause()
            self._frames = RED if is_cause else FAINT
            self._message = BOLD_RED if is_cause else FAINT
            self._in_traceback = True
            return self._message
        if self._in_traceback:
            # The first line without an indent is the exception itself.
            self._in_traceback = line[:1] in (b" ", b"\t")
            return self._frames if self._in_traceback else self._message
        return BOLD_RED if line.startswith(_ERRORS) else ""
