"""Sweeps on a real Slurm: an element that loses a rank or is preempted continues, and the others never notice."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from slurm_train.rundir.events import read_preflight
from slurm_train.rundir.sweep import SweepDirectory, read_table
from tests.campaigns.arrays import restarts
from tests.support import light_training
from tests.support.cluster_faults import take_nodes
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.light_training import undisturbed_losses
from tests.support.process_faults import kill, rank_pid
from tests.support.slurm_runs import losses, wait_until_finished, wait_until_step

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SHAPES = (
    "+cluster=1x1,2x1",
    *light_training.words(step_s=0.5),
    "preflight.enabled=true",
    "seed=1,2",
    "run.name=nodes${cluster.nodes}",
)


@pytest.fixture(autouse=True)
def _program(person: Person) -> None:
    light_training.add_program(person)


def test_an_element_that_loses_a_rank_continues_and_the_others_never_notice(person: Person) -> None:
    done = person.types("-m", *SHAPES)
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert len(lines) == 2, "one array per shape"
    sweep = SweepDirectory(Path(lines[0][1]))
    runs = [element.run for element in read_table(sweep)]
    assert [element.job for element in read_table(sweep)] == [f"{job}_{task}" for job, _ in lines for task in range(2)]
    wait_until_step(runs[3], 5)
    kill(rank_pid(runs[3], 1))
    for run in runs:
        wait_until_finished(run)
    ledgers = [ledger_lines(run) for run in runs]
    assert [[entry["world_size"] for entry in ledger] for ledger in ledgers] == [[1], [1], [2], [2, 2]]
    reasons = [[entry["reason"] for entry in ledger] for ledger in ledgers]
    assert reasons == [["done"], ["done"], ["done"], ["failed", "done"]]
    assert all(read_preflight(run, 0)["table"] for run in runs), "the nodes of each element were looked at"
    assert [losses(run) for run in runs] == [undisturbed_losses(seed=seed) for seed in (1, 2, 1, 2)]
    assert [set(restarts(job).values()) for job, _ in lines] == [{0}, {0}]
    assert "4 runs: 4 finished" in person.types("status", sweep.sweep_id).out
    table = list(csv.DictReader(io.StringIO(person.types("collate", lines[1][0], "--format", "csv").out)))
    assert [row["attempts"] for row in table] == ["1", "1", "1", "2"]
    again = person.types("-m", *SHAPES)
    assert (again.code, again.out) == (0, "") and "4 runs are finished, 0 active; 0 to submit" in again.err


def test_the_preemption_of_an_element_restarts_no_other(person: Person) -> None:
    words = ("+cluster=1x1", *light_training.words(), "seed=range(1,5)", "cluster.sbatch.exclusive=true")
    light_training.slow_down(person)
    done = person.types("-m", *words)
    assert done.code == 0, done.err
    job, path = done.out.split()
    runs = [element.run for element in read_table(SweepDirectory(Path(path)))]
    for run in runs:
        wait_until_step(run, 2)
    (node,) = ledger_lines(runs[1])[0]["nodes"]
    take_nodes([node])
    light_training.speed_up(person)
    for run in runs:
        wait_until_finished(run)
    assert restarts(job) == {0: 0, 1: 1, 2: 0, 3: 0}
    reasons = [[entry["reason"] for entry in ledger_lines(run)] for run in runs]
    assert reasons == [["done"], ["preempted", "done"], ["done"], ["done"]]
    assert [losses(run) for run in runs] == [undisturbed_losses(seed=seed) for seed in range(1, 5)]
