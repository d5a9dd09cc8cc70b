"""Passes that are made to look at something, and leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from slurm_train.distributed.seeds import rng_state, set_rng_state


@contextlib.contextmanager
def without_traces(module: nn.Module) -> Iterator[None]:
    """Puts random streams and buffers back bit for bit, and drops gradients, after passes of a module.

    Args:
        module: has no gradients before.
    """
    streams = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for parameter in module.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        set_rng_state(streams)
