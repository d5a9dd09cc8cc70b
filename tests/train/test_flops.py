"""The formula against torch's own counter, on the meta device at the published sizes."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from slurm_train.assets import read_asset
from slurm_train.config.target import instantiate
from slurm_train.train.metrics import flops_per_token

PUBLISHED = ["gpt", "gpt2-124m", "llama3-8b"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_costs_what_torch_counts_of_the_matrix_products(name: str) -> None:
    mapping = yaml.safe_load(read_asset("conf/model", f"{name}.yaml"))
    with torch.device("meta"):
        model = instantiate({**mapping, "num_layers": 2, "context": 16})
        tokens = torch.zeros((2, 16), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    # Attention's own products, which the formula leaves out, are of another operation.
    products = sum(counts.get(operation, 0) for operation in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products > 0 and flops_per_token(model) == products / 32
