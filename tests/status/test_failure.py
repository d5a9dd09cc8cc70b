from __future__ import annotations

import os
from typing import Any

import pytest

from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.paths import RunDirectory
from slurm_train.status.failure import error_at_end, find_failure, first_failed_rank, last_words, tracebacks
from tests.support.run_facts import attempt

ONE = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: no such layer"""
LONG = """\
Traceback (most recent call last):
  File "b.py", line 2, in g
    h()
    ^^^
torch.AcceleratorError: device error
It was reported late.
For debugging, look earlier."""
CHAINED = f"""\
{ONE}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "c.py", line 3, in <module>
RuntimeError: again"""
CUT = ONE.rpartition("\n")[0]
NOTE = "rank 3 on node2: ValueError: no such layer; the ranks are started again in this allocation"
PEER = 'Traceback (most recent call last):\n  File "x", line 1\nRuntimeError: connection closed by peer'


CRASH = 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 1 in f'
GONE = PEER.replace("connection closed by peer", "worker 7 is killed by signal: Aborted.")
KILLED = "rank 5 on node3: Killed; the ranks are started again in this allocation"
RAISED, CLOSED = "ValueError: no such layer", "RuntimeError: connection closed by peer"
# The ledger's note, the ranks' logs in the order in which they ended, their marks; rank, host, kind and excerpt.
CASES: dict[str, tuple[str, dict[int, str], dict[int, str], tuple[int | None, str, str, str]]] = {
    "the first mark": (NOTE, {3: f"step 1\n{ONE}\n", 0: PEER}, {3: RAISED, 0: CLOSED}, (3, "node2", "traceback", ONE)),
    "one that was killed comes before its peers' marks": (
        *(KILLED, {5: "step 1\nstep 2\n", 0: PEER}, {0: CLOSED}),
        (5, "node3", "last lines", "step 1\nstep 2"),
    ),
    "one that crashed with its stacks": (
        *(
            "rank 5 on node3: Aborted at a.py:1 in f; the ranks are started again",
            {5: f"{ONE}\nmalloc(): no\n{CRASH}\n"},
            {},
        ),
        (5, "node3", "traceback", f"{ONE}\nmalloc(): no\n{CRASH}"),
    ),
    "an exception after a crash of a process of its own": (
        *("rank 5 on node3: Aborted", {5: f"{CRASH}\n{ONE}\n"}, {}),
        (5, "node3", "traceback", ONE),
    ),
    "a process of its loader that crashed": (
        "rank 5 on node3: RuntimeError: worker 7 is killed by signal: Aborted. at a.py:1 in f; the code of",
        {5: f"{ONE}\n{CRASH}\n{GONE}\n"},
        {5: "RuntimeError: worker 7 is killed by signal: Aborted."},
        (5, "node3", "traceback", f"{CRASH}\n\n{GONE}"),
    ),
    "where nobody is named the log that ended first": (
        *("the ranks ended with code 1; see the logs of this attempt", {1: "fine\n", 7: f"{LONG}\n", 0: PEER}, {}),
        (7, "", "traceback", LONG),
    ),
    "nobody for a lost node": ("node failure on node2", {0: PEER}, {}, (None, "", "", "")),
    "one without a log": (NOTE, {}, {3: RAISED}, (3, "node2", "", "")),
    "the traceback with the message": (
        *(NOTE, {3: f"{LONG}\n\n{ONE}\n\nbye\n"}, {3: "AcceleratorError: device error"}),
        (3, "node2", "traceback", LONG),
    ),
    "else the last": (NOTE, {3: f"{LONG}\n\n{ONE}\n\nbye\n"}, {3: "KeyError: 'x'"}, (3, "node2", "traceback", ONE)),
}


def failed(has_run: Any, note: str, logs: dict[int, str], marks: dict[int, str], **facts: Any) -> RunDirectory:
    files = {f"attempt_0/rank_{rank}.log": text for rank, text in logs.items()}
    run: RunDirectory = has_run(ledger=attempt(0, reason="failed", action="relaunch", note=note, **facts), logs=files)
    for seconds, rank in enumerate(logs):
        os.utime(run.rank_log(0, rank), (seconds, seconds))
    for rank, message in marks.items():
        mark(run, rank, message)
    return run


def mark(run: RunDirectory, rank: int, message: str) -> None:
    leave_mark(run, 0, FailureMark(rank=rank, host=f"node{rank // 2 + 1}", exit_code=1, message=message))


@pytest.mark.parametrize("case", CASES)
def test_who_failed_first_and_why(case: str, has_run: Any) -> None:
    note, logs, marks, expected = CASES[case]
    run = failed(has_run, note, logs, marks)
    found = find_failure(run, 0)
    assert (found.rank, found.host, found.kind, found.excerpt) == expected and found.note == note
    assert found.log == (run.rank_log(0, found.rank) if found.rank in logs else None)


@pytest.mark.parametrize(
    ("cause", "logs", "marks", "expected"),
    [
        ({"ranks": [5, 6], "node": "node3", "words": "Killed"}, {5: "step 1\n", 0: PEER}, {0: CLOSED}, (5, "node3")),
        ({"ranks": [3], "node": "node2", "words": RAISED}, {3: ONE, 0: PEER}, {0: CLOSED, 3: RAISED}, (3, "node2")),
        ({"words": "srun itself was killed by signal 9"}, {0: PEER}, {}, (None, "")),
        # Its words name other ranks than the one that is at fault.
        ({"ranks": [2], "node": "node2", "words": "ranks 0 on a waits"}, {2: "x\n"}, {}, (2, "node2")),
    ],
)
def test_the_cause_on_record_names_the_first_whatever_the_note_is(
    cause: dict[str, Any],
    logs: dict[int, str],
    marks: dict[int, str],
    expected: tuple[int | None, str],
    has_run: Any,
) -> None:
    run = failed(has_run, "failed; this job cannot be requeued; job 8 takes over", logs, marks, cause=cause)
    found = find_failure(run, 0)
    assert (found.rank, found.host) == expected
    assert (found.excerpt == ONE) == (RAISED in cause["words"])


def test_a_rank_that_stood_still_shows_where(has_run: Any) -> None:
    run = failed(has_run, "rank 2 on node2 made no progress for 30 s", {2: "step 1\n"}, {2: "no progress for 30 s"})
    run.stacks(0, 2).write_text("main thread 0x1\nThread 0x1 (most recent call first):\n")
    found = find_failure(run, 0)
    assert found.kind == "stacks" and found.excerpt.startswith("main thread")
    assert found.lines(rank_shown=0)[-1].endswith(f"its stacks, from {run.stacks(0, 2)}:")


def test_while_an_attempt_is_at_it_the_marks_tell(has_run: Any) -> None:
    run = has_run(ledger=attempt(0))
    assert first_failed_rank(run, 0) is None
    mark(run, 3, RAISED)
    mark(run, 0, CLOSED)
    assert first_failed_rank(run, 0) == 3 and find_failure(run, 0) is None
    assert find_failure(has_run("aaaa0000", ledger=attempt(0, reason="preempted", action="requeue")), 0) is None


LAUNCHER = """\
Traceback (most recent call last):
  File "/x/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
============================================================"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("step 1\nnvidia-smi: command not found\n=====\n\n", "nvidia-smi: command not found"),
        (f"{ONE}\n\n{LAUNCHER}\n", "ValueError: no such layer"),
        (f"{CHAINED}\nbye\n", "RuntimeError: again"),
        ("\n".join(f"[rank3]: {line}" for line in ONE.splitlines()) + f"\n{LAUNCHER}", "ValueError: no such layer"),
        ("\x1b[1;31mValueError\x1b[0m: no\r 40%|██  | 4/10 [\r\x1b[KKilled\r\n", "Killed"),
        (LAUNCHER, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"),
        (
            "step 1\nslurmstepd: error: pyxis: no image\nslurmstepd-n1: error: Failed to invoke spank plugin stack\n",
            "slurmstepd: pyxis: no image; Failed to invoke spank plugin stack",
        ),
    ],
    ids=[
        "nothing",
        "no traceback",
        "torchrun's after its rank's",
        "chained",
        "with the rank",
        "with signs for a terminal",
        "torchrun's alone",
        "a plug-in of Slurm",
    ],
)
def test_the_last_words_of_a_log(text: str, words: str) -> None:
    assert last_words(text) == words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"step 1\n{ONE}\n\nstep 2\n{LONG}\n\nthe end\n", [ONE, LONG]),
        (f"x\n{CHAINED}\n", [CHAINED]),
        (CUT, [CUT]),
        (f"x\n{ONE}:\n\tMissing key(s): a\n\tUnexpected: b\n\nbye", [f"{ONE}:\n\tMissing key(s): a\n\tUnexpected: b"]),
        (f"ERROR: bus error\n \0{ONE}\n", [ONE]),
        ("\n".join(f"[rank3]: {line}" for line in CHAINED.splitlines()), [CHAINED]),
        ("Traceback of our steps\n", []),
    ],
    ids=[
        *(
            "between other lines",
            "chained",
            "cut off by a kill",
            "message in lines",
            "after a bus error",
            "with the rank",
        ),
        "none",
    ],
)
def test_tracebacks_in_a_log(text: str, found: list[str]) -> None:
    assert tracebacks(text) == found


def test_an_error_is_at_the_end_of_a_log_where_nothing_follows_it() -> None:
    error = ONE.splitlines()[-1]
    assert error_at_end(f"step 1\n{ONE}\n\n") == error
    assert error_at_end("\n".join(f"[rank3]: {line}" for line in ONE.splitlines())) == error
    # A program that went on after it.
    for later in (f"{ONE}\nstep 2\n", f"{ONE}\n\nstep 2\n", "step 1\n", ""):
        assert error_at_end(later) == ""
