"""What a GPT is stacked of: attention, feed-forward and positions in all the forms that published models have.

Shapes: B batch, T positions, C width, H heads, D width per head, M hidden width of the feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError
from slurm_train.models.documents import DocumentMask, attend_in_blocks

SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_context")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What all blocks of a model have in common; the meanings are those of `GPT`'s arguments."""

    width: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    norm: str
    norm_eps: float
    activation: str
    positions: str
    bias: bool
    dropout: float

    @property
    def head_width(self) -> int:
        """Width of one head, D."""
        return self.width // self.num_heads

    def build_norm(self) -> nn.Module:
        """Returns a norm over the residual stream."""
        if self.norm == "rmsnorm":
            return RMSNorm(self.width, eps=self.norm_eps)
        return LayerNorm(self.width, eps=self.norm_eps, bias=self.bias)

    def build_embedding(self, vocab_size: int, *, context: int) -> nn.Embedding:
        """Returns what makes the residual stream of token ids."""
        if self.positions == "learned":
            return LearnedPositions(vocab_size, self.width, context=context)
        return TokenEmbedding(vocab_size, self.width)

    def build_angles(
        self, context: int, *, theta: float, scaling: Mapping[str, float] | None
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns the tables of rotary positions, None and None where positions are learned."""
        if self.positions == "learned":
            return None, None
        return rotary_table(context, self.head_width, theta=theta, scaling=scaling)


class TokenEmbedding(nn.Embedding):
    """An embedding whose rows tensor parallelism may spread over its ranks: all of them get all vectors."""

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Returns (B, T, C), under autocast to bfloat16 in that type: the residual stream keeps it.

        Args:
            tokens_BT: int64 (B, T).
            positions_BT: int64 (B, T), where each token is in its text; blocks turn by it. None: in order.
        """
        del positions_BT
        return self._embed(tokens_BT)

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        weight: Any = self.weight
        if not hasattr(weight, "placements"):
            return _as_stream(functional.embedding(tokens_BT, self.weight))
        from torch.distributed.tensor import DTensor, Partial, Replicate

        own_VC = weight.to_local()
        mesh = weight.device_mesh
        torch._assert_async(((tokens_BT >= 0) & (tokens_BT < len(weight))).all(), "a token is no id of the vocabulary")
        own_BT = tokens_BT - mesh.get_local_rank() * len(own_VC)
        is_here_BT = (own_BT >= 0) & (own_BT < len(own_VC))
        # One rank adds a vector, the others nothing.
        part_BTC = functional.embedding(own_BT.where(is_here_BT, 0), own_VC) * is_here_BT.unsqueeze(-1)
        parts = DTensor.from_local(_as_stream(part_BTC), mesh, [Partial()], run_check=False)
        embedded_BTC: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return embedded_BTC


class LearnedPositions(TokenEmbedding):
    """An embedding of tokens to which one of their positions is added: one part, so that one stage has both.

    Args:
        vocab_size: number of token ids.
        width: width of the residual stream.
        context: number of positions.
    """

    order_T: Tensor

    def __init__(self, vocab_size: int, width: int, *, context: int) -> None:
        super().__init__(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.register_buffer("order_T", torch.arange(context), persistent=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Returns (B, T, C); arguments as for `TokenEmbedding`."""
        embedded_BTC = self._embed(tokens_BT)
        order: Tensor = self.order_T[: tokens_BT.shape[1]] if positions_BT is None else positions_BT
        position: Tensor = self.positions(order)
        return embedded_BTC + position.to(embedded_BTC.dtype)


def _as_stream(x_BTC: Tensor) -> Tensor:
    """Returns what begins the residual stream: in bfloat16 under autocast to it, as where FSDP gathers in bfloat16.

    In float16 it would leave that type's range.
    """
    if _is_under_autocast(x_BTC) and torch.get_autocast_dtype(x_BTC.device.type) == torch.bfloat16:
        return x_BTC.to(torch.bfloat16)
    return x_BTC


def _is_under_autocast(x: Tensor) -> bool:
    # The meta device has no autocast, and torch refuses the question.
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class LayerNorm(nn.LayerNorm):
    """torch's, without autocast's rule on GPUs that it computes, keeps and gives float32 whatever comes in.

    The kernel adds up in float32 all the same.
    """

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Returns (B, T, C) in the type of the residual stream."""
        if not _is_lowered(x_BTC):
            return super().forward(x_BTC)
        with torch.autocast(x_BTC.device.type, enabled=False):
            weight, bias = (None if tensor is None else tensor.to(x_BTC.dtype) for tensor in (self.weight, self.bias))
            return functional.layer_norm(x_BTC, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """torch's, as `LayerNorm`."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Returns (B, T, C) in the type of the residual stream."""
        if not _is_lowered(x_BTC):
            return super().forward(x_BTC)
        with torch.autocast(x_BTC.device.type, enabled=False):
            return functional.rms_norm(x_BTC, self.normalized_shape, self.weight.to(x_BTC.dtype), self.eps)


def _is_lowered(x_BTC: Tensor) -> bool:
    return x_BTC.dtype == torch.bfloat16 and _is_under_autocast(x_BTC)


class Mixing(nn.Module):
    """Scaled-dot-product attention as a part with a name, where the positions of a sequence meet."""

    def forward(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, attn_mask: DocumentMask | None = None, **options: Any
    ) -> Tensor:
        """Returns (B, H, T, D).

        Args:
            q_BHTD: queries.
            k_BHTD: keys.
            v_BHTD: values.
            attn_mask: what `documents.document_mask` gives; None for plain causal attention.
            **options: those of torch's `scaled_dot_product_attention`.
        """
        if attn_mask is None or isinstance(attn_mask, Tensor):
            return functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=attn_mask, **options)
        return attend_in_blocks(q_BHTD, k_BHTD, v_BHTD, attn_mask, is_grouped=options["enable_gqa"])


class Places:
    """Where the positions at hand are: the angles that queries and keys are turned by, and which of them meet.

    One object and not tensors: where FSDP gathers in bfloat16 it casts the tensors among a block's arguments too, and
    angles in bfloat16 are off by up to 0.002.

    Args:
        cos_TD: float32 cosines of `rotary_table`, (T, D), or (B, 1, T, D) where each sequence has positions of its own;
            None where positions are learned.
        sin_TD: float32 sines.
        mask: which positions meet, from `documents.document_mask`; None: each meets all before it.
    """

    def __init__(self, cos_TD: Tensor | None, sin_TD: Tensor | None, *, mask: DocumentMask | None = None) -> None:
        self.cos_TD = cos_TD
        self.sin_TD = sin_TD
        self.mask = mask

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        """Returns the vectors turned by the angle of their position; as they are where positions are learned."""
        if self.cos_TD is None or self.sin_TD is None:
            return x_BHTD
        first, second = x_BHTD.chunk(2, dim=-1)
        turned_BHTD = x_BHTD * self.cos_TD + torch.cat((-second, first), dim=-1) * self.sin_TD
        return turned_BHTD.to(x_BHTD.dtype)


class Attention(nn.Module):
    """Causal self-attention; several heads of queries may share one of keys and values."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        width = shape.width
        shared = shape.num_kv_heads * shape.head_width
        self.head_width = shape.head_width
        self.is_grouped = shape.num_kv_heads != shape.num_heads
        self.dropout = shape.dropout
        # Three matrices: each can be cut by heads.
        self.q = nn.Linear(width, width, bias=shape.bias)
        self.k = nn.Linear(width, shared, bias=shape.bias)
        self.v = nn.Linear(width, shared, bias=shape.bias)
        self.out = nn.Linear(width, width, bias=shape.bias)
        self.mix = Mixing()

    def forward(self, x_BTC: Tensor, places: Places) -> Tensor:
        """Returns the mixed values, (B, T, C)."""
        q_BHTD, k_BHTD, v_BHTD = map(self._heads, self._project(x_BTC))
        mixed_BHTD = self.mix(
            places.rotate(q_BHTD),
            places.rotate(k_BHTD),
            v_BHTD,
            dropout_p=self.dropout if self.training else 0.0,
            # torch takes one of the two; the mask is causal, too.
            is_causal=places.mask is None,
            attn_mask=places.mask,
            enable_gqa=self.is_grouped,
        )
        out_BTC: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return out_BTC

    def _project(self, x_BTC: Tensor) -> Sequence[Tensor]:
        """Returns queries, keys and values; by one product where putting the matrices together costs nothing.

        That is a compiled graph under autocast, which copies the matrices in any case and keeps the copies.
        """
        parts = (self.q, self.k, self.v)
        if not (torch.compiler.is_compiling() and _is_under_autocast(x_BTC)) or any(map(_is_special, parts)):
            return [part(x_BTC) for part in parts]
        weight = torch.cat([part.weight for part in parts])
        bias = None if self.q.bias is None else torch.cat([part.bias for part in parts])
        return torch.split(functional.linear(x_BTC, weight, bias), [part.out_features for part in parts], dim=-1)

    def _heads(self, x_BTC: Tensor) -> Tensor:
        # As many heads as came: a rank may hold a part of the matrix.
        batch, positions, _ = x_BTC.shape
        return x_BTC.view(batch, positions, -1, self.head_width).transpose(1, 2)


def _is_special(linear: nn.Linear) -> bool:
    """Returns whether a layer is more than a product with a float32 matrix: parts, adapters, float8, hooks."""
    is_plain = type(linear) is nn.Linear and linear.weight.dtype == torch.float32
    has_hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    return not is_plain or hasattr(linear.weight, "placements") or bool(has_hooks or linear._backward_pre_hooks)


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them; or three, one of which gates another through a SiLU (SwiGLU)."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        is_gated = shape.activation == "swiglu"
        self.gate = nn.Linear(shape.width, shape.hidden, bias=shape.bias) if is_gated else None
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.out = nn.Linear(shape.hidden, shape.width, bias=shape.bias)
        self.approximation = "tanh" if shape.activation == "gelu_tanh" else "none"

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Returns (B, T, C)."""
        up_BTM: Tensor = self.up(x_BTC)
        if self.gate is None:
            mixed_BTM = functional.gelu(up_BTM, approximate=self.approximation)
        else:
            mixed_BTM = functional.silu(self.gate(x_BTC)) * up_BTM
        out_BTC: Tensor = self.out(mixed_BTM)
        return out_BTC


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.attention_norm = shape.build_norm()
        self.attention = Attention(shape)
        self.feed_forward_norm = shape.build_norm()
        self.feed_forward = FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor, places: Places) -> Tensor:
        """Returns the residual stream after this layer, (B, T, C)."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), places))
        mixed_BTC: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x_BTC)))
        return x_BTC + mixed_BTC


def rotary_table(
    num_positions: int, head_width: int, *, theta: float = 10000.0, scaling: Mapping[str, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of rotary positions, each float32 (T, D), the two halves of D alike.

    Queries and keys are turned by an angle that grows with their place in the sequence. The two halves of a head are
    turned against each other, as transformers does it, so weights need no reordering.

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
        frequency = _stretch(frequency, scaling)
    angle_TD = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency).repeat(1, 2)
    return angle_TD.cos(), angle_TD.sin()


def _stretch(frequency: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Returns the frequencies of a context `factor` times as long.

    What turns often within the original context stays, what turns seldom becomes slower by the factor, and what lies
    between goes over from the one to the other in proportion to its number of turns.
    """
    if set(scaling) != set(SCALING_KEYS):
        raise ConfigError(
            f"model.rope_scaling has the keys {', '.join(sorted(scaling)) or 'none'}",
            hint=f"give all of {', '.join(SCALING_KEYS)} and nothing else",
        )
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    num_turns = scaling["original_context"] * frequency / (2 * math.pi)
    kept = ((num_turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling["factor"] + kept * frequency
