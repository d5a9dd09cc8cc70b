from __future__ import annotations

import pytest

from slurm_train.slurm.records import SACCT_FORMAT
from slurm_train.slurm.states import Phase
from slurm_train.slurm.waiting_line import QUEUE_FORMAT, parse_queue


def row(priority: int, job_id: str, word: str = "PENDING", reason: str = "Priority", partition: str = "main") -> str:
    return f"{priority}|{job_id}|{word}|{reason}||N/A|N/A|{partition}\n"


LINE = (
    row(100, "7", reason="Resources")
    + row(90, "9")
    + row(90, "8")
    + row(80, "20_[0-9%2]")
    + row(70, "30")
    + row(60, "31", partition="big,main")
    + row(200, "40", reason="JobHeldUser")
    + row(200, "41", reason="Dependency")
    + row(200, "42", "RUNNING", "None")
    + row(200, "43", "COMPLETED", "None")
    + row(200, "44", partition="other")
)


@pytest.mark.parametrize(
    ("job_id", "ahead"),
    [("7", 0), ("8", 1), ("9", 2), ("20_4", 3), ("30", 13), ("31", 14), ("44", 0)],
)
def test_how_many_jobs_come_before_one_in_its_partition(job_id: str, ahead: int) -> None:
    assert parse_queue(LINE, asked=[job_id]).jobs_ahead == {job_id: ahead}


@pytest.mark.parametrize("job_id", ["40", "41", "42", "43", "99"])
def test_a_job_that_is_not_in_line_has_no_place(job_id: str) -> None:
    assert parse_queue(LINE, asked=[job_id]).jobs_ahead == {}


def test_only_the_jobs_that_were_asked_for_are_told() -> None:
    found = parse_queue(LINE, asked=["20_3", "20_5", "42"])
    assert {job_id: job.phase for job_id, job in found.jobs.items()} == {
        "20_3": Phase.QUEUED,
        "20_5": Phase.QUEUED,
        "42": Phase.RUNNING,
    }
    assert set(parse_queue(LINE, asked=["20"]).jobs) == {f"20_{task}" for task in range(10)}


def test_lines_that_cannot_be_read_cost_nothing_but_themselves() -> None:
    odd = "slurm_load_jobs: warning\n\n" + row(500, "50_[...]") + "x|y\n"
    assert parse_queue(LINE + odd, asked=["7"]).jobs_ahead == {"7": 1}


def test_the_format_has_as_many_columns_as_are_read() -> None:
    assert QUEUE_FORMAT.count("|") == row(1, "1").count("|")


def test_no_column_about_many_jobs_holds_text_that_a_user_chose() -> None:
    # Name, comment, account, WCKey, dependency, command, working directory, user and group of squeue.
    chosen = {"%j", "%k", "%a", "%w", "%E", "%o", "%Z", "%u", "%g"}
    assert not chosen & set(QUEUE_FORMAT.split("|"))
    assert not {"JobName", "Comment", "AdminComment", "Account", "User", "WCKey", "WorkDir"} & set(
        SACCT_FORMAT.split(",")
    )
