from __future__ import annotations

import io

import pytest

from slurm_train.cli.terminal import Painter, build_console, takes_escapes, width_of


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
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_where_escape_codes_may_be_written(stream: io.StringIO, env: dict[str, str], takes: bool) -> None:
    assert takes_escapes(stream, env) is takes
    console = build_console(stream, env)
    console.print("[x]", style="bold red")
    assert ("\x1b" in stream.getvalue()) is takes and "[x]" in stream.getvalue()


def test_the_lines_of_a_file_have_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    assert (width_of(io.StringIO()), width_of(Tty())) == (None, 64)


LOG = b"""\
step 1
Traceback (most recent call last):
  File "a.py", line 1
ValueError: no
step 2
error: srun is gone
half a line"""
RED, BOLD, PLAIN = b"\x1b[31m", b"\x1b[1;31m", b"\x1b[0m"


def test_tracebacks_and_errors_are_red_and_nothing_else_changes() -> None:
    painter = Painter(in_colour=True)
    painted = painter.paint(LOG) + painter.rest()
    assert painted.splitlines() == [
        b"step 1",
        BOLD + b"Traceback (most recent call last):" + PLAIN,
        RED + b'  File "a.py", line 1' + PLAIN,
        BOLD + b"ValueError: no" + PLAIN,
        b"step 2",
        BOLD + b"error: srun is gone" + PLAIN,
        b"half a line",
    ]
    pieces = Painter(in_colour=True)
    assert b"".join(pieces.paint(LOG[at : at + 1]) for at in range(len(LOG))) + pieces.rest() == painted


def test_the_traceback_of_another_cause_is_faint() -> None:
    answers = [False, True]
    painter = Painter(in_colour=True, is_cause=lambda: answers.pop(0))
    painted = painter.paint(LOG + b"\n" + LOG)
    assert painted.count(b"\x1b[2mValueError: no\x1b[0m") == 1 and painted.count(BOLD + b"ValueError: no" + PLAIN) == 1


def test_without_colour_every_byte_is_passed_on_at_once() -> None:
    painter = Painter(in_colour=False)
    assert painter.paint(b"\xff half\x1b") == b"\xff half\x1b" and painter.rest() == b""
