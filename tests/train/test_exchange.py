"""Gradients sent in bfloat16: two gloo ranks against what they should get; the agreed numbers exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_train.train.ddp import sent_bytes
from tests.support.warm_ranks import run_pair
from tests.train.small_runs import assert_resumes_bit_for_bit, config_of

CASES = [("none", "float32"), ("bf16", "float32"), ("bf16", "bfloat16")]
STEPS = 4
# Rank r gives (r + 1) x the same gradients at every step, and agreed numbers that bfloat16 cannot hold. The buckets are
# so small that one of them has nothing but the agreed numbers. All cases run in one pair of processes.
PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
from torch import nn
from slurm_train.config.schema import DdpSection
from slurm_train.session.signals import StopFlag
from slurm_train.train.ddp import TrainingModule, build_ddp, send_bfloat16

cases, steps = json.loads(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
inputs = torch.linspace(-1, 1, 160).view(4, 40)

class Objective(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(40, 40, dtype=dtype), nn.Linear(40, 40, dtype=dtype)
    def forward(self, inputs):
        out = self.last(torch.tanh(self.first(inputs.to(self.first.weight.dtype))))
        return out.float().sum() * (rank + 1), torch.tensor(8388606 + rank)

def steps_of(comm, dtype):
    stop = StopFlag()
    if rank == 1:
        stop.request("test")
    objective = Objective(getattr(torch, dtype))
    module = TrainingModule(objective, stop=stop, device=device, autocast=None)
    ddp = build_ddp(module, ddp=DdpSection(comm=comm, bucket_cap_mb=0.005), device=device)
    if comm == "bf16":
        send_bfloat16(ddp, module.stats_param)
    for step in range(steps):
        module.backward(ddp(inputs))
        gradients = [number for p in objective.parameters() for number in p.grad.float().flatten().tolist()]
        yield {"numbers": module.stats_param.grad.tolist(), "gradients": gradients}
        for parameter in module.parameters():
            parameter.grad = None

found = {f"{comm} {dtype}": list(steps_of(comm, dtype)) for comm, dtype in cases}
with open(os.environ["OUT"], "w") as file:
    json.dump(found, file)
dist.barrier()
os._exit(0)
"""

Steps = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """What each of two ranks has after each step, by case."""
    ranks = run_pair(tmp_path_factory.mktemp("exchange"), PROGRAM, json.dumps(CASES), str(STEPS))
    return {case: [steps[case] for steps in ranks] for case in ranks[0]}


def gradients(facts: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(facts["gradients"])


@pytest.mark.distributed
@pytest.mark.parametrize(("comm", "dtype"), CASES)
def test_the_agreed_numbers_are_exact_however_gradients_are_sent(
    exchanged: dict[str, Steps], comm: str, dtype: str
) -> None:
    first, second = exchanged[f"{comm} {dtype}"]
    for facts in (*first, *second):
        stop, count, _, non_finite = facts["numbers"]
        # Float32 holds the sum of the ranks' counts, bfloat16 not nearly.
        assert (stop, round(2 * count), non_finite) == (0.5, 16777213, 0.0)
    assert len({facts["numbers"][2] for facts in (*first, *second)}) == 1, "the sum of losses, bit for bit"


@pytest.mark.distributed
def test_bfloat16_gradients_are_those_in_full_to_their_precision(exchanged: dict[str, Steps]) -> None:
    first, second = exchanged["bf16 float32"]
    plain = gradients(exchanged["none float32"][0][0])
    for step in range(STEPS):
        assert torch.equal(gradients(first[step]), gradients(second[step]))
        error = (gradients(first[step]) - plain).norm() / plain.norm()
        assert 0 < error < 0.01


@pytest.mark.distributed
def test_resuming_with_bfloat16_gradients_is_bitwise_exact(tmp_path: Path) -> None:
    assert_resumes_bit_for_bit(tmp_path, config_of(ddp={"comm": "bf16"}), signal_rank=1)


def test_bytes_that_are_sent() -> None:
    parameters = [torch.zeros(1000, 500), torch.zeros(1000)]
    assert sent_bytes(parameters, comm="none") == 4 * 501_000
    assert sent_bytes(parameters, comm="bf16") == 2 * 501_000
    assert sent_bytes([torch.zeros(10, dtype=torch.bfloat16)], comm="bf16") == 20
