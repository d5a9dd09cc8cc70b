"""The identity of a model's weights as one hash, to compare two runs bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor


def weights_digest(named_parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Gives the xxh3_128 hash (hexadecimal) over name, type, shape and bytes of each parameter, in name order.

    Args:
        named_parameters: whole tensors of any shape and type, on any device; of a sharded model, gather them first.
    """
    hasher = xxhash.xxh3_128()
    for name, parameter in sorted(named_parameters, key=lambda item: item[0]):
        # A line of JSON per parameter, so that no two lists of parameters give the same stream of bytes.
        head = [name, str(parameter.dtype), list(parameter.shape)]
        hasher.update(json.dumps(head).encode() + b"\n")
        hasher.update(_bytes_of(parameter))
    return hasher.hexdigest()


def _bytes_of(parameter: Tensor) -> memoryview:
    """Gives the elements in row-major order as bytes; numpy has no bfloat16, so the view is made in torch."""
    import torch

    flat = parameter.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return flat.numpy().data
