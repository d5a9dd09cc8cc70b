"""A small decoder-only transformer: pre-norm, rotary positions, causal scaled-dot-product attention.

Made for byte-level text at one to three million parameters, and wide enough in its arguments for more. The model knows
no parallelism, no loss and no optimizer: `model(tokens)` gives logits, everything else is somebody else's room. It only
says, as data, where it may be cut.

Shapes: B batch, T positions, C width, H heads, D width per head, V vocabulary, M hidden width of the feed-forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError

_ROTARY_BASE = 10000.0
_INIT_STD = 0.02


def rotary_table(num_positions: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of rotary positions, each float32 (T, D), the two halves of D alike."""
    frequency = _ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle_TD = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency).repeat(1, 2)
    return angle_TD.cos(), angle_TD.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Returns the vectors turned by the angle of their position."""
    first, second = x_BHTD.chunk(2, dim=-1)
    turned_BHTD = x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD
    return turned_BHTD.to(x_BHTD.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.dropout = dropout
        # Three matrices: each can be cut by heads.
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Returns the mixed values, (B, T, C)."""
        q_BHTD, k_BHTD, v_BHTD = (self._heads(linear(x_BTC)) for linear in (self.q, self.k, self.v))
        mixed_BHTD = functional.scaled_dot_product_attention(
            rotate(q_BHTD, cos_TD, sin_TD),
            rotate(k_BHTD, cos_TD, sin_TD),
            v_BHTD,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out_BTC: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return out_BTC

    def _heads(self, x_BTC: Tensor) -> Tensor:
        # As many heads as came: a rank may hold a part of the matrix.
        batch, positions, _ = x_BTC.shape
        return x_BTC.view(batch, positions, -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int, *, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Returns (B, T, C)."""
        out_BTC: Tensor = self.out(functional.gelu(self.up(x_BTC)))
        return out_BTC


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, width: int, *, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, num_heads=num_heads, dropout=dropout)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.feed_forward = FeedForward(width, hidden=hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Returns the residual stream after this layer, (B, T, C)."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), cos_TD, sin_TD))
        mixed_BTC: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x_BTC)))
        return x_BTC + mixed_BTC


class GPT(nn.Module):
    """Decoder-only transformer over token ids.

    Args:
        vocab_size: number of token ids; 257 is a byte or the end of a document.
        context: longest sequence it is called with, in tokens.
        num_layers: blocks.
        num_heads: heads of attention; `width / num_heads` must be an even whole number.
        width: width of the residual stream.
        hidden: width inside the feed-forward; 0 means 4 x width.
        dropout: probability on the residual branches and attention weights.
        tied: the output layer is the embedding's weight.

    Raises:
        ConfigError: the heads do not divide the width into even parts.
    """

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        context: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 160,
        hidden: int = 0,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        _require_even_heads(width, num_heads)
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, num_heads=num_heads, hidden=hidden or 4 * width, dropout=dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.initialise()
        if tied:
            self.head.weight = self.embedding.weight
        for name, table_TD in zip(("cos_TD", "sin_TD"), rotary_table(context, width // num_heads), strict=True):
            self.register_buffer(name, table_TD, persistent=False)

    def initialise(self) -> None:
        """Draws every matrix from N(0, 0.02), the ones that write to the residual stream scaled by 1/sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 1 / math.sqrt(2 * max(len(self.blocks), 1)) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=_INIT_STD * scale)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns the logits of the next token at every position.

        Args:
            tokens_BT: int64 (B, T) with T <= context.

        Returns:
            (B, T, V); float32, or bfloat16 under autocast.
        """
        positions = tokens_BT.shape[1]
        if positions > self.context:
            raise ConfigError(
                f"a sequence of {positions} tokens was given to a model of context {self.context}",
                hint=f"set model.context={positions} or data.context={self.context}",
            )
        x_BTC = self.dropout(self.embedding(tokens_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC, self.cos_TD[:positions], self.sin_TD[:positions])
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV

    def sharding_plan(self) -> tuple[str, ...]:
        """Returns the parts whose parameters are gathered together, as patterns of names; the rest is one more."""
        return ("blocks.*",)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Returns which matrices may be cut, by pattern of names: "colwise" by outputs, "rowwise" by inputs.

        Attention is cut by heads. Embedding, norms and head stay whole.
        """
        by_outputs = ("attention.q", "attention.k", "attention.v", "feed_forward.up")
        by_inputs = ("attention.out", "feed_forward.out")
        return {
            **{f"blocks.*.{name}": "colwise" for name in by_outputs},
            **{f"blocks.*.{name}": "rowwise" for name in by_inputs},
        }

    def pipeline_plan(self) -> dict[str, tuple[str, ...]]:
        """Returns the parts of the first stage, those that are spread over all stages, and those of the last."""
        return {"first": ("embedding", "dropout"), "spread": ("blocks",), "last": ("norm", "head")}

    @torch.no_grad()
    def generate(
        self, tokens_BT: Tensor, *, num_tokens: int, temperature: float = 0.8, generator: torch.Generator | None = None
    ) -> Tensor:
        """Returns the given tokens followed by sampled ones, int64 (B, T + num_tokens).

        Args:
            tokens_BT: int64 (B, T) with T >= 1; only the last `context` tokens are looked at.
            num_tokens: tokens to add.
            temperature: divides the logits; 0 takes the most likely token.
            generator: source of the draws, on the model's device; None for torch's own.
        """
        for _ in range(num_tokens):
            logits_BV = self(tokens_BT[:, -self.context :])[:, -1].float()
            if temperature > 0:
                chances_BV = torch.softmax(logits_BV / temperature, dim=-1)
                next_B1 = torch.multinomial(chances_BV, 1, generator=generator)
            else:
                next_B1 = logits_BV.argmax(dim=-1, keepdim=True)
            tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
        return tokens_BT


def _require_even_heads(width: int, num_heads: int) -> None:
    if num_heads < 1 or width % (2 * num_heads):
        raise ConfigError(
            f"model.width={width} cannot be split into model.num_heads={num_heads} heads of an even width",
            hint=f"set model.width to a multiple of {2 * max(num_heads, 1)}",
        )
