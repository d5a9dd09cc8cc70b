"""Saving and loading over two gloo ranks; all scenes share one start of the processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.load import load_rank_state, load_tensors
from tests.support.warm_ranks import start_rank

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("two_ranks.py")
SCENES = ("failure", "choose", "shard", "copies", "near", "plans")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    env = dict(os.environ) | {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start_rank(WORKER, str(rank), "2", str(folder), *SCENES, env=env) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return folder


@pytest.mark.parametrize("scene", SCENES)
def test_both_ranks_find_nothing_wrong(folder, scene):
    assert [(folder / f"{scene}_{rank}.txt").read_text() for rank in range(2)] == ["", ""]


def test_what_two_ranks_saved_loads_in_one_process(folder):
    choice = choose_checkpoint(folder / "shard", group=None, attempt=1)
    assert choice is not None
    tensors = {"model": {"sharded": torch.zeros(6, 4)}, "step": 0}
    load_tensors(choice.path, tensors)
    assert tensors["model"]["sharded"].equal(torch.arange(24.0).reshape(6, 4)) and tensors["step"] == 5
    assert load_rank_state(choice.path, 1) == {"rank": 1}
