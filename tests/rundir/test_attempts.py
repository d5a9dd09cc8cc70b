from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.attempts import (
    AttemptStart,
    check_fence,
    close_attempt,
    open_attempt,
    publish_result,
    read_ledger,
    withdraw_result,
)
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory, existing_attempts

START = AttemptStart(job_id="12_3", restart_count=1, nodes=("n1", "n2"), world_size=16)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    path = tmp_path / "gpt" / "3f9a1c07"
    path.mkdir(parents=True)
    return RunDirectory(path)


def test_attempts_are_numbered_from_zero_and_get_a_log_folder(run: RunDirectory) -> None:
    assert [open_attempt(run, START) for _ in range(3)] == [0, 1, 2]
    assert existing_attempts(run) == [0, 1, 2]
    assert all(run.attempt_logs(number).is_dir() for number in range(3))


def test_a_number_is_never_given_twice_also_after_gaps(run: RunDirectory) -> None:
    open_attempt(run, START)
    (run.epochs / "attempt_7").write_text("{}")
    (run.epochs / "note.txt").write_text("not an attempt")
    assert open_attempt(run, START) == 8


OPENER = """
import sys
from pathlib import Path
from slurm_train.rundir.attempts import AttemptStart, open_attempt
from slurm_train.rundir.layout import RunDirectory
start = AttemptStart(job_id=None, restart_count=0, nodes=("here",), world_size=1)
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
    assert [entry["attempt"] for entry in read_ledger(run)] == list(range(30))


def test_the_fence_lets_only_the_newest_through(run: RunDirectory) -> None:
    first = open_attempt(run, START)
    check_fence(run, first)
    second = open_attempt(run, START)
    check_fence(run, second)
    with pytest.raises(RunError, match=r"attempt 0 of .* was overtaken by attempt 1"):
        check_fence(run, first)


def test_the_ledger_merges_start_and_end(run: RunDirectory) -> None:
    number = open_attempt(run, START)
    (running,) = read_ledger(run)
    assert "end_time_unix_s" not in running
    close_attempt(run, number, {"reason": "preempted", "exit_code": 75, "last_step": 40})
    (entry,) = read_ledger(run)
    assert entry["end_time_unix_s"] >= entry["time_unix_s"]
    assert {key: value for key, value in entry.items() if not key.endswith("time_unix_s")} == {
        "attempt": 0,
        "event": "end",
        "job_id": "12_3",
        "restart_count": 1,
        "nodes": ["n1", "n2"],
        "world_size": 16,
        "reason": "preempted",
        "exit_code": 75,
        "last_step": 40,
    }


def test_the_end_line_of_an_older_attempt_stays_with_it(run: RunDirectory) -> None:
    for _ in range(2):
        open_attempt(run, START)
    close_attempt(run, 0, {"reason": "failed"})
    assert [entry.get("reason") for entry in read_ledger(run)] == ["failed", None]


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
    withdraw_result(run, tmp_path / "kept.json")
    withdraw_result(run, tmp_path / "kept.json")
    assert read_json(tmp_path / "kept.json") == {"attempt": first} and not run.result.exists()
    with pytest.raises(RunError, match="was changed after attempt 0 began"):
        publish_result(run, first, {"attempt": first})
    second = open_attempt(run, START)
    assert second == 1, "no number is lost"
    publish_result(run, second, {"attempt": second})
    assert existing_attempts(run) == [0, 1]
