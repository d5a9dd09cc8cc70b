"""A sweep on a real Slurm: elements of one node and of two, one of which loses a rank; the others never notice."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import read_preflight
from slurm_train.rundir.sweep import SweepDirectory, read_table
from tests.campaigns.arrays import restarts
from tests.support.command_line import TINY, Person
from tests.support.process_faults import kill, rank_pid
from tests.support.slurm_runs import losses, wait_until_finished, wait_until_step

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
WORDS = (*TINY, "train.threads=1", "model.step_s=0.2", "seed=1,2", "run.name=nodes${cluster.nodes}")


def test_an_element_that_loses_a_rank_continues_and_the_others_never_notice(person: Person) -> None:
    done = person.types("-m", "+cluster=1x1,2x1", *WORDS)
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert len(lines) == 2, "one array per shape"
    sweep = SweepDirectory(Path(lines[0][1]))
    runs = [element.run for element in read_table(sweep)]
    assert [element.job for element in read_table(sweep)] == [f"{job}_{task}" for job, _ in lines for task in range(2)]
    wait_until_step(runs[3], 5)
    kill(rank_pid(runs[3], 1))
    results = [wait_until_finished(run) for run in runs]
    assert [result["world_size"] for result in results] == [1, 1, 2, 2]
    assert results[0]["loss"] == pytest.approx(results[2]["loss"], rel=1e-4), "the size makes no other run"
    assert [[entry["reason"] for entry in read_ledger(run)] for run in runs] == [
        ["done"],
        ["done"],
        ["done"],
        ["failed", "done"],
    ]
    assert all(read_preflight(run, 0)["table"] for run in runs), "the nodes of each element were looked at"
    assert all(sorted(losses(run)) == list(range(1, 13)) for run in runs)
    assert [set(restarts(job).values()) for job, _ in lines] == [{0}, {0}]
    assert "4 runs: 4 finished" in person.types("status", sweep.sweep_id).out
    table = list(csv.DictReader(io.StringIO(person.types("collate", lines[1][0], "--format", "csv").out)))
    assert [row["attempts"] for row in table] == ["1", "1", "1", "2"]
    again = person.types("-m", "+cluster=1x1,2x1", *WORDS)
    assert (again.code, again.out) == (0, "") and "4 runs are finished, 0 active; 0 to submit" in again.err
