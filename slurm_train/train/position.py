"""How far a run is, as checkpoints keep it and as the loop counts it.

Apart from what saves it, since callbacks look at it and are saved themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slurm_train.checkpoint.manifest import Manifest
from slurm_train.config.batch import num_batches


@dataclass(slots=True)
class Position:
    """How far a run is: a few integers, counted at the optimizer."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Global samples that they consumed."""
    items: int = 0
    """Tokens (or samples) that their losses counted."""
    empty_steps: int = 0
    """Steps in which no item counted, so that nothing was learned."""
    loss: float | None = None
    """Loss of the newest step that was read."""
    evaluation_due: bool = False
    """The evaluation of this step was broken off by a stop."""
    ended: str = ""
    """Why the run ends at this step, before its last; "" where it goes on."""
    recent_losses: list[float] = field(default_factory=list)
    """Newest losses, oldest first; only kept where spikes are looked for."""
    loss_scale: list[float] | None = None
    """State of the loss scale; None without float16."""
    batch_since: list[int] = field(default_factory=lambda: [0, 0])
    """Steps and samples done when the global batch got its present size."""
    bucket_order: list[int] = field(default_factory=list)
    """Order in which gradients became ready in the run's first step; empty without DDP."""

    @classmethod
    def of(cls, manifest: Manifest) -> Position:
        """Returns the position that a checkpoint was saved at."""
        fields = {key: value for key, value in manifest.extra.items() if key in cls.__slots__}
        return cls(step=manifest.step, samples=manifest.samples, **fields)

    def as_extra(self) -> dict[str, Any]:
        """Returns what a manifest keeps of it besides step and samples."""
        return {key: value for key, value in asdict(self).items() if key not in ("step", "samples")}

    def samples_at(self, step: int, *, global_size: int, growth: Mapping[str, int]) -> int:
        """Returns the samples that the run will have seen at a step, as planned."""
        since_step, since_samples = self.batch_since
        return since_samples + (num_batches(growth, step) - num_batches(growth, since_step)) * global_size
