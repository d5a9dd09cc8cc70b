from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_train.models.bigram import bigram_bits_per_byte


def test_equals_counting_by_hand() -> None:
    train, held_out = np.array([0, 1, 0, 1, 1], dtype=np.uint16), np.array([0, 1, 1, 0], dtype=np.uint16)
    # after 0: 1 twice; after 1: 0 once, 1 once
    bits = -math.log2(2.1 / 2.2) - 2 * math.log2(1.1 / 2.2)
    assert bigram_bits_per_byte([train], [held_out], vocab_size=2) == pytest.approx(bits / 3)


def test_arrays_are_not_joined_and_bytes_divide() -> None:
    halves = [np.array([0, 1], dtype=np.uint16), np.array([1, 0], dtype=np.uint16)]
    one = bigram_bits_per_byte(halves, halves, vocab_size=2)
    assert one == pytest.approx(-math.log2(1.1 / 1.2))
    assert bigram_bits_per_byte(halves, halves, vocab_size=2, bytes_per_target=4.0) == pytest.approx(one / 4)


def test_long_arrays_are_counted_across_blocks() -> None:
    tokens = np.tile(np.array([0, 1, 2], dtype=np.uint16), 2**20)
    assert bigram_bits_per_byte([tokens], [tokens], vocab_size=3) < 1e-5


def test_uniform_noise_costs_eight_bits() -> None:
    rng = np.random.default_rng(0)
    train, held_out = (rng.integers(0, 256, size, dtype=np.uint16) for size in (2_000_000, 100_000))
    assert bigram_bits_per_byte([train], [held_out], vocab_size=257) == pytest.approx(8, abs=0.05)
