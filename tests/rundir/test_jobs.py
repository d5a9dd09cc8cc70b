"""The jobs of a run, the STOP file, the two locks, and when nothing more will come."""

from __future__ import annotations

import errno
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
    JobRecord,
    ask_to_stop,
    clear_dead,
    complete_stop,
    has_ended,
    has_stopped,
    jobs_elsewhere,
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
from tests.support.ledgers import attempt_of
from tests.support.run_facts import RunFacts, attempt


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def ids(run: RunDirectory) -> tuple[str, ...]:
    record = read_job(run)
    return () if record is None else record.job_ids


def test_jobs_are_listed_in_the_order_of_recording(run: RunDirectory) -> None:
    assert read_job(run) is None
    record_job(run, "12")
    record_job(run, "13_4", continues="12")
    record_job(run, "12")
    record = read_job(run)
    assert record is not None and (record.job_ids, record.job_id) == (("12", "13_4"), "13_4")
    assert record.continues == {"13_4": "12"}
    assert json.loads(run.job.read_text())["job_ids"] == ["12", "13_4"]


def test_a_recorder_that_wakes_up_late_loses_no_job(run: RunDirectory) -> None:
    record_job(run, "12")
    stale = run.job.read_text()
    record_job(run, "13")
    # It had read the list before 13 was there, and writes it now.
    run.job.write_text(stale)
    assert ids(run) == ("12", "13")


def test_recorders_at_the_same_moment_lose_no_job(run: RunDirectory) -> None:
    code = (
        "import sys; from pathlib import Path; from slurm_train.rundir.jobs import record_job; "
        "from slurm_train.rundir.paths import RunDirectory\n"
        "for number in range(20): record_job(RunDirectory(Path(sys.argv[1])), f'{sys.argv[2]}{number:02}')"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(run.path), str(one)]) for one in (1, 2, 3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert sorted(ids(run)) == [f"{one}{number:02}" for one in (1, 2, 3) for number in range(20)]


BEGINS = [
    ("78", None, True),
    ("78_0", None, True),
    ("77", None, False),
    ("75", None, False),
    ("75_3", None, False),
    ("80", "70", False),
    ("80", "78", True),
    (None, None, False),
]
IDS = [
    "submitted by hand later",
    "an array submitted later",
    "on its way by then",
    "cancelled itself",
    "an element of a cancelled array",
    "takes over from a cancelled job",
    "takes over from a job that came later",
    "without Slurm",
]


@pytest.mark.parametrize(("job_id", "continues", "begins"), BEGINS, ids=IDS)
def test_a_stop_holds_back_what_was_submitted_before_it(
    job_id: str | None, continues: str | None, begins: bool, run: RunDirectory
) -> None:
    ask_to_stop(run, ["70", "75"], newest_job=77)
    assert json.loads(run.stop_file.read_text()) == {"jobs": ["70", "75"], "newest_job": 77, "cancels": True}
    refusal = obey_stop(run, job_id, continues=continues, newest_job=lambda: 99)
    assert (refusal == "") is begins
    assert run.stop_file.exists() is not begins, "a new request forgets the old stop"


def test_without_an_answer_of_slurm_the_cancelled_jobs_are_the_newest(run: RunDirectory) -> None:
    ask_to_stop(run, ["70", "75_1"], newest_job=None)
    assert json.loads(run.stop_file.read_text())["newest_job"] == 75


def test_a_stop_by_touch_holds_back_what_slurm_knows_when_it_is_obeyed(run: RunDirectory) -> None:
    run.stop_file.touch()
    assert "STOP is there" in obey_stop(run, "70", continues=None, newest_job=lambda: 72)
    assert json.loads(run.stop_file.read_text()) == {"jobs": ["70"], "newest_job": 72, "cancels": False}
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


def never(_holder: Holder) -> bool:
    return False


def always(_holder: Holder) -> bool:
    return True


def test_a_free_run_is_taken_and_given_back(run: RunDirectory) -> None:
    me = this_process()
    take_lock(run.lock, me, is_alive=always)
    assert read_holder(run.lock) == me
    release_lock(run.lock, me)
    assert read_holder(run.lock) is None
    assert not run.lock.exists()


def test_a_living_holder_is_named_and_keeps_the_run(run: RunDirectory) -> None:
    take_lock(run.lock, JOB, is_alive=always)
    with pytest.raises(RunError) as caught:
        take_lock(run.lock, this_process(), is_alive=always)
    assert caught.value.message == f"{run.path} is being run by Slurm job 12"
    assert f"remove {run.lock}" in caught.value.hint
    assert read_holder(run.lock) == JOB


@pytest.mark.parametrize("holder", [DEAD, JOB], ids=["process", "job"])
def test_a_dead_holder_is_overtaken(holder: Holder, run: RunDirectory) -> None:
    take_lock(run.lock, holder, is_alive=always)
    me = this_process()
    take_lock(run.lock, me, is_alive=never)
    assert read_holder(run.lock) == me


def test_the_next_attempt_of_the_same_job_overtakes_though_the_job_lives(run: RunDirectory) -> None:
    take_lock(run.lock, JOB, is_alive=always)
    again = Holder(job_id="12", host="node2", pid=9, started="300")
    take_lock(run.lock, again, is_alive=always)
    assert read_holder(run.lock) == again
    release_lock(run.lock, JOB)
    assert read_holder(run.lock) == again, "the earlier attempt cannot give away what it has no more"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', '{"who": "knows"}'])
def test_a_damaged_lock_is_nobodys(text: str, run: RunDirectory) -> None:
    run.lock.write_text(text)
    me = this_process()
    take_lock(run.lock, me, is_alive=always)
    assert read_holder(run.lock) == me


def test_clear_dead_removes_the_dead_only(run: RunDirectory) -> None:
    clear_dead(run.lock, is_alive=always)
    take_lock(run.lock, DEAD, is_alive=always)
    clear_dead(run.lock, is_alive=always)
    assert read_holder(run.lock) == DEAD
    clear_dead(run.lock, is_alive=process_lives)
    assert read_holder(run.lock) is None


def test_a_process_is_known_by_its_start_not_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    assert process_lives(me)
    recycled = Holder(job_id=None, host=me.host, pid=me.pid, started="1")
    assert not process_lives(recycled)
    assert not process_lives(DEAD)
    assert process_lives(Holder(job_id=None, host="elsewhere", pid=1, started="1")), "it cannot be told from here"
    monkeypatch.setattr(lock, "_machine", lambda: "this")
    for machine, is_known_dead in (("", True), ("this", True), ("another of this name", False)):
        assert process_lives(replace(recycled, machine=machine)) is not is_known_dead


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


def test_a_link_that_was_made_but_reported_as_existing_is_ours(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server that gets the same request twice answers the second one."""
    real = os.link

    def link_twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    me = this_process()
    take_lock(run.lock, me, is_alive=always)
    assert read_holder(run.lock) == me
    with pytest.raises(RunError, match="is being run by"):
        take_lock(run.lock, JOB, is_alive=always)


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
from dataclasses import replace
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
@pytest.mark.parametrize("stale", [False, True], ids=["free", "held by the dead"])
def test_of_starters_that_race_exactly_one_wins(stale: bool, tmp_path: Path) -> None:
    rounds = 40
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        if stale:
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
        left = {path.name for path in (tmp_path / str(number)).iterdir()}
        assert left <= {"lock.json", ".lock.guard"}
        assert json.loads((tmp_path / str(number) / "lock.json").read_text())["pid"] in [s.pid for s in starters]


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


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
def test_when_nothing_more_will_come(facts: dict[str, Any], ended: bool, tmp_path: Path) -> None:
    run = RunFacts(**facts).write(RunDirectory(tmp_path / "gpt" / "3f9a1c07"))
    assert has_ended(run) is ended


def test_a_result_without_an_end_line_is_the_end_a_minute_later(tmp_path: Path) -> None:
    run = RunFacts(ledger=attempt(0), result={}).write(RunDirectory(tmp_path / "gpt" / "3f9a1c07"))
    assert not has_ended(run), "rank 0 may still say something"
    os.utime(run.result, (1.0, 1.0))
    assert has_ended(run)


def test_a_job_is_another_one_where_its_cluster_is_another(run: RunDirectory) -> None:
    take_lock(run.lock, replace(JOB, cluster="a"), is_alive=always)
    with pytest.raises(RunError, match="Slurm job 12 of cluster a"):
        take_lock(run.lock, replace(JOB, cluster="b"), is_alive=always)
    take_lock(run.lock, JOB, is_alive=always)  # of a version that wrote no clusters


def test_the_newer_of_two_jobs_with_one_id_is_meant(run: RunDirectory) -> None:
    for job_id, cluster in (("12", "a"), ("13", "a"), ("12", "b"), ("12", "b"), ("13", "")):
        record_job(run, job_id, cluster=cluster)
    record = read_job(run)
    assert record is not None and record.job_ids == ("13", "12") and record.clusters == {"13": "a", "12": "b"}
    run.job.unlink()
    assert read_job(run) == record, "each entry has it, too"
    assert jobs_elsewhere(record, None, cluster="a") == {"12": "b"} and not jobs_elsewhere(record, None, cluster="")
    holder = replace(JOB, job_id="13", cluster="c")
    assert jobs_elsewhere(record, holder, cluster="a") == {"12": "b", "13": "c"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_lock_on_a_file_system_without_hard_links_is_refused_by_name(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RunError, match="makes no hard links"):
        take_lock(tmp_path / "lock.json", this_process(), is_alive=lambda _: True)
    assert list(tmp_path.glob("*lock.json*")) == []


@pytest.mark.parametrize(
    ("jobs", "attempts", "expected"),
    [
        (["12"], [("12", "stop")], True),
        (["12"], [("12", "requeue")], False),
        (["12", "13"], [("12", "stop")], False),
        (["12", "13"], [("12", "stop"), ("13", "stop")], True),
        (["12", "13"], [("12", "requeue"), ("13", "stop"), ("12", "stop")], True),
        (["12", "13"], [("13", "requeue"), ("12", "stop")], False),
        ([], [("12", "stop")], True),
        ([], [("None", "stop")], True),
    ],
)
@pytest.mark.parametrize("clock_s", [-3600.0, 3600.0])
def test_whether_a_run_has_stopped_does_not_depend_on_clocks(
    jobs: list[str], attempts: list[tuple[str, str]], expected: bool, clock_s: float
) -> None:
    record = JobRecord(job_ids=tuple(jobs), submit_time_unix_s=1000.0 + clock_s) if jobs else None
    ledger = [attempt_of(job_id=job_id, action=action, end_time_unix_s=1000.0) for job_id, action in attempts]
    assert has_stopped(ledger, record) == expected
