"""What the trainings of all peers have in common: data, model, one line per step, and a file when all is done.

Imported by job scripts; knows nothing of Slurm, checkpoints or signals, which is what the peers are compared by.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from slurm_train.checkpoint.digest import weights_digest

STEPS = 60
SAVE_EVERY = 10
LOCAL_SIZE = 8
NUM_RANKS = 2


class Numbers(Dataset):
    """One epoch of samples: 60 steps of 2 x 8."""

    def __init__(self, size: int = STEPS * LOCAL_SIZE * NUM_RANKS, split: str = "train") -> None:
        generator = torch.Generator().manual_seed(7 if split == "train" else 8)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x @ torch.arange(8.0).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Tiny(nn.Module):
    """A model whose step takes as long as one says."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, 8); returns (batch, 1)."""
        time.sleep(self.step_s)
        return self.layers(x)


def note_step(folder: Path, step: int) -> None:
    """Adds the line of a step that has been done."""
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "start": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}) + "\n")


def note_done(folder: Path, model: nn.Module) -> None:
    """Says that all steps are done, with the weights' digest."""
    digest = weights_digest(model.named_parameters())
    (folder / "done.json").write_text(json.dumps({"weights_digest": digest}))
