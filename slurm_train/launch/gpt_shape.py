"""How large the shipped GPT is in each of its forms: parameters and kept activations by formula. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GPT = "slurm_train.models.gpt.GPT"
FLOAT, HALF, INDEX = 4, 2, 8
"""Bytes of a number in float32, in bfloat16, and of a token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """The numbers that decide how large the shipped GPT is."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    is_gated: bool
    """Whether the feed-forward has a third matrix (SwiGLU)."""
    has_rms_norm: bool
    has_learned_positions: bool
    bias: bool
    dropout: bool
    tied: bool

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> GptShape | None:
        """Returns the shape that the `model` part of a configuration asks for; None for any other model."""
        if model.get("_target_") != GPT:
            return None
        width, heads = int(model.get("width", 160)), int(model.get("num_heads", 4))
        return cls(
            vocabulary=int(model.get("vocab_size", 257)),
            context=int(model.get("context", 256)),
            layers=int(model.get("num_layers", 4)),
            heads=heads,
            kv_heads=int(model.get("num_kv_heads", 0)) or heads,
            width=width,
            hidden=int(model.get("hidden", 0)) or 4 * width,
            is_gated=model.get("activation") == "swiglu",
            has_rms_norm=model.get("norm") == "rmsnorm",
            has_learned_positions=model.get("positions") == "learned",
            bias=bool(model.get("bias", False)),
            dropout=bool(float(model.get("dropout", 0.0))),
            tied=bool(model.get("tied", True)),
        )

    @property
    def shared_width(self) -> int:
        """Width of all keys of a position, and of all values."""
        return self.width // self.heads * self.kv_heads

    @property
    def inner_width(self) -> int:
        """Width of what the feed-forward's first matrices give together."""
        return (2 if self.is_gated else 1) * self.hidden

    @property
    def cut_by_outputs(self) -> int:
        """Matrices of a block that tensor parallelism cuts by their outputs: q, k, v, up, gate."""
        return 5 if self.is_gated else 4

    @property
    def parameters(self) -> int:
        """Numbers in the whole model."""
        return self.layers * self.block_parameters(tp=1) + self.end_parameters(is_first=True, is_last=True)

    def block_parameters(self, *, tp: int) -> int:
        """Numbers in one block, of which a rank holds its part of the matrices and the whole of the norms."""
        by_outputs = self.width + 2 * self.shared_width + self.inner_width
        biases = by_outputs // tp + 2 * self.width if self.bias else 0
        return self.matrices_in_block(tp=tp) + biases + 2 * self._norm_parameters

    def matrices_in_block(self, *, tp: int) -> int:
        """Numbers in one block's matrices, as far as a rank has them."""
        by_outputs = self.width + 2 * self.shared_width + self.inner_width
        return self.width * (by_outputs + self.width + self.hidden) // tp

    def end_parameters(self, *, is_first: bool, is_last: bool) -> int:
        """Numbers in the embeddings, and in the last norm and the head, as far as a stage has them."""
        table = self.vocabulary * self.width
        positions = self.context * self.width if self.has_learned_positions else 0
        head = self._norm_parameters + (0 if self.tied and is_first else table)
        return (table + positions if is_first else 0) + (head if is_last else 0)

    def kept_in_block(self, *, tp: int, half: bool, recompute: str, splits: bool = False) -> int:
        """Bytes that one block keeps for the backward pass per position.

        Args:
            tp: parts of each matrix.
            half: whether matrix products are in bfloat16.
            recompute: kind of activation checkpointing.
            splits: whether the ranks of `tp` have positions of their own between the matrices.
        """
        kept, dealt = HALF if half else FLOAT, tp if splits else 1
        stream = FLOAT * self.width // dealt
        if recompute == "full":
            return stream
        attention = kept * 2 * (self.width + self.shared_width) // tp
        inner = kept * self.inner_width // tp
        if recompute == "selective":
            # Its input, and the results of the matrix products and of attention.
            return stream + attention + inner + kept * 2 * self.width + FLOAT * self.heads // tp
        # Two norms; q, k, v and attention's result; input and result of the activation, and of SwiGLU's product.
        # Autocast casts a norm's output for each of the matrices behind it anew.
        outputs = kept * self.width * (self.cut_by_outputs if half else 2)
        dropped = 2 * self.width // dealt if self.dropout else 0
        return 2 * self._kept_in_norm // dealt + outputs + attention + FLOAT * self.heads // tp + 2 * inner + dropped

    def kept_for_context(self, *, cp: int, tp: int, half: bool) -> int:
        """Bytes that attention keeps in addition where it is shared by `cp` ranks, per position of a rank's own.

        Keys and values as far as either of two chunks looks back, in place of the rank's own, and the joined result.
        """
        looked_at = (2 * cp - 1) * self.shared_width + self.width
        return 0 if cp == 1 else (HALF if half else FLOAT) * looked_at // tp

    def passing_in_block(self, *, tp: int, cp: int) -> int:
        """Bytes that come and go in the backward pass of one block, per position: two gradients, or those of keys."""
        feed_forward = self.inner_width // tp + self.width
        return FLOAT * max(feed_forward, 4 * cp * self.shared_width // tp if cp > 1 else 0)

    def kept_at_end(self, *, half: bool) -> int:
        """Bytes that last norm, head and loss keep per position, with the input and target tokens."""
        kept = HALF if half else FLOAT
        return self._kept_in_norm + FLOAT * self.vocabulary + kept * self.width + 2 * INDEX

    @property
    def _norm_parameters(self) -> int:
        return self.width * (2 if self.bias and not self.has_rms_norm else 1)

    @property
    def _kept_in_norm(self) -> int:
        """Bytes per position beside the output: the input and two numbers; of RMSNorm also the scaled input."""
        return FLOAT * (2 * self.width + 1 if self.has_rms_norm else self.width + 2)
