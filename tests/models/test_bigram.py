from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_train.models.bigram import bigram_bits_per_byte


def test_bigram_baseline_equals_counting_by_hand_without_joining_arrays() -> None:
    train, held_out = np.array([0, 1, 0, 1, 1], dtype=np.uint16), np.array([0, 1, 1, 0], dtype=np.uint16)
    # after 0: 1 twice; after 1: 0 once, 1 once
    bits = -math.log2(2.1 / 2.2) - 2 * math.log2(1.1 / 2.2)
    assert bigram_bits_per_byte([train], [held_out], vocab_size=2) == pytest.approx(bits / 3)
    halves = [np.array([0, 1], dtype=np.uint16), np.array([1, 0], dtype=np.uint16)]
    one = -math.log2(1.1 / 1.2)
    assert bigram_bits_per_byte(halves, halves, vocab_size=2, bytes_per_target=4.0) == pytest.approx(one / 4)
    long = np.tile(np.array([0, 1, 2], dtype=np.uint16), 2**20)
    assert bigram_bits_per_byte([long], [long], vocab_size=3) < 1e-5, "counted across blocks"
