"""The jobs of a run, the STOP file, the two locks, and when nothing more will come."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir import jobs as lock
from slurm_train.rundir.jobs import (
    Holder,
    ask_to_stop,
    clear_dead,
    complete_stop,
    has_ended,
    obey_stop,
    process_lives,
    read_holder,
    read_job,
    record_job,
    release_lock,
    take_lock,
    this_process,
)
from slurm_train.rundir.paths import RunDirectory
from tests.support.run_facts import RunFacts, attempt


def test_a_recorder_that_wakes_up_late_loses_no_job(run: RunDirectory) -> None:
    assert read_job(run) is None
    record_job(run, "12")
    stale = run.job.read_text()
    record_job(run, "13_4", continues="12")
    record_job(run, "12")
    assert json.loads(run.job.read_text())["job_ids"] == ["12", "13_4"]
    # It had read the list before 13_4 was there, and writes it now.
    run.job.write_text(stale)
    record = read_job(run)
    assert record is not None and (record.job_ids, record.continues) == (("12", "13_4"), {"13_4": "12"})


@pytest.mark.parametrize(
    ("job_id", "continues", "begins"),
    [
        pytest.param("78_0", None, True, id="submitted by hand later"),
        pytest.param("77", None, False, id="on its way by then"),
        pytest.param("75_3", None, False, id="an element of a cancelled array"),
        pytest.param("80", "70", False, id="takes over from a cancelled job"),
        pytest.param("80", "78", True, id="takes over from a job that came later"),
        pytest.param(None, None, False, id="without Slurm"),
    ],
)
def test_a_stop_holds_back_what_was_submitted_before_it(
    job_id: str | None, continues: str | None, begins: bool, run: RunDirectory
) -> None:
    ask_to_stop(run, ["70", "75_1"], newest_job=None)
    assert json.loads(run.stop_file.read_text())["newest_job"] == 75, "Slurm did not answer"
    ask_to_stop(run, ["70", "75"], newest_job=77)
    assert json.loads(run.stop_file.read_text()) == {"jobs": ["70", "75"], "newest_job": 77}
    refusal = obey_stop(run, job_id, continues=continues, newest_job=lambda: 99)
    assert (refusal == "") is begins
    assert run.stop_file.exists() is not begins, "a new request forgets the old stop"


def test_a_stop_by_touch_holds_back_what_slurm_knows_when_it_is_obeyed(run: RunDirectory) -> None:
    run.stop_file.touch()
    assert "STOP is there" in obey_stop(run, "70", continues=None, newest_job=lambda: 72)
    assert json.loads(run.stop_file.read_text()) == {"jobs": ["70"], "newest_job": 72}
    assert obey_stop(run, "72", continues=None, newest_job=lambda: 99)
    assert obey_stop(run, "73", continues=None, newest_job=lambda: 99) == ""
    assert not run.stop_file.exists()


def test_a_stop_that_was_removed_is_not_made_again(run: RunDirectory) -> None:
    run.stop_file.touch()

    def remove() -> int:
        run.stop_file.unlink()
        return 72

    complete_stop(run, "70", newest_job=remove)
    assert not run.stop_file.exists()


DEAD = Holder(job_id=None, host=socket.gethostname(), pid=4_194_300, started="1")
JOB = Holder(job_id="12", host="node1", pid=5, started="100")


def always(_holder: Holder) -> bool:
    return True


def test_a_living_holder_keeps_the_run_and_a_dead_one_is_overtaken(run: RunDirectory) -> None:
    take_lock(run.lock, JOB, is_alive=always)
    me = this_process()
    with pytest.raises(RunError, match=f"{run.path} is being run by Slurm job 12") as caught:
        take_lock(run.lock, me, is_alive=always)
    assert f"remove {run.lock}" in caught.value.hint
    assert read_holder(run.lock) == JOB
    take_lock(run.lock, me, is_alive=lambda _: False)
    assert read_holder(run.lock) == me


def test_the_next_attempt_of_the_same_job_overtakes_though_the_job_lives(run: RunDirectory) -> None:
    take_lock(run.lock, JOB, is_alive=always)
    again = Holder(job_id="12", host="node2", pid=9, started="300")
    take_lock(run.lock, again, is_alive=always)
    assert read_holder(run.lock) == again
    release_lock(run.lock, JOB)
    assert read_holder(run.lock) == again, "the earlier attempt cannot give away what it has no more"


def test_a_damaged_lock_is_nobodys(run: RunDirectory) -> None:
    run.lock.write_text('{"pid": 1}')
    me = this_process()
    take_lock(run.lock, me, is_alive=always)
    assert read_holder(run.lock) == me


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({}, True),
        ({"started": "1"}, False),
        ({"pid": DEAD.pid}, False),
        ({"host": "elsewhere", "started": "1"}, True),
    ],
    ids=["this one", "its number was given again", "none", "cannot be told from here"],
)
def test_the_lock_of_a_dead_process_is_cleared(change: dict[str, Any], lives: bool, run: RunDirectory) -> None:
    holder = replace(this_process(), **change)
    take_lock(run.lock, holder, is_alive=always)
    clear_dead(run.lock, is_alive=process_lives)
    assert read_holder(run.lock) == (holder if lives else None)


def test_a_lock_that_was_made_since_one_looked_is_left_where_it_is(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_lock(run.lock, this_process(), is_alive=process_lives)
    made = run.lock.stat()
    # Another starter has removed a dead one's, and this one was made, between two looks of a third.
    looks, real = itertools.count(), lock.read_holder
    monkeypatch.setattr(lock, "read_holder", lambda path: real(path) if next(looks) % 2 else None)
    with pytest.raises(RunError, match="another starter is quicker"):
        take_lock(run.lock, DEAD, is_alive=always)
    assert run.lock.stat().st_ctime_ns == made.st_ctime_ns, "it was away for a moment, in which it could be taken"


def test_a_release_that_comes_late_leaves_the_successors_lock(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_lock(run.lock, DEAD, is_alive=always)
    me = this_process()
    real = lock.read_holder

    def look_then_stop(path: Path) -> Holder | None:
        found = real(path)
        monkeypatch.undo()
        take_lock(path, me, is_alive=process_lives)
        return found

    monkeypatch.setattr(lock, "read_holder", look_then_stop)
    release_lock(run.lock, DEAD)
    assert read_holder(run.lock) == me


STARTER = """
import sys
from pathlib import Path
from slurm_train.errors import RunError
from slurm_train.rundir import jobs as lock
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.jobs import process_lives, take_lock, this_process
run = RunDirectory(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2])):
    folder = RunDirectory(run.path / str(number))
    try:
        take_lock(folder.lock, this_process(), is_alive=process_lives)
        print("won", number, flush=True)
    except RunError:
        pass
print("end", flush=True)
sys.stdin.readline()
"""


@pytest.mark.faults
def test_of_starters_that_race_for_the_lock_of_the_dead_exactly_one_wins(tmp_path: Path) -> None:
    rounds = 40
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        take_lock(RunDirectory(folder).lock, DEAD, is_alive=always)
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, str(tmp_path), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    winners: list[int] = []
    for starter in starters:
        assert starter.stdout is not None and starter.stdout.readline() == "ready\n"
    for starter in starters:
        tell(starter)
    for starter in starters:
        # The winners stay alive until all have tried, else their locks would be stale in turn.
        assert starter.stdout is not None
        for line in iter(starter.stdout.readline, "end\n"):
            winners.append(int(line.split()[1]))
    for starter in starters:
        tell(starter)
        starter.communicate()
    assert sorted(winners) == list(range(rounds))
    for number in range(rounds):
        assert {path.name for path in (tmp_path / str(number)).iterdir()} <= {"lock.json", ".lock.guard"}
        assert json.loads((tmp_path / str(number) / "lock.json").read_text())["pid"] in [s.pid for s in starters]


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


STOPPED = attempt(0, action="stop")


@pytest.mark.parametrize(
    ("facts", "ended"),
    [
        pytest.param({}, False, id="nothing yet"),
        pytest.param({"ledger": attempt(0, action="requeue")}, False, id="requeued"),
        pytest.param({"ledger": STOPPED}, True, id="stopped"),
        pytest.param({"ledger": (*STOPPED, *attempt(1))}, False, id="stopped, running again"),
        pytest.param({"ledger": STOPPED, "job_ids": ("13",)}, False, id="stopped, then submitted again"),
        pytest.param(
            {"ledger": STOPPED, "job_ids": ("12",), "submitted_unix_s": 1.0}, True, id="submitted, then stopped"
        ),
        pytest.param({"ledger": attempt(0, action="finish"), "result": {}}, True, id="finished"),
    ],
)
def test_when_nothing_more_will_come(facts: dict[str, Any], ended: bool, tmp_path: Path) -> None:
    run = RunFacts(**facts).write(RunDirectory(tmp_path / "gpt" / "3f9a1c07"))
    assert has_ended(run) is ended


def test_a_result_without_an_end_line_is_the_end_a_minute_later(tmp_path: Path) -> None:
    run = RunFacts(ledger=attempt(0), result={}).write(RunDirectory(tmp_path / "gpt" / "3f9a1c07"))
    assert not has_ended(run), "rank 0 may still say something"
    os.utime(run.result, (1.0, 1.0))
    assert has_ended(run)
