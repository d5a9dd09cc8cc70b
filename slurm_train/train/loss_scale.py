"""Dynamic loss scaling: what float16 needs to hold the small gradients of a backward pass.

Each rank back-propagates the sum of its losses times a factor, the same on all ranks and always a power of two, so that
dividing by it again is exact. Where gradients of a finite loss overflow, the step is not applied and the factor is
halved. It starts at 1, is doubled with every step until the first overflow, and then after every 2000 steps without
one. It stays on the device and follows the reduced numbers there: no step waits for the host, and no rank differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_LEAST = 2.0**-24
_MOST = 2.0**30
_GROWTH_STEPS = 2000


class LossScale:
    """The factor of the losses, and the state from which the next factor follows.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        # The factor, steps since it changed, whether there was an overflow.
        self._values = torch.tensor((1.0, 0.0, 0.0), device=device)
        self.factor = self._values[0]
        """The factor of the losses, a scalar on the device; `update` changes it in place."""

    def state_dict(self) -> dict[str, list[float]]:
        """Returns {"values": [factor, steps since it changed, 1 after an overflow]}. Waits for a GPU."""
        return {"values": self._values.tolist()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes over what `state_dict` returned."""
        self._values.copy_(torch.tensor(state["values"]))

    def update(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Sets the factor of the next step; returns whether this step's factor was too large, a bool scalar.

        Args:
            loss: the step's loss, reduced over all ranks.
            norm: norm of the gradients, reduced over all ranks.
        """
        factor, streak, has_overflowed = self._values
        is_fine = norm.isfinite()
        overflows = loss.isfinite() & is_fine.logical_not()
        grows = is_fine & ((has_overflowed == 0) | (streak + 1 >= _GROWTH_STEPS))
        # Where the factor is the least one, the gradients are not finite for another reason.
        is_too_large: Tensor = overflows & (factor > _LEAST)
        following = torch.where(overflows, factor / 2, torch.where(grows, factor * 2, factor)).clamp(_LEAST, _MOST)
        streak = torch.where(overflows | grows, 0.0, streak + 1)
        self._values.copy_(torch.stack((following, streak, torch.maximum(has_overflowed, overflows.float()))))
        return is_too_large
