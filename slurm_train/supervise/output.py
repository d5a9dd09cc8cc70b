"""Output of a process whose terminal may close.

A run on this machine is asked to save and stop when its terminal closes. `outlive_terminal` redirects its further
output to a file. Without that, the next print would raise an error, and nothing would be saved.
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
    """A descriptor that is redirected to a file when its reader has closed.

    Args:
        descriptor: 1 or 2.
        fallback: the file; it is created if it is missing.
    """

    def __init__(self, descriptor: int, fallback: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._fallback = fallback

    def write(self, text: ReadableBuffer, /) -> int:
        """Writes to the descriptor, or to the file."""
        try:
            return super().write(text)
        except OSError as err:
            if err.errno not in (errno.EIO, errno.EPIPE):
                raise
        opened = os.open(self._fallback, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(opened, self.fileno())
        os.close(opened)
        return super().write(text)


def outlive_terminal(fallback: Path) -> None:
    """Redirects stdout and stderr of this process to a file when they can no longer be written to."""
    for name in ("stdout", "stderr"):
        current: TextIO = getattr(sys, name)
        stream = unfiltered(current)
        # A stream that was replaced, e.g. by a test, is left alone.
        if stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = io.BufferedWriter(_Enduring(stream.fileno(), fallback))
            lasting = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
            if isinstance(current, PrintableStream):
                current.stream = lasting
            else:
                setattr(sys, name, lasting)
