from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_train.rundir.events import (
    bad_nodes_of,
    codes_of,
    fatal_line,
    finding_lines,
    named_node,
    read_preflight,
    write_preflight,
)
from slurm_train.rundir.layout import RunDirectory


def found(code: str, level: str, node: str = "", *, blames: bool = False) -> dict[str, Any]:
    line = f"{code} {node}: seen; todo"
    return {"code": code, "level": level, "node": node, "seen": "seen", "line": line, "blames_node": blames}


RECORD = {
    "findings": [
        found("GPU_SICK", "error", "node3, node4", blames=True),
        found("FS_STALE", "error", "node2"),
        found("CLOCK_SKEW", "warning", "node5", blames=True),
    ]
}


def test_a_record_is_read_back_and_absent_before(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(2).mkdir(parents=True)
    assert read_preflight(run, 2) == {}
    write_preflight(run, 2, RECORD)
    assert read_preflight(run, 2) == RECORD


def test_errors_make_one_line_and_blame_nodes() -> None:
    assert fatal_line(RECORD) == "GPU_SICK node3, node4: seen; todo (and 1 more: see preflight.json of the attempt)"
    assert bad_nodes_of(RECORD) == {"node3": "GPU_SICK: seen", "node4": "GPU_SICK: seen"}
    assert codes_of(RECORD) == "GPU_SICK node3, node4; FS_STALE node2; CLOCK_SKEW node5"
    assert len(finding_lines(RECORD)) == 3


def test_the_node_of_an_error_is_told_where_it_is_one() -> None:
    assert named_node(RECORD) == ""
    assert named_node({"findings": RECORD["findings"][1:]}) == "node2"
    assert named_node({"findings": RECORD["findings"][2:]}) == ""


def test_warnings_alone_are_not_fatal() -> None:
    warned = {"findings": RECORD["findings"][2:]}
    assert (fatal_line(warned), bad_nodes_of(warned), fatal_line({})) == ("", {}, "")
