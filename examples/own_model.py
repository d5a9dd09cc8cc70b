"""Your own module and data set, trained by the toolkit.

From this folder:

    python -m slurm_train model._target_=own_model.Regressor data._target_=own_model.Waves train.max_steps=200
    python -m slurm_train +cluster=2x2 model._target_=own_model.Regressor data._target_=own_model.Waves

`forward(inputs)` and a data set of `(inputs, targets)` are enough: whole-number targets mean cross entropy, real ones
mean squared error. Define `training_loss` and `evaluation_sums` for anything else (docs/bring-your-own.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Noisy sine waves: 64 points in, phase out. `split` is passed because the constructor has such an argument."""

    def __init__(self, split: str = "train", size: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        self.phases = torch.rand(size if split == "train" else size // 8, 1, generator=generator) * 2 - 1
        time = torch.linspace(0, 6, 64)
        self.waves = torch.sin(time + self.phases) + 0.1 * torch.randn(len(self.phases), 64, generator=generator)

    def __len__(self) -> int:
        return len(self.phases)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.waves[index], self.phases[index]


class Regressor(nn.Module):
    """Two layers."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def halving(samples: int, *, warmup_samples: int, total_samples: int, times: int = 4) -> float:
    """A learning-rate schedule: the factor of the peak after so many samples is halved so many times in a run."""
    warmup = min(1.0, samples / max(1, warmup_samples))
    return warmup * 0.5 ** (samples * times // total_samples)
