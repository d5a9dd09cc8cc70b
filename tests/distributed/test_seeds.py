"""Random streams: apart from rank to rank, and back bit for bit from a plain file."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from slurm_train.distributed.seeds import mix, rng_state, seed_everything, set_rng_state


def draws() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), random.random(), float(np.random.standard_normal()), float(torch.rand(()))


def test_ranks_draw_differently_and_the_same_seed_alike() -> None:
    found = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        seed_everything(seed, data_parallel_rank=rank)
        found.append(draws())
    assert found[0] == found[3]
    assert len({value for drawn in found[:3] for value in drawn}) == 12
    assert mix(-1, 0) != mix(0, -1)


def test_state_comes_back_through_a_safe_load() -> None:
    seed_everything(3, data_parallel_rank=2)
    draws()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = [draws() for _ in range(700)]
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert [draws() for _ in range(700)] == expected
