from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.events import FailureMark, first_mark, leave_mark
from slurm_train.rundir.layout import RunDirectory


def test_the_earliest_mark_is_the_cause(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    assert first_mark(run, 0) is None
    first = FailureMark(rank=3, host="node2", exit_code=1, message="ValueError: odd")
    leave_mark(run, 0, first)
    leave_mark(run, 0, FailureMark(rank=0, host="node1", exit_code=1, message="connection closed by peer"))
    assert first_mark(run, 0) == first
    assert str(first) == "rank 3 on node2: ValueError: odd"


def test_a_run_directory_that_is_gone_is_no_second_failure(tmp_path: Path) -> None:
    leave_mark(RunDirectory(tmp_path / "gone"), 0, FailureMark(rank=0, host="node1", exit_code=1, message="x"))
