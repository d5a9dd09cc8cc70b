from __future__ import annotations

import io

import pytest

from slurm_train.cli.terminal import build_console, takes_escapes, width_of


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "env", "takes"),
    [
        (Tty(), {"TERM": "xterm-256color"}, True),
        (Tty(), {"TERM": "xterm", "NO_COLOR": ""}, True),
        (Tty(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Tty(), {"TERM": "dumb"}, False),
        (Tty(), {}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_where_escape_codes_may_be_written(stream: io.StringIO, env: dict[str, str], takes: bool) -> None:
    assert takes_escapes(stream, env) is takes
    console = build_console(stream, env)
    console.print("[x]", style="bold red")
    assert ("\x1b" in stream.getvalue()) is takes and "[x]" in stream.getvalue()


def test_nobody_cuts_the_lines_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    assert (width_of(io.StringIO()), width_of(Tty())) == (None, 64)
