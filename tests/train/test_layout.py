"""Shards in bfloat16 see the inputs that whole replicas see under autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slurm_train.train.inputs import ModelInputs
from tests.support.warm_ranks import run_alone

PROGRAM = """
import copy
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection, RunConfig, TrainSection
from slurm_train.distributed.parallelize import build_mesh, has_own_loss, shard
from slurm_train.models.objective import Objective
from slurm_train.train.layout import build_inputs
from tests.support.ranks import make_rank

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
CPU = torch.device("cpu")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x, clock):
        angle = clock.float() * 0.5
        features = torch.cat((x, angle.sin().to(x.dtype), angle.cos().to(x.dtype)), -1)
        return x + self.net(features.to(self.net.weight.dtype))

class Timed(nn.Module):
    # The clock reaches the blocks beside what they compute with.
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, clock):
        x = torch.zeros_like(clock)
        for block in self.blocks:
            x = block(x, clock)
        return x

class WithLoss(Timed):
    def training_loss(self, batch):
        clock, values = batch
        return (self(clock).float() - values).square().sum(), len(values)

class Named(Timed):
    def forward(self, clock, labels):
        return {"loss": (super().forward(clock).float() - labels).square().mean()}

class Detector(Timed):
    def forward(self, images, targets):
        outputs = torch.cat([super(Detector, self).forward(image) for image in images])
        return {"loss_time": (outputs.float() - torch.cat([target["at"] for target in targets])).square().mean()}

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(9, 8), nn.Linear(8, 1)])

    def forward(self, tokens):
        return self.blocks[1](self.blocks[0](tokens))

clock = torch.tensor([[526.0], [341.0], [999.0], [3.0]])
values = torch.tensor([[341.7], [0.2], [0.3], [0.4]])
cases = {
    Timed: (clock, values),
    WithLoss: (clock, values),
    Named: {"clock": clock, "labels": values},
    Detector: (list(clock[:, None]), [{"at": value[None]} for value in values]),
    Text: (torch.arange(8).view(4, 2), torch.zeros(4, 2, 1)),
}
mesh = build_mesh(ParallelLayout(), device=CPU)
settings = ParallelSection(gather_dtype="bfloat16")
for precision in ("bfloat16", "float32"):
    for kind, batch in cases.items():
        torch.manual_seed(1)
        model = kind()
        plain = copy.deepcopy(model)
        shard(model, layout=ParallelLayout(), mesh=mesh, roots=[model], settings=settings)
        rank = make_rank(config=RunConfig(train=TrainSection(precision=precision)))
        inputs = build_inputs(rank, gathers_half=True, casts_shards=not has_own_loss(model))
        inputs.keep_floats(model, batch)
        assert inputs.casts_shards == (kind is Text), kind
        if kind is Text:
            with inputs.in_precision():
                assert not torch.is_autocast_enabled("cpu")
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = Objective(plain)(batch)[0]
        with inputs.in_precision():
            loss = Objective(model)(batch)[0]
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, msg=f"{kind.__name__}: {loss} {expected}")
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
print("alike")
"""


def test_float_inputs_of_shards_are_not_rounded_and_texts_are_computed_in_bfloat16(tmp_path: Path) -> None:
    assert run_alone(tmp_path, PROGRAM) == "alike"


@pytest.mark.parametrize("casts", [False, True])
def test_autocast_does_not_lie_on_top_of_shards_that_are_cast(casts: bool) -> None:
    inputs = ModelInputs(torch.device("cpu"), autocast=torch.bfloat16, gathers_half=True, casts_shards=casts)
    with inputs.in_precision():
        assert torch.is_autocast_enabled("cpu") is not casts
