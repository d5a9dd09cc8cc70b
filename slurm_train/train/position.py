"""How far a run is, as checkpoints keep it and as the loop counts it.

Apart from what saves it, since callbacks look at it and are saved themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
    batch_since: list[int] = field(default_factory=lambda: [0, 0])
    """Steps and samples done when the global batch got its present size."""

    @classmethod
    def of(cls, manifest: Manifest) -> Position:
        """Returns the position that a checkpoint was saved at."""
        # Earlier versions kept the states of other parts here.
        known = {key: value for key, value in manifest.extra.items() if key in cls.__slots__}
        return cls(step=manifest.step, samples=manifest.samples, **known)

    def continue_from(self, manifest: Manifest) -> None:
        """Takes over the position that a checkpoint was saved at."""
        position = Position.of(manifest)
        for number in fields(self):
            setattr(self, number.name, getattr(position, number.name))

    def as_extra(self) -> dict[str, Any]:
        """Returns what a manifest keeps of it besides step and samples."""
        return {key: value for key, value in asdict(self).items() if key not in ("step", "samples")}

    def samples_at(self, step: int, *, global_size: int, growth: Mapping[str, int]) -> int:
        """Returns the samples that the run will have seen at a step, as planned."""
        since_step, since_samples = self.batch_since
        return since_samples + (num_batches(growth, step) - num_batches(growth, since_step)) * global_size
