"""What a run has in the end, to be compared with another: its last checkpoint, bit for bit, and its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from slurm_train.checkpoint.load import load_rank_state, load_tensors
from slurm_train.checkpoint.tensors import tensor_shapes
from slurm_train.checkpoint.verify import newest_verified
from slurm_train.metrics import read_metrics

_KEYS = ("step", "samples_digest", "lr", "loss", "grad_norm", "eval_loss")
_MOST_RANKS = 4


class End(NamedTuple):
    """All that two runs must have in common."""

    tensors: Any
    """Of the last checkpoint, as bytes."""
    ranks: list[Any]
    """The ranks' own states in it."""
    lines: list[dict[str, Any]]
    """What metrics.jsonl has of each step and evaluation."""


def bits(value: Any) -> Any:
    """Returns the value with bytes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


def end_of(path: Path) -> End:
    """Returns what is left of a run of up to four ranks."""
    found = newest_verified(path / "checkpoints").newest
    assert found is not None
    tensors = tensor_shapes(found[0])
    load_tensors(found[0], tensors)
    ranks = [bits(load_rank_state(found[0], rank)) for rank in range(_MOST_RANKS)]
    lines = [{key: line.get(key) for key in _KEYS} for line in read_metrics(path / "metrics.jsonl")]
    return End(bits(tensors), ranks, lines)
