"""What is printed when the terminal is closed, or the reader of a pipe has gone: it goes on in a file.

A run on this machine is asked to save and stop when its terminal closes. Without this, the first line that it prints
after that would be an error of its own, and nothing would be saved.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Enduring(io.FileIO):
    """A descriptor that is turned to a file once nobody reads it any more.

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
            self._turn()
            return super().write(text)

    def _turn(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        opened = os.open(self._instead, flags, 0o600)
        os.dup2(opened, self.fileno())
        os.close(opened)


def outlive_terminal(instead: Path) -> None:
    """Lets this process print on into a file when its stdout or stderr can no longer be written to."""
    # A stream that somebody has put in their place (a test, say) is theirs.
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _enduring(stream, instead))


def _enduring(stream: TextIO, instead: Path) -> TextIO:
    stream.flush()
    raw = _Enduring(stream.fileno(), instead)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
