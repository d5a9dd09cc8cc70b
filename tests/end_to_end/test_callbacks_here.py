"""The example callback and those of the package: a run that ends early, what is said about it, and what goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.command_line import REPOSITORY, Person

pytestmark = [pytest.mark.distributed, pytest.mark.full]
OWN = "slurm_train.train.callbacks"
MODEL = ("model._target_=own_model.Regressor", "data._target_=own_model.Waves", "run.name=a", "run.processes=2")
LIST = f"[{{_target_:own_callback.Goal,goal:0.02}},{{_target_:{OWN}.EMA,decay:0.5}},{{_target_:{OWN}.BestCheckpoint}}]"
WORDS = (*MODEL, "train.max_steps=60", "train.eval_every_steps=5", "train.threads=1")


@pytest.mark.campaign
def test_a_run_that_a_callback_ends_is_finished_until_a_change_is_accepted(tmp_path: Path) -> None:
    for name in ("own_model.py", "own_callback.py"):
        shutil.copy(REPOSITORY / "examples" / name, tmp_path)
    person = Person(tmp_path)
    done = person.types(*WORDS, f"+callbacks={LIST}")
    assert done.code == 0 and "ended early: the mean loss is below 0.02" in done.err, done.err
    status = person.types("status", "a").out
    assert "finished" in status and "the mean loss is below 0.02" in status and "best eval_loss 0." in status
    assert "complete, best eval_loss 0." in person.types("checkpoint", "ls", "a").out
    weights = []
    for words in (("a@best", "best.safetensors"), ("a@best", "ema.safetensors", "--ema")):
        exported = person.types("checkpoint", "export", *words)
        assert exported.code == 0, exported.err
        weights.append(load_file(tmp_path / words[1]))
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] != average).any() for name, average in weights[1].items())
    again = person.types(*WORDS, f"callbacks={LIST}")
    assert again.code == 0 and '"ended_early": "the mean loss is below 0.02"' in again.out
    refused = person.types("resume", "a")
    assert refused.code == 2 and "is finished (the mean loss is below 0.02); there is nothing to resume" in refused.err
    assert "callbacks=[] --accept callbacks" in refused.err
    longer = person.types("resume", "a", "callbacks=[]", "--accept", "callbacks")
    assert longer.code == 0 and "finished step 60" in longer.err, longer.err
