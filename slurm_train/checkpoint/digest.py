"""The identity of a model's weights as one hash, to compare two runs bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from torch import Tensor


def weights_digest(named_parameters: Iterable[tuple[str, Any]]) -> str:
    """Gives the xxh3_128 hash (hexadecimal) over name, type, shape and bytes of each parameter, in name order.

    Args:
        named_parameters: tensors of any shape and type, on any device; what is sharded is gathered, one after the
            other, so all ranks that hold a part call this together.
    """
    hasher = xxhash.xxh3_128()
    for name, parameter in sorted(named_parameters, key=lambda item: item[0]):
        # A line of JSON per parameter, so that no two lists of parameters give the same stream of bytes.
        head = [name, str(parameter.dtype), list(parameter.shape)]
        hasher.update(json.dumps(head).encode() + b"\n")
        hasher.update(_bytes_of(parameter))
    return hasher.hexdigest()


class _SavedWeight:
    """A parameter that is read from a checkpoint when its bytes are asked for."""

    def __init__(self, path: Path, name: str, like: Tensor) -> None:
        self.dtype, self.shape = like.dtype, like.shape
        self._path, self._name = path, name

    def full_tensor(self) -> Tensor:
        import torch

        from slurm_train.checkpoint.load import load_tensors

        tensors = {"model": {self._name: torch.empty(self.shape, dtype=self.dtype)}}
        load_tensors(self._path, tensors)
        return tensors["model"][self._name]


def saved_weights(path: Path, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Gives (name, parameter) of a durable checkpoint for `weights_digest`; one at a time is in memory. One process."""
    from slurm_train.checkpoint.tensors import tensor_shapes

    found = tensor_shapes(path)
    return [(name, _SavedWeight(path, name, found[f"model.{name}"])) for name in names]


def _bytes_of(parameter: Any) -> memoryview:
    """Gives the elements in row-major order as bytes; numpy has no bfloat16, so the view is made in torch."""
    import torch

    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    flat = whole.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    view: memoryview = flat.numpy().data
    return view
