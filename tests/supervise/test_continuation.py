from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import ClusterSection, RequeueSection, RunConfig
from slurm_train.errors import ClusterError
from slurm_train.request.batch_script import renewed_warning
from slurm_train.rundir.jobs import read_job, record_job
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.continuation import (
    CONTINUES,
    can_avoid,
    continued_job,
    exclude_nodes,
    is_cancelled,
    submit_continuation,
)
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.fakes.slurm_programs import SlurmPrograms


def test_another_job_takes_over_after_this_one(tmp_path: Path) -> None:
    run, slurm = RunDirectory(tmp_path / "run"), SlurmPrograms(tmp_path / "bin")
    run.path.mkdir()
    run.logs.mkdir()
    env = {"PATH": slurm.path, "SLURM_JOB_ID": "77", "TRAVELLED": "here"}
    with pytest.raises(ClusterError, match=r"submit\.sh is missing"):
        submit_continuation(run, "77", exclude=(), env=env)
    run.submit_script.write_text("#!/bin/bash\n")
    run.config.write_text(dump_config(RunConfig(cluster=ClusterSection(time_limit_min=60))))
    (slurm.folder / "job_id").write_text("78\n")
    record_job(run, "77")
    (slurm.folder / "squeue.out").write_text("90|afterok:77(unfulfilled)\n91|afterany:77(unfulfilled)\n")
    assert submit_continuation(run, "77", exclude=("node2",), env=env) == "78"
    words = (slurm.said("submitted_words") or "").split()
    assert words[:-1] == ["--parsable", "--dependency=afterany:77", "--exclude=node2", "--signal=USR2@120"]
    told = (slurm.said("submitted_env") or "").splitlines()
    assert {f"{CONTINUES}=77", "TRAVELLED=here"} <= set(told), "what sbatch really gets"
    assert not any(line.startswith("SLURM_JOB_ID=") for line in told)
    record = read_job(run)
    assert record is not None and record.job_id == "78" and record.continues == {"78": "77"}
    assert slurm.said("updated") == "update JobId=90 Dependency=afterok:78\n", "what waits for the run's success"


@pytest.mark.parametrize(("lead", "flags"), [("auto", ["--signal=USR2@120"]), (300, [])])
def test_a_warning_that_was_set_stays_as_the_script_has_it(lead: Any, flags: list[str], tmp_path: Path) -> None:
    requeue = RequeueSection(warn_before_limit_s=lead)
    config = RunConfig(cluster=ClusterSection(time_limit_min=60), requeue=requeue)
    assert renewed_warning(config, RunDirectory(tmp_path)) == flags


@pytest.mark.parametrize("env", [{}, {CONTINUES: "77"}], ids=["on record", "from its environment"])
def test_a_job_knows_the_one_that_it_takes_over_from(env: dict[str, str], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    if not env:
        record_job(run, "78", continues="77")
    assert continued_job(run, "78", env) == "77"
    assert continued_job(run, "79", {}) is None


@pytest.mark.parametrize(("word", "expected"), [("CANCELLED", True), ("PREEMPTED", False)])
def test_it_does_not_begin_if_the_one_before_was_cancelled(word: str, expected: bool) -> None:
    commands = FakeSlurmCommands([job_state("77", word)])
    assert is_cancelled("77", commands) is expected
    assert not is_cancelled("76", commands)


def running_job(**fields: str) -> FakeSlurmCommands:
    """A job on a cluster of four nodes in partition main."""
    none = {"Partition": "main", "ReqNodeList": "(null)", "ExcNodeList": "(null)"}
    return FakeSlurmCommands(fields={"7": {**none, **fields}})


@pytest.mark.parametrize(
    ("fields", "nodes", "num_nodes", "expected"),
    [
        ({}, ["node4"], 3, True),
        ({}, ["node3", "node4"], 3, False),
        ({"ExcNodeList": "node[1-3]"}, ["node4"], 1, False),
        ({"ExcNodeList": "node[1-3]"}, ["node3"], 1, True),
        ({"ReqNodeList": "node[1-2]"}, ["node4"], 2, False),
        ({"ExcNodeList": "node[1-"}, ["node4"], 1, False),
    ],
    ids=["room", "none left", "compressed", "excluded already", "bound", "not readable"],
)
def test_a_job_is_requeued_elsewhere_only_where_nodes_enough_are_left(
    fields: dict[str, str], nodes: list[str], num_nodes: int, expected: bool
) -> None:
    assert can_avoid(nodes, "7", running_job(**fields), num_nodes=num_nodes) is expected


@pytest.mark.parametrize(
    ("excluded", "nodes", "expected"),
    [
        ("(null)", ["node4"], "node4"),
        ("node[1-3]", ["node2"], "node[1-3]"),
        ("node[1-2]", ["node2", "node3"], "node[1-3]"),
    ],
)
def test_what_a_job_excludes_already_stays_excluded(excluded: str, nodes: list[str], expected: str) -> None:
    commands = running_job(ExcNodeList=excluded)
    exclude_nodes(nodes, "7", commands)
    assert commands.fields["7"]["ExcNodeList"] == expected
