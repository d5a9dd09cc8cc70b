"""What a language model must beat: the next token predicted from the one before it, by counting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]
_ALPHA = 0.1
# Pairs of tokens counted at once; a block of int64 codes is 8 MB.
_BLOCK = 2**20


def bigram_bits_per_byte(
    train: Iterable[Tokens], heldout: Iterable[Tokens], *, vocab_size: int, bytes_per_target: float = 1.0
) -> float:
    """Returns the held-out bits per byte of a bigram model with add-0.1 smoothing: what a language model must beat.

    In every array all tokens but the first are targets, each predicted from the token before it: the same targets as a
    model's, which sees more than one token back.

    Args:
        train: arrays (n,) of token ids to count.
        heldout: arrays (n,) of token ids to predict; at least one target in all.
        vocab_size: number of token ids; the table has its square of entries, so this is for bytes.
        bytes_per_target: bytes of text per predicted token.
    """
    counts = _count_pairs(train, vocab_size)
    bits = -np.log2((counts + _ALPHA) / (counts + _ALPHA).sum(axis=1, keepdims=True))
    predicted = _count_pairs(heldout, vocab_size)
    return float((predicted * bits).sum() / predicted.sum() / bytes_per_target)


def _count_pairs(arrays: Iterable[Tokens], vocab_size: int) -> NDArray[np.int64]:
    """Returns how often the second token follows the first, int64 (vocab_size, vocab_size)."""
    counts = np.zeros(vocab_size * vocab_size, dtype=np.int64)
    for tokens in arrays:
        for start in range(0, len(tokens) - 1, _BLOCK):
            block = tokens[start : start + _BLOCK + 1].astype(np.int64)
            counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=len(counts))
    return counts.reshape(vocab_size, vocab_size)
