"""How large the shipped models are: parameters and kept activations by formula, from the configuration alone.

Counted is what autograd keeps of a micro-batch until the backward pass has used it, operation by operation as the
models' `forward` has them. The way of counting is that of Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (arXiv:2205.05198), section 4.1; the numbers differ, since these models are other ones (rotary
positions, attention that keeps no matrix of positions). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLOAT, HALF, INDEX = 4, 2, 8
"""Bytes of a number in float32, in bfloat16, and of a token id."""
_GPT, _CNN = "slurm_train.models.gpt.GPT", "slurm_train.models.cnn.CNN"
GPT_DEFAULTS = {
    "vocab_size": 257,
    "context": 256,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 0,
    "width": 160,
    "hidden": 0,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "gelu",
    "positions": "rope",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bias": False,
    "dropout": 0.0,
    "tied": True,
}
"""Arguments of the constructor; a configuration may leave any of them out."""
CNN_DEFAULTS = {"num_classes": 10, "channels": 1, "features": 32, "side": 8, "dropout": 0.0}
_CNN_NORM_GROUPS = 8


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
        if model.get("_target_") != _GPT:
            return None
        asked: dict[str, Any] = {**GPT_DEFAULTS, **model}
        width, heads = int(asked["width"]), int(asked["num_heads"])
        return cls(
            vocabulary=int(asked["vocab_size"]),
            context=int(asked["context"]),
            layers=int(asked["num_layers"]),
            heads=heads,
            kv_heads=int(asked["num_kv_heads"]) or heads,
            width=width,
            hidden=int(asked["hidden"]) or 4 * width,
            is_gated=asked["activation"] == "swiglu",
            has_rms_norm=asked["norm"] == "rmsnorm",
            has_learned_positions=asked["positions"] == "learned",
            bias=bool(asked["bias"]),
            dropout=bool(float(asked["dropout"])),
            tied=bool(asked["tied"]),
        )

    @property
    def shared_width(self) -> int:
        """Width of all keys of a position, and of all values."""
        return self.width // self.heads * self.kv_heads

    @property
    def inner_width(self) -> int:
        """Width of the results of the feed-forward's first matrices together."""
        return (2 if self.is_gated else 1) * self.hidden

    @property
    def cut_by_outputs(self) -> int:
        """Matrices of a block that tensor parallelism cuts by their outputs: q, k, v, up, gate."""
        return 5 if self.is_gated else 4

    @property
    def parameters(self) -> int:
        """Numbers in the whole model."""
        return self.layers * self.block_parameters(tp=1) + self.end_parameters(is_first=True, is_last=True)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the tables that positions are looked up in."""
        return self.context * (INDEX if self.has_learned_positions else 2 * FLOAT * (self.width // self.heads))

    def block_parameters(self, *, tp: int) -> int:
        """Numbers in one block, of which a rank holds its part of the matrices and the whole of the norms."""
        by_outputs = self.width + 2 * self.shared_width + self.inner_width
        biases = by_outputs // tp + 2 * self.width if self.bias else 0
        return self.matrices_in_block(tp=tp) + biases + 2 * self._norm_parameters

    def matrices_in_block(self, *, tp: int) -> int:
        """Numbers in one block's matrices that a rank holds."""
        by_outputs = self.width + 2 * self.shared_width + self.inner_width
        return self.width * (by_outputs + self.width + self.hidden) // tp

    def end_parameters(self, *, is_first: bool, is_last: bool) -> int:
        """Numbers that a stage holds of the embeddings (first stage), and of the last norm and the head (last)."""
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
        # Autocast casts a norm's output for each of the matrices behind it anew. Dropout keeps a byte for each number.
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
        """Bytes held for a moment in the backward pass of one block, per position: two gradients, or those of keys."""
        feed_forward = self.inner_width // tp + self.width
        return FLOAT * max(feed_forward, 4 * cp * self.shared_width // tp if cp > 1 else 0)

    def passing_in_replica(self, *, tokens: int, half: bool) -> int:
        """Bytes held for a moment in the backward pass of the last feed-forward where a rank has the whole model."""
        kept = HALF if half else FLOAT
        matrix = self.width * max(self.hidden, 3 * self.width)
        per_token = self._kept_in_norm + kept * self.inner_width + 2 * INDEX
        return tokens * per_token + matrix * (FLOAT + (kept if half else 0))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnSize:
    """What a replica of the shipped CNN takes, dropout aside."""

    parameters: int
    per_image: int
    """Bytes that are kept of an image: inputs of convolutions and norms, results of ReLU, pooled positions."""
    passing: int
    """Bytes per image that are held for a moment: gradients before and after the widest layer's norm."""
    casts: int
    """Bytes of the bfloat16 copies of matrices."""

    @classmethod
    def of(cls, model: Mapping[str, Any], *, half: bool) -> CnnSize | None:
        """Returns the sizes for the `model` part of a configuration; None for any other model.

        Under autocast a GPU computes norms in float32, and each convolution keeps a bfloat16 copy of its input.
        """
        if model.get("_target_") != _CNN:
            return None
        asked: dict[str, Any] = {**CNN_DEFAULTS, **model}
        classes, channels, features, side = (int(asked[key]) for key in ("num_classes", "channels", "features", "side"))
        wide = 2 * features
        pooled = wide * (side // 2) ** 2
        # A norm's input, and the result of ReLU, which is the next convolution's input.
        stages = 2 * FLOAT * ((features + wide) * side**2 + pooled)
        copies = HALF * (channels * side**2 + features * side**2 + 2 * pooled) if half else FLOAT * channels * side**2
        norms = 3 * 2 * _CNN_NORM_GROUPS * FLOAT
        convolutions = 9 * (channels * features + features * wide + wide * wide)
        linear = classes * (pooled + 1)
        return cls(
            parameters=convolutions + 2 * (features + 2 * wide) + linear,
            per_image=stages + copies + (INDEX + FLOAT) * pooled + FLOAT * classes + INDEX + norms,
            passing=2 * FLOAT * wide * side**2,
            casts=HALF * (convolutions + linear) if half else 0,
        )
