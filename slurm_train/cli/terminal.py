"""What may be written to a stream: colours and cursor movements on a terminal that wants them, else plain text."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def is_terminal(stream: TextIO) -> bool:
    """Returns whether a person looks at the stream."""
    return stream.isatty()


def takes_escapes(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Returns whether escape codes may be written: no pipe, no TERM=dumb, no NO_COLOR (https://no-color.org)."""
    return is_terminal(stream) and not env.get("NO_COLOR") and env.get("TERM", "dumb") not in ("dumb", "unknown", "")


def width_of(stream: TextIO) -> int | None:
    """Returns the characters of a line, None where nobody cuts lines."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def build_console(stream: TextIO, env: Mapping[str, str]) -> Console:
    """Returns rich's view of a terminal; where no escape codes may be written it writes none."""
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
