"""Where colours go, what is coloured in a log, and printing on when the terminal is gone."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from slurm_train.cli.terminal import BOLD_RED, RED, Painter, painted, takes_escapes, working_folder
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from tests.support.command_line import TINY, Person, new_project
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import losses, wait_until_step
from tests.support.waiting import wait_for


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_escape_codes_may_be_written() -> None:
    takes = {"TERM": "xterm", "NO_COLOR": ""}
    assert takes_escapes(Tty(), takes) and not takes_escapes(io.StringIO(), takes)
    assert not any(takes_escapes(Tty(), env) for env in ({"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}))


LOG = b"""\
step 1
Traceback (most recent call last):
  File "a.py", line 1
ValueError: no
step 2
error: srun is gone
half a line"""
COLOURS = ["", BOLD_RED, RED, BOLD_RED, "", BOLD_RED, ""]


def test_tracebacks_and_errors_are_red_and_nothing_else_changes() -> None:
    painter = Painter(for_terminal=True, in_colour=True)
    # Byte by byte: a log comes in pieces.
    shown = b"".join(painter.paint(LOG[at : at + 1]) for at in range(len(LOG))) + painter.rest()
    texts = [painted(text, style) for text, style in zip(LOG.decode().splitlines(), COLOURS, strict=True)]
    assert shown.decode().splitlines() == texts
    plain = Painter(for_terminal=False, in_colour=False)
    assert plain.paint(b"\xff half\x1b") == b"\xff half\x1b" and plain.rest() == b""


@pytest.mark.parametrize("in_colour", [True, False])
def test_a_log_does_nothing_to_the_terminal_that_shows_it(in_colour: bool) -> None:
    log = b"10%\r20%\t\x1b[38;5;9mred\x1b[0m\n\x1b]52;c;cm0gLXJm\x07 \x1b[2J\xc2\x9bA \xff\n\x1b"
    shown = b"10%\r20%\t\x1b[38;5;9mred\x1b[0m\n\\x1b]52;c;cm0gLXJm\\x07 \\x1b[2J\\x9bA \\xff\n\\x1b"
    painter = Painter(for_terminal=True, in_colour=in_colour)
    pieces = [painter.paint(log[at : at + 1]) for at in range(len(log))]
    assert b"".join(pieces) + painter.rest() == shown


def test_a_run_whose_terminal_is_closed_saves_before_it_ends(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    words = [*TINY[:2], *TINY[3:], "train.max_steps=4000", "checkpoint.every_steps=null", "model.step_s=0.02"]
    argv = [sys.executable, "-m", "slurm_train", *words, "run.processes=2", "train.threads=1"]
    pid, terminal = pty.fork()
    if pid == 0:
        # Else a `nohup` around the tests would count.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(person.folder)
        os.execve(sys.executable, argv, {**person.environment(), "TERM": "xterm"})
    config = "runs/*/*/config.yaml"
    wait_for(lambda: list(person.folder.glob(config)), within_s=60, what="the run directory")
    run = RunDirectory(next(person.folder.glob(config)).parent)
    wait_until_step(run, 5, within_s=90)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert ledger_lines(run)[-1]["reason"] == "stopped"
    assert [name_of(path).step for path in list_checkpoints(run.checkpoints)] == [max(losses(run))]


def test_the_folder_is_spelled_as_the_shell_spells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    real, link = str(tmp_path / "real"), str(tmp_path / "link")
    for spelled, folder in (
        (link, link),
        (real, real),
        (f"{link}/../link", real),
        ("link", real),
        (str(tmp_path), real),
        ("/nonexistent", real),
        ("", real),
    ):
        assert str(working_folder({"PWD": spelled})) == folder, spelled
    assert str(working_folder({})) == real
