"""The commands against a real Slurm."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.slurm.records import Phase
from slurm_train.slurm.refusals import Refusal

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def submit(script: Path, *options: str) -> str:
    argv = ["sbatch", "--parsable", "--output=/dev/null", *options, str(script)]
    done = subprocess.run(argv, env=scrubbed(os.environ), capture_output=True, text=True, check=True)
    return done.stdout.strip().split(";")[0]


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "Slurm did not get there in time"
        time.sleep(0.1)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\nexec sleep 300\n")
    return path


def test_a_job_through_its_life(real_slurm: SlurmCommands, script: Path) -> None:
    job_id = submit(script, "--job-name=x JobState=FAILED | y")
    try:
        wait_for(lambda: real_slurm.job_states([job_id])[job_id].phase is Phase.RUNNING)
        state = real_slurm.job_states([job_id])[job_id]
        assert (state.source, state.is_active) == ("squeue", True)
        assert state.nodelist
        fields = real_slurm.show_job(job_id)
        assert (fields["JobState"], fields["JobName"]) == ("RUNNING", "x JobState=FAILED | y")
        assert (fields["Restarts"], fields["PreemptTime"]) == ("0", "None")
    finally:
        real_slurm.cancel([job_id])
    wait_for(lambda: real_slurm.job_states([job_id])[job_id].phase is Phase.CANCELLED)
    real_slurm.cancel([job_id])
    assert not real_slurm.job_states([job_id])[job_id].is_active


def test_the_name_of_a_job_is_no_row_about_another(real_slurm: SlurmCommands, script: Path) -> None:
    row = "4000000|RUNNING|None|node1|N/A|N/A|main"
    job_id = submit(script, "--hold", f"--job-name=a\n{row}\n100|{row}\n{row}|0:0", f"--comment=b\n100|{row}")
    try:
        for jobs, _ in (real_slurm.queue(["4000000", job_id], whole=True), real_slurm.queue([job_id])):
            assert list(jobs) == [job_id]
        assert list(real_slurm.job_states([job_id, "4000000"])) == [job_id]
    finally:
        real_slurm.cancel([job_id])
    wait_for(lambda: job_id in real_slurm.accounted([job_id]))
    assert list(real_slurm.accounted([job_id, "4000000"])) == [job_id]


def test_every_element_of_a_held_array_is_listed(real_slurm: SlurmCommands, script: Path) -> None:
    job_id = submit(script, "--hold", "--array=0-6:2%2")
    try:
        found = real_slurm.job_states([job_id, "4000000"])
        assert sorted(found) == [f"{job_id}_{index}" for index in (0, 2, 4, 6)]
        assert {state.phase for state in found.values()} == {Phase.QUEUED}
        assert list(real_slurm.job_states([f"{job_id}_4"])) == [f"{job_id}_4"]
    finally:
        real_slurm.cancel([job_id])


def test_a_running_job_is_requeued_and_a_cancelled_one_stays_cancelled(real_slurm: SlurmCommands, script: Path) -> None:
    job_id = submit(script, "--requeue")
    try:
        wait_for(lambda: real_slurm.show_job(job_id)["JobState"] == "RUNNING")
        real_slurm.requeue(job_id)
        assert real_slurm.restarts(job_id) == 1
    finally:
        real_slurm.cancel([job_id])
    wait_for(lambda: real_slurm.job_states([job_id])[job_id].phase is Phase.CANCELLED)
    real_slurm.requeue(job_id)
    assert real_slurm.show_job(job_id)["JobState"] == "CANCELLED"


@pytest.mark.parametrize(
    ("option", "refusal"),
    [
        ("--nodes=1", None),
        ("--partition=no-such-partition", Refusal.PARTITION),
        ("--nodes=5000", Refusal.RESOURCES),
        ("--gpus-per-node=999", Refusal.RESOURCES),
        ("--nodelist=no-such-node", Refusal.NODE_NAME),
        ("--no-such-option=1", Refusal.OPTION),
    ],
)
def test_only_testing(option: str, refusal: Refusal | None, real_slurm: SlurmCommands, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {option}\ntrue\n")
    verdict = real_slurm.test_only(script)
    assert verdict.refusal is refusal
    assert verdict.is_accepted is (refusal is None)
    assert bool(verdict.start) is verdict.is_accepted


def test_srun_reads_its_flags_and_runs_nothing(real_slurm: SlurmCommands) -> None:
    for flag in ("--auto-resume=1", "--cpu-bnd=none", "--gpu-bind=foo", "--mpi=openmpi9"):
        assert real_slurm.refused_flags([flag]).startswith("srun: "), flag
    # The last one is Slurm's to judge, in a job.
    for flag in ("--mpi=none", "--gpu-bind=none", "--cpu-bind=none", "--label", "--nodelist=node77"):
        assert real_slurm.refused_flags([flag]) == "", flag
    assert {"mpi", "gpu-bind", "cpu-bind"} <= set(real_slurm.options_of_srun())
