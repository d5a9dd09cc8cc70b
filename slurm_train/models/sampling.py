"""Samples text from a model that gives logits: one token after the other, drawn from the model's probabilities.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def sample(
    score: Callable[[Tensor], Tensor],
    tokens_BT: Tensor,
    *,
    num_tokens: int,
    context: int | None,
    temperature: float = 0.8,
    top_k: int | None = None,
    end: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns the given tokens followed by sampled ones, int64 (B, T + num_tokens) or shorter.

    Args:
        score: gives the logits (B, T, V) of the next token at every position.
        tokens_BT: int64 (B, T) with T >= 1.
        num_tokens: tokens to add at most.
        context: how many of the last tokens are looked at; None: all.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draws among so many of the most likely tokens; None: among all.
        end: where all of the batch have this token last, nothing more is added.
        generator: source of the draws, on the tokens' device; None for torch's own.
    """
    for _ in range(num_tokens):
        logits_BV = score(tokens_BT[:, -(context or 0) :])[:, -1].float()
        if top_k is not None:
            least_B1 = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        if temperature > 0:
            chances_BV = torch.softmax(logits_BV / temperature, dim=-1)
            next_B1 = torch.multinomial(chances_BV, 1, generator=generator)
        else:
            next_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
        if end is not None and bool((next_B1 == end).all()):
            break
    return tokens_BT
