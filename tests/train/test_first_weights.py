"""The first weights have the same bits in every layout, on gloo ranks: drawn, read from a file, of an own model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import nn

from slurm_train.models.gpt import GPT
from tests.support.ports import free_port
from tests.support.warm_ranks import start_rank
from tests.train.small_runs import finish

PROGRAM = Path(__file__).with_name("first_weights_rank.py")
# The head of 37 ids and 3 layers leave uneven parts.
SHAPE: dict[str, Any] = {"vocab_size": 37, "context": 8, "num_layers": 3, "num_heads": 4, "width": 16, "tied": False}
KINDS = {
    "drawn": {"_target_": "slurm_train.models.gpt.GPT", **SHAPE},
    "from a file": {"_target_": "slurm_train.models.gpt.GPT", **SHAPE},
    "own": {"_target_": "small_training.LooksAtWeights", **SHAPE},
}
LAYOUTS = {
    "HSDP 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "FSDP over 4": {"dp_shard": 4},
    "FSDP from the host": {"dp_shard": 4, "cpu_offload": True},
    "replicas 2 x TP2": {"dp_replicate": 2, "tp": 2},
    "DP2 x TP2": {"dp_shard": 2, "tp": 2},
    "DP2 x PP2": {"dp_shard": 2, "pp": 2},
    "TP2 x PP2": {"tp": 2, "pp": 2},
    "DP2 x CP2": {"dp_shard": 2, "cp": 2},
}


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_every_layout_begins_with_the_weights_of_one_rank(tmp_path: Path) -> None:
    model = GPT(**SHAPE)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    port = free_port()
    orders = {
        "port": port,
        "run": str(tmp_path / "run"),
        "file": str(tmp_path / "model.safetensors"),
        "kinds": KINDS,
        "layouts": LAYOUTS,
    }
    env = {**os.environ, "WORLD_SIZE": "4"}
    codes, text = finish([start_rank(PROGRAM, json.dumps(orders), env={**env, "RANK": str(rank)}) for rank in range(4)])
    assert codes == [0] * 4 and text.count("alike") == 4, text
