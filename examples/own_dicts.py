"""Batches by name: samples as a tokenized Hugging Face data set gives them, and a model that takes their keywords.

From this folder:

    python -m slurm_train model._target_=own_dicts.Tagger data._target_=own_dicts.Sums

Samples of unequal length are padded: `labels` with -100, which does not count, everything else with 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Sums(Dataset[dict[str, list[int]]]):
    """Random digits; the label of each place is the last digit of the sum so far."""

    def __init__(self, split: str = "train", size: int = 2048) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        lengths = torch.randint(3, 12, (size if split == "train" else size // 8,), generator=generator)
        self.rows = [torch.randint(0, 10, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        labels = (row.cumsum(0) % 10).tolist()
        return {"input_ids": row.tolist(), "attention_mask": [1] * len(row), "labels": labels}


class Tagger(nn.Module):
    """A recurrent network; the trainer computes the loss from its logits and `labels`."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, hidden), nn.Linear(hidden, 10)
        self.layers = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
        del labels  # for models that compute a loss of their own
        return self.head(self.layers(self.embed(input_ids) * attention_mask[..., None])[0])
