from __future__ import annotations

import numpy as np
import torch

from slurm_train.data.digits import build, held_out_rows


def test_halves_are_disjoint_and_hold_all_digits_in_proportion() -> None:
    train, held_out = build(split="train"), build(split="heldout")
    assert len(train) + len(held_out) == 1797
    for source in (train, held_out):
        images, labels = source.batch(np.arange(len(source)))
        assert images.shape == (len(source), 1, 8, 8) and images.dtype == torch.float32
        assert images.min() == 0 and images.max() == 1
        assert labels.dtype == torch.int64
        counts = labels.bincount(minlength=10) / len(source)
        assert (counts - 0.1).abs().max() < 0.01
    assert train.fingerprint() != held_out.fingerprint()


def test_held_out_rows_are_the_same_for_ever() -> None:
    labels = np.repeat(np.arange(2), 10)
    assert np.flatnonzero(held_out_rows(labels)).tolist() == [6, 9, 14, 19]
