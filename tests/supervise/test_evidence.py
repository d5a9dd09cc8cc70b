from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.events import FailureMark, Finding, leave_mark, read_marks
from slurm_train.rundir.ledger import End, Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.records import TaskEnd
from slurm_train.supervise.evidence import (
    Evidence,
    Surroundings,
    diagnose,
    silent_end,
    task_end,
    with_crash_place,
    with_missing_variable,
)
from tests.support.ledgers import attempt_of

MARK = FailureMark(
    rank=3, host="node2", exit_code=1, message="ValueError: no such layer", place="model.py:41 in forward"
)
FULL = Finding(code="DISK_FULL", level="error", seen="0 GiB left", todo="free some", node="node1, node2")
SICK = Finding(code="GPU_SICK", level="error", seen="Xid 79", todo="reset it", node="node3", blames_node=True)
SLOW = Finding(code="SLOW_NODE", level="warning", seen="half the speed", todo="wait", node="node4", blames_node=True)
EVIDENCE = Evidence(
    number=1,
    start=Start(first_committed=0),
    end=End(time_unix_s=9.0, exit_code=1),
    ledger=[attempt_of(reason="failed", failed_on="node2", action="relaunch")],
    findings=[],
    mark=None,
    previous_marks=[],
    stop={},
    hang={},
    had_joined=True,
)
QUIET = Surroundings(violent_end="", lost_nodes=(), had_oom_kill=False, head_node="node1")
KILLED = "rank 3 on node2: Killed"
LOST = replace(MARK, rank=0, host="node1", message="RuntimeError: Connection closed by peer [10.0.0.2]:31245", place="")
EXITED = TaskEnd((3,), "node2", "Exited with exit code 1")
OUTLIVED = TaskEnd((0, 1), "node1", "Killed")
SILENT = "rank 2 on node2: ended with exit code 127"


@pytest.mark.parametrize(
    ("evidence", "around", "cause"),
    [
        ({"mark": MARK}, {}, "rank 3 on node2: ValueError: no such layer"),
        ({"mark": MARK}, {"violent_end": KILLED}, KILLED),
        ({"mark": MARK, "findings": [SICK]}, {"violent_end": KILLED}, SICK.line),
        ({"findings": [SLOW]}, {"violent_end": KILLED}, KILLED),
        ({"hang": {"sentence": "rank 1 waits"}, "findings": [SICK]}, {"violent_end": KILLED}, "rank 1 waits"),
        ({"mark": MARK}, {"lost_nodes": ("node2", "node3")}, "node failure on node2,node3"),
        ({}, {}, ""),
        ({"mark": MARK}, {"violent_end": "rank 0 on node1: Killed", "ends": [EXITED, OUTLIVED]}, str(MARK)),
        ({"mark": LOST}, {"violent_end": KILLED, "ends": [EXITED, OUTLIVED]}, KILLED),
        ({"mark": MARK}, {"violent_end": KILLED, "ends": [OUTLIVED, EXITED]}, KILLED),
        ({"mark": LOST}, {"silent_end": SILENT}, SILENT),
        ({}, {"own_words": "srun: unrecognized option"}, "srun: unrecognized option"),
        ({"mark": MARK}, {"own_words": "srun: Socket timed out"}, str(MARK)),
        (
            {"mark": replace(MARK, time_unix_s=3.0), "hang": {"sentence": "it waits", "time_unix_s": 99.0}},
            {},
            str(MARK),
        ),
        (
            {"mark": replace(MARK, time_unix_s=98.0), "hang": {"sentence": "it waits", "time_unix_s": 99.0}},
            {},
            "it waits",
        ),
    ],
    ids=[
        *("mark", "srun first", "preflight first", "warnings are no cause", "hang first", "lost nodes", "nothing"),
        *(
            "one failed, the others were killed",
            "all lost one",
            "killed first",
            "no mark",
            "srun itself",
            "a rank, not srun",
        ),
        "failed before the hang",
        "the mark of the hang itself",
    ],
)
def test_the_cause_is_the_word_of_the_best_witness(
    evidence: dict[str, Any], around: dict[str, Any], cause: str
) -> None:
    diagnosis = diagnose(replace(EVIDENCE, **evidence), replace(QUIET, **around), has_failed=True)
    assert diagnosis.cause == cause


def test_a_mark_is_no_cause_where_the_ranks_ended_as_they_should() -> None:
    diagnosis = diagnose(replace(EVIDENCE, mark=MARK, end=End(time_unix_s=9.0, exit_code=75)), QUIET, has_failed=False)
    assert (diagnosis.cause, diagnosis.exit_code) == ("", 75)


@pytest.mark.parametrize(
    ("violent_end", "had_oom_kill", "is_named"),
    [("rank 0 on node1: Killed", True, True), ("", True, True), (KILLED, True, False), ("", False, False)],
    ids=["here", "no words", "on another node", "none"],
)
def test_the_kernel_is_named_for_ranks_of_its_own_node(violent_end: str, had_oom_kill: bool, is_named: bool) -> None:
    around = replace(QUIET, violent_end=violent_end, had_oom_kill=had_oom_kill)
    diagnosis = diagnose(replace(EVIDENCE, end=End(time_unix_s=9.0, exit_code=137)), around, has_failed=True)
    assert diagnosis.cause.endswith("(an oom-kill by the kernel)") is is_named


@pytest.mark.parametrize(
    ("evidence", "around", "failed_on", "to_avoid"),
    [
        ({"mark": MARK}, {}, "node2", "node2"),
        ({"mark": MARK, "end": replace(EVIDENCE.end, last_committed=4)}, {}, "node2", ""),
        ({"mark": MARK, "previous_marks": [MARK]}, {}, "node2", ""),
        ({"mark": replace(MARK, host="node4")}, {}, "node4", ""),
        ({"findings": [SICK]}, {}, "node3", "node3"),
        ({"findings": [FULL]}, {}, "", ""),
        ({"mark": MARK}, {"lost_nodes": ("node1", "node3")}, "node2", "node1 node3"),
        ({"mark": MARK, "marks": [MARK, replace(MARK, host="node1")]}, {}, "", ""),
        ({"mark": MARK, "marks": [MARK, LOST]}, {}, "node2", "node2"),
        ({"mark": replace(LOST, host="node2")}, {}, "", ""),
        ({"mark": LOST}, {"silent_end": SILENT}, "node2", "node2"),
        ({"mark": LOST}, {"silent_end": "rank 2 had ended"}, "", ""),
        ({}, {"silent_end": SILENT, "ends": [TaskEnd((2,), "node2", "Exited with exit code 127")]}, "node2", "node2"),
        ({}, {"silent_end": SILENT, "ends": [EXITED, replace(EXITED, tasks=(0,), node="node1")]}, "", ""),
        ({"mark": MARK, "marks": [MARK, replace(MARK, host="node1")]}, {"silent_end": f"{MARK}; and"}, "", ""),
    ],
    ids=[
        *("twice", "progress", "own exception", "another node", "preflight", "several without blame", "lost"),
        *(
            "on all nodes",
            "others lost it",
            "one that lost another",
            "no mark",
            "ended too early",
            "one exit",
            "exits",
            "exit on all",
        ),
    ],
)
def test_a_node_is_avoided_where_it_is_to_blame(
    evidence: dict[str, Any], around: dict[str, Any], failed_on: str, to_avoid: str
) -> None:
    diagnosis = diagnose(replace(EVIDENCE, **evidence), replace(QUIET, **around), has_failed=True)
    assert diagnosis.failed_on == tuple(failed_on.split())
    assert diagnosis.to_avoid == tuple(to_avoid.split())


def test_the_same_exception_counts_as_repeated_unless_a_person_started_the_run_again() -> None:
    evidence = replace(EVIDENCE, mark=MARK, previous_marks=[replace(MARK, rank=0, host="node9")])
    assert diagnose(evidence, QUIET, has_failed=True).is_repeated
    stopped = replace(evidence, ledger=[attempt_of(reason="failed", failed_on="node2", action="stop")])
    assert not diagnose(stopped, QUIET, has_failed=True).is_repeated


ENDS = [TaskEnd((0,), "node1", "Exited with exit code 1"), TaskEnd((2,), "node2", "Exited with exit code 127")]


@pytest.mark.parametrize(
    ("marks", "ends", "words"),
    [
        ([], ENDS, "rank 0 on node1: ended with exit code 1"),
        ([LOST], ENDS, "rank 2 on node2: ended with exit code 127; its last words: train: command not found"),
        ([LOST, replace(MARK, rank=1)], ENDS, ""),
        (
            [LOST],
            [ENDS[0], TaskEnd((2, 3), "node2", "Terminated")],
            f"rank 1 had ended with exit code 0 while others went on; its last words: no data left; then {LOST}; all "
            "ranks must take the same number of steps and end together",
        ),
        ([LOST], [ENDS[0], TaskEnd((1, 2, 3), "node2", "Terminated")], ""),
        ([LOST], [TaskEnd((2, 3), "node2", "Terminated"), ENDS[0]], "rank 2 on node2: Terminated"),
        ([LOST], [], ""),
        (
            [LOST, replace(MARK, rank=2, message="the script ended with code 2", place="")],
            [],
            "rank 2 on node2: the script ended with code 2; its last words: train: command not found",
        ),
    ],
    ids=[
        *(
            "no marks",
            "no Python",
            "another cause",
            "ended too early",
            "nobody ended too early",
            "a signal from outside",
        ),
        *("not known", "sys.exit"),
    ],
)
def test_a_rank_that_left_no_mark(tmp_path: Path, marks: list[FailureMark], ends: list[TaskEnd], words: str) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    run.rank_log(1, 2).write_text("step 1\ntrain: command not found\n\n")
    run.rank_log(1, 1).write_text("step 1\n\x1b[33mno data left\x1b[0m\r\n")
    for mark in marks:
        leave_mark(run, 1, mark)
    assert silent_end(run, 1, ends, marks=read_marks(run, 1), num_ranks=4) == words


def test_a_node_that_lacks_the_program_is_no_wrong_use() -> None:
    evidence = replace(EVIDENCE, end=End(time_unix_s=9.0, exit_code=2))
    assert diagnose(evidence, replace(QUIET, silent_end=SILENT), has_failed=True).exit_code == 1
    assert diagnose(evidence, QUIET, has_failed=True).exit_code == 2


def test_ranks_whose_step_slurm_did_not_create_had_not_begun() -> None:
    no_step = "Unable to create step for job 7: it still has 7.0 of an earlier attempt"
    diagnosis = diagnose(EVIDENCE, replace(QUIET, violent_end=no_step), has_failed=True)
    assert not diagnosis.had_begun and not diagnosis.lacks_room
    assert diagnose(EVIDENCE, QUIET, has_failed=True).had_begun


def test_ranks_that_ended_well_had_begun_whatever_the_preflight_found() -> None:
    evidence = replace(EVIDENCE, findings=[SICK], end=End(time_unix_s=9.0, exit_code=0))
    assert diagnose(evidence, QUIET, has_failed=False).had_begun
    assert not diagnose(evidence, QUIET, has_failed=True).had_begun


def test_room_that_lacked_is_the_preflights_word() -> None:
    diagnosis = diagnose(replace(EVIDENCE, findings=[FULL]), QUIET, has_failed=True)
    assert diagnosis.lacks_room and not diagnosis.had_begun
    assert not diagnose(replace(EVIDENCE, findings=[SICK]), QUIET, has_failed=True).lacks_room


def test_a_stop_without_a_save_says_what_time_was_left() -> None:
    stop = {"event": "stop", "asked_by": "TERM", "saved": False, "left_s": 4.2, "save_s": 30.0}
    evidence = replace(EVIDENCE, stop=stop)
    assert "4 s" in evidence.not_saved and "30 s" in evidence.not_saved


CRASH = """
import ctypes, faulthandler, sys, threading, time

faulthandler.enable()

def load(address):
    ctypes.string_at(address)

def train(address):
    if sys.argv[1] == "main":
        load(address)
    # A thread of a library, which has no frame of Python.
    thread = ctypes.c_ulong()
    create = ctypes.CDLL(None).pthread_create
    create(ctypes.byref(thread), None, ctypes.c_void_p(address), None), time.sleep(60)

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
train(8)
"""


@pytest.mark.parametrize(
    ("thread", "place"),
    [("main", " at train.py:7 in load"), ("another", ", the main thread at train.py:15 in train")],
)
def test_a_crash_is_told_with_its_place_in_the_program(tmp_path: Path, thread: str, place: str) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    (tmp_path / "train.py").write_text(CRASH)
    with run.rank_log(1, 3).open("w") as log:
        log.write("step 1\n")
        log.flush()
        subprocess.run([sys.executable, tmp_path / "train.py", thread], stderr=log, check=False)
    words = "rank 3 on node2: Segmentation fault"
    assert with_crash_place(words, run, 1) == words + place


def test_an_abort_is_told_with_what_was_thrown(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    thrown = "[PG ID 0 Rank 3] Process group watchdog thread terminated with exception: Watchdog caught collective"
    run.rank_log(1, 3).write_text(
        f"terminate called after throwing an instance of 'E'\n  what():  {thrown}\nframe #0\n"
    )
    words = "rank 3 on node2: Aborted (core dumped)"
    assert with_crash_place(words, run, 1) == f"{words}: {thrown}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("os.environ['DATA_DIR']", "DATA_DIR"),
        ("env = os.environ\nint(env['MY_LR'])", "MY_LR"),
        # Slurm's own variables are no shell's to export, and a mapping of the program is no environment.
        ("os.environ['SLURM_TMPDIR_OF_SITE']", ""),
        ("{}['DATA_DIR']", ""),
        ("raise KeyError('DATA_DIR')", ""),
    ],
)
def test_a_variable_that_the_job_lacks_is_told_with_what_exports_it(tmp_path: Path, source: str, name: str) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    (tmp_path / "train.py").write_text(f"import os\n{source}\n")
    with run.rank_log(1, 3).open("w") as log:
        subprocess.run([sys.executable, tmp_path / "train.py"], stderr=log, env={}, check=False)
    words = f"rank 3 on node2: {run.rank_log(1, 3).read_text().splitlines()[-1]}"
    told = with_missing_variable(words, run, 1)
    assert told.startswith(words)
    assert (f"cluster.export=[{name}]" in told) if name else told == words
    # The exception is not the node's, whatever is said of it.
    mark = FailureMark(rank=3, host="node2", exit_code=1, message=words.partition(": ")[2], place="train.py:2")
    assert told.startswith(str(mark))


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault. ",
            " at data.py:9 in decode",
        ),
        ("ProcessExitedException: process 1 terminated with signal SIGABRT", " at data.py:9 in decode"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", ""),
        ("ValueError: odd", ""),
    ],
)
def test_a_crash_of_a_process_of_its_own_is_told_with_its_place(tmp_path: Path, words: str, place: str) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    frames = '  File "/me/data.py", line 9 in decode\n  File "/me/data.py", line 30 in __getitem__\n'
    crash = f"Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n{frames}"
    run.rank_log(1, 3).write_text(f"{crash}\nTraceback (most recent call last):\n  File x\n{words}\n")
    assert with_crash_place(f"rank 3 on node2: {words}", run, 1) == f"rank 3 on node2: {words}{place}"


@pytest.mark.parametrize("words", [KILLED, "", "rank 3 on node2: Aborted"], ids=["killed", "no words", "no log"])
def test_other_ends_are_told_as_they_are(tmp_path: Path, words: str) -> None:
    assert with_crash_place(words, RunDirectory(tmp_path), 1) == words


def test_a_task_that_is_no_rank_is_quoted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    (run.attempt_logs(1) / "node_1.log").write_text(
        "Traceback (most recent call last):\n  File x\nTimeoutError: no store\n"
    )
    ends = [TaskEnd((0,), "node1", "Terminated"), TaskEnd((1,), "node2", "Exited with exit code 1")]
    words = "task 1 on node2: ended with exit code 1; its last words: TimeoutError: no store"
    assert task_end(run, 1, ends) == words
    assert task_end(run, 1, ends[:1]) == task_end(run, 1, []) == ""
    assert diagnose(EVIDENCE, replace(QUIET, own_words=words), has_failed=True).failed_on == ()
    # Of a step with a rank for each node the task is the rank.
    assert silent_end(run, 1, ends[1:], marks=[], num_ranks=2) == words.replace("task", "rank")
