from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import EXIT_FAILURE
from slurm_train.rundir import cause as cause_module
from slurm_train.rundir.attempts import Round
from slurm_train.rundir.cause import KINDS, Kind
from slurm_train.rundir.events import (
    FailureMark,
    Finding,
    append_event,
    leave_mark,
    message_of,
    would_last,
    write_preflight,
)
from slurm_train.rundir.ledger import Action, Attempt, End, Reason, Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.records import StepEnd, TaskEnd
from slurm_train.supervise.best_effort import BestEffort
from slurm_train.supervise.decision import advice_on, exit_code_of, failed_on, fails_alike, nodes_to_avoid
from slurm_train.supervise.evidence import Traces, cause_of
from slurm_train.supervise.job import Job
from slurm_train.supervise.step import Step

MARK = FailureMark(
    rank=3, host="node2", exit_code=1, message="ValueError: no such layer", place="model.py:41 in forward"
)
FULL = Finding(code="DISK_FULL", level="error", seen="0 GiB left", todo="free some", node="node1, node2")
SICK = Finding(code="GPU_SICK", level="error", seen="Xid 79", todo="reset it", node="node3", blames_node=True)
SLOW = Finding(code="SLOW_NODE", level="warning", seen="half the speed", todo="wait", node="node4", blames_node=True)
FAILED = End(time_unix_s=5.0, reason=Reason.FAILED, action=Action.RELAUNCH, failed_on=("node2",))
TRACES = Traces(
    number=1,
    exit_code=1,
    end=End(time_unix_s=9.0),
    past=[Attempt(0, Start(), FAILED)],
    had_joined=True,
    start=Start(job_id="7", nodes=("node1", "node2"), world_size=4),
)
PROGRESS = {"end": End(time_unix_s=9.0, first_step=1, last_step=9)}


def traces_of(
    traces: Traces = TRACES,
    *,
    violent: TaskEnd | None = None,
    ends: Sequence[TaskEnd] = (),
    own_words: str = "",
    **facts: Any,
) -> Traces:
    """Returns traces with other facts."""
    return replace(traces, step=StepEnd(violent=violent, tasks=tuple(ends), own_words=own_words), **facts)


def killed(rank: int, node: str) -> TaskEnd:
    return TaskEnd((rank,), node, "Killed")


KILLED = killed(3, "node2")
LOST = replace(MARK, rank=0, host="node1", message="RuntimeError: Connection closed by peer [10.0.0.2]:31245", place="")
EXITED = TaskEnd((3,), "node2", "Exited with exit code 1")
OUTLIVED = TaskEnd((0, 1), "node1", "Killed")
NO_PROGRAM = TaskEnd((2,), "node2", "Exited with exit code 127")
SILENT = "rank 2 on node2: ended with exit code 127"
ENDED_WELL = [TaskEnd((0,), "node1", "Exited with exit code 1"), TaskEnd((2, 3), "node2", "Terminated")]


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"marks": [MARK]}, "rank 3 on node2: ValueError: no such layer"),
        ({"marks": [MARK], "violent": KILLED}, "rank 3 on node2: Killed"),
        ({"marks": [MARK], "findings": [SICK], "violent": KILLED}, SICK.line),
        ({"findings": [SLOW], "violent": KILLED}, "rank 3 on node2: Killed"),
        ({"hang": {"sentence": "rank 1 waits"}, "findings": [SICK], "violent": KILLED}, "rank 1 waits"),
        ({"marks": [MARK], "lost_nodes": ("node2", "node3")}, "node failure on node2,node3"),
        ({}, "None"),
        ({"marks": [MARK], "violent": killed(0, "node1"), "ends": [EXITED, OUTLIVED]}, str(MARK.cause)),
        ({"marks": [LOST], "violent": KILLED, "ends": [EXITED, OUTLIVED]}, "rank 3 on node2: Killed"),
        ({"marks": [MARK], "violent": KILLED, "ends": [OUTLIVED, EXITED]}, "rank 3 on node2: Killed"),
        ({"marks": [LOST], "ends": [NO_PROGRAM]}, SILENT),
        ({"own_words": "srun: unrecognized option"}, "srun: unrecognized option"),
        ({"marks": [MARK], "own_words": "srun: Socket timed out"}, str(MARK.cause)),
        (
            {"marks": [replace(MARK, time_unix_s=3.0)], "hang": {"sentence": "it waits", "time_unix_s": 99.0}},
            str(MARK.cause),
        ),
        (
            {"marks": [replace(MARK, time_unix_s=98.0)], "hang": {"sentence": "it waits", "time_unix_s": 99.0}},
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
def test_the_cause_is_the_word_of_the_best_witness(facts: dict[str, Any], cause: str) -> None:
    assert str(cause_of(traces_of(**facts))) == cause


def test_a_mark_is_no_cause_where_the_ranks_ended_as_they_should() -> None:
    traces = replace(TRACES, marks=[MARK], exit_code=75)
    assert (cause_of(traces), exit_code_of(traces, None)) == (None, 75)


@pytest.mark.parametrize(
    ("violent", "had_oom_kill", "is_named"),
    [(killed(0, "node1"), True, True), (None, True, True), (KILLED, True, False), (None, False, False)],
    ids=["here", "no words", "on another node", "none"],
)
def test_the_kernel_is_named_for_ranks_of_its_own_node(
    violent: TaskEnd | None, had_oom_kill: bool, is_named: bool
) -> None:
    cause = cause_of(traces_of(exit_code=137, violent=violent, had_oom_kill=had_oom_kill))
    assert str(cause).endswith("(an oom-kill by the kernel)") is is_named
    assert (cause is not None and cause.kind == "memory") is is_named


@pytest.mark.parametrize(
    ("facts", "blamed", "to_avoid"),
    [
        ({"marks": [MARK]}, "node2", "node2"),
        ({"marks": [MARK], **PROGRESS}, "node2", ""),
        ({"marks": [MARK], "previous_marks": [MARK]}, "node2", ""),
        ({"marks": [replace(MARK, host="node4")]}, "node4", ""),
        ({"findings": [SICK]}, "node3", "node3"),
        ({"findings": [FULL]}, "", ""),
        ({"marks": [MARK], "lost_nodes": ("node1", "node3")}, "node2", "node1 node3"),
        ({"marks": [MARK, replace(MARK, host="node1")]}, "", ""),
        ({"marks": [MARK, LOST]}, "node2", "node2"),
        ({"marks": [replace(LOST, host="node2")]}, "", ""),
        ({"marks": [LOST], "ends": [NO_PROGRAM]}, "node2", "node2"),
        ({"marks": [LOST], "ends": ENDED_WELL}, "", ""),
        ({"ends": [NO_PROGRAM]}, "node2", "node2"),
        ({"ends": [NO_PROGRAM, replace(EXITED, tasks=(0,), node="node1")]}, "", ""),
        ({"marks": [replace(one, message="the script ended with code 1") for one in (MARK, LOST)]}, "", ""),
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
def test_a_node_is_avoided_where_it_is_to_blame(facts: dict[str, Any], blamed: str, to_avoid: str) -> None:
    traces = traces_of(**facts)
    cause = cause_of(traces)
    assert failed_on(traces, cause) == tuple(blamed.split())
    assert nodes_to_avoid(traces, cause) == tuple(to_avoid.split())


def test_the_same_exception_is_known_again_on_whatever_rank() -> None:
    traces = replace(TRACES, marks=[MARK], previous_marks=[replace(MARK, rank=0, host="node9")])
    assert fails_alike(traces, cause_of(traces))
    for mark in (replace(MARK, message="ValueError: no"), replace(MARK, place="a.py:1 in f")):
        assert not fails_alike(replace(traces, previous_marks=[mark]), cause_of(traces))
    passing = replace(traces, marks=[replace(MARK, lasting=False)])
    assert not fails_alike(passing, cause_of(passing))
    outlived = traces_of(traces, violent=KILLED)
    assert not fails_alike(outlived, cause_of(outlived))


def test_one_row_gives_a_diagnosis_its_retry_its_blame_and_its_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Kind("address", "illegal address", lasting=True, blames_node=False, advice="see the kernel")
    error = RuntimeError("CUDA error: an illegal address")

    def verdict() -> tuple[str, bool, tuple[str, ...], str]:
        mark = replace(MARK, message=message_of(error), lasting=would_last(error))
        traces = replace(TRACES, marks=[mark], previous_marks=[mark])
        cause = cause_of(traces)
        assert cause is not None
        return cause.kind, fails_alike(traces, cause), failed_on(traces, cause), advice_on(cause.words)

    assert verdict() == ("passing", False, ("node2",), "")
    monkeypatch.setattr(cause_module, "KINDS", (row, *KINDS))
    assert verdict() == ("address", True, (), "; see the kernel")


ENDS = [TaskEnd((0,), "node1", "Exited with exit code 1"), NO_PROGRAM]
LOGS = {1: "step 1\n\x1b[33mno data left\x1b[0m\r\n", 2: "step 1\ntrain: command not found\n\n"}


@pytest.mark.parametrize(
    ("marks", "ends", "words"),
    [
        ([], ENDS, "rank 0 on node1: ended with exit code 1"),
        ([LOST], ENDS, "rank 2 on node2: ended with exit code 127; its last words: train: command not found"),
        ([LOST, replace(MARK, rank=1)], ENDS, "rank 1 on node2: ValueError: no such layer"),
        (
            [LOST],
            ENDED_WELL,
            f"rank 1 had ended with exit code 0 while others went on; its last words: no data left; then {LOST.cause}; "
            "all ranks must take the same number of steps and end together",
        ),
        ([LOST], [ENDS[0], TaskEnd((1, 2, 3), "node2", "Terminated")], str(LOST.cause)),
        ([LOST], [TaskEnd((2, 3), "node2", "Terminated"), ENDS[0]], "rank 2 on node2: Terminated"),
        ([LOST], [], str(LOST.cause)),
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
def test_a_rank_that_left_no_mark(marks: list[FailureMark], ends: list[TaskEnd], words: str) -> None:
    traces = traces_of(marks=marks, ends=ends, read_log=lambda rank: LOGS.get(rank, ""))
    assert str(cause_of(traces)) == words


def test_a_node_that_lacks_the_program_is_no_wrong_use() -> None:
    traces = replace(TRACES, exit_code=2)
    silent = traces_of(traces, ends=[NO_PROGRAM])
    assert exit_code_of(silent, cause_of(silent)) == EXIT_FAILURE
    assert exit_code_of(traces, cause_of(traces)) == 2


def test_ranks_whose_step_slurm_did_not_create_had_not_begun() -> None:
    no_step = TaskEnd((), "", "Unable to create step for job 7: it still has 7.0 of an earlier attempt")
    assert not traces_of(violent=no_step).had_begun
    assert TRACES.had_begun


def test_ranks_that_ended_well_had_begun_whatever_the_preflight_found() -> None:
    traces = replace(TRACES, findings=[SICK])
    assert replace(traces, exit_code=0).had_begun and not traces.had_begun


def test_a_stop_without_a_save_says_what_time_was_left(read: Callable[..., Traces], run: RunDirectory) -> None:
    append_event(run, "stop", attempt=1, asked_by="TERM", saved=False, left_s=4.2, save_s=30.0)
    write_preflight(run, 1, {"findings": [SICK.as_json()]})
    traces = read()
    assert "4 s" in traces.not_saved and "30 s" in traces.not_saved
    end = traces.end
    assert (end.exit_code, end.asked_by, end.found, end.seconds) == (1, "TERM", "GPU_SICK node3", {"start_s": 6.0})
    assert TRACES.not_saved == ""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    return run


@pytest.fixture
def read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Traces]:
    """Reads what attempt 1 has left; facts of the step may be given."""

    def read(**ended: Any) -> Traces:
        job = Job({})
        job.job_id = "7"
        step = Step(Start(nodes=("node1",), world_size=2, job_id="7"))
        monkeypatch.setattr(step, "ended", lambda _attempt: StepEnd(**ended))
        monkeypatch.setattr("time.time", lambda: 9.0)
        opening = Round(world_size=2, first_step=0, start_unix_s=3.0)
        return Traces.read(
            run,
            1,
            opening,
            1,
            job=job,
            step=step,
            best_effort=BestEffort(),
            last_committed=None,
            is_own_code=False,
            had_oom_kill=False,
        )

    return read


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
def test_a_crash_is_told_with_its_place_in_the_program(
    read: Callable[..., Traces], run: RunDirectory, thread: str, place: str
) -> None:
    (run.path / "train.py").write_text(CRASH)
    with run.rank_log(1, 3).open("w") as log:
        log.write("step 1\n")
        log.flush()
        subprocess.run([sys.executable, run.path / "train.py", thread], stderr=log, check=False)
    end = TaskEnd((3,), "node2", "Segmentation fault")
    assert str(cause_of(read(violent=end))) == f"rank 3 on node2: Segmentation fault{place}"


def test_an_abort_is_told_with_what_was_thrown(read: Callable[..., Traces], run: RunDirectory) -> None:
    thrown = "[PG ID 0 Rank 3] Process group watchdog thread terminated with exception: Watchdog caught collective"
    run.rank_log(1, 3).write_text(
        f"terminate called after throwing an instance of 'E'\n  what():  {thrown}\nframe #0\n"
    )
    cause = cause_of(read(violent=TaskEnd((3,), "node2", "Aborted (core dumped)")))
    assert str(cause) == f"rank 3 on node2: Aborted (core dumped): {thrown}"
    assert cause is not None and cause.blames_node, "its words alone would be those of one that has lost another"


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
def test_a_variable_that_the_job_lacks_is_told_with_what_exports_it(
    read: Callable[..., Traces], run: RunDirectory, source: str, name: str
) -> None:
    (run.path / "train.py").write_text(f"import os\n{source}\n")
    with run.rank_log(1, 3).open("w") as log:
        subprocess.run([sys.executable, run.path / "train.py"], stderr=log, env={}, check=False)
    message = run.rank_log(1, 3).read_text().splitlines()[-1]
    mark = replace(MARK, message=message, place="train.py:2")
    leave_mark(run, 1, mark)
    traces = read()
    cause = cause_of(traces)
    told = str(cause)
    assert told.startswith(f"rank 3 on node2: {message}")
    assert (f"cluster.export=[{name}]" in told) if name else told == str(mark.cause)
    assert fails_alike(replace(traces, previous_marks=[mark]), cause), "whatever is said of it"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.",
            " at data.py:9 in decode",
        ),
        ("ProcessExitedException: process 1 terminated with signal SIGABRT", " at data.py:9 in decode"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", ""),
        ("ValueError: odd", ""),
    ],
)
def test_a_crash_of_a_process_of_its_own_is_told_with_its_place(words: str, place: str) -> None:
    frames = '  File "/me/data.py", line 9 in decode\n  File "/me/data.py", line 30 in __getitem__\n'
    crash = f"Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n{frames}"
    log = f"{crash}\nTraceback (most recent call last):\n  File x\n{words}\n"
    traces = replace(TRACES, marks=[replace(MARK, message=words)], read_log=lambda _rank: log)
    assert str(cause_of(traces)) == f"rank 3 on node2: {words}{place}"


@pytest.mark.parametrize("end", [KILLED, TaskEnd((3,), "node2", "Aborted")], ids=["killed", "no log"])
def test_other_ends_are_told_as_they_are(end: TaskEnd) -> None:
    assert str(cause_of(traces_of(violent=end))) == f"rank 3 on node2: {end.words}"


def test_a_task_that_is_no_rank_is_quoted(read: Callable[..., Traces], run: RunDirectory) -> None:
    (run.attempt_logs(1) / "node_1.log").write_text(
        "Traceback (most recent call last):\n  File x\nTimeoutError: no store\n"
    )
    ends = [TaskEnd((0,), "node1", "Terminated"), TaskEnd((1,), "node2", "Exited with exit code 1")]

    def told(*ends: TaskEnd, are_ranks: bool = False) -> tuple[str, tuple[str, ...]]:
        traces = read(tasks=ends, are_ranks=are_ranks)
        cause = cause_of(traces)
        return str(cause), failed_on(traces, cause)

    words = "task 1 on node2: ended with exit code 1; its last words: TimeoutError: no store"
    assert told(*ends) == (words, ())
    assert told(*ends[:1]) == told() == ("None", ())
    # Of a step with a rank for each node the task is the rank.
    assert told(*ends[1:], are_ranks=True)[0] == words.replace("task", "rank")
