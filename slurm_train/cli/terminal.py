"""What is printed for people: notes on stderr, so that stdout stays data; colours only on terminals.

A run on this machine is asked to save and stop when its terminal closes. `outlive_terminal` lets it print on into a
file: without that, the next line that it prints would be an error of its own, and nothing would be saved.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from slurm_train.formatting import PrintableStream, printable, unfiltered
from slurm_train.status.failure import HEADLINE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

RED, BOLD_RED, FAINT, BOLD = "31", "1;31", "2", "1"
"""Parameters of SGR escape sequences, as are "32" (green), "33" (yellow), "35" (magenta) and "36" (cyan)."""
_HEADLINE = HEADLINE.encode()
# In a log: colours of any program, carriage returns; and runs of everything else.
_HARMLESS = re.compile(r"(\x1b\[[0-9;:]*m|\r)|([^\x1b\r]+|\x1b)")
_ERRORS = (b"error: ", b"srun: error: ", b"slurmstepd: error: ")


def working_folder(env: Mapping[str, str]) -> Path:
    """Returns the current folder as the shell spells it: entered through a link, it has the link in its path.

    The kernel knows the folder without links, which may lead elsewhere on the nodes (automounted homes).
    """
    here, spelled = Path.cwd(), env.get("PWD", "")
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

    What a terminal would obey is written out, but for a program's own colours, tabs and carriage returns (progress
    bars); tracebacks and errors are coloured.

    Args:
        for_terminal: False passes everything on as it is.
        in_colour: colour tracebacks and errors.
        is_cause: asked at each traceback whether it may be the first of its attempt; others are faint.
    """

    def __init__(self, *, for_terminal: bool, in_colour: bool, is_cause: Callable[[], bool] = lambda: True) -> None:
        self._for_terminal, self._in_colour, self._is_cause = for_terminal, in_colour, is_cause
        self._frames, self._message = RED, BOLD_RED
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
        held, self._held = self._held, b""
        return self._line(held)

    def _line(self, line: bytes) -> bytes:
        text = line.decode(errors="backslashreplace")
        line = _HARMLESS.sub(lambda found: found[1] or printable(found[2]), text).encode()
        if not self._in_colour:
            return line
        style = BOLD_RED if line.startswith(_ERRORS) else ""
        if line == _HEADLINE:
            self._frames, self._message = (RED, BOLD_RED) if self._is_cause() else (FAINT, FAINT)
            self._in_traceback, style = True, self._message
        elif self._in_traceback:
            # The first line without an indent is the exception itself.
            self._in_traceback = line[:1] in (b" ", b"\t")
            style = self._frames if self._in_traceback else self._message
        return b"\x1b[%sm%s\x1b[0m" % (style.encode(), line) if line and style else line


class _Enduring(io.FileIO):
    """A descriptor that is redirected to a file once its reader is gone.

    Args:
        descriptor: 1 or 2.
        instead: the file; it is made where it is missing.
    """

    def __init__(self, descriptor: int, instead: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._instead = instead

    def write(self, text: ReadableBuffer, /) -> int:
        """Writes to the descriptor, or to the file."""
        try:
            return super().write(text)
        except OSError as err:
            if err.errno not in (errno.EIO, errno.EPIPE):
                raise
        opened = os.open(self._instead, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(opened, self.fileno())
        os.close(opened)
        return super().write(text)


def outlive_terminal(instead: Path) -> None:
    """Lets this process print on into a file when its stdout or stderr can no longer be written to."""
    for name in ("stdout", "stderr"):
        current: TextIO = getattr(sys, name)
        stream = unfiltered(current)
        # A stream that somebody has put in their place (a test, say) is theirs.
        if stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = io.BufferedWriter(_Enduring(stream.fileno(), instead))
            lasting = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
            if isinstance(current, PrintableStream):
                current.stream = lasting
            else:
                setattr(sys, name, lasting)
