"""Blocks that compute parts: all of them are one graph in every layout, or a deep model would not stay compiled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# torch gives up a function after eight graphs of it; the ninth block would be eager without a word.
PROGRAM = """
import json
import torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.parallelize import build_mesh, parallelize
from slurm_train.models.gpt import GPT

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
compile, found = torch.compile, {}
torch.compile = lambda function, **how: compile(function, **how | {"backend": "aot_eager"})
for axis, more in (("dp_shard", {}), ("tp", {"sequence_parallel": True}), ("cp", {})):
    for kind in ("none", "alternate", "full"):
        torch._dynamo.reset()
        counters.clear()
        layout = ParallelLayout(**{axis: 2})
        model = GPT(vocab_size=64, context=32, num_layers=3, num_heads=2, width=32, tied=False)
        settings = ParallelSection(activation_checkpointing=kind, gather_dtype="bfloat16", **more)
        mesh = build_mesh(layout, device=torch.device("cpu"))
        parallelize(model, layout=layout, mesh=mesh, roots=[model], settings=settings, compiles=True)
        model(torch.zeros(1, 16, dtype=torch.int64)).float().sum().backward()
        assert all(one.grad is not None for one in model.blocks.parameters())
        found[f"{axis} {kind}"] = [counters["stats"]["unique_graphs"], len(counters["graph_break"])]
print(json.dumps(found))
"""


@pytest.mark.timeout(600)
@pytest.mark.campaign
def test_all_blocks_are_one_graph_in_every_layout() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {key: [1, 0] for key in found} and len(found) == 9
