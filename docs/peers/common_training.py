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

from slurm_train.checkpoint.load import weights_digest

STEPS = 60
SAVE_EVERY = 18
AT_STEP = 25
"""After which a fault comes."""
LOCAL_SIZE = 8
NUM_RANKS = 2


class Numbers(Dataset):
    """One epoch of samples: 60 steps of 2 x 8. Held out is one batch, so that no peer pays for an evaluation."""

    def __init__(self, size: int = STEPS * LOCAL_SIZE * NUM_RANKS, split: str = "train") -> None:
        size = size if split == "train" else LOCAL_SIZE * NUM_RANKS
        generator = torch.Generator().manual_seed(7 if split == "train" else 8)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x @ torch.arange(8.0).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Tiny(nn.Module):
    """A model whose step takes as long as one says.

    Args:
        step_s: seconds.
        gate: a file that the steps after AT_STEP wait for, so that a fault finds all peers at the same step; "": none.
            Two calls later, since some write a step's line, or look at a batch, one step ahead.
    """

    def __init__(self, step_s: float = 0.0, gate: str = "") -> None:
        super().__init__()
        self.step_s, self.gate, self.num_calls = step_s, gate, 0
        self.layers = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, 8); returns (batch, 1)."""
        self.num_calls += 1
        while self.gate and self.num_calls > AT_STEP + 2 and not Path(self.gate).exists():
            time.sleep(0.02)
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
