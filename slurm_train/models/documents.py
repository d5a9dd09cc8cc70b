"""Attention within documents that are packed into one sequence: which positions meet, and the kernels for it.

A document begins where its position is 0. Each position meets those before it in its own document, and itself.

On GPUs, in what is compiled, it is torch's flex attention, whose kernel leaves out blocks of positions that do not
meet; everywhere else `scaled_dot_product_attention` with a mask. torch's kernels for sequences of varying lengths are
not used: they need torch 2.10, and the number of documents on the host, for which every step would wait.

Shapes: B batch, H heads, T positions, D width per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DocumentMask: TypeAlias = "Tensor | BlockMask"
"""Which positions meet: bool (B, 1, T, T), or what flex attention takes."""


def document_mask(position_ids: Tensor, *, compiled: bool, has_dropout: bool) -> DocumentMask:
    """Returns which positions meet.

    Args:
        position_ids: int64 (B, T), 0 where a document begins; the first position of a sequence begins one anyway.
        compiled: whether attention is compiled; flex attention would make whole matrices of scores otherwise.
        has_dropout: whether attention drops weights, which flex attention cannot.
    """
    document_BT = (position_ids == 0).cumsum(dim=1)
    if position_ids.device.type == "cuda" and compiled and not has_dropout:
        return block_mask(document_BT)
    order_T = torch.arange(position_ids.shape[1], device=position_ids.device)
    is_before_TT = order_T.unsqueeze(1) >= order_T
    is_same_BTT = document_BT.unsqueeze(2) == document_BT.unsqueeze(1)
    return (is_same_BTT & is_before_TT).unsqueeze(1)


def block_mask(document_BT: Tensor) -> BlockMask:
    """Returns the same for flex attention.

    Args:
        document_BT: int64 (B, T), the number of each position's document.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    # By itself it would make all T x T answers first.
    is_apart = document_BT.device.type != "cpu" and not torch.compiler.is_compiling()
    create = torch.compile(create_block_mask) if is_apart else create_block_mask

    def meet(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_BT[sample, query] == document_BT[sample, key])

    batch, positions = document_BT.shape
    mask: BlockMask = create(meet, batch, None, positions, positions, device=str(document_BT.device))
    return mask


def attend_in_blocks(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: BlockMask, *, is_grouped: bool) -> Tensor:
    """Returns flex attention, (B, H, T, D).

    Args:
        q_BHTD: queries.
        k_BHTD: keys; fewer heads than the queries where `is_grouped`.
        v_BHTD: values.
        mask: from `block_mask`.
        is_grouped: whether several heads of queries share one of keys.
    """
    from torch.nn.attention.flex_attention import flex_attention

    mixed = flex_attention(q_BHTD, k_BHTD, v_BHTD, block_mask=mask, enable_gqa=is_grouped)
    assert isinstance(mixed, Tensor)
    return mixed
