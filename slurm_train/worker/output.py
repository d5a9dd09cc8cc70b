"""Output of a process whose terminal may close.

A run on this machine is asked to save and stop when its terminal closes. `outlive_terminal` lets it print on into a
file: without that, the next line that it prints would be an error of its own, and nothing would be saved.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from slurm_train.formatting import PrintableStream, unfiltered

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
