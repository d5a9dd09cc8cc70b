from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.plan.memory import facts_of, rank_memory
from slurm_train.train.measure import measure_model

GPT = {"_target_": "slurm_train.models.gpt.GPT", "context": 64, "num_layers": 2}
TEXT = {"_target_": "slurm_train.data.text.build", "path": "/nowhere", "context": 64}


def measured(model: dict[str, Any], *, half: bool = False) -> dict[str, Any]:
    return measure_model(build_config(RunConfig, {"model": model, "data": TEXT}), batch_size=4, half=half)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_a_measured_gpt_is_what_the_formula_says(half: bool) -> None:
    config, batch = build_config(RunConfig, {"model": GPT}), BatchPlan.equal(local_size=4, ranks=1, accumulation=1)
    found, facts = measured(GPT, half=half), facts_of(config, ParallelLayout(), batch, half=half)
    assert facts is not None
    assert (found["trained_bytes"], found["other_bytes"]) == (4 * facts.shape.parameters, facts.shape.buffer_bytes)
    assert found["optimizer_bytes"] == 4 * facts.kept_by_optimizer(0)
    assert found["activation_bytes"] == pytest.approx(rank_memory(facts, stage=0).activation_bytes, rel=0.1)


class Frozen(nn.Module):
    """Half of it is not trained, and it looks at numbers."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.head = nn.Linear(8, 257, bias=False)
        self.head.weight.requires_grad_(False)
        self.looks = looks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.looks and tokens.sum().item() > 0:
            raise AssertionError
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("looks", [False, True])
def test_frozen_parameters_have_no_gradients_and_a_model_that_looks_at_numbers_no_activations(looks: bool) -> None:
    found = measured({"_target_": f"{__name__}.Frozen", "looks": looks})
    assert (found["trained_bytes"], found["other_bytes"]) == (257 * 8 * 4, 257 * 8 * 4)
    assert ("problem" in found, "activation_bytes" in found) == (looks, not looks)


def test_no_memory_is_taken() -> None:
    # 40 GB of weights.
    found = measured({**GPT, "width": 8192, "num_layers": 12, "num_heads": 64})
    assert found["trained_bytes"] > 3 * 10**10
