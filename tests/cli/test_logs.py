"""`logs`: which log, the first rank that failed, and following across attempts."""

from __future__ import annotations

import io
import os
import threading

import pytest

from slurm_train.cli import logs
from slurm_train.cli.logs import wait_for_log
from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.queue_view import QueueView
from slurm_train.verbs import run as run_words
from tests.cli.conftest import Shell
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.status.test_failure import ONE
from tests.support.ledgers import close_attempt
from tests.support.run_facts import attempt
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
CHOICES = {
    "": "second\n",
    "--attempt 0": "first\n",
    "--rank -1": "srun said 1\n",
    "--rank 5": "srun said 1\n",
}


def test_which_log_is_shown(shell: Shell) -> None:
    shell.has_run("new", "aaaa0000")
    shell.refuses("has no log yet", "logs")
    shell.has_run(ledger=(*attempt(0, reason="preempted"), *attempt(1)), logs=FILES)
    assert {words: shell.types(f"logs gpt-stdlib {words}").out for words in CHOICES} == CHOICES
    other = shell.types("logs gpt-stdlib --rank 5")
    assert "rank 5 has no log of its own in attempt 1; this is " in other.err and "attempt_1/batch.log" in other.err
    assert "no log of its own" not in shell.types("logs gpt-stdlib").err
    shell.refuses("has no attempt 7\nhint: attempts: 0, 1", "logs gpt-stdlib --attempt 7")


def test_a_finished_run_does_not_end_with_what_the_batch_script_said_of_another_attempt(shell: Shell) -> None:
    ended = {"reason": "done", "action": "finish", "note": "the run is finished"}
    ledger = (*attempt(0, reason="failed", action="stop", note="rank 0"), *attempt(1, job_id=None, **ended))
    run = shell.has_run(ledger=ledger, logs={"batch.log": "attempt 0: rank 0\n"})
    os.utime(run.logs / "batch.log", (5.0, 5.0))
    done = shell.types("logs")
    assert (done.code, done.out) == (0, "")
    assert done.err == "attempt 1: the run is finished; its rank 0 wrote to the terminal\n"


def test_a_newer_job_that_opened_no_attempt_is_shown_by_its_batch_log(shell: Shell) -> None:
    ledger = attempt(0, job_id="11", reason="cancelled", action="stop", note="n")
    logs = {"attempt_0/rank_0.log": "rank\n", "batch.log": "module: command not found\n"}
    run = shell.has_run(ledger=ledger, job_ids=("11", "12"), logs=logs, submitted_unix_s=100.0)
    assert shell.types("logs").out == "module: command not found\n"
    os.utime(run.logs / "batch.log", (5.5, 5.5))
    assert shell.types("logs").out == "rank\n", "the last words of the attempt's own supervisor"


def test_a_log_is_passed_on_byte_by_byte(shell: Shell) -> None:
    written = b"a\xff\xc3\n\x00" * 30_000
    shell.has_run(ledger=attempt(0)).rank_log(0, 0).write_bytes(written)
    out = io.BytesIO()
    shell.patch.setattr("sys.stdout", io.TextIOWrapper(out))
    assert shell.types("logs").code == 0
    assert out.getvalue() == written


NOTE = "rank 3 on node2: ValueError: no such layer"
STEP = {"attempt_0/rank_0.log": "step 1\n"}
LOGS = {**STEP, "attempt_0/rank_3.log": f"step 1\n{ONE}\n"}
FAILURES: list[tuple[str, dict[str, str], str, str]] = [
    ("logs", LOGS, f"step 1\n{ONE}\n", "its traceback, from {log}:"),
    ("logs", STEP, "step 1\n", "it has no log of its own"),
    ("logs", {"attempt_0/rank_3.log": "usage: train.py\n"}, "usage: train.py\n", "its last lines, from {log}:"),
]


def fails(shell: Shell, files: dict[str, str]) -> RunDirectory:
    run = shell.has_run(ledger=attempt(0, reason="failed", action="stop", note=NOTE), logs=files)
    leave_mark(run, 0, FailureMark(rank=3, host="node2", exit_code=1, message="ValueError: no such layer"))
    return run


@pytest.mark.parametrize(("words", "files", "out", "where"), FAILURES)
def test_the_rank_that_failed_first_is_named_with_its_traceback_once(
    words: str, files: dict[str, str], out: str, where: str, shell: Shell
) -> None:
    log = fails(shell, files).rank_log(0, 3)
    done = shell.types(words)
    assert (done.code, done.out) == (0, out)
    named = f"rank 3 on node2 failed first; {where.format(log=log)}"
    assert done.err.splitlines() == [f"attempt 0 failed: {NOTE}", named]


def test_rank_0_of_a_run_on_this_machine_has_written_to_a_terminal(shell: Shell) -> None:
    failed = attempt(0, job_id=None, reason="failed", action="stop", note="rank 0 on here: ValueError: no such layer")
    run = shell.has_run(ledger=failed, logs={"attempt_0/rank_0.log": ""})
    leave_mark(run, 0, FailureMark(rank=0, host="here", exit_code=1, message="ValueError: no such layer"))
    assert shell.types("logs").err.splitlines()[-1] == (
        "rank 0 on here failed first; it has no log of its own: it wrote to the terminal that the run was started in"
    )


# -f

START = Start(job_id="12", restart_count=0, nodes=("node1",), world_size=4)


class Following:
    """`logs -f` in a thread, and what it has printed."""

    def __init__(self, shell: Shell, *words: str) -> None:
        self.out, self.err, self._capture = "", "", shell.capture
        shell.patch.setattr(logs, "_POLL_S", 0.01)
        # The shell's own capture would be read by two.
        self._thread = threading.Thread(target=run_words, args=(("logs", "-f", *words),))
        self._thread.start()

    def shows(self, text: str) -> bool:
        captured = self._capture.readouterr()
        self.out, self.err = self.out + captured.out, self.err + captured.err
        return text in self.out + self.err

    def waits_for(self, text: str) -> None:
        wait_for(lambda: self.shows(text), within_s=60, what=text, poll_s=0.01)

    def ends(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        self.shows("")


def says(run: RunDirectory, number: int, rank: int, text: str) -> None:
    with run.rank_log(number, rank).open("a") as log:
        log.write(text)


def test_it_goes_on_across_attempts_tells_their_ends_and_ends_with_the_run(shell: Shell) -> None:
    run, rank = shell.has_run(), 3
    first = open_attempt(run, START)
    says(run, first, 2, "not mine\n")
    says(run, first, rank, "step 1\n")
    follower = Following(shell, "--rank", str(rank))
    follower.waits_for("step 1\n")
    says(run, first, rank, "saved, goodbye\n")
    close_attempt(run, first, {"reason": "preempted", "action": "requeue", "note": "preempted; the job is requeued"})
    follower.waits_for("attempt 0: preempted; the job is requeued\n")
    second = open_attempt(run, START)
    says(run, second, rank, "step 2\n")
    follower.waits_for("step 2\n")
    says(run, second, 5, f"{ONE}\n")
    leave_mark(run, second, FailureMark(rank=5, host="node2", exit_code=1, message="ValueError: no such layer"))
    close_attempt(run, second, {"reason": "failed", "action": "relaunch", "note": "rank 5; started again"})
    third = open_attempt(run, START)
    close_attempt(run, third, {"reason": "stopped", "action": "stop", "note": "stopped as asked"})
    follower.ends()
    assert follower.out == f"step 1\nsaved, goodbye\nstep 2\n{ONE}\n"


def test_waiting_says_what_for_whenever_that_changes(shell: Shell) -> None:
    run, now_s = shell.has_run(job_ids=("12",)), [0.0]
    run.logs.mkdir()
    slurm = FakeSlurmCommands([job_state("12", "PENDING", reason="Priority")])

    def breaks() -> None:
        slurm.error = ClusterError("nobody there", hint="try again")

    events = iter([breaks, slurm.jobs.clear, lambda: (run.logs / "batch.log").write_text("hello\n")])

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        next(events)()

    shell.patch.setattr("slurm_train.cli.logs.time.sleep", sleep)
    wait_for_log(run, QueueView(slurm, clock=lambda: now_s[0]), rank=0)  # type: ignore[arg-type]  # the fake
    assert shell.capture.readouterr().err.splitlines() == [
        "job 12 is queued: other jobs come first (Priority); Ctrl-C does not end it",
        "Slurm does not answer: nobody there; Ctrl-C does not end it",
    ]
