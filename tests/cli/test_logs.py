from __future__ import annotations

import io
from typing import Any

import pytest

from slurm_train.rundir.events import FailureMark, leave_mark
from tests.status.test_failure import ONE
from tests.support.run_facts import attempt

FILES = {
    "batch.log": "slurm said\n",
    "attempt_0/batch.log": "srun said 0\n",
    "attempt_0/rank_0.log": "first\n",
    "attempt_0/rank_3.log": "third\n",
    "attempt_1/batch.log": "srun said 1\n",
    "attempt_1/rank_0.log": "second\n",
    "attempt_1/rank_5.log": "",
}
TWO = (*attempt(0, reason="preempted"), *attempt(1))

CHOICES = [
    ([], "second\n"),
    (["--attempt", "0"], "first\n"),
    (["--rank", "3", "--attempt", "0"], "third\n"),
    (["--rank", "-1"], "srun said 1\n"),
    (["--rank", "-1", "--attempt", "0"], "srun said 0\n"),
    (["--rank", "5"], "srun said 1\n"),
]


@pytest.mark.parametrize(("words", "text"), CHOICES, ids=[" ".join(words) or "newest" for words, _ in CHOICES])
def test_which_log_is_shown(words: list[str], text: str, shell: Any) -> None:
    shell.has_run(ledger=TWO, logs=FILES)
    done = shell.types("logs", "gpt-stdlib", *words)
    assert (done.code, done.out) == (0, text)


@pytest.mark.parametrize("words", [(), ("--rank", "-1")])
def test_a_job_that_has_not_begun_shows_what_slurm_wrote(words: tuple[str, ...], shell: Any) -> None:
    shell.has_run(logs={"batch.log": "slurm said\n"})
    assert shell.types("logs", *words).out == "slurm said\n"


@pytest.mark.parametrize("written", ["caf\u00e9 \u4e2d\n".encode() * 30_000, b"a\xff\xc3\n\x00"])
def test_a_log_is_passed_on_byte_by_byte(written: bytes, shell: Any) -> None:
    shell.has_run(ledger=attempt(0)).rank_log(0, 0).write_bytes(written)
    out = io.BytesIO()
    shell.patch.setattr("sys.stdout", io.TextIOWrapper(out))
    assert shell.types("logs").code == 0
    assert out.getvalue() == written


def test_an_attempt_that_never_was_is_an_error(shell: Any) -> None:
    shell.has_run(ledger=TWO, logs=FILES)
    done = shell.types("logs", "--attempt", "7")
    assert (done.code, done.out) == (2, "")
    assert "has no attempt 7\nhint: attempts: 0, 1" in done.err


def test_no_log_yet_is_an_error_with_what_to_do(shell: Any) -> None:
    shell.has_run()
    done = shell.types("logs")
    assert done.code == 2 and "has no log yet" in done.err and "-f waits for the log" in done.err


NOTE = "rank 3 on node2: ValueError: no such layer"
FAILED = attempt(0, reason="failed", action="stop", note=NOTE)
LOGS = {"attempt_0/rank_0.log": "step 1\n", "attempt_0/rank_3.log": f"step 1\n{ONE}\n"}


def fails(shell: Any, **facts: Any) -> Any:
    run = shell.has_run(**({"ledger": FAILED, "logs": LOGS} | facts))
    leave_mark(run, 0, FailureMark(rank=3, host="node2", exit_code=1, message="ValueError: no such layer"))
    return run


def test_the_rank_that_failed_first_is_named_with_its_traceback(shell: Any) -> None:
    run = fails(shell)
    done = shell.types("logs")
    assert (done.code, done.out) == (0, f"step 1\n{ONE}\n")
    assert done.err.splitlines() == [
        f"attempt 0 failed: {NOTE}",
        f"rank 3 on node2 failed first; its traceback, from {run.rank_log(0, 3)}:",
    ]


def test_a_traceback_that_is_in_the_log_is_not_shown_twice(shell: Any) -> None:
    fails(shell)
    done = shell.types("logs", "--rank", "3")
    assert done.out == f"step 1\n{ONE}\n"
    assert done.err.splitlines()[1] == "rank 3 on node2 failed first; its traceback is above"


def test_a_rank_without_a_log_is_named(shell: Any) -> None:
    fails(shell, logs={"attempt_0/rank_0.log": "step 1\n"})
    done = shell.types("logs")
    assert done.out == "step 1\n"
    assert done.err.splitlines()[1] == "rank 3 on node2 failed first; it has no log of its own"


def test_here_the_failure_of_another_rank_is_shown_without_a_log_of_rank_0(shell: Any) -> None:
    run = fails(shell, logs={"attempt_0/rank_3.log": "usage: train.py\n", "attempt_0/rank_0.log": ""})
    done = shell.types("logs")
    assert (done.code, done.out) == (0, "usage: train.py\n")
    assert done.err.splitlines()[1] == f"rank 3 on node2 failed first; its last lines, from {run.rank_log(0, 3)}:"


def test_an_earlier_failure_is_pointed_to(shell: Any) -> None:
    fails(shell, ledger=(*FAILED, *attempt(1)), logs={**LOGS, "attempt_1/rank_0.log": "step 2\n"})
    done = shell.types("logs")
    assert done.out == "step 2\n"
    assert done.err == f"attempt 0 failed: {NOTE}; `logs 3f9a1c07 --attempt 0` shows it\n"
    assert ONE in shell.types("logs", "--attempt", "0").out


def test_an_attempt_that_came_back_is_its_log_and_why(shell: Any) -> None:
    shell.has_run(ledger=attempt(0, reason="preempted", action="requeue", note="n"), logs=LOGS)
    done = shell.types("logs")
    assert (done.out, done.err) == ("step 1\n", "attempt 0: n\n")


@pytest.mark.parametrize("in_colour", [True, False])
def test_only_the_first_traceback_is_red(in_colour: bool, shell: Any) -> None:
    run = fails(shell)
    run.rank_log(0, 0).write_text(f"{ONE.replace('no such layer', 'peer is gone')}\n")
    shell.patch.setattr("slurm_train.cli.logs.takes_escapes", lambda *_: in_colour)
    done = shell.types("logs")
    assert ("\x1b[2mValueError: peer is gone\x1b[0m" in done.out) is in_colour
    assert ("\x1b[1;31mValueError: no such layer\x1b[0m" in done.out) is in_colour
    assert ("\x1b" in done.out + done.err) is in_colour
