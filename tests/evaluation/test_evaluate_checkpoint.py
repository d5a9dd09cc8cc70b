"""Weights of a run that goes on meanwhile: its checkpoints get other names at any moment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurm_train.checkpoint import load
from slurm_train.checkpoint.manifest import FileRecord, check_hash
from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.config.schema import RunConfig
from slurm_train.errors import CheckpointError
from slurm_train.evaluation import evaluate_checkpoint
from slurm_train.models.gpt import GPT
from slurm_train.rundir.paths import list_checkpoints, save_path
from tests.support.small_checkpoints import make_header

SHAPE: dict[str, Any] = {"num_layers": 1, "width": 16, "num_heads": 2, "vocab_size": 257, "context": 16}


def test_a_checkpoint_that_is_renamed_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = GPT(**SHAPE)
    tensors = {"model": saved.state_dict()}
    rank_state: dict[str, Any] = {"modules": None}
    save_checkpoint(tmp_path, tensors=tensors, rank_state=rank_state, header=make_header(1), group=None, keep=9)
    (before,) = list_checkpoints(tmp_path)
    after = before.with_name(before.name.replace("attempt_0001", "attempt_0002"))
    assert after != before

    def check_and_rename(path: Path, record: FileRecord) -> None:
        check_hash(path, record)
        if before.exists():
            # As the run does when it resumes.
            before.rename(after)

    monkeypatch.setattr(load, "check_hash", check_and_rename)
    model = GPT(**SHAPE)
    parts: Any = SimpleNamespace(model=model, pipeline=None, rank=SimpleNamespace(config=RunConfig()))
    path, manifest = evaluate_checkpoint.load_weights(parts, save_path(before))
    assert (path, manifest.step) == (after, 1)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError):
        evaluate_checkpoint.load_weights(parts, save_path(before.with_name(before.name.replace("0000001", "0000002"))))
