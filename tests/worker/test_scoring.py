"""A scorer of one's own: what it hands back counts only if the evaluator was not asked to stop while it ran."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.evaluation.follower import Waiting
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of, save_path
from slurm_train.rundir.scores import append_score, read_scores
from slurm_train.session.signals import StopFlag
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"a": 1, "b": 0.5, "c": -2}', {"a": 1.0, "b": 0.5, "c": -2.0}),
        ('{"a": NaN, "b": Infinity, "c": 1e400}', {"a": None, "b": None, "c": None}),
        (f'{{"a": 1{"0" * 308}}}', {"a": 1e308}),
        (f'{{"a": 1{"0" * 400}}}', RunError),
        (f'{{"a": -1{"0" * 4400}}}', RunError),
        ('{"a": true}', RunError),
        ('{"a": "0.5"}', RunError),
        ('{"a": null}', RunError),
        ('{"a": {"f1": 0.5}}', RunError),
        ('{"a": [0.5]}', RunError),
        ("{}", RunError),
        ("0.5", RunError),
        ("{'a': 0.5}", RunError),
    ],
)
def test_a_scorers_numbers_are_recorded_or_refused_by_name(
    answer: str, expected: dict[str, float | None] | type[RunError], tmp_path: Path
) -> None:
    waiting = _save_in(new_run(tmp_path / "followed"))
    evaluator = new_run(tmp_path / "evaluator")
    evaluator.attempt_logs(0).mkdir(parents=True)
    (tmp_path / "answer").write_text(answer)
    call = partial(_score, waiting, ["cat", str(tmp_path / "answer")], os.environ, run=evaluator, attempt=0)
    if isinstance(expected, type):
        with pytest.raises(expected, match="the scorer has handed back"):
            call(stop=StopFlag(), name="")
        return
    score = call(stop=StopFlag(), name="")
    assert score is not None
    append_score(evaluator, score)
    (recorded,) = read_scores(evaluator).values()
    assert recorded.values == {f"eval_{name}": value for name, value in expected.items()}
