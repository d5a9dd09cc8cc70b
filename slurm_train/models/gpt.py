"""A decoder-only transformer: pre-norm, causal scaled-dot-product attention, every published shape by its arguments.

The defaults are for byte-level text, one to three million parameters; `conf/model` has GPT-2's and Llama's shapes. The
model knows no parallelism, no loss and no optimizer: `model(tokens)` gives logits, everything else is in other rooms.
It only describes, as data, where it may be cut.

Shapes: B batch, T positions, C width, H heads, D width per head, V vocabulary, M hidden width of the feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.config.schema import GptSection, build_config
from slurm_train.errors import ConfigError
from slurm_train.models.blocks import Block, BlockShape, Places
from slurm_train.models.documents import document_mask
from slurm_train.models.head import Head
from slurm_train.models.sampling import sample

_INIT_STD = 0.02


class GPT(nn.Module):
    """Decoder-only transformer over token ids.

    Args:
        vocab_size: number of token ids; 257 is a byte or the end of a document.
        context: longest sequence it is called with, in tokens.
        num_layers: blocks.
        num_heads: heads of attention; `width / num_heads` must be an even whole number.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`; 0 means as many.
        width: width of the residual stream.
        hidden: width inside the feed-forward; 0 means 4 x width.
        norm: "layernorm" or "rmsnorm".
        norm_eps: what a norm adds to the variance.
        activation: of the feed-forward: "gelu", "gelu_tanh" (GPT-2's approximation) or "swiglu" (three matrices).
        positions: "rope" turns queries and keys, "learned" adds an embedding of the position.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama 3.1's stretching of them (`blocks.SCALING_KEYS`); None for none.
        bias: the matrices of the blocks and layer norms have biases.
        dropout: probability on the residual branches and attention weights.
        tied: the output layer is the embedding's weight.

    Raises:
        ConfigError: the heads do not divide the width into even parts or each other, or a choice is unknown.
    """

    takes_targets = True
    cos_TD: Tensor | None
    sin_TD: Tensor | None

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        context: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int = 0,
        width: int = 160,
        hidden: int = 0,
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        activation: str = "gelu",
        positions: str = "rope",
        rope_theta: float = 10000.0,
        rope_scaling: Mapping[str, float] | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        build_config(
            GptSection,
            {
                "vocab_size": vocab_size, "context": context, "num_layers": num_layers, "num_heads": num_heads,
                "num_kv_heads": num_kv_heads, "width": width, "hidden": hidden, "norm": norm, "norm_eps": norm_eps,
                "activation": activation, "positions": positions, "rope_theta": rope_theta, "dropout": dropout,
            },
            path="model.",
        )  # fmt: skip
        shape = BlockShape(
            width=width, num_heads=num_heads, num_kv_heads=num_kv_heads or num_heads, hidden=hidden or 4 * width,
            norm=norm, norm_eps=norm_eps, activation=activation, positions=positions, bias=bias, dropout=dropout,
        )  # fmt: skip
        self.context = context
        self.shape = shape
        self.is_tied = tied
        self.num_layers = num_layers
        self.embedding = shape.build_embedding(vocab_size, context=context)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(num_layers))
        self.norm = shape.build_norm()
        self.head = Head(width, vocab_size)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                # A derived class is not complete yet, so its own method is not called.
                GPT.init_weights(self, name, parameter)
        if tied:
            self.head.weight = self.embedding.weight
        angles = shape.build_angles(context, theta=rope_theta, scaling=rope_scaling)
        for name, table_TD in zip(("cos_TD", "sin_TD"), angles, strict=True):
            self.register_buffer(name, table_TD, persistent=False)

    def init_weights(self, name: str, part: Tensor) -> None:
        """Draws matrices from N(0, 0.02), the ones that write to the residual stream scaled by 1/sqrt(2 layers).

        Biases begin at zero, the weights of norms at one.

        Args:
            name: of a parameter.
            part: rows of it, which are changed in place.
        """
        if part.dim() > 1:
            scale = 1 / math.sqrt(2 * max(self.num_layers, 1)) if name.endswith("out.weight") else 1.0
            nn.init.normal_(part, std=_INIT_STD * scale)
        elif name.endswith("bias"):
            nn.init.zeros_(part)
        elif name.endswith("norm.weight"):
            nn.init.ones_(part)

    def forward(self, tokens_BT: Tensor, targets: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Returns the logits of the next token at every position, or how far they are from its targets.

        Args:
            tokens_BT: int64 (B, T) with T <= context.
            targets: int64 (B, T), the next tokens; -100 where one does not count.
            position_ids: int64 (B, T), where each token is in its document; 0 begins another one, which sees nothing of
                those before it. None: a sequence is one document.

        Returns:
            (B, T, V), float32, or bfloat16 under autocast; with targets what `head.linear_cross_entropy` gives.
        """
        positions = tokens_BT.shape[1]
        if positions > self.context:
            raise ConfigError(
                f"a sequence of {positions} tokens was given to a model of context {self.context}",
                hint=f"set model.context={positions} or data.context={self.context}",
            )
        x_BTC = self.dropout(self.embedding(tokens_BT, position_ids))
        places = self._places(positions, position_ids)
        for block in self.blocks:
            x_BTC = block(x_BTC, places)
        given: Tensor = self.head(self.norm(x_BTC), targets)
        return given

    def _places(self, positions: int, position_ids: Tensor | None) -> Places:
        """Returns where the positions at hand are; without `position_ids` the first ones, in order."""
        tables = (self.cos_TD, self.sin_TD)
        if position_ids is None:
            return Places(*(None if table is None else table[:positions] for table in tables))
        # As many rows as positions, with an axis for the heads.
        rows = (None if table is None else table[position_ids].unsqueeze(1) for table in tables)
        has_dropout = self.training and self.shape.dropout > 0
        return Places(*rows, mask=document_mask(position_ids, compiled=self._is_compiled(), has_dropout=has_dropout))

    def _is_compiled(self) -> bool:
        """Returns whether blocks are compiled: within a graph of the whole model, or one by one."""
        return torch.compiler.is_compiling() or any(block._compiled_call_impl is not None for block in self.blocks)

    def sharding_plan(self) -> tuple[str, ...]:
        """Returns the parts whose parameters are gathered together, as patterns of names; the rest is one more."""
        return ("blocks.*",)

    def sharding_ends(self) -> tuple[tuple[str, ...], ...]:
        """Returns the parts outside of the blocks that are gathered apart: each when it is called, the last one once.

        A tied embedding is used at both ends, so it stays with what is left.
        """
        return () if self.is_tied else (("embedding",), ("norm", "head"))

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Returns which matrices may be cut, by pattern of names: "colwise" by outputs, "rowwise" by inputs.

        Attention is cut by heads, embedding and head by ids ("vocabulary") if they give equal parts. Norms stay whole.
        """
        gate = ("feed_forward.gate",) if self.shape.activation == "swiglu" else ()
        by_outputs = ("attention.q", "attention.k", "attention.v", "feed_forward.up", *gate)
        by_inputs = ("attention.out", "feed_forward.out")
        return {
            "embedding": "vocabulary",
            "head": "vocabulary",
            **{f"blocks.*.{name}": "colwise" for name in by_outputs},
            **{f"blocks.*.{name}": "rowwise" for name in by_inputs},
        }

    def tensor_parallel_counts(self) -> dict[str, int]:
        """Returns the numbers that tensor parallelism must be able to divide, by their keys."""
        return {f"model.{name}": getattr(self.shape, name) for name in ("num_heads", "num_kv_heads", "hidden")}

    def attention_width(self) -> int:
        """Returns the widths of all attention layers together, for the operations per token."""
        return len(self.blocks) * self.shape.width

    def sequence_parallel_plan(self) -> dict[str, str]:
        """Returns where the positions are dealt out among the ranks that have a part of each matrix.

        "split" deals out what a part gives, "own" works on a rank's own positions, "gather" gets them all.
        """
        return {
            "embedding": "split",
            "blocks.*.attention_norm": "own",
            "blocks.*.attention": "gather",
            "blocks.*.feed_forward_norm": "own",
            "blocks.*.feed_forward": "gather",
            "norm": "own",
            "head": "gather",
        }

    def context_parallel_plan(self) -> dict[str, tuple[str, ...]]:
        """Returns the buffers whose first dimension is the position, and the parts where positions meet."""
        tables = ("embedding.order_T",) if self.cos_TD is None else ("cos_TD", "sin_TD")
        return {"positions": tables, "attention": ("blocks.*.attention.mix",)}

    def pipeline_plan(self) -> dict[str, tuple[str, ...]]:
        """Returns the parts of the first stage, those that are spread over all stages, and those of the last."""
        return {"first": ("embedding", "dropout"), "spread": ("blocks",), "last": ("norm", "head")}

    def generate(self, tokens_BT: Tensor, **sampling: Any) -> Tensor:
        """Returns the given tokens followed by sampled ones; see `sample`."""
        return sample(self, tokens_BT, context=self.context, **sampling)
