"""Ways to exchange less than whole gradients: two gloo ranks against what they should get; agreed numbers exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurm_train.config.schema import DdpSection
from slurm_train.errors import RunError
from slurm_train.tools.exchanges import HalfPrecision, PowerSgd
from tests.support.warm_ranks import run_pair
from tests.train.small_runs import assert_same_steps, config_of, digest_of, run_to_end, steps_of

CASES = [
    ("none", "float32"),
    ("bf16", "float32"),
    ("bf16", "bfloat16"),
    ("powersgd", "float32"),
    ("post_local_sgd", "float32"),
    ("post_local_sgd", "bfloat16"),
]
STEPS = 12
# Rank r gives (r + 1) x the same gradients at every step, and agreed numbers that bfloat16 cannot hold. The first
# step is exchanged in full. All cases one after the other in one pair of processes.
PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
from torch import nn
from slurm_train.config.schema import DdpSection, RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.train.signals import StopFlag
from slurm_train.tools.exchanges import build_exchange
from slurm_train.train.step import Exchange, TrainingModule, build_ddp

cases, steps = json.loads(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
# Each rank is a node of its own.
place = RankPlace(rank=rank, local_rank=0, node_rank=rank, world_size=2, local_world_size=1, host=f"node{rank}")
inputs = torch.linspace(-1, 1, 160).view(4, 40)

class Objective(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(40, 40, dtype=dtype), nn.Linear(40, 40, dtype=dtype)
    def forward(self, inputs):
        out = self.last(torch.tanh(self.first(inputs.to(self.first.weight.dtype))))
        return out.float().sum() * (rank + 1), torch.tensor(8388606 + rank)

def steps_of(way, dtype):
    section = DdpSection(comm=way, comm_start_step=1, bucket_cap_mb=0.005)
    exchange = Exchange()
    if way != "none":
        exchange = build_exchange(RunConfig(ddp=section), place=place, device=device)
    stop = StopFlag()
    if rank == 1:
        stop.request("test")
    objective = Objective(getattr(torch, dtype))
    module = TrainingModule(objective, stop=stop, device=device, autocast=None)
    parameters = list(objective.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    ddp = build_ddp(module, ddp=exchange.fit_buckets(section, parameters, device=device), device=device)
    exchange.attach(ddp, module.stats_param, optimizer=optimizer, before_change=lambda: None)
    for step in range(1, steps + 1):
        exchange.begin(step)
        module.backward(ddp(inputs))
        gradients = [number for p in objective.parameters() for number in p.grad.float().flatten().tolist()]
        yield {"numbers": module.stats_param.grad.tolist(), "gradients": gradients}
        for parameter in module.parameters():
            parameter.grad = None

found = {f"{way} {dtype}": list(steps_of(way, dtype)) for way, dtype in cases}
with open(os.environ["OUT"], "w") as file:
    json.dump(found, file)
dist.barrier()
os._exit(0)
"""

Found = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What each of two ranks has after each step, by case."""
    ranks = run_pair(tmp_path_factory.mktemp("exchange"), PROGRAM, json.dumps(CASES), str(STEPS))
    return {case: [of_rank[case] for of_rank in ranks] for case in ranks[0]}


def gradients(facts: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(facts["gradients"])


@pytest.mark.distributed
@pytest.mark.parametrize(("way", "dtype"), CASES)
def test_the_agreed_numbers_are_exact_however_gradients_are_sent(found: dict[str, Found], way: str, dtype: str) -> None:
    ranks = found[f"{way} {dtype}"]
    for facts in (*ranks[0], *ranks[1]):
        stop, count, _, non_finite = facts["numbers"]
        # Float32 holds the sum of the ranks' counts, bfloat16 not nearly.
        assert (stop, round(2 * count), non_finite) == (0.5, 16777213, 0.0)
    assert len({facts["numbers"][2] for facts in (*ranks[0], *ranks[1])}) == 1, "the sum of losses, bit for bit"


@pytest.mark.distributed
def test_bfloat16_gradients_are_those_in_full_to_their_precision(found: dict[str, Found]) -> None:
    ranks, plain = found["bf16 float32"], gradients(found["none float32"][0][0])
    for step in range(STEPS):
        assert torch.equal(gradients(ranks[0][step]), gradients(ranks[1][step]))
        error = (gradients(ranks[0][step]) - plain).norm() / plain.norm()
        assert 0 < error < 0.01


@pytest.mark.distributed
def test_powersgd_gives_all_ranks_the_same_and_what_it_left_out_comes_later(found: dict[str, Found]) -> None:
    ranks, plain = found["powersgd float32"], gradients(found["none float32"][0][0])
    assert torch.equal(gradients(ranks[0][0]), plain), "the first step is exchanged in full"
    for step in range(STEPS):
        assert torch.equal(gradients(ranks[0][step]), gradients(ranks[1][step]))
    # The gradients are the same at every step here, so the mean over the steps tends to them.
    mean = torch.stack([gradients(facts) for facts in ranks[0][1:]]).mean(dim=0)
    assert 0 < (mean - plain).norm() < 0.05 * plain.norm()


@pytest.mark.distributed
def test_post_local_sgd_leaves_each_node_its_own_gradients(found: dict[str, Found]) -> None:
    ranks, plain = found["post_local_sgd float32"], gradients(found["none float32"][0][0])
    assert torch.equal(gradients(ranks[0][0]), plain)
    # Rank r gives (r + 1) x the same, and the mean is 1.5 x.
    assert torch.allclose(gradients(ranks[0][1]), plain / 1.5, rtol=1e-5)
    assert torch.allclose(gradients(ranks[1][1]), plain * 2 / 1.5, rtol=1e-5)


def test_bytes_that_are_sent() -> None:
    parameters = [torch.zeros(1000, 500), torch.zeros(1000)]
    assert HalfPrecision().sent_bytes(parameters) == 2 * 501_000
    powersgd = PowerSgd(start_step=0, rank=2, seed=0, device=torch.device("cpu"))
    assert powersgd.sent_bytes(parameters) == 4 * (2 * 1500 + 1000)
    fitting = powersgd.fit_buckets(DdpSection(), parameters, device=torch.device("cpu"))
    assert fitting.bucket_cap_mb > 4 * 501_000 / 2**20


def config_with(comm: str, **sections: Any) -> dict[str, Any]:
    ddp = {"comm": comm, "comm_start_step": 3, "average_every_steps": 4, "powersgd_rank": 1}
    return config_of(ddp=ddp, **sections)


@pytest.mark.distributed
def test_resuming_with_powersgd_is_bitwise_exact_and_begins_anew_on_other_ranks(tmp_path: Path) -> None:
    whole, cut, other = tmp_path / "whole", tmp_path / "cut", tmp_path / "other"
    run_to_end(whole, config_with("powersgd"))
    config = config_with("powersgd", model={"signal_at": 9, "signal_rank": 1, "only_in": str(tmp_path / "sent")})
    assert "stopped at step" in run_to_end(cut, config, code=75)
    shutil.copytree(cut, other)
    run_to_end(cut, config, attempt=1)
    assert digest_of(cut) == digest_of(whole)
    assert_same_steps(cut, whole)
    text = run_to_end(other, config, ranks=1, attempt=1)
    assert "powersgd: what 2 ranks have kept of their gradients fits no 1, so it begins anew" in text


@pytest.mark.distributed
def test_post_local_sgd_saves_the_same_on_every_rank(tmp_path: Path) -> None:
    # Replicas are compared before each save: at steps 6, 12 and 18 no average of parameters was due.
    health = {"check_replicas_every_steps": 4}
    run_to_end(tmp_path / "run", config_with("post_local_sgd", checkpoint={"every_steps": 6}, health=health))
    assert len(steps_of(tmp_path / "run")) == 20


class Bucket:
    """What a hook is given."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        self._parameters = list(parameters)
        self._buffer = torch.cat([parameter.detach().flatten() for parameter in parameters])

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def test_what_powersgd_keeps_is_forgotten_and_must_fit(group_of_one: None) -> None:
    weight = nn.Parameter(torch.randn(20, 20, generator=torch.Generator().manual_seed(1)))
    exchange = PowerSgd(start_step=0, rank=1, seed=0, device=torch.device("cpu"))
    exchange.begin(1)
    exchange._reduce(Bucket(weight)).wait()
    kept = exchange.state()
    assert kept["error"][0].norm() > 0 and kept["q"][0].numel() == 20
    exchange.forget()
    assert exchange.state() == {"error": {}, "p": {}, "q": {}}
    exchange.load(kept)
    assert torch.equal(exchange.state()["error"][0], kept["error"][0])
    with pytest.raises(RunError, match="bucket 0 has 100 gradients, PowerSGD's state is of 400"):
        exchange._reduce(Bucket(nn.Parameter(torch.zeros(10, 10))))
