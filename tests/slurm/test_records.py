"""What Slurm's commands print about jobs; the recorded answers are those of 22.05.8."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.records import (
    QUEUE_FORMAT,
    SACCT_FORMAT,
    JobState,
    Phase,
    TaskEnd,
    end_and_limit,
    expand_array_id,
    own_words,
    parse_queue,
    parse_record,
    parse_sacct,
    parse_squeue,
    parse_topology,
    task_ends,
    violent_end,
)

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
    assert (found["13"].exit_code, found["39_2"].end, found["25"].nodelist) == ("1:0", "", "")


def test_sacct_says_why_a_job_waits_and_its_last_row_counts() -> None:
    row = "39_[0-1%2]|{}|Resources|None assigned|Unknown|Unknown|main|0:0\n"
    assert [(one.job_id, one.reason) for one in parse_sacct(row.format("PENDING")).values()] == [
        ("39_0", "Resources"),
        ("39_1", "Resources"),
    ]
    ended = parse_sacct(row.format("REQUEUED") + row.format("COMPLETED"))["39_0"]
    assert (ended.word, ended.reason) == ("COMPLETED", ""), "why it once waited explains nothing"


@pytest.mark.parametrize("text", ["", "\n", "sacct: error: x\n", "1|2|3\n"])
def test_lines_of_another_form_are_no_jobs(text: str) -> None:
    assert parse_squeue(text) == {}
    assert parse_sacct(text) == {}


def test_a_job_cannot_pass_for_another_state_by_its_name_or_comment(recorded: Recorded) -> None:
    fields = parse_record(recorded("show_job_cancelled"))
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


@pytest.mark.parametrize(
    "text", ["12_[0-2,...]", "12_[]", "12_[x]", "12_[1-2", "x_[1]", "12_[1-2:0]", "12_[0-99999999]"]
)
def test_other_brackets_are_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a"):
        expand_array_id(text)


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
    assert parse_queue(LINE, [job_id])[1] == {job_id: ahead}


def test_lines_that_cannot_be_read_cost_nothing_but_themselves() -> None:
    odd = "slurm_load_jobs: warning\n\n" + row(500, "50_[...]") + "x|y\n"
    assert parse_queue(LINE + odd, ["7"])[1] == {"7": 1}


def test_no_column_about_many_jobs_holds_text_that_a_user_chose() -> None:
    # Name, comment, account, WCKey, dependency, command, working directory, user and group of squeue.
    chosen = {"%j", "%k", "%a", "%w", "%E", "%o", "%Z", "%u", "%g"}
    assert not chosen & set(QUEUE_FORMAT.split("|"))
    assert not {"JobName", "Comment", "AdminComment", "Account", "User", "WCKey", "WorkDir"} & set(
        SACCT_FORMAT.split(",")
    )


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", None),
        ("srun: error: node1: task 0: Exited with exit code 1\n", None),
        ("srun: error: node2: tasks 2-3: Aborted (core dumped)\n", TaskEnd((2, 3), "node2", "Aborted (core dumped)")),
        (
            "srun: error: node2: tasks 2-3: Terminated\nsrun: error: node1: task 1: Killed\n",
            TaskEnd((1,), "node1", "Killed"),
        ),
        (
            "srun: error: node2: task 3: User defined signal 2\nsrun: error: node1: tasks 0-1: Terminated\n",
            TaskEnd((3,), "node2", "User defined signal 2"),
        ),
        (
            "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
            "srun: error: Unable to create step for job 7: Memory required by task is not available\n",
            TaskEnd((), "", "Unable to create step for job 7: Memory required by task is not available"),
        ),
        (
            "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x0F.\n"
            "srun: error: Task launch for StepId=7.0 failed on node n1: Unable to satisfy cpu bind request\n"
            "srun: error: Application launch failed: Unable to satisfy cpu bind request\n",
            TaskEnd((), "", "Task launch for StepId=7.0 failed on node n1: Unable to satisfy cpu bind request"),
        ),
        ("srun: error: node2: task 3: CPU time limit exceeded\n", TaskEnd((3,), "node2", "CPU time limit exceeded")),
        ("srun: error: node2: task 3: Bad system call\n", TaskEnd((3,), "node2", "Bad system call")),
        (
            "srun: fatal: --ntasks-per-node is mutually exclusive with --ntasks-per-gpu\n",
            TaskEnd((), "", "srun: fatal: --ntasks-per-node is mutually exclusive with --ntasks-per-gpu"),
        ),
        (
            "srun: error: Node failure on node3\nsrun: error: node1: task 0: Killed\n",
            TaskEnd((), "node3", "node failure on node3"),
        ),
        ("srun: error: Node failure on node[3-4]\n", TaskEnd((), "", "node failure on node[3-4]")),
    ],
)
def test_the_first_violent_end_is_named(text: str, end: TaskEnd | None) -> None:
    assert violent_end(text) == end


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        (
            "srun: unrecognized option '--auto-resume=1'\nTry \"srun --help\" for more information\n",
            "srun: unrecognized option '--auto-resume=1'",
        ),
        (
            "srun: option '--gpu' is ambiguous; possibilities: '--gpus' '--gpu-bind'\nTry ...\n",
            "srun: option '--gpu' is ambiguous; possibilities: '--gpus' '--gpu-bind'",
        ),
        ("srun: error: Invalid --gpu-bind argument: gpu:foo\n", "srun: Invalid --gpu-bind argument: gpu:foo"),
        (
            "srun: error:  mpi/pmix_v4: can not load PMIx library\nsrun: error: MPI: Unable to load any plugin\n"
            "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types\n",
            "srun: mpi/pmix_v4: can not load PMIx library; Invalid MPI type 'pmix', --mpi=list for acceptable types",
        ),
        (
            "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x0F.\n",
            "srun: CPU binding outside of job step allocation, allocated CPUs are: 0x0F.",
        ),
        # Its tasks have begun, so what it says of the network is not why they ended.
        (
            "srun: error: slurm_receive_msgs: Socket timed out\nsrun: error: node1: task 0: Exited with exit code 1\n",
            "",
        ),
        ("srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n", ""),
        ("a program writes srun: error: of its own\n", ""),
    ],
)
def test_an_srun_that_ends_of_itself_is_quoted(text: str, words: str) -> None:
    assert own_words(text) == words


def test_the_ends_of_tasks_in_their_order() -> None:
    text = "srun: error: node2: task 1: Exited with exit code 3\nsrun: error: node1: tasks 0,2-3: Killed\n"
    first, second = task_ends(text)
    assert first == TaskEnd((1,), "node2", "Exited with exit code 3") and not first.is_violent
    assert second == TaskEnd((0, 2, 3), "node1", "Killed") and second.is_violent


# 02:30 for the second time on the night on which summer time ends.
REPEATED = 1792891800


def test_the_end_of_a_job_in_the_hour_that_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    form = '+"${SLURM_TIME_FORMAT:-%Y-%m-%dT%H:%M:%S}"'
    start, end = (f"$(date -d @{time_s} {form})" for time_s in (REPEATED - 7200, REPEATED))
    scontrol.write_text(f'#!/bin/sh\necho "JobId=7 JobName=x"; echo "   StartTime={start} EndTime={end}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert datetime.fromtimestamp(REPEATED).isoformat() == "2026-10-25T02:30:00"
        job = SlurmCommands({"PATH": f"{tmp_path}:/usr/bin:/bin", "TZ": "Europe/Berlin"}).show_job("7")
        assert end_and_limit(job) == (REPEATED, 7200)
        # Slurm's usual form still is read, where it is not ambiguous.
        job = {"StartTime": "2026-10-25T05:00:00", "EndTime": "2026-10-25T05:30:00"}
        assert end_and_limit(job) == (REPEATED + 3 * 3600, 1800)
        assert end_and_limit(job | {"EndTime": "Unknown"}) == end_and_limit({}) == (None, None)
    finally:
        monkeypatch.undo()
        time.tzset()


TREE = """SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node3
SwitchName=empty Level=0 LinkSpeed=1 Nodes=(null)
SwitchName=root Level=1 LinkSpeed=1 Nodes=node[1-3] Switches=leaf[1-2]
"""
BLOCKS = """BlockName=b0 BlockIndex=0 Nodes=node[1-2] BlockSize=2
BlockName=b1 BlockIndex=1 Nodes=node3 BlockSize=2
AggregatedBlock=b[0-1] BlockIndex=2 Nodes=node[1-3] BlockSize=4
"""


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        (TREE, ["switch leaf1", "switch leaf1", "switch leaf2"]),
        (BLOCKS, ["block b0", "block b0", "block b1"]),
        ("SwitchName=a Level=0 LinkSpeed=1 Nodes=node1\n" + TREE, ["switch a", "switch leaf1", "switch leaf2"]),
    ],
)
def test_a_node_hangs_on_its_lowest_switch_or_block(text: str, leaves: list[str]) -> None:
    nodes = ("node1", "node2", "node3")
    assert parse_topology(text) == dict(zip(nodes, leaves, strict=True))


def test_no_topology_has_no_leaves() -> None:
    assert parse_topology("") == {}
