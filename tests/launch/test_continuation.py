from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ClusterError
from slurm_train.launch.continuation import (
    CONTINUES,
    continued_job,
    how_it_returns,
    is_cancelled,
    submit_continuation,
)
from slurm_train.rundir.jobs import read_job, record_job
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.policy import Preemption
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.fakes.slurm_programs import SlurmPrograms


def test_another_job_takes_over_after_this_one(tmp_path: Path) -> None:
    run, slurm = RunDirectory(tmp_path / "run"), SlurmPrograms(tmp_path / "bin")
    run.path.mkdir()
    run.logs.mkdir()
    env = {"PATH": slurm.path, "SLURM_JOB_ID": "77", "TRAVELLED": "here"}
    with pytest.raises(ClusterError, match=r"submit\.sh is missing"):
        submit_continuation(run, "77", exclude="", env=env)
    run.submit_script.write_text("#!/bin/bash\n")
    run.config.write_text(dump_config(RunConfig(cluster=ClusterSection(time_limit_min=60))))
    (slurm.folder / "job_id").write_text("78\n")
    record_job(run, "77")
    assert submit_continuation(run, "77", exclude="node2", env=env) == "78"
    words = (slurm.said("submitted_words") or "").split()
    assert words[:-1] == ["--parsable", "--dependency=afterany:77", "--exclude=node2", "--signal=USR2@120"]
    told = (slurm.said("submitted_env") or "").splitlines()
    assert {f"{CONTINUES}=77", "TRAVELLED=here"} <= set(told), "what sbatch really gets"
    assert not any(line.startswith("SLURM_JOB_ID=") for line in told)
    record = read_job(run)
    assert record is not None and record.job_id == "78" and record.continues == {"78": "77"}


@pytest.mark.parametrize("env", [{}, {CONTINUES: "77"}], ids=["on record", "from its environment"])
def test_a_job_knows_the_one_that_it_takes_over_from(env: dict[str, str], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    if not env:
        record_job(run, "78", continues="77")
    assert continued_job(run, "78", env) == "77"
    assert continued_job(run, "79", {}) is None


@pytest.mark.parametrize(("word", "expected"), [("CANCELLED", True), ("PREEMPTED", False), ("TIMEOUT", False)])
def test_it_does_not_begin_if_the_one_before_was_cancelled(word: str, expected: bool) -> None:
    commands = FakeSlurmCommands([job_state("77", word)])
    assert is_cancelled("77", commands) is expected
    assert not is_cancelled("76", commands)


@pytest.mark.parametrize(
    ("preemption", "said"),
    [
        (Preemption(by="qos", mode="CANCEL", grace_s=60, kill_wait_s=30), "else another job takes over"),
        (Preemption(by="nobody", mode="OFF", grace_s=0, kill_wait_s=30), "nobody preempts here"),
        (None, "what happens on preemption is not known"),
    ],
)
def test_how_a_run_comes_back_is_read_from_the_site(preemption: Preemption | None, said: str) -> None:
    assert said in how_it_returns(preemption, requeue_enabled=True)
    assert "not by itself" in how_it_returns(preemption, requeue_enabled=False)
