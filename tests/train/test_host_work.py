"""What the host has to dispatch in a step: ours against a bare FSDP2 loop around the same model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import OptimSection, ParallelSection, RunConfig
from slurm_train.distributed.parallelize import build_mesh, shard
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective
from slurm_train.train.layout import build_inputs
from slurm_train.train.optimizer import build_optimizer
from slurm_train.train.passes import ShardPasses
from slurm_train.train.step import StepFacts, Stepper
from tests.support.ranks import make_rank
from tests.support.warm_ranks import run_alone

pytestmark = pytest.mark.usefixtures("group_of_one")
LAYERS = 4
# What a step of ours has beyond the bare one: the agreed numbers, the test of what is finite, the masked result.
ALLOWANCE = 30


class Batch(NamedTuple):
    tensors: tuple[Tensor, ...]


class Counting(TorchDispatchMode):
    """Counts operations that may reach a kernel: views and a profiler's marks cost a GPU nothing, and are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "profiler":
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=64, context=16, num_layers=LAYERS, num_heads=2, width=16, tied=False)


def make_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def bare() -> Callable[[], object]:
    """What a short script does: FSDP2 around each block and the model, clipping, fused AdamW."""
    model, mesh = make_model(), init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, targets = make_batch()

    def step() -> None:
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(model: GPT, *, accumulation: int = 1, copies: int = 1, shards: int = 1) -> Callable[[], object]:
    """This trainer's step over the same shards, everything agreed on and masked."""
    degrees = {"dp_replicate": copies, "dp_shard": shards}
    layout = ParallelLayout(**degrees)
    config = RunConfig(optim=OptimSection(grad_clip_norm=1.0), parallel=ParallelSection(**degrees))
    ranks = copies * shards
    plan = BatchPlan.equal(local_size=2, ranks=ranks, accumulation=accumulation)
    rank = make_rank(config=config, plan=plan, ranks=ranks)
    mesh = build_mesh(layout, device=rank.device)
    shard(model, layout=layout, mesh=mesh, roots=[model], settings=ParallelSection(gather_dtype="float32"))
    optimizer = build_optimizer(model, optim=config.optim)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    passes = ShardPasses(rank, build_inputs(rank), model=model, objective=Objective(model), parameters=parameters)
    stepper, batch = Stepper(rank, passes, optimizer), Batch(make_batch())
    return lambda: stepper.step(StepFacts(1, 2, 1e-3), iter([batch] * accumulation))


def counted(step: Callable[[], object]) -> Counter[str]:
    # The first steps make the optimizer's state.
    for _ in range(3):
        step()
    with Counting() as mode:
        step()
    return mode.calls


def test_a_step_dispatches_hardly_more_than_a_bare_loop(capsys: pytest.CaptureFixture[str]) -> None:
    theirs, own = counted(bare()), counted(ours(make_model()))
    with capsys.disabled():
        print(f"\noperations per step: ours {own.total()}, a bare FSDP2 loop {theirs.total()}")
    more = own - theirs
    assert own.total() <= theirs.total() + ALLOWANCE, f"more than the bare loop: {more.most_common(20)}"


# Two copies of the model, each over two ranks (HSDP); one rank alone would exchange nothing. In a process of its own:
# a pretended world must not meet another test's group.
EXCHANGES = """
import json
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.train.test_host_work import counted, make_model, ours

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
calls = []
for accumulation in (1, 2, 3):
    calls.append(counted(ours(make_model(), accumulation=accumulation, copies=2, shards=2)))
counts = {}
for name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"):
    counts[name] = [step[f"c10d.{name}.default"] for step in calls]
print(json.dumps(counts))
"""


def test_micro_batches_gather_and_reduce_shards_alike_and_copies_of_shards_are_reduced_once(tmp_path: Path) -> None:
    counts = json.loads(run_alone(tmp_path, EXCHANGES))
    gathers, scatters, reductions = counts["_allgather_base_"], counts["_reduce_scatter_base_"], counts["allreduce_"]
    assert gathers[0] >= LAYERS and gathers == [gathers[0], 2 * gathers[0], 3 * gathers[0]]
    assert scatters[0] >= LAYERS and scatters == [scatters[0], 2 * scatters[0], 3 * scatters[0]]
    # One for each shard, and that of the agreed numbers.
    assert reductions == [scatters[0] + 1] * 3


def test_what_a_step_adds_does_not_grow_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    for layers in (2, 4):
        monkeypatch.setattr(f"{__name__}.LAYERS", layers)
        added.append(counted(ours(make_model())).total() - counted(bare()).total())
    assert added[1] <= added[0], f"operations beyond the bare loop's: {added[0]} with 2 layers, {added[1]} with 4"
