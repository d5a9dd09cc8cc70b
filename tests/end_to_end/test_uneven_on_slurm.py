"""Uneven nodes on a real Slurm, one heterogeneous job, by srun and by torchrun: what even ranks train, bit for bit."""

from __future__ import annotations

import os
import signal

import pytest

from slurm_train.rundir.files import read_json
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import command, losses, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign]

UNEVEN = ("+cluster=2x2", "cluster.gpus_per_node=[2,1]")
WORDS = (*TINY, "batch.global_size=12", "train.max_steps=30", "train.threads=1", "checkpoint.every_steps=2")


def settled(run: RunDirectory, attempt: int) -> bool:
    beats = read_beats(run, attempt)
    return len(beats) == 3 and all(beat.settled for beat in beats.values())


def test_uneven_nodes_train_what_even_ranks_train_whoever_starts_them(person: Person) -> None:
    pace = ("model.step_s=0.2", "train.samples_digest=true")
    job, by_srun = person.types(*UNEVEN, *WORDS, *pace, "run.name=srun").job_and_run
    torchrun = ("run.name=torchrun", "cluster.launcher=torchrun")
    other_job, by_torchrun = person.types(*UNEVEN, *WORDS, *pace, *torchrun).job_and_run
    wait_until_step(by_srun, 4)
    command("scontrol", "requeue", job)
    wait_for(lambda: settled(by_torchrun, 0), within_s=150, what="all ranks under torchrun")
    os.kill(read_beats(by_torchrun, 0)[2].pid, signal.SIGKILL)
    assert person.types(*WORDS, "run.processes=3", "run.name=alone").code == 0
    alone = find_run(person.folder / "runs", "alone")
    for run in (by_srun, by_torchrun):
        assert wait_until_finished(run)["world_size"] == 3
        assert losses(run) == losses(alone)
        assert weights(run) == weights(alone)
    assert [entry["restart_count"] for entry in ledger_lines(by_srun)] == [0, 1]
    rounds = ledger_lines(by_torchrun)
    assert [(entry["job_id"], entry["restart_count"]) for entry in rounds] == [(other_job, 0)] * 2
    assert [len(entry["nodes"]) for entry in rounds] == [2, 2]
    assert (by_srun.attempt_logs(1) / "rank_2.log").is_file()


def weights(run: RunDirectory) -> str:
    return str((read_json(run.result) or {})["weights_digest"])
