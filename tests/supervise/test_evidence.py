from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.events import FailureMark, Finding
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.evidence import Evidence, Surroundings, diagnose, with_crash_place

MARK = FailureMark(
    rank=3, host="node2", exit_code=1, message="ValueError: no such layer", place="model.py:41 in forward"
)
FULL = Finding(code="DISK_FULL", level="error", seen="0 GiB left", todo="free some", node="node1, node2")
SICK = Finding(code="GPU_SICK", level="error", seen="Xid 79", todo="reset it", node="node3", blames_node=True)
SLOW = Finding(code="SLOW_NODE", level="warning", seen="half the speed", todo="wait", node="node4", blames_node=True)
EVIDENCE = Evidence(
    attempt=1,
    progress={"exit_code": 1},
    seconds={},
    start_unix_s=0.0,
    end_unix_s=9.0,
    ledger=[{"attempt": 0, "reason": "failed", "failed_on": "node2", "action": "relaunch"}],
    has_progress=False,
    findings=[],
    mark=None,
    previous_marks=[],
    stop={},
    hang={},
    had_joined=True,
)
QUIET = Surroundings(violent_end="", lost_nodes=(), had_oom_kill=False, head_node="node1")
KILLED = "rank 3 on node2: Killed"


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
    ],
    ids=["mark", "srun first", "preflight first", "warnings are no cause", "hang first", "lost nodes", "nothing"],
)
def test_the_cause_is_the_word_of_the_best_witness(
    evidence: dict[str, Any], around: dict[str, Any], cause: str
) -> None:
    diagnosis = diagnose(replace(EVIDENCE, **evidence), replace(QUIET, **around), has_failed=True)
    assert diagnosis.cause == cause


def test_a_mark_is_no_cause_where_the_ranks_ended_as_they_should() -> None:
    diagnosis = diagnose(replace(EVIDENCE, mark=MARK, progress={"exit_code": 75}), QUIET, has_failed=False)
    assert (diagnosis.cause, diagnosis.exit_code) == ("", 75)


@pytest.mark.parametrize(
    ("violent_end", "had_oom_kill", "is_named"),
    [("rank 0 on node1: Killed", True, True), ("", True, True), (KILLED, True, False), ("", False, False)],
    ids=["here", "no words", "on another node", "none"],
)
def test_the_kernel_is_named_for_ranks_of_its_own_node(violent_end: str, had_oom_kill: bool, is_named: bool) -> None:
    around = replace(QUIET, violent_end=violent_end, had_oom_kill=had_oom_kill)
    diagnosis = diagnose(replace(EVIDENCE, progress={"exit_code": 137}), around, has_failed=True)
    assert diagnosis.cause.endswith("(an oom-kill by the kernel)") is is_named


@pytest.mark.parametrize(
    ("evidence", "around", "failed_on", "to_avoid"),
    [
        ({"mark": MARK}, {}, "node2", "node2"),
        ({"mark": MARK, "has_progress": True}, {}, "node2", ""),
        ({"mark": MARK, "previous_marks": [MARK]}, {}, "node2", ""),
        ({"mark": replace(MARK, host="node4")}, {}, "node4", ""),
        ({"findings": [SICK]}, {}, "node3", "node3"),
        ({"findings": [FULL]}, {}, "", ""),
        ({"mark": MARK}, {"lost_nodes": ("node1", "node3")}, "node2", "node1 node3"),
    ],
    ids=["twice", "progress", "own exception", "another node", "preflight", "several without blame", "lost"],
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
    stopped = replace(evidence, ledger=[{**EVIDENCE.ledger[0], "action": "stop"}])
    assert not diagnose(stopped, QUIET, has_failed=True).is_repeated


def test_room_that_lacked_is_the_preflights_word() -> None:
    diagnosis = diagnose(replace(EVIDENCE, findings=[FULL]), QUIET, has_failed=True)
    assert diagnosis.lacks_room and not diagnosis.had_begun
    assert not diagnose(replace(EVIDENCE, findings=[SICK]), QUIET, has_failed=True).lacks_room


def test_a_stop_without_a_save_says_what_time_was_left() -> None:
    stop = {"event": "stop", "asked_by": "TERM", "saved": False, "left_s": 4.2, "save_s": 30.0}
    evidence = replace(EVIDENCE, stop=stop, findings=[SICK], seconds={"start_s": 3.0})
    assert "4 s" in evidence.not_saved and "30 s" in evidence.not_saved
    expected = {"exit_code": 1, "asked_by": "TERM", "found": "GPU_SICK node3", "start_s": 3.0}
    assert evidence.facts == expected and EVIDENCE.facts == {"exit_code": 1}


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


@pytest.mark.parametrize("words", [KILLED, "", "rank 3 on node2: Aborted"], ids=["killed", "no words", "no log"])
def test_other_ends_are_told_as_they_are(tmp_path: Path, words: str) -> None:
    assert with_crash_place(words, RunDirectory(tmp_path), 1) == words
