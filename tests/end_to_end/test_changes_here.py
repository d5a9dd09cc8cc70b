"""A run that is trained here, changed on purpose in the middle, on real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.verify import newest_verified, read_manifest
from slurm_train.metrics import read_metrics
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import TINY, Person, new_project
from tests.support.ledgers import ledger_lines
from tests.support.small_checkpoints import checkpoint_of
from tests.support.warm_commands import WarmPerson

pytestmark = pytest.mark.distributed
WORDS = (*TINY, "run.name=a", "train.threads=1", "run.processes=2", "train.samples_digest=true")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Person, RunDirectory]:
    """A run that has finished its twelve steps on two ranks."""
    person = WarmPerson(new_project(tmp_path_factory.mktemp("changes") / "project"))
    done = person.types(*WORDS)
    assert done.code == 0, done.err
    (path,) = (person.folder / "runs" / "a").iterdir()
    return person, RunDirectory(path)


def test_no_bytecode_is_left_in_the_copy_of_the_code(trained: tuple[Person, RunDirectory]) -> None:
    """Root may write into the copy, and others could read what Python leaves there."""
    _, run = trained
    assert [path.name for path in run.code.glob("t*")] == ["tiny.py"] and not [*run.code.rglob("__pycache__")]


def test_a_run_goes_on_with_what_was_accepted_and_its_checkpoints_say_so(trained: tuple[Person, RunDirectory]) -> None:
    person, run = trained
    before = read_manifest(checkpoint_of(run.checkpoints, 12)).config_hash
    assert before == json.loads(run.plan.read_text())["config_hash"]
    words = ("resume", run.run_id, "train.max_steps=16", "optim.weight_decay=0.5", "run.processes=1")
    refused = person.types(*words)
    assert refused.code == 2 and "train.max_steps     12 -> 16" in refused.err
    done = person.types(*words, "--accept", "config")
    assert done.code == 0, done.err
    assert "from step 12 on, as accepted: optim.weight_decay: 0.1 -> 0.5" in done.err
    assert json.loads(run.result.read_text())["step"] == 16
    lines = [line for line in read_metrics(run.metrics) if "loss" in line]
    assert [(line["step"], line["world_size"]) for line in lines][-5:] == [(12, 2), *((n, 1) for n in range(13, 17))]
    assert [line["samples"] for line in lines][-1] == 256
    found = newest_verified(run.checkpoints).newest
    assert found is not None
    assert found[1].extra["changes"] == [{"number": 1, "step": 12, "names": ["optim.weight_decay", "train.max_steps"]}]
    assert ledger_lines(run)[-1]["accepted"] == ["optim.weight_decay", "train.max_steps"]
    assert found[1].config_hash == json.loads(run.plan.read_text())["config_hash"] != before
    groups: dict[str, Any] = {"optimizer": {"param_groups": [{"weight_decay": None, "lr": None}]}}
    load_tensors(found[0], groups)
    assert groups["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


def test_weights_that_do_not_fit_are_refused_by_the_ranks(trained: tuple[Person, RunDirectory]) -> None:
    person, run = trained
    text = (person.folder / "tiny.py").read_text()
    narrow = text.replace("nn.Linear(8, 16)", "nn.Linear(8, 8)").replace("nn.Linear(16, 1)", "nn.Linear(8, 1)")
    (person.folder / "tiny.py").write_text(narrow)
    done = person.types("resume", run.run_id, "train.max_steps=20", "--accept", "config,code")
    assert done.code == 2
    text = " do not fit the model as it is now: layers.0.bias 16 -> 8, layers.0.weight 16x8 -> 8x8"
    assert f"the weights in {checkpoint_of(run.checkpoints, 16).name}{text}" in done.err, done.err[-3000:]
    assert newest_verified(run.checkpoints).newest is not None
