from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_train.slurm.records import JobState, parse_config, parse_job, parse_partitions, parse_sacct, parse_squeue
from slurm_train.slurm.states import Phase

Recorded = Callable[[str], str]


def test_recorded_squeue(recorded: Recorded) -> None:
    found = parse_squeue(recorded("squeue"))
    assert {job_id: job.phase for job_id, job in found.items()} == {
        "26_4": Phase.CANCELLED,
        "1": Phase.COMPLETED,
        "8": Phase.COMPLETED,
        "9_3": Phase.COMPLETED,
        "42": Phase.FINISHING,
        "10": Phase.FAILED,
        "13": Phase.FAILED,
        "39_2": Phase.QUEUED,
        "38_4": Phase.QUEUED,
        "38_6": Phase.QUEUED,
        "38_8": Phase.QUEUED,
        "39_0": Phase.RUNNING,
        "40": Phase.RUNNING,
    }
    assert found["39_2"] == JobState(
        job_id="39_2",
        word="PENDING",
        source="squeue",
        reason="JobArrayTaskLimit",
        partition="main",
    )
    assert (found["40"].nodelist, found["40"].end) == ("node1,node2", "2026-11-20T10:53:24")


def test_recorded_sacct(recorded: Recorded) -> None:
    found = parse_sacct(recorded("sacct"))
    assert {job_id: job.phase for job_id, job in found.items()} == {
        "1": Phase.COMPLETED,
        "7": Phase.COMPLETED,
        "8": Phase.COMPLETED,
        "10": Phase.FAILED,
        "13": Phase.FAILED,
        "9_5": Phase.COMPLETED,
        "40": Phase.COMPLETED,
        "42": Phase.CANCELLED,
        "39_2": Phase.RUNNING,
        "25": Phase.CANCELLED,
    }
    assert found["13"].exit_code == "1:0"
    assert found["39_2"].end == ""
    assert found["25"].nodelist == ""


def test_sacct_says_why_a_job_waits_but_not_why_an_ended_one_waited_once() -> None:
    row = "7|{}|Resources|None assigned|Unknown|Unknown|main|0:0\n"
    assert parse_sacct(row.format("PENDING"))["7"].reason == "Resources"
    assert parse_sacct(row.format("COMPLETED"))["7"].reason == ""


def test_the_last_row_of_sacct_wins() -> None:
    row = "7|{}|None|n1|2026-01-01T00:00:00|2026-01-01T00:01:00|main|0:0\n"
    assert parse_sacct(row.format("REQUEUED") + row.format("COMPLETED"))["7"].word == "COMPLETED"


def test_a_pending_array_of_sacct_is_written_out() -> None:
    found = parse_sacct("39_[0-2%2]|PENDING|Priority|None assigned|Unknown|Unknown|main|0:0\n")
    assert list(found) == ["39_0", "39_1", "39_2"]
    assert found["39_1"].job_id == "39_1"


@pytest.mark.parametrize("text", ["", "\n", "sacct: error: x\n", "1|2|3\n"])
def test_lines_of_another_form_are_no_jobs(text: str) -> None:
    assert parse_squeue(text) == {}
    assert parse_sacct(text) == {}


@pytest.mark.parametrize(
    ("word", "source", "is_active"),
    [
        ("RUNNING", "squeue", True),
        ("RUNNING", "sacct", True),
        ("COMPLETED", "squeue", False),
        # A job that Slurm requeues shows COMPLETING, then PENDING; these rows are kept for MinJobAge.
        ("PREEMPTED", "squeue", False),
        ("PREEMPTED", "sacct", False),
        ("NODE_FAIL", "squeue", False),
        ("NODE_FAIL", "sacct", False),
        ("COMPLETING", "squeue", True),
        ("REQUEUED", "squeue", True),
        ("SOMETHING", "squeue", False),
    ],
)
def test_activity_depends_on_who_says_so(word: str, source: str, is_active: bool) -> None:
    assert JobState(job_id="1", word=word, source=source).is_active is is_active


def test_a_job_cannot_pass_for_another_state_by_its_name_or_comment(recorded: Recorded) -> None:
    fields = parse_job(recorded("show_job_cancelled"))
    wanted = ("JobId", "JobName", "JobState", "Restarts", "PreemptTime", "Comment", "ExitCode", "CPUs/Task", "StdOut")
    assert {key: fields[key] for key in wanted} == {
        "JobId": "42",
        "JobName": "x JobState=FAILED | y",
        "JobState": "COMPLETING",
        "Restarts": "0",
        "PreemptTime": "None",
        "Comment": "hello JobState=COMPLETED  Restarts=9",
        "ExitCode": "0:15",
        "CPUs/Task": "1",
        "StdOut": "/home/user/lab/slurm-42.out",
    }


def test_an_array_element_and_a_command_with_arguments(recorded: Recorded) -> None:
    fields = parse_job(recorded("show_job_array_element"))
    wanted = ("JobId", "ArrayJobId", "ArrayTaskId", "JobName", "JobState", "Command", "TRES", "ReqB:S:C:T", "Features")
    assert {key: fields[key] for key in wanted} == {
        "JobId": "44",
        "ArrayJobId": "39",
        "ArrayTaskId": "1",
        "JobName": "real | one",
        "JobState": "RUNNING",
        "Command": "/home/user/lab/real.sh 6",
        "TRES": "cpu=4,node=2,billing=4,gres/gpu=4",
        "ReqB:S:C:T": "0:0:*:*",
        "Features": "(null)",
    }


def test_of_several_records_the_first_counts(recorded: Recorded) -> None:
    both = recorded("show_job_held_array") + recorded("show_job_cancelled")
    assert parse_job(both)["ArrayTaskId"] == "4,6,8%2"
    assert parse_job(both)["JobState"] == "PENDING"
    assert parse_job("") == {}


def test_recorded_config(recorded: Recorded) -> None:
    config = parse_config(recorded("show_config"))
    assert config["MaxArraySize"] == "1001"
    assert config["KillWait"] == "5 sec"
    assert config["SLURM_VERSION"] == "22.05.8"


def test_each_partition_is_a_record_of_its_own() -> None:
    text = "PartitionName=a\n   State=UP TRES=cpu=4,mem=1G\n\nPartitionName=b\n   State=DOWN\n\n"
    assert [(one["PartitionName"], one["State"]) for one in parse_partitions(text)] == [("a", "UP"), ("b", "DOWN")]
    assert parse_partitions(text)[0]["TRES"] == "cpu=4,mem=1G"
    assert parse_partitions("\n") == []
