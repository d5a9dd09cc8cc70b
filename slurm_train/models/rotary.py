"""Rotary positions: queries and keys are turned by an angle that grows with their place in the sequence.

The two halves of a head are turned against each other, as transformers does it, so weights need no reordering.

Shapes: B batch, H heads, T positions, D width per head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from slurm_train.errors import ConfigError

SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_context")


def rotary_table(
    num_positions: int, head_width: int, *, theta: float = 10000.0, scaling: Mapping[str, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of rotary positions, each float32 (T, D), the two halves of D alike.

    Args:
        num_positions: T.
        head_width: D, even.
        theta: base of the frequencies; a larger one turns slower.
        scaling: Llama 3.1's stretching to a longer context, with the keys `SCALING_KEYS`; None for none.

    Raises:
        ConfigError: the scaling has other keys.
    """
    frequency = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    if scaling:
        frequency = stretch(frequency, scaling)
    angle_TD = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency).repeat(1, 2)
    return angle_TD.cos(), angle_TD.sin()


def stretch(frequency: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Returns the frequencies of a context `factor` times as long.

    What turns often within the original context stays, what turns seldom becomes slower by the factor, and what lies
    between goes over from the one to the other in proportion to its number of turns.
    """
    if set(scaling) != set(SCALING_KEYS):
        raise ConfigError(
            f"model.rope_scaling has the keys {', '.join(sorted(scaling)) or 'none'}",
            hint=f"give all of {', '.join(SCALING_KEYS)} and nothing else",
        )
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    num_turns = scaling["original_context"] * frequency / (2 * math.pi)
    kept = ((num_turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling["factor"] + kept * frequency


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Returns the vectors turned by the angle of their position."""
    first, second = x_BHTD.chunk(2, dim=-1)
    turned_BHTD = x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD
    return turned_BHTD.to(x_BHTD.dtype)
