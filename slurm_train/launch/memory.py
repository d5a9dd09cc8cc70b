"""How much memory a rank needs at most, put together from what is known without a GPU. Pure.

Data parallel ranks hold everything: weights, gradients, the two moments of AdamW, and what the forward pass keeps of
one micro-batch. Gradients lie in DDP's buckets (gradient_as_bucket_view), so buckets are no extra; with
accumulation the micro-batches before the last add theirs up beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank, where torch's tensors lie."""

    source: str
    """Where the activations are from: "formula" or "measured"."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Of one micro-batch, what is held for a moment at the peak included."""
    host_copy_bytes: int
    """Copy that a background save writes from; in the host's memory."""
    on_gpu: bool

    @property
    def total_bytes(self) -> int:
        """The peak of a rank's tensors: on its GPU, or in the host's memory where there is none."""
        tensors = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        return tensors if self.on_gpu else tensors + self.host_copy_bytes

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan --json` prints."""
        names = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "host_copy_bytes")
        return {
            "source": self.source,
            "on_gpu": self.on_gpu,
            **{name: getattr(self, name) for name in names},
            "total_bytes": self.total_bytes,
        }

    @property
    def in_words(self) -> str:
        """One line, e.g. "70 MiB per rank: weights 4.8 MiB, ... (formula, float32)"."""
        parts = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "AdamW": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }
        if self.host_copy_bytes and not self.on_gpu:
            parts["copy for saves"] = self.host_copy_bytes
        listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items())
        host = f"; on the host {size(self.host_copy_bytes)} for saves" if self.host_copy_bytes and self.on_gpu else ""
        return f"{size(self.total_bytes)} per rank: {listed} ({self.source}){host}"


def estimate_memory(
    *,
    trained_bytes: int,
    other_bytes: int,
    activation_bytes: int,
    accumulation: int,
    saves_in_background: bool,
    on_gpu: bool,
    source: str,
) -> MemoryEstimate:
    """Returns what a rank needs.

    Args:
        trained_bytes: of the parameters that are trained.
        other_bytes: of buffers and frozen parameters.
        activation_bytes: of one micro-batch, at the peak.
        accumulation: micro-batches of a step.
        saves_in_background: whether a save is written from a copy.
        on_gpu: whether the ranks have GPUs.
        source: where the activations are from.
    """
    return MemoryEstimate(
        source=source,
        weight_bytes=trained_bytes + other_bytes,
        gradient_bytes=trained_bytes * (2 if accumulation > 1 else 1),
        optimizer_bytes=2 * trained_bytes,
        activation_bytes=activation_bytes,
        host_copy_bytes=3 * trained_bytes + other_bytes if saves_in_background else 0,
        on_gpu=on_gpu,
    )


def size(num_bytes: int) -> str:
    """Returns bytes for people, e.g. "4.8 MiB", "1.3 GiB"."""
    number, unit = (num_bytes / _GIB, "GiB") if num_bytes >= _GIB else (num_bytes / _MIB, "MiB")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"
