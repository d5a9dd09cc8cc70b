from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.events import BAD_NODES_PARTS, add_bad_nodes, forgive_nodes, list_file, read_bad_nodes
from slurm_train.rundir.layout import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "name" / "id")
    run.path.mkdir(parents=True)
    return run


def names(run: RunDirectory, now_unix_s: float) -> list[str]:
    return [bad.node for bad in read_bad_nodes(run, now_unix_s=now_unix_s)]


def test_without_a_list_no_node_is_bad(run: RunDirectory) -> None:
    assert names(run, 0.0) == []


def test_a_node_is_listed_for_its_term_in_the_root_that_runs_share(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node3": "GPU_SICK: three errors"}, hours=2.0, now_unix_s=1000.0)
    assert list_file(run) == run.path.parent.parent / "bad_nodes.jsonl"
    (bad,) = read_bad_nodes(RunDirectory(run.path.parent / "other"), now_unix_s=1000.0 + 7199)
    assert (bad.node, bad.why, bad.until_unix_s) == ("node3", "GPU_SICK: three errors", 8200.0)
    assert str(bad).startswith("node3 (until ") and str(bad).endswith("; GPU_SICK: three errors)")
    assert names(run, 1000.0 + 7201) == []


def test_the_last_word_about_a_node_counts(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node3": "first", "node4": "first"}, hours=1.0, now_unix_s=0.0)
    add_bad_nodes(run, {"node3": "second"}, hours=3.0, now_unix_s=0.0)
    assert names(run, 2 * 3600.0) == ["node3"]
    assert forgive_nodes(run, ["node3", "node9"], now_unix_s=10.0) == ["node3"]
    assert names(run, 20.0) == ["node4"]
    assert forgive_nodes(run, ["node3"], now_unix_s=30.0) == [], "it is on no list any more"


def test_with_no_hours_nothing_is_written(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node3": "x"}, hours=0.0, now_unix_s=0.0)
    assert not list(list_file(run).parent.glob(BAD_NODES_PARTS))


def test_lines_that_make_no_sense_are_passed_over(run: RunDirectory) -> None:
    list_file(run).write_text('{"node": "node3"}\n[]\n{"node": "node4", "until_unix_s": 50}\n{"node": "no')
    assert names(run, 10.0) == ["node4"]


def test_the_list_is_its_users_alone(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node3": "x"}, hours=1.0, now_unix_s=0.0)
    (part,) = list_file(run).parent.glob(BAD_NODES_PARTS)
    assert part.stat().st_mode & 0o077 == 0
