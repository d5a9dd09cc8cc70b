"""The learning rate as a pure function of the samples consumed: no state, so nothing to save and nothing to resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slurm_train.config.schema import OptimSection

_WARMUP_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up, then a cosine or nothing."""

    peak_lr: float
    warmup_samples: int
    """Samples over which the rate rises from 0 to the peak."""
    total_samples: int
    """Samples of the whole run; the cosine ends there."""
    min_lr_ratio: float
    """Last rate of the cosine as a fraction of the peak."""
    shape: Literal["cosine", "constant"]

    def lr_at(self, samples: int) -> float:
        """Returns the learning rate of the step that brings the run to so many samples.

        Args:
            samples: global samples consumed, the step's own included.
        """
        if samples < self.warmup_samples:
            return self.peak_lr * samples / self.warmup_samples
        if self.shape == "constant":
            return self.peak_lr
        done = (samples - self.warmup_samples) / max(self.total_samples - self.warmup_samples, 1)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
        return self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine)


def build_schedule(optim: OptimSection, *, peak_lr: float, total_samples: int) -> Schedule:
    """Returns the schedule of a run.

    Args:
        optim: its shape.
        peak_lr: `optim.lr` after the retune of the batch plan.
        total_samples: samples of all steps.
    """
    warmup = optim.warmup_samples if optim.warmup_samples is not None else round(total_samples * _WARMUP_SHARE)
    return Schedule(
        peak_lr=peak_lr,
        warmup_samples=warmup,
        total_samples=total_samples,
        min_lr_ratio=optim.min_lr_ratio,
        shape=optim.schedule,
    )
