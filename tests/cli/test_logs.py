from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli import logs
from slurm_train.cli.logs import choose_log, follow, has_ended
from slurm_train.rundir.attempts import AttemptStart, close_attempt, open_attempt
from slurm_train.rundir.layout import RunDirectory
from tests.cli.conftest import attempt
from tests.support.waiting import wait_for

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


def test_a_job_that_has_not_begun_shows_what_slurm_wrote(shell: Any) -> None:
    shell.has_run(logs={"batch.log": "slurm said\n"})
    assert shell.types("logs").out == "slurm said\n"


def test_an_attempt_that_never_was_is_an_error(shell: Any) -> None:
    shell.has_run(ledger=TWO, logs=FILES)
    done = shell.types("logs", "--attempt", "7")
    assert (done.code, done.out) == (2, "")
    assert "has no attempt 7\nhint: attempts: 0, 1" in done.err


def test_no_log_yet_is_an_error_with_what_to_do(shell: Any) -> None:
    shell.has_run()
    done = shell.types("logs")
    assert done.code == 2 and "has no log yet" in done.err and "-f waits for the log" in done.err


def test_bytes_that_are_no_text_are_passed_on(shell: Any) -> None:
    run = shell.has_run(ledger=attempt(0))
    run.rank_log(0, 0).write_bytes("caf\u00e9 \u4e2d\n".encode() * 30_000)
    assert shell.types("logs").out == "caf\u00e9 \u4e2d\n" * 30_000


ENDS = [
    ("nothing yet", {}, False),
    ("running", {"ledger": attempt(0)}, False),
    ("requeued", {"ledger": attempt(0, action="requeue")}, False),
    ("stopped", {"ledger": attempt(0, action="stop")}, True),
    ("stopped, running again", {"ledger": (*attempt(0, action="stop"), *attempt(1))}, False),
    ("stopped, then submitted again", {"ledger": attempt(0, action="stop"), "job_ids": ("13",)}, False),
    (
        "submitted, then stopped",
        {"ledger": attempt(0, action="stop"), "job_ids": ("12",), "submitted_unix_s": 1.0},
        True,
    ),
    ("finished", {"ledger": attempt(0, action="finish"), "result": {}}, True),
]


@pytest.mark.parametrize(("facts", "ended"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_when_nothing_more_will_come(facts: dict[str, Any], ended: bool, shell: Any) -> None:
    assert has_ended(shell.has_run(**facts)) is ended


START = AttemptStart(job_id="12", restart_count=0, nodes=("node1",), world_size=1)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "gpt" / "3f9a1c07")
    run.path.mkdir(parents=True)
    return run


def test_following_goes_on_across_attempts_and_ends_with_the_run(
    run: RunDirectory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_POLL_S", 0.01)
    seen = {"out": ""}

    def shows(text: str) -> bool:
        seen["out"] += capfd.readouterr().out
        return text in seen["out"]

    follower = threading.Thread(
        target=follow,
        args=(lambda: choose_log(run, attempt=None, rank=0),),
        kwargs={"until": lambda: has_ended(run)},
    )
    follower.start()
    first = open_attempt(run, START)
    with run.rank_log(first, 0).open("a") as log:
        log.write("step 1\n")
        log.flush()
        wait_for(lambda: shows("step 1\n"), within_s=10, what="the first line", poll_s=0.01)
        log.write("saved, goodbye\n")
    close_attempt(run, first, {"action": "requeue"})
    second = open_attempt(run, START)
    run.rank_log(second, 0).write_text("step 2\n")
    wait_for(lambda: shows("step 2\n"), within_s=10, what="the second attempt", poll_s=0.01)
    with run.rank_log(second, 0).open("a") as log:
        log.write("the end\n")
    close_attempt(run, second, {"action": "stop"})
    follower.join(timeout=10)
    assert not follower.is_alive()
    shows("")
    assert seen["out"] == "step 1\nsaved, goodbye\nstep 2\nthe end\n"
