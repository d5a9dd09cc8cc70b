from __future__ import annotations

import os
from typing import Any

import pytest

from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.paths import RunDirectory
from slurm_train.status.failure import find_failure, first_failed_rank, tracebacks
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


def failed(has_run: Any, note: str = NOTE, **logs: str) -> RunDirectory:
    files = {f"attempt_0/{name}.log": text for name, text in logs.items()}
    run: RunDirectory = has_run(ledger=attempt(0, reason="failed", action="relaunch", note=note), logs=files)
    return run


def mark(run: RunDirectory, rank: int, message: str) -> None:
    leave_mark(run, 0, FailureMark(rank=rank, host=f"node{rank // 2 + 1}", exit_code=1, message=message))


def test_the_first_mark_names_the_rank_and_its_traceback_is_found(has_run: Any) -> None:
    run = failed(has_run, rank_3=f"step 1\n{ONE}\n", rank_0=f"{PEER}\n")
    mark(run, 3, "ValueError: no such layer")
    mark(run, 0, "RuntimeError: connection closed by peer")
    found = find_failure(run, 0)
    assert found is not None
    assert (found.rank, found.host, found.kind, found.excerpt) == (3, "node2", "traceback", ONE)
    assert found.log == run.rank_log(0, 3) and found.note == NOTE


def test_a_rank_that_was_killed_comes_before_the_marks_of_its_peers(has_run: Any) -> None:
    note = "rank 5 on node3: Killed; the ranks are started again in this allocation"
    run = failed(has_run, note, rank_5="step 1\nstep 2\n", rank_0=f"{PEER}\n")
    mark(run, 0, "RuntimeError: connection closed by peer")
    found = find_failure(run, 0)
    assert found is not None
    assert (found.rank, found.host, found.kind, found.excerpt) == (5, "node3", "last lines", "step 1\nstep 2")


def test_a_rank_that_stood_still_shows_where(has_run: Any) -> None:
    run = failed(has_run, "rank 2 on node2 made no progress for 30 s", rank_2="step 1\n")
    mark(run, 2, "no progress for 30 s")
    run.stacks(0, 2).write_text("main thread 0x1\nThread 0x1 (most recent call first):\n")
    found = find_failure(run, 0)
    assert found is not None and found.kind == "stacks" and found.excerpt.startswith("main thread")


def test_where_nobody_is_named_the_log_that_ended_first_is_taken(has_run: Any) -> None:
    note = "the ranks ended with code 1; see the logs of this attempt"
    run = failed(has_run, note, rank_0=f"{PEER}\n", rank_7=f"{LONG}\n", rank_1="fine\n")
    for rank, seconds in ((0, 200), (7, 100), (1, 50)):
        os.utime(run.rank_log(0, rank), (seconds, seconds))
    found = find_failure(run, 0)
    assert found is not None and (found.rank, found.excerpt) == (7, LONG)


@pytest.mark.parametrize("note", ["node failure on node2", "srun itself was killed by signal 9"])
def test_nobody_is_blamed_for_a_lost_node(note: str, has_run: Any) -> None:
    found = find_failure(failed(has_run, note, rank_0=f"{PEER}\n"), 0)
    assert found is not None and (found.rank, found.excerpt) == (None, "")


def test_a_rank_without_a_log_is_named_all_the_same(has_run: Any) -> None:
    run = failed(has_run)
    mark(run, 3, "ValueError: no such layer")
    found = find_failure(run, 0)
    assert found is not None and (found.rank, found.log, found.kind) == (3, None, "")


def test_while_an_attempt_is_at_it_the_marks_tell(has_run: Any) -> None:
    run = has_run(ledger=attempt(0))
    assert first_failed_rank(run, 0) is None
    mark(run, 3, "ValueError: no such layer")
    mark(run, 0, "RuntimeError: connection closed by peer")
    assert first_failed_rank(run, 0) == 3 and find_failure(run, 0) is None


@pytest.mark.parametrize(
    "ledger", [(), attempt(0), attempt(0, reason="preempted", action="requeue"), attempt(0, reason="done")]
)
def test_an_attempt_that_did_not_fail_has_no_failure(ledger: Any, has_run: Any) -> None:
    run = has_run(ledger=ledger)
    assert find_failure(run, 0) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"step 1\n{ONE}\n\nstep 2\n{LONG}\n\nthe end\n", [ONE, LONG]),
        (f"x\n{CHAINED}\n", [CHAINED]),
        (f"{ONE}\n{ONE}\n", [ONE, ONE]),
        (CUT, [CUT]),
        ("Traceback of our steps\n", []),
    ],
    ids=["between other lines", "chained", "two in a row", "cut off by a kill", "none"],
)
def test_tracebacks_in_a_log(text: str, found: list[str]) -> None:
    assert tracebacks(text) == found


def test_of_several_tracebacks_the_one_with_the_message_is_taken_else_the_last(has_run: Any) -> None:
    run = failed(has_run, rank_3=f"{LONG}\n\n{ONE}\n\nbye\n")
    for message, expected in (("AcceleratorError: device error", LONG), ("KeyError: 'other'", ONE)):
        (run.attempt_logs(0) / "failures.jsonl").unlink(missing_ok=True)
        for part in run.attempt_logs(0).glob("failures@*"):
            part.unlink()
        mark(run, 3, message)
        found = find_failure(run, 0)
        assert found is not None and found.excerpt == expected
