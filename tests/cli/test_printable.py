"""Runs below one root are of several people: what others have written there steers neither terminals nor commands."""

from __future__ import annotations

import io
import os

import pytest

from slurm_train.cli.status import Screen
from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig, RunSection
from slurm_train.formatting import PrintableStream
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, write_table
from slurm_train.slurm.queue_view import KnownJobs
from slurm_train.status.run_status import Survey
from tests.cli.conftest import Shell
from tests.cli.test_status import NOW_S, status
from tests.cli.test_terminal import Tty
from tests.support.run_facts import attempt

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
"""What many terminals obey: the clipboard holds something else from now on."""
WORDS = (
    "status",
    "status --where name=x",
    "logs nothing",
    "diff theirs other --only config,code",
    "collate 9b1c44e0",
    "collate 9b1c44e0 --format csv",
    "status 9b1c44e0",
    "cancel theirs",
    "resume theirs",
    "report theirs",
    "complete",
)


@pytest.fixture
def hostile(shell: Shell) -> RunDirectory:
    """A run whose every text has an escape sequence in it, another one, and a sweep of both."""
    reason = {"reason": "failed", "action": "stop", "note": f"rank 3 on node2: {CLIPBOARD}", "last_step": 1}
    ledger = (*attempt(0, **reason), *attempt(1, **reason))
    logs = {"attempt_1/rank_3.log": f"Traceback (most recent call last):\n  {CLIPBOARD}\nValueError: {CLIPBOARD}\n"}
    metrics = ({"step": 1, "loss": 1.0, f"eval_{CLIPBOARD}": 2.0},)
    run = shell.has_run("theirs", ledger=ledger, logs=logs, metrics=metrics)
    leave_mark(run, 1, FailureMark(rank=3, host=f"node2{CLIPBOARD}", exit_code=1, message=f"ValueError: {CLIPBOARD}"))
    (shell.folder / "runs" / f"name{CLIPBOARD}" / f"id{CLIPBOARD}").mkdir(parents=True)
    other = shell.has_run("other", "77aa0000", ledger=ledger)
    other.config.write_text(dump_config(RunConfig(run=RunSection(name=f"x{CLIPBOARD}"))))
    (other.code / "sub").mkdir(parents=True)
    (other.code / "sub" / f"a{CLIPBOARD}.py").write_text(f"x = 1  # {CLIPBOARD}\n")
    sweep = SweepDirectory(shell.folder / "runs" / "sweeps" / "9b1c44e0")
    sweep.path.mkdir(parents=True)
    given = {"data.path": CLIPBOARD}
    write_table(sweep, [Element(run=one, index=at, overrides=given) for at, one in enumerate((run, other))])
    return run


@pytest.mark.parametrize("words", WORDS)
def test_no_verb_prints_what_a_terminal_obeys(words: str, shell: Shell, hostile: RunDirectory) -> None:
    if "--where" in words:
        words = f"status --where data.path='{CLIPBOARD}'"
    done = shell.types(words)
    assert not {"\x1b", "\x07"} & {*done.out, *done.err}, done
    if not words.startswith(("complete", "cancel", "resume", "report", "logs nothing", "status --where")):
        assert "\\x1b]52" in done.out + done.err, "it was there to be printed"


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("words", ["logs theirs", "logs theirs --rank 3"])
def test_a_log_on_a_terminal_is_no_exception(words: str, shell: Shell, hostile: RunDirectory) -> None:
    out = io.BytesIO()
    shell.patch.setattr("sys.stdout", Terminal(out))
    assert shell.types(words).code == 0
    assert b"ValueError: \\x1b]52;c;" in out.getvalue()
    assert b"\x1b]" not in out.getvalue() and b"\x07" not in out.getvalue()


def test_a_terminal_that_is_watched_is_redrawn_by_us_alone() -> None:
    terminal = Tty()
    screen = Screen(PrintableStream(terminal), is_live=True)  # type: ignore[arg-type]
    for _ in range(2):
        screen.show(Survey((status(note=f"waits{CLIPBOARD}\x1b[5A"),), KnownJobs()), now_unix_s=NOW_S, of_sweep=False)
    shown = terminal.getvalue()
    assert shown.count("\x1b[J") == 2 and shown.count("\x1b[4A") <= 1 and "\x1b]" not in shown
    assert "waits\\x1b]52;c;cm0gLXJm\\x07\\x1b[5A" in shown.replace("\n    ", " ")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")


@needs_root
def test_the_runs_of_others_are_named_and_one_s_own_come_first(shell: Shell) -> None:
    own = shell.has_run("gpt", "aaaa0000", ledger=attempt(0), logs={"attempt_0/rank_0.log": "mine\n"})
    theirs = shell.has_run("gpt", "bbbb0000", ledger=attempt(0), logs={"attempt_0/rank_0.log": "theirs\n"})
    assert "OWNER" not in shell.types("status").out
    os.chown(theirs.path, 65534, 65534)
    os.utime(own.config, (5.0, 5.0))
    header, *rows = shell.types("status").out.splitlines()
    assert "OWNER" in header and "nobody" in next(row for row in rows if "bbbb0000" in row)
    assert "nobody" not in next(row for row in rows if "aaaa0000" in row)
    assert shell.types("logs gpt").out == "mine\n" and shell.types("logs").out == "mine\n"
    assert shell.types("logs bbbb0000").out == "theirs\n"
