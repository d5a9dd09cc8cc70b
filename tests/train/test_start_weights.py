from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from slurm_train.config.schema import RunConfig, TrainSection
from slurm_train.rundir.layout import CheckpointName, RunDirectory
from slurm_train.train.trainer import load_start_weights


def test_a_run_starts_from_weights_until_it_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    run, trained = RunDirectory(tmp_path / "run"), nn.Linear(3, 2)
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    config = RunConfig(model={}, train=TrainSection(init_from=str(tmp_path / "model.safetensors")))

    def started(config: RunConfig) -> bool:
        model = nn.Linear(3, 2)
        load_start_weights(model, config, run=run)
        return bool(torch.equal(model.weight, trained.weight) and torch.equal(model.bias, trained.bias))

    assert started(config) and not started(replace(config, train=TrainSection()))
    saved = run.checkpoints / str(CheckpointName(5, 0, "00000000"))
    (saved.with_name(f"{saved.name}.tmp")).mkdir(parents=True)
    assert started(config)  # it was not saved to the end
    saved.mkdir()
    assert not started(config)
