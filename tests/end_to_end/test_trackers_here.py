"""A run that is trained here, killed and continued: one tracker run has every step, and a bad tracker costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.metrics import read_metrics
from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import TINY, Person, new_project
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import kill
from tests.support.slurm_runs import losses
from tests.support.tracked_runs import trackio_points, wandb_points
from tests.support.waiting import wait_for
from tests.support.warm_commands import WarmPerson

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORDS = (*TINY, "run.name=a", "run.processes=1", "train.threads=1", "model.step_s=0.3", "track.wandb.project=p")


def only_run(person: Person) -> RunDirectory:
    return find_run(person.folder / "runs", "a")


@pytest.mark.full
def test_a_killed_and_a_finished_attempt_are_one_run_of_each_tracker(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    person = WarmPerson(new_project(tmp_path / "project"))
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    words = (*WORDS, "track.wandb.mode=offline", "track.trackio.project=p", "track.tensorboard=true")
    command = [sys.executable, "-m", "slurm_train", *words]
    process = subprocess.Popen(command, cwd=person.folder, env=person.environment() | env, stderr=subprocess.DEVNULL)
    wait_for(lambda: list(person.folder.glob("runs/a/*/metrics.jsonl")), within_s=90, what="metrics")
    run = only_run(person)
    # Behind the checkpoint of step 4, so that steps come twice.
    wait_for(lambda: max(losses(run), default=0) >= 6, within_s=90, what="step 6")
    kill(read_beats(run, 0)[0].pid)
    assert process.wait(60) != 0
    done = person.types(*words, env=env)
    assert done.code == 0, done.err
    assert [(line["attempt"], line["step"]) for line in read_metrics(run.metrics) if "loss" in line][-1] == (1, 12)
    logged = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    points = [(line["step"], line["loss"]) for line in logged if "loss" in line]
    assert {step for step, _ in points} == set(range(1, 13))
    assert wandb_points(run.trackers) == points
    assert trackio_points(tmp_path / "trackio" / "p.db") == points
    assert len(list(run.tensorboard.iterdir())) == 2
    ids = {path.name.rpartition("-run-")[2].partition("-")[2] for path in run.trackers.glob("wandb/offline-run-*")}
    assert ids == {json.loads((run.trackers / "wandb.json").read_text())["tracker_id"]}
    assert [entry["reason"] for entry in ledger_lines(run)] == ["failed", "done"]


BROKEN = """
import time
class Settings:
    def __init__(self, **words): pass
def init(**words):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        # Two more in `make test-returns`; test_beside causes all three without a run.
        pytest.param(
            "raise RuntimeError('401 unauthorized')",
            "RuntimeError: 401 unauthorized",
            id="raises",
            marks=pytest.mark.campaign,
        ),
        pytest.param("time.sleep(600)", "it did not answer within 2 s", id="hangs"),
        pytest.param(
            "import os; os.abort()", "its process ended with code -6", id="crashes", marks=pytest.mark.campaign
        ),
    ],
)
def test_a_bad_tracker_changes_nothing_for_the_run(body: str, problem: str, tmp_path: Path) -> None:
    person = WarmPerson(new_project(tmp_path / "project"))
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(BROKEN.format(body=body))
    env = {"PYTHONPATH": f"{tmp_path / 'packages'}:{person.environment()['PYTHONPATH']}", "WANDB_API_KEY": "x"}
    done = person.types(*WORDS, "track.timeout_s=2", "track.close_timeout_s=2", "train.max_steps=20", env=env)
    assert done.code == 0, done.err
    run = only_run(person)
    assert json.loads(run.result.read_text())["step"] == 20
    assert done.err.count(f"wandb: {problem}; tried again later") == 1
    assert "21 lines of metrics were not delivered" in done.err
    assert [event["problem"] for event in read_events(run, "tracker")] == [problem]
