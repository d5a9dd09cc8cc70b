"""What happens in a run: changes, saves, failures of ranks, findings of the preflight, bad nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.attempts import AttemptStart, open_attempt, read_ledger
from slurm_train.rundir.events import (
    BAD_NODES_PARTS,
    AcceptedChange,
    FailureMark,
    SaveLog,
    add_bad_nodes,
    bad_nodes_of,
    codes_of,
    covers_code,
    covers_config,
    covers_data,
    errors_of,
    findings_of,
    first_mark,
    forgive_nodes,
    leave_mark,
    list_file,
    read_bad_nodes,
    read_changes,
    read_preflight,
    read_saves,
    record_change,
    write_preflight,
)
from slurm_train.rundir.paths import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "name" / "id")
    run.path.mkdir(parents=True)
    return run


LR = AcceptedChange(number=1, step=40, config={"optim.lr": [0.3, 0.1]})
CODE = AcceptedChange(number=2, step=80, code={"old": "a", "new": "b", "files": ["x.py: +1 -0"]})
BACK = AcceptedChange(number=3, step=90, config={"optim.lr": [0.1, 0.3]}, data={"old": "d1", "new": ""})
START = AttemptStart(job_id=None, restart_count=0, nodes=("n1",), world_size=1)


def test_what_is_recorded_is_read_again(run: RunDirectory) -> None:
    assert read_changes(run) == []
    for change in (LR, CODE, BACK):
        record_change(run, change)
    found = read_changes(run)
    assert [(item.number, item.step, item.names) for item in found] == [
        (1, 40, ["optim.lr"]),
        (2, 80, ["code"]),
        (3, 90, ["optim.lr", "data"]),
    ]
    assert all(item.time_unix_s > 1e9 for item in found)


def test_only_the_newest_value_is_covered() -> None:
    assert covers_config([LR], "optim.lr", 0.1) and not covers_config([LR], "optim.lr", 0.3)
    assert covers_config([LR, CODE, BACK], "optim.lr", 0.3) and not covers_config([LR, CODE, BACK], "optim.lr", 0.1)
    assert not covers_config([LR], "seed", 0)
    assert covers_code([LR, CODE], "b") and not covers_code([LR, CODE], "c") and not covers_code([], "b")
    assert covers_data([BACK], old="d1", new="anything") and not covers_data([BACK], old="d2", new="d1")


def test_an_attempt_says_what_it_is_the_first_to_carry(run: RunDirectory) -> None:
    open_attempt(run, START)
    record_change(run, LR)
    record_change(run, CODE)
    open_attempt(run, START)
    open_attempt(run, START)
    facts = [(entry.get("changes"), entry.get("accepted")) for entry in read_ledger(run)]
    assert facts == [(None, None), (2, ["optim.lr", "code"]), (2, None)]


def test_a_save_has_a_line_with_its_size_stall_and_duration(run: RunDirectory) -> None:
    log = SaveLog(run, 3, now=lambda: 17.0)
    log.stalled(10, 0.25)
    log.stalled(10, 0.25)
    log.ended(10, num_bytes=1000, save_s=2.0)
    log.ended(20, num_bytes=0, save_s=1.0, error="no space left")
    lines = read_saves(run)
    assert lines[0] == {"attempt": 3, "step": 10, "bytes": 1000, "stall_s": 0.5, "save_s": 2.0, "time_unix_s": 17.0}
    assert (lines[1]["step"], lines[1]["stall_s"], lines[1]["error"]) == (20, 0.0, "no space left")


def test_a_step_that_was_saved_before_has_no_second_line(run: RunDirectory) -> None:
    log = SaveLog(run, 0)
    log.ended(10, num_bytes=5, save_s=1.0)
    log.ended(10, num_bytes=0, save_s=0.1)
    assert [line["bytes"] for line in read_saves(run)] == [5]


def test_a_disk_that_refuses_costs_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "gone")
    SaveLog(run, 0).ended(10, num_bytes=5, save_s=1.0)
    assert read_saves(run) == []


def test_the_earliest_mark_is_the_cause(run: RunDirectory) -> None:
    run.attempt_logs(0).mkdir(parents=True)
    assert first_mark(run, 0) is None
    first = FailureMark(rank=3, host="node2", exit_code=1, message="ValueError: odd")
    leave_mark(run, 0, first)
    leave_mark(run, 0, FailureMark(rank=0, host="node1", exit_code=1, message="connection closed by peer"))
    assert first_mark(run, 0) == first
    assert str(first) == "rank 3 on node2: ValueError: odd"


def test_a_run_directory_that_is_gone_is_no_second_failure(tmp_path: Path) -> None:
    leave_mark(RunDirectory(tmp_path / "gone"), 0, FailureMark(rank=0, host="node1", exit_code=1, message="x"))


def found(code: str, level: str, node: str = "", *, blames: bool = False) -> dict[str, Any]:
    facts = {"seen": "seen", "todo": "todo", "line": "for people", "blames_node": blames}
    return {"code": code, "level": level, "node": node, **facts}


RECORD = {
    "findings": [
        found("GPU_SICK", "error", "node3, node4", blames=True),
        found("FS_STALE", "error", "node2"),
        found("CLOCK_SKEW", "warning", "node5", blames=True),
    ]
}


def test_a_record_is_read_back_and_absent_before(run: RunDirectory) -> None:
    run.attempt_logs(2).mkdir(parents=True)
    assert read_preflight(run, 2) == {}
    write_preflight(run, 2, RECORD)
    assert read_preflight(run, 2) == RECORD


def test_errors_blame_nodes() -> None:
    findings = findings_of({"findings": [*RECORD["findings"], {}, 3]})
    assert [finding.code for finding in errors_of(findings)] == ["GPU_SICK", "FS_STALE"]
    assert findings[1].line == "FS_STALE node2: seen; todo (docs/troubleshooting.md#fs_stale)"
    assert bad_nodes_of(findings) == {"node3": "GPU_SICK: seen", "node4": "GPU_SICK: seen"}
    assert codes_of(findings) == "GPU_SICK node3, node4; FS_STALE node2; CLOCK_SKEW node5"
    assert findings_of({}) == []


def names(run: RunDirectory, now_unix_s: float) -> list[str]:
    return [bad.node for bad in read_bad_nodes(run, now_unix_s=now_unix_s)]


def test_a_node_is_listed_for_its_term_in_the_root_that_runs_share(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node3": "GPU_SICK: three errors"}, hours=2.0, now_unix_s=1000.0)
    assert list_file(run) == run.path.parent.parent / "bad_nodes.jsonl"
    (bad,) = read_bad_nodes(RunDirectory(run.path.parent / "other"), now_unix_s=1000.0 + 7199)
    assert (bad.node, bad.why, bad.until_unix_s) == ("node3", "GPU_SICK: three errors", 8200.0)
    assert str(bad).startswith("node3 (until ") and str(bad).endswith("; GPU_SICK: three errors)")
    assert names(run, 1000.0 + 7201) == []


def test_the_last_word_about_a_node_counts(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node9": "x"}, hours=0.0, now_unix_s=0.0)
    assert not list(list_file(run).parent.glob(BAD_NODES_PARTS)) and names(run, 0.0) == []
    add_bad_nodes(run, {"node3": "first", "node4": "first"}, hours=1.0, now_unix_s=0.0)
    add_bad_nodes(run, {"node3": "second"}, hours=3.0, now_unix_s=0.0)
    assert names(run, 2 * 3600.0) == ["node3"]
    assert forgive_nodes(run, ["node3", "node9"], now_unix_s=10.0) == ["node3"]
    assert names(run, 20.0) == ["node4"]
    assert forgive_nodes(run, ["node3"], now_unix_s=30.0) == [], "it is on no list any more"


def test_lines_that_make_no_sense_are_passed_over(run: RunDirectory) -> None:
    list_file(run).write_text('{"node": "node3"}\n[]\n{"node": "node4", "until_unix_s": 50}\n{"node": "no')
    assert names(run, 10.0) == ["node4"]


def test_a_failure_mark_repeats_no_secret(run: RunDirectory) -> None:
    attempt = open_attempt(run, AttemptStart(job_id="1", restart_count=0, nodes=("n",), world_size=1))
    token = "hf_" + "aB3" * 9
    leave_mark(run, attempt, FailureMark(rank=0, host="n", exit_code=1, message=f"401 for {token}"))
    mark = first_mark(run, attempt)
    assert mark is not None
    assert mark.message == "401 for [redacted]"
