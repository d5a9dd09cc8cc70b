from __future__ import annotations

from slurm_train.cli.painting import Painter, emphasised

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
    for code in (RED, BOLD, PLAIN):
        painted = painted.replace(code, b"")
    assert painted == LOG


def test_the_traceback_of_a_victim_is_faint() -> None:
    answers = [False, True]
    painter = Painter(in_colour=True, is_cause=lambda: answers.pop(0))
    painted = painter.paint(LOG + b"\n" + LOG)
    assert painted.count(b"\x1b[2mValueError: no\x1b[0m") == 1 and painted.count(BOLD + b"ValueError: no" + PLAIN) == 1


def test_a_log_that_comes_in_pieces_looks_the_same() -> None:
    whole, pieces = Painter(in_colour=True), Painter(in_colour=True)
    expected = whole.paint(LOG) + whole.rest()
    assert b"".join(pieces.paint(LOG[at : at + 1]) for at in range(len(LOG))) + pieces.rest() == expected


def test_without_colour_every_byte_is_passed_on_at_once() -> None:
    painter = Painter(in_colour=False)
    assert painter.paint(b"\xff half\x1b") == b"\xff half\x1b" and painter.rest() == b""
    assert emphasised("text", in_colour=False) == "text"
