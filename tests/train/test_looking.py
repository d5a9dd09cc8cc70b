"""Evaluations, saves and interruptions leave no trace in a training, whatever a model keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_train.checkpoint.load import read_model
from slurm_train.checkpoint.verify import newest_verified
from tests.support.ports import rank_environments
from tests.support.warm_ranks import start_rank
from tests.train import looked_at
from tests.train.small_runs import config_of, run_to_end

pytestmark = pytest.mark.timeout(300)
PARTS = [part.__name__ for part in looked_at.PARTS]
RANKS = [1, 2, 3]
LOOKS: dict[str, dict[str, Any]] = {
    "evaluated": {"train": {"eval_every_steps": 1}},
    "saved": {"checkpoint": {"every_steps": 1}},
    "all, and stopped": {
        "train": {"eval_every_steps": 2},
        "checkpoint": {"every_steps": 2, "background": False},
        "callbacks": [{"_target_": "small_training.Stopper", "steps": [3]}],
    },
}
"""What is done besides training."""


def configuration(**sections: Any) -> dict[str, Any]:
    train = {"max_steps": looked_at.STEPS, "eval_every_steps": None, **sections.pop("train", {})}
    callbacks = sections.pop("callbacks", [])
    optim = {
        "_target_": "torch.optim.SGD",
        "lr": looked_at.LR,
        "schedule": "constant",
        "warmup_samples": 0,
        "weight_decay": 0.0,
        "grad_clip_norm": None,
    }
    sections |= {
        "model": {"_target_": "looked_at.Table"},
        "data": {"_target_": "looked_at.Data"},
        "batch": {"global_size": looked_at.GLOBAL_SIZE},
        "optim": optim,
    }
    return {**config_of(train=train, **sections), "callbacks": callbacks}


def trained(folder: Path, ranks: int, **sections: Any) -> dict[str, torch.Tensor]:
    """Returns all that the last checkpoint has of the model."""
    config = configuration(**sections)
    is_stopped = bool(config["callbacks"])
    run_to_end(folder, config, ranks=ranks, code=75 if is_stopped else 0)
    if is_stopped:
        run_to_end(folder, config, ranks=ranks, attempt=1)
    found = newest_verified(folder / "checkpoints").newest
    assert found is not None and found[1].step == looked_at.STEPS
    return read_model(found[0])[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """The models of runs that are neither evaluated nor saved before their end, by number of ranks."""
    return {ranks: trained(tmp_path_factory.mktemp("whole") / "run", ranks) for ranks in RANKS}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Returns the parts whose tensors are not equal bit for bit."""
    assert one.keys() == other.keys()
    names = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    return sorted({name.split(".")[1] for name in names})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_a_model_changes_no_bit_of_it(
    undisturbed: dict[int, dict[str, torch.Tensor]], tmp_path: Path, ranks: int, name: str
) -> None:
    assert differing(trained(tmp_path / "run", ranks, **LOOKS[name]), undisturbed[ranks]) == []


@pytest.mark.parametrize("ranks", RANKS)
def test_training_gives_the_weights_of_a_plain_loop(
    undisturbed: dict[int, dict[str, torch.Tensor]], tmp_path: Path, ranks: int
) -> None:
    out = tmp_path / "weights.json"
    program = Path(looked_at.__file__)
    started = [start_rank(program, env={**os.environ, **env, "OUT": str(out)}) for env in rank_environments(ranks)]
    texts = [rank.communicate(timeout=240)[1] for rank in started]
    assert [rank.returncode for rank in started] == [0] * ranks, "".join(texts)
    weights = json.loads(out.read_text())
    for name, values in weights.items():
        assert undisturbed[ranks][name].flatten().tolist() == pytest.approx(values, rel=1e-9, abs=1e-12), name
    assert {name.split(".")[1] for name in weights} == set(PARTS)
