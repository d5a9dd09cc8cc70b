from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_train.launch.avoidance import can_avoid, describe, exclude_flags, keep_off, listed_among
from slurm_train.rundir.events import add_bad_nodes
from slurm_train.rundir.layout import RunDirectory
from tests.fakes.slurm_commands import FakeSlurmCommands
from tests.fakes.slurm_programs import SlurmPrograms


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "name" / "id")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A cluster of four nodes in partition main."""
    return {"PATH": SlurmPrograms(tmp_path / "bin").path}


def script(*directives: str) -> str:
    lines = (f"#SBATCH --{directive}\n" for directive in ("nodes=2", "ntasks=4", *directives))
    return f"#!/bin/bash\n{''.join(lines)}\nsrun --nodes=2 true\n"


def bad(run: RunDirectory, *names: str) -> None:
    add_bad_nodes(run, dict.fromkeys(names, "GPU_SICK: errors"), hours=1.0, now_unix_s=time.time())


def test_without_a_list_slurm_is_not_even_asked(run: RunDirectory) -> None:
    assert exclude_flags(script(), run, {"PATH": "/nowhere"}) == []
    assert describe([], run) == ""


def test_listed_nodes_are_left_out_and_told(run: RunDirectory, env: dict[str, str]) -> None:
    bad(run, "node3")
    flags = exclude_flags(script(), run, env)
    assert flags == ["--exclude=node3"]
    assert describe(flags, run).startswith("left out: node3 (until ")
    assert [one.node for one in listed_among(("node2", "node3"), run)] == ["node3"]


def test_of_a_range_of_nodes_the_fewest_must_be_left(run: RunDirectory, env: dict[str, str]) -> None:
    bad(run, "node3")
    assert exclude_flags(script("nodes=2-4"), run, env) == ["--exclude=node3"]


def test_nodes_that_the_script_leaves_out_stay_left_out(run: RunDirectory, env: dict[str, str]) -> None:
    bad(run, "node3")
    assert exclude_flags(script('exclude="node[1]"'), run, env) == ["--exclude=node[1],node3"]


@pytest.mark.parametrize(
    ("directives", "names"),
    [
        (("nodes=4",), ("node3",)),
        ((), ("node1", "node2", "node3")),
        (("exclude=node1",), ("node2", "node3")),
        (("nodelist=node[3-4]",), ("node3",)),
        (("partition=other",), ("node3",)),
        (("mem=0\n#SBATCH hetjob", "nodes=1"), ("node3",)),
    ],
)
def test_a_job_that_needs_the_nodes_gets_them(
    directives: tuple[str, ...], names: tuple[str, ...], run: RunDirectory, env: dict[str, str]
) -> None:
    bad(run, *names)
    flags = exclude_flags(script(*directives), run, env)
    assert flags == []
    assert describe(flags, run).startswith("found bad, and not left out, since the job needs them or its nodes are ")


def test_where_slurm_does_not_say_nothing_is_left_out(run: RunDirectory) -> None:
    bad(run, "node3")
    assert exclude_flags(script(), run, {"PATH": "/nowhere"}) == []


def running_job(**fields: str) -> FakeSlurmCommands:
    """A job on a cluster of four nodes in partition main."""
    none = {"Partition": "main", "ReqNodeList": "(null)", "ExcNodeList": "(null)"}
    return FakeSlurmCommands(fields={"7": {**none, **fields}})


@pytest.mark.parametrize(
    ("fields", "nodes", "num_nodes", "expected"),
    [
        ({}, "node4", 3, True),
        ({}, "node[3-4]", 3, False),
        ({"ExcNodeList": "node[1-3]"}, "node4", 1, False),
        ({"ExcNodeList": "node[1-3]"}, "node3", 1, True),
        ({"ExcNodeList": "node1,node[2-3]"}, "node4", 1, False),
        ({"ReqNodeList": "node[1-2]"}, "node4", 2, False),
        ({"ExcNodeList": "node[1-"}, "node4", 1, False),
    ],
    ids=["room", "none left", "compressed", "excluded already", "mixed", "bound", "not readable"],
)
def test_a_job_is_requeued_elsewhere_only_where_nodes_enough_are_left(
    fields: dict[str, str], nodes: str, num_nodes: int, expected: bool
) -> None:
    assert can_avoid(nodes, "7", running_job(**fields), num_nodes=num_nodes) is expected


@pytest.mark.parametrize(
    ("excluded", "nodes", "expected"),
    [
        ("(null)", "node4", "node4"),
        ("node[1-2]", "node4", "node[1-2],node4"),
        ("node[1-3]", "node2", "node[1-3]"),
        ("node[1-2]", "node2,node3", "node[1-3]"),
    ],
)
def test_what_a_job_excludes_already_stays_excluded(excluded: str, nodes: str, expected: str) -> None:
    commands = running_job(ExcNodeList=excluded)
    keep_off(nodes, "7", commands)
    assert commands.fields["7"]["ExcNodeList"] == expected
