"""`logs -f`: waits, follows, goes over to the next attempt, and says how each ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli import logs
from slurm_train.cli.logs import choose_log, wait_for_log
from slurm_train.errors import ClusterError, RunError
from slurm_train.rundir.attempts import AttemptStart, close_attempt, open_attempt
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.queue_view import QueueView
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.status.test_failure import ONE
from tests.support.run_facts import attempt
from tests.support.waiting import wait_for

START = AttemptStart(job_id="12", restart_count=0, nodes=("node1",), world_size=4)


class Following:
    """`logs -f` in a thread, and what it has printed."""

    def __init__(self, shell: Any, *words: str) -> None:
        self.out, self.err, self._capture = "", "", shell.capture
        shell.patch.setattr(logs, "_POLL_S", 0.01)
        # The shell's own capture would be read by two.
        from slurm_train.verbs import run

        self._thread = threading.Thread(target=run, args=(("logs", "-f", *words),))
        self._thread.start()

    def shows(self, text: str) -> bool:
        captured = self._capture.readouterr()
        self.out, self.err = self.out + captured.out, self.err + captured.err
        return text in self.out + self.err

    def waits_for(self, text: str) -> None:
        wait_for(lambda: self.shows(text), within_s=10, what=text, poll_s=0.01)

    def ends(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self.shows("")


def says(run: RunDirectory, number: int, rank: int, text: str) -> None:
    with run.rank_log(number, rank).open("a") as log:
        log.write(text)


def test_it_goes_on_across_attempts_tells_their_ends_and_ends_with_the_run(shell: Any) -> None:
    run = shell.has_run()
    first = open_attempt(run, START)
    says(run, first, 0, "step 1\n")
    follower = Following(shell)
    follower.waits_for("step 1\n")
    says(run, first, 0, "saved, goodbye\n")
    close_attempt(run, first, {"reason": "preempted", "action": "requeue", "note": "preempted; the job is requeued"})
    follower.waits_for("attempt 0: preempted; the job is requeued\n")
    second = open_attempt(run, START)
    says(run, second, 0, "step 2\n")
    follower.waits_for("step 2\n")
    says(run, second, 3, f"{ONE}\n")
    leave_mark(run, second, FailureMark(rank=3, host="node2", exit_code=1, message="ValueError: no such layer"))
    note = "rank 3 on node2: ValueError: no such layer; the ranks are started again in this allocation"
    close_attempt(run, second, {"reason": "failed", "action": "relaunch", "note": note})
    third = open_attempt(run, START)
    says(run, third, 0, "step 3\n")
    follower.waits_for("step 3\n")
    says(run, third, 0, "the end\n")
    close_attempt(run, third, {"reason": "stopped", "action": "stop", "note": "stopped as asked"})
    follower.ends()
    assert follower.out == f"step 1\nsaved, goodbye\nstep 2\n{ONE}\nstep 3\nthe end\n"
    said = [line for line in follower.err.splitlines() if not line.startswith("==>")]
    assert said == [
        "attempt 0: preempted; the job is requeued",
        f"attempt 1 failed: {note}",
        f"rank 3 on node2 failed first; its traceback, from {run.rank_log(second, 3)}:",
    ]


def test_another_rank_is_followed_into_the_next_attempt(shell: Any) -> None:
    run, follower = shell.has_run(), None
    for number, (reason, action) in enumerate((("time_limit", "requeue"), ("cancelled", "stop"))):
        assert open_attempt(run, START) == number
        says(run, number, 0, "not mine\n")
        says(run, number, 3, f"rank 3 in attempt {number}\n")
        follower = follower or Following(shell, "--rank", "3")
        follower.waits_for(f"rank 3 in attempt {number}\n")
        close_attempt(run, number, {"reason": reason, "action": action, "note": reason})
    assert follower is not None
    follower.ends()
    assert follower.out == "rank 3 in attempt 0\nrank 3 in attempt 1\n"


def test_an_attempt_that_was_asked_for_ends_the_following_with_it(shell: Any) -> None:
    ends = attempt(0, reason="failed", action="relaunch", note="rank 0 on node1: x")
    run = shell.has_run(ledger=(*ends, *attempt(1)), logs={"attempt_0/rank_0.log": "old\n"})
    follower = Following(shell, "--attempt", "0")
    follower.ends()
    assert follower.out == "old\n" and "attempt 0 failed: rank 0 on node1: x" in follower.err
    assert run.path.exists()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "gpt" / "3f9a1c07")
    run.logs.mkdir(parents=True)
    run.job.write_text('{"job_ids": ["12"], "submit_time_unix_s": 1.0}')
    return run


def wait(
    run: RunDirectory, slurm: FakeSlurmCommands, monkeypatch: pytest.MonkeyPatch, *events: Callable[[], None]
) -> None:
    """Waits for a log while things happen; each sleep of five seconds brings the next."""
    now_s, left = [0.0], list(events)

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        if left:
            left.pop(0)()

    monkeypatch.setattr(logs.time, "sleep", sleep)
    view = QueueView(slurm, clock=lambda: now_s[0])
    wait_for_log(run, view, lambda: choose_log(run, attempt=None, rank=0))


def test_waiting_says_what_for_whenever_that_changes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurmCommands([job_state("12", "PENDING", reason="Priority")])

    def becomes(word: str, reason: str) -> Callable[[], None]:
        return lambda: slurm.jobs.update({"12": job_state("12", word, reason=reason)})

    def breaks() -> None:
        slurm.error = ClusterError("nobody there")

    def writes() -> None:
        (run.logs / "batch.log").write_text("hello\n")

    wait(run, slurm, monkeypatch, lambda: None, becomes("PENDING", "Resources"), breaks, lambda: None, writes)
    assert capsys.readouterr().err.splitlines() == [
        "job 12 is queued: other jobs come first (Priority); Ctrl-C does not end it",
        "job 12 is queued: waits for free nodes (Resources); Ctrl-C does not end it",
        "Slurm does not answer: nobody there; Ctrl-C does not end it",
    ]


def test_a_job_that_ended_without_a_log_is_an_error(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurmCommands([job_state("12", "FAILED", nodelist="node3")])
    with pytest.raises(RunError, match="job 12 has no log") as caught:
        wait(run, slurm, monkeypatch)
    assert "does node3 see the run directory?" in caught.value.hint
