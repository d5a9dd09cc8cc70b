"""Attempts: numbers, fence, ledger and result; torchrun's restarts, each an attempt of its own; publishing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.commit import Place
from slurm_train.errors import RunError
from slurm_train.rundir import attempts
from slurm_train.rundir.attempts import (
    attempt_secret,
    begin_round,
    check_fence,
    first_round,
    hold_run,
    let_go,
    newest_round,
    open_attempt,
    publish_result,
    read_round,
    rendezvous_secret,
    withdraw_result,
)
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.files import append_line, make_folder, read_json
from slurm_train.rundir.ledger import End, Start, record_end
from slurm_train.rundir.lineage import Origin, record_origin
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from tests.support.ledgers import ledger_lines

START = Start(job_id="12_3", restart_count=1, nodes=("n1", "n2"), world_size=16)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    path = tmp_path / "gpt" / "3f9a1c07"
    path.mkdir(parents=True)
    return RunDirectory(path)


def test_attempts_are_numbered_from_zero_and_get_a_log_folder(run: RunDirectory) -> None:
    assert [open_attempt(run, START) for _ in range(3)] == [0, 1, 2]
    assert existing_attempts(run) == [0, 1, 2]
    assert all(run.attempt_logs(number).is_dir() for number in range(3))


def test_both_lines_of_an_attempt_are_on_the_disk(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, sizes = os.fsync, list[int]()

    def note(descriptor: int) -> None:
        fsync(descriptor)
        if run.attempts.exists() and os.fstat(descriptor).st_ino == run.attempts.stat().st_ino:
            sizes.append(run.attempts.stat().st_size)

    monkeypatch.setattr(os, "fsync", note)
    number = open_attempt(run, START)
    assert sizes == [run.attempts.stat().st_size]
    record_end(run, number, End(time_unix_s=1.0))
    assert sizes[1:] == [run.attempts.stat().st_size]


def test_a_number_is_never_given_twice_also_after_gaps(run: RunDirectory) -> None:
    open_attempt(run, START)
    (run.epochs / "attempt_7").write_text("{}")
    (run.epochs / "note.txt").write_text("not an attempt")
    assert open_attempt(run, START) == 8


OPENER = """
import sys
from pathlib import Path
from slurm_train.rundir.attempts import Start, open_attempt
from slurm_train.rundir.paths import RunDirectory
start = Start(job_id=None, restart_count=0, nodes=("here",), world_size=1)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    print(open_attempt(RunDirectory(Path(sys.argv[1])), start))
"""


@pytest.mark.faults
def test_processes_that_open_at_once_get_different_numbers(run: RunDirectory) -> None:
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for opener in openers:
        assert opener.stdout is not None and opener.stdout.readline() == "ready\n"
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("go\n")
        opener.stdin.flush()
    numbers = [int(number) for opener in openers for number in opener.communicate()[0].split()]
    assert sorted(numbers) == list(range(30))
    assert [entry["attempt"] for entry in ledger_lines(run)] == list(range(30))


def test_the_fence_lets_only_the_newest_through(run: RunDirectory) -> None:
    first = open_attempt(run, START)
    check_fence(run, first)
    second = open_attempt(run, START)
    check_fence(run, second)
    with pytest.raises(RunError, match=r"attempt 0 of .* was overtaken by attempt 1"):
        check_fence(run, first)


def test_the_fence_holds_the_directory_that_was_there_at_the_start(run: RunDirectory) -> None:
    attempt = open_attempt(run, START)
    hold_run(run)
    check_fence(run, attempt)
    moved = run.path.rename(run.path.with_name("moved"))
    with pytest.raises(RunError, match="was moved or removed"):
        check_fence(run, attempt)
    shutil.copytree(moved, run.path)
    with pytest.raises(RunError, match="was moved or removed"):
        check_fence(run, attempt)
    shutil.rmtree(run.path)
    moved.rename(run.path)
    check_fence(run, attempt)
    let_go(run)


def test_no_folder_of_a_run_makes_the_run_directory_anew(run: RunDirectory) -> None:
    attempt = open_attempt(run, START)
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError):
        open_attempt(run, START)
    with pytest.raises(FileNotFoundError):
        make_folder(run.attempt_logs(attempt), within=run.path)
    with pytest.raises(FileNotFoundError):
        Place(root=run.checkpoints, attempt=attempt).begin(1)
    assert not run.path.exists()


@pytest.mark.parametrize("ask", [check_fence, newest_round], ids=["fence", "torchrun's restarts"])
def test_a_look_lists_nothing_however_many_attempts_there_were(run: RunDirectory, ask: Any) -> None:
    """With 10,000 attempts a listing took 35 ms, on each node each second or two."""
    newest = [open_attempt(run, START) for _ in range(3)][-1]
    listed = []

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.listdir", "os.scandir") and str(args[0]).startswith(str(run.path)):
            listed.append(args[0])

    sys.addaudithook(note)
    ask(run, newest)
    assert listed == []


def test_a_result_replaces_an_older_attempts_and_only_the_newest_publishes(run: RunDirectory) -> None:
    first = open_attempt(run, START)
    publish_result(run, first, {"attempt": first})
    second = open_attempt(run, START)
    with pytest.raises(RunError, match="overtaken by attempt 1"):
        publish_result(run, first, {"attempt": first, "late": True})
    publish_result(run, second, {"attempt": second})
    assert read_json(run.result) == {"attempt": second}


def test_a_prepared_result_is_taken_away_by_the_next_attempt(run: RunDirectory) -> None:
    first = open_attempt(run, START)
    run.prepared_result(first).write_text("{}")
    second = open_attempt(run, START)
    run.prepared_result(second).write_text("{}")
    assert not run.prepared_result(first).exists() and run.prepared_result(second).exists()


def test_a_withdrawn_result_is_kept_and_no_attempt_until_then_writes_another(run: RunDirectory, tmp_path: Path) -> None:
    withdraw_result(run, tmp_path / "kept.json")
    first = open_attempt(run, START)
    publish_result(run, first, {"attempt": first})
    run.prepared_result(first).write_text("{}")
    withdraw_result(run, tmp_path / "kept.json")
    assert not run.prepared_result(first).exists(), "a rename of it that comes late finds nothing"
    withdraw_result(run, tmp_path / "kept.json")
    assert read_json(tmp_path / "kept.json") == {"attempt": first} and not run.result.exists()
    with pytest.raises(RunError, match="was changed after attempt 0 began"):
        publish_result(run, first, {"attempt": first})
    second = open_attempt(run, START)
    assert second == 1, "no number is lost"
    publish_result(run, second, {"attempt": second})
    assert existing_attempts(run) == [0, 1]


SUPERVISOR = Start(job_id="77", restart_count=2, nodes=("node1", "node2"), world_size=6)
RANKS = Start(job_id=None, restart_count=0, nodes=("node2", "node1"), world_size=6)


def test_the_first_round_is_the_attempt_that_the_supervisor_has_opened(run: RunDirectory) -> None:
    attempt = open_attempt(run, SUPERVISOR)
    assert read_round(run, attempt) is None
    assert begin_round(run, RANKS, first=attempt) == attempt
    begun = read_round(run, attempt)
    assert begun is not None and (begun.world_size, begun.first_step) == (6, 0)
    assert (newest_round(run, attempt), first_round(run, attempt)) == (attempt, attempt)
    assert len(ledger_lines(run)) == 1


def test_ranks_that_are_started_again_are_another_attempt_of_the_same_job(run: RunDirectory) -> None:
    begin_round(run, RANKS, first=open_attempt(run, SUPERVISOR))
    append_line(run.metrics, {"step": 7, "loss": 1.0})
    leave_mark(run, 0, FailureMark(rank=4, host="node2", exit_code=1, message="Boom: no"))
    assert begin_round(run, RANKS, first=0) == 1
    assert begin_round(run, RANKS, first=0) == 2
    assert (newest_round(run, 0), first_round(run, 2)) == (2, 0)
    old, newer, newest = ledger_lines(run)
    assert (old["reason"], old["action"], old["first_step"], old["last_step"]) == ("failed", "relaunch", 0, 7)
    assert old["note"] == "rank 4 on node2: Boom: no; torchrun starts the ranks again"
    assert newer["note"] == "a rank was killed; torchrun starts the ranks again"
    assert (newest["job_id"], newest["restart_count"], newest["nodes"]) == ("77", 2, ["node2", "node1"])
    assert "end_time_unix_s" not in newest
    assert len({attempt_secret(run, attempt) for attempt in range(3)}) == 3
    check_fence(run, 2)
    with pytest.raises(RunError, match=r"attempt 1 .* was overtaken by attempt 2"):
        check_fence(run, 1)


def test_an_attempt_that_went_back_is_booked_with_its_own_steps(run: RunDirectory) -> None:
    """Not with the largest in metrics.jsonl, which are of the past that it has left."""
    begin_round(run, RANKS, first=open_attempt(run, SUPERVISOR))
    append_line(run.metrics, {"step": 38, "attempt": 0, "loss": 1.0})
    begin_round(run, RANKS, first=0)
    record_origin(run, 1, Origin(step=20, save_id="c0ffee00"))
    append_line(run.metrics, {"step": 25, "attempt": 1, "loss": 1.0})
    begin_round(run, RANKS, first=0)
    begin_round(run, RANKS, first=0)
    facts = [tuple(entry[key] for key in ("first_step", "last_step", "step_before")) for entry in ledger_lines(run)[:3]]
    assert facts == [(0, 38, 0), (20, 25, 38), (38, 38, 38)], "the third has taken no step"


def test_ranks_of_a_step_that_was_overtaken_begin_nothing(run: RunDirectory) -> None:
    begin_round(run, RANKS, first=open_attempt(run, SUPERVISOR))
    other = open_attempt(run, SUPERVISOR)
    with pytest.raises(RunError, match=r"attempt 0 .* was overtaken by attempt 1"):
        begin_round(run, RANKS, first=0)
    assert newest_round(run, 0) == 0 and newest_round(run, other) == other


def test_without_a_supervisor_rank_0_opens_and_closes_all(run: RunDirectory) -> None:
    assert [begin_round(run, RANKS, first=None) for _ in range(2)] == [0, 1]
    assert newest_round(run, 0) == 0, "nobody's step"
    first, second = ledger_lines(run)
    assert first["reason"] == "failed" and "reason" not in second
    assert second["nodes"] == ["node2", "node1"]
    begin_round(run, RANKS, first=None)
    assert ledger_lines(run)[0] == first, "an attempt ends once"


def test_the_lobby_has_one_secret_and_says_where_it_is_not_seen(run: RunDirectory, tmp_path: Path) -> None:
    secret = rendezvous_secret(run, is_first=True, wait_s=0.0)
    assert len(secret) == 32
    assert (
        secret
        == rendezvous_secret(run, is_first=True, wait_s=0.0)
        == rendezvous_secret(run, is_first=False, wait_s=0.0)
    )
    assert (run.epochs / "lobby").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RunError, match="rank 0 does not write to this run directory"):
        rendezvous_secret(RunDirectory(tmp_path / "elsewhere"), is_first=False, wait_s=0.0)


@pytest.fixture
def _own_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_under_way", threading.RLock())


@pytest.mark.usefixtures("_own_lock")
def test_an_end_waits_for_what_is_under_way() -> None:
    began, may_end, done = threading.Event(), threading.Event(), []

    def publish() -> None:
        with attempts.publishing():
            began.set()
            may_end.wait(10)
            done.append("published")

    thread = threading.Thread(target=publish)
    thread.start()
    assert began.wait(10) and not attempts.end_publishing(within_s=0.01) and not done
    may_end.set()
    assert attempts.end_publishing(within_s=60) and done == ["published"]
    thread.join()


@pytest.mark.usefixtures("_own_lock")
def test_nothing_is_published_after_it() -> None:
    assert attempts.end_publishing(within_s=0)
    thread = threading.Thread(target=lambda: attempts.publishing().__enter__(), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()


_WORKER = """
import os, threading
from slurm_train.worker.rank import cut_off
from slurm_train.rundir.attempts import publishing

began = threading.Event()

def publish():
    with publishing():
        began.set()
        threading.Event().wait(0.3)  # as long as an fsync
        print("whole", flush=True)

threading.Thread(target=publish, daemon=True).start()
began.wait()
cut_off(3)
"""


def test_a_worker_that_leaves_lets_a_commit_become_whole() -> None:
    done = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "whole\n"), done.stderr
