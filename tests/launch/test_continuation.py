from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ClusterError
from slurm_train.launch import submission
from slurm_train.launch.continuation import (
    CONTINUES,
    cancelled_before,
    how_it_returns,
    is_new_request,
    submit_continuation,
)
from slurm_train.launch.preparation import record_job
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lookup import read_job
from slurm_train.slurm.preemption import Preemption
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state


def test_another_job_takes_over_after_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(ClusterError, match=r"submit\.sh is missing"):
        submit_continuation(run, "77", exclude="", env={})
    run.submit_script.write_text("#!/bin/bash\n")
    run.config.write_text(dump_config(RunConfig(cluster=ClusterSection(time_limit_min=60))))
    seen: list[list[str]] = []
    of_env: list[str] = []

    def submit(
        _script: str, *, flags: list[str], env: dict[str, str], export: tuple[str, ...], **_words: object
    ) -> str:
        seen.append(flags)
        of_env.append(env[CONTINUES])
        assert CONTINUES in export
        return "78"

    monkeypatch.setattr(submission, "submit_script", submit)
    record_job(run, "77")
    assert submit_continuation(run, "77", exclude="node2", env={}) == "78"
    assert of_env == ["77"]
    assert seen == [["--dependency=afterany:77", "--exclude=node2", "--signal=USR2@120"]]
    record = read_job(run)
    assert record is not None and record.job_id == "78"


@pytest.mark.parametrize(
    ("job", "env", "expected"),
    [
        ({"SubmitTime": "2026-01-02T03:04:06", "Restarts": "0"}, {}, True),
        ({"SubmitTime": "2026-01-02T03:04:05", "Restarts": "0"}, {}, False),
        ({"SubmitTime": "2026-01-02T03:04:06", "Restarts": "1"}, {}, False),
        ({"SubmitTime": "2026-01-02T03:04:06"}, {CONTINUES: "77"}, False),
        ({"SubmitTime": "Unknown"}, {}, False),
        ({}, {}, False),
    ],
    ids=["by hand, later", "on its way by then", "requeued", "takes over", "nobody knows", "no record"],
)
def test_a_job_submitted_by_hand_after_the_stop_is_a_new_request(
    job: dict[str, str], env: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    run.stop_file.touch()
    stopped = datetime.fromisoformat("2026-01-02T03:04:05.500").timestamp()
    os.utime(run.stop_file, (stopped, stopped))
    assert is_new_request(run, job, env) is expected


@pytest.mark.parametrize(("word", "expected"), [("CANCELLED", "77"), ("PREEMPTED", None), ("TIMEOUT", None)])
def test_it_does_not_begin_if_the_one_before_was_cancelled(word: str, expected: str | None, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    record_job(run, "78", continues="77")
    commands = FakeSlurmCommands([job_state("77", word)])
    assert cancelled_before(run, "78", commands) == expected
    assert cancelled_before(run, "79", commands) is None


@pytest.mark.parametrize(
    ("preemption", "said"),
    [
        (Preemption(by="qos", mode="CANCEL", grace_s=60, kill_wait_s=30), "else another job takes over"),
        (Preemption(by="nobody", mode="OFF", grace_s=0, kill_wait_s=30), "nobody preempts here"),
        (None, "Slurm does not say what it does on preemption"),
    ],
)
def test_how_a_run_comes_back_is_read_from_the_site(preemption: Preemption | None, said: str) -> None:
    assert said in how_it_returns(preemption, requeue_enabled=True)
    assert "not by itself" in how_it_returns(preemption, requeue_enabled=False)
