"""`evaluate --follow` on a real Slurm: evaluator and run are preempted, and the evaluator's batch script is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_train.rundir.events import read_saves
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.rundir.scores import read_scores
from tests.support.cluster_faults import take_nodes
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import kill, supervisor_pid
from tests.support.slurm_runs import all_logs, losses, wait_until_finished
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]
PATIENCE_S = 240.0
RUN = (*TINY, "run.name=a", "train.max_steps=240", "checkpoint.every_steps=20", "checkpoint.keep=1", "train.threads=1")
FOLLOW = ("evaluate", "a", "--follow", "--keep", "99", "+cluster=1x1", "cluster.nodelist=node2")


def scored(own: RunDirectory) -> int:
    return len(read_scores(own))


def test_each_checkpoint_has_one_line_whatever_is_preempted(person: Person) -> None:
    _, run = person.types(*RUN, "model.step_s=0.3", "+cluster=1x1", "cluster.nodelist=node1").job_and_run
    _, own = person.types(*FOLLOW).job_and_run
    try:
        _disturb(person, run, own)
        wait_until_finished(run, within_s=PATIENCE_S)
        result = wait_until_finished(own, within_s=PATIENCE_S)
    except AssertionError as err:
        raise AssertionError(f"{err}\n{all_logs(own)}") from None
    finally:
        # The helper of the tests knows jobs of runs, not of their evaluations.
        person.runs("scancel", "--quiet", *(read_json(own.job) or {})["job_ids"])
    lines = [json.loads(line) for line in own.scores.read_text().splitlines()]
    # The stop of a preemption has saved, too.
    saved = sorted(line["step"] for line in read_saves(run))
    assert {*saved} >= {*range(20, 241, 20)}
    assert sorted(line["step"] for line in lines) == saved, lines
    assert (result["scored"], result["missed"]) == (len(saved), 0)
    assert {entry["reason"] for entry in ledger_lines(own)} >= {"preempted", "done"}
    assert "preempted" in {entry["reason"] for entry in ledger_lines(run)}
    assert f"follower {own.run_id}: finished, {len(saved)} scored" in person.types("status", "a").out
    assert len(list_checkpoints(run.checkpoints)) == 1, "nothing is kept for it any more"
    golden = person.types(*RUN, "run.name=golden", "run.processes=1")
    assert golden.code == 0, golden.err
    (path,) = (person.folder / "runs" / "golden").iterdir()
    assert losses(run) == losses(RunDirectory(Path(path)))


def _disturb(person: Person, run: RunDirectory, own: RunDirectory) -> None:
    wait_for(lambda: scored(own) >= 1, within_s=PATIENCE_S, what="the first score")
    assert f"follower {own.run_id}: running" in person.types("status", "a").out
    take_nodes(["node2"])
    wait_for(lambda: len(ledger_lines(own)) >= 2, within_s=PATIENCE_S, what="the evaluator is back")
    before = scored(own)
    take_nodes(["node1"])
    wait_for(lambda: scored(own) > before + 1, within_s=PATIENCE_S, what="scores of the run that came back")
    kill(supervisor_pid(own))
    # Slurm calls the job failed, and nothing brings it back: the same command does.
    wait_for(lambda: person.types(*FOLLOW).code == 0, within_s=PATIENCE_S, what="the same command", poll_s=3.0)
