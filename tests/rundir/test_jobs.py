from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.rundir.jobs import ask_to_stop, complete_stop, number_of, obey_stop, read_job, record_job
from slurm_train.rundir.layout import RunDirectory


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


def test_a_list_from_before_there_were_entries_counts(run: RunDirectory) -> None:
    run.job.write_text(json.dumps({"job_ids": ["7", "8"], "submit_time_unix_s": 5.0, "continues": {"8": "7"}}))
    record_job(run, "9")
    record = read_job(run)
    assert record is not None and record.job_ids == ("7", "8", "9") and record.continues == {"8": "7"}


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
        "from slurm_train.rundir.layout import RunDirectory\n"
        "for number in range(20): record_job(RunDirectory(Path(sys.argv[1])), f'{sys.argv[2]}{number:02}')"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(run.path), str(one)]) for one in (1, 2, 3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert sorted(ids(run)) == [f"{one}{number:02}" for one in (1, 2, 3) for number in range(20)]


@pytest.mark.parametrize(("job_id", "number"), [("12", 12), ("12_3", 12), ("12_[0-3]", 12), ("", 0), ("x", 0)])
def test_slurm_counts_submissions(job_id: str, number: int) -> None:
    assert number_of(job_id) == number


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
    assert json.loads(run.stop_file.read_text()) == {"jobs": ["70", "75"], "newest_job": 77}
    refusal = obey_stop(run, job_id, continues=continues, newest_job=lambda: 99)
    assert (refusal == "") is begins
    assert run.stop_file.exists() is not begins, "a new request forgets the old stop"


def test_without_an_answer_of_slurm_the_cancelled_jobs_are_the_newest(run: RunDirectory) -> None:
    ask_to_stop(run, ["70", "75_1"], newest_job=None)
    assert json.loads(run.stop_file.read_text())["newest_job"] == 75


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
