"""A scorer of one's own: what it hands back counts only if the evaluator was not asked to stop while it ran."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of, save_path
from slurm_train.session.signals import StopFlag
from slurm_train.status.following import Waiting
from slurm_train.worker.scoring import _score
from tests.support.joined_runs import joined, new_run


def _save_in(run: RunDirectory) -> Waiting:
    with joined(run) as session, session.save(3) as folder:
        (folder / "model.txt").write_text("x")
    (checkpoint,) = list_checkpoints(run.checkpoints)
    name = name_of(checkpoint)
    return Waiting(save=save_path(checkpoint), step=name.step, save_id=name.save_id, attempt=name.attempt)


@pytest.mark.parametrize(("before", "has_score"), [("", True), ("touch $STOP;", False)], ids=["undisturbed", "asked"])
def test_a_scorer_that_ran_when_its_evaluator_was_asked_to_stop_has_no_score(
    before: str, has_score: bool, tmp_path: Path
) -> None:
    waiting = _save_in(new_run(tmp_path / "followed"))
    evaluator = new_run(tmp_path / "evaluator")
    evaluator.attempt_logs(0).mkdir(parents=True)
    command = ["sh", "-c", f"{before} echo '{{\"accuracy\": 0.5}}'"]
    env = {**os.environ, "STOP": str(evaluator.stop_file)}
    score = _score(waiting, command, env, run=evaluator, attempt=0, stop=StopFlag(), name="own")
    assert (score is not None) == has_score
