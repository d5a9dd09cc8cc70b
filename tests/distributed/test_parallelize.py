"""Who exchanges with whom: the formula against torch's own DeviceMesh, on a process group that is only pretended."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode

from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.float8 import to_float8
from slurm_train.distributed.group import open_axis
from slurm_train.distributed.parallelize import (
    gathers_in_bfloat16,
    is_deep,
    overlap_exchanges,
    prepare_blocks,
    require_dimensions,
    require_gloo_means,
    shared_parts,
    units,
)
from slurm_train.distributed.pipeline import require_gloo_pipelines
from slurm_train.errors import ConfigError
from slurm_train.models.cnn import CNN
from slurm_train.models.gpt import GPT
from slurm_train.models.head import Head
from slurm_train.train.context import require_float8
from tests.support.extras import NEEDS_TORCHAO
from tests.support.warm_ranks import run_alone

# In a process of its own: a pretended world of 64 must not meet another test's group.
PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.parallel import AXES, ParallelLayout
from slurm_train.distributed.parallelize import build_mesh, context_mesh, sharding_mesh

degrees, ranks = json.loads(sys.argv[1]), json.loads(sys.argv[2])
layout = ParallelLayout(**degrees)
shards = ("dp_shard", "cp")
opened = []
for rank in ranks:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    mesh = build_mesh(layout, device=torch.device("cpu"))
    meshes = {(name,) if name != "shard" else shards: mesh[name] for name in mesh.mesh_dim_names}
    if layout.cp > 1:
        meshes["cp",] = context_mesh(mesh, layout)
    for axes, along in meshes.items():
        members = layout.members(axes, rank)
        assert tuple(along.mesh.tolist()) == members, (rank, axes)
        assert along.get_local_rank() == members.index(rank)
        assert dist.get_process_group_ranks(along.get_group()) == list(members)
    over = shards if layout.dp_replicate == 1 else ("dp_replicate", *shards)
    assert sharding_mesh(mesh, layout).mesh.flatten().tolist() == list(layout.members(over, rank))
    # Groups of the world are not opened again, those of axes that exchange nothing not at all.
    groups = dist.distributed_c10d._world.pg_map
    opened.append(sorted(f"{group.group_desc}:{group.size()}" for group in groups if group.size() < layout.world_size))
    whole = mesh.mesh
    dist.destroy_process_group()
assert whole.flatten().tolist() == list(range(layout.world_size))
assert opened == [opened[0]] * len(ranks)
print(*opened[0])
"""


@pytest.mark.parametrize(
    ("degrees", "ranks", "groups"),
    [
        ({"dp_shard": 8, "tp": 4, "pp": 2}, [0, 31, 63], "mesh_pp:2 mesh_shard:8 mesh_tp:4"),
        ({"dp_replicate": 2, "dp_shard": 2}, [3], "mesh_dp_replicate:2 mesh_shard:2"),
        ({"dp_replicate": 2, "tp": 2}, [1], "mesh_dp_replicate:2 mesh_shard:1 mesh_tp:2"),
        ({"dp_shard": 8}, [5], ""),
        ({"dp_shard": 2, "cp": 4}, [6], "mesh_cp:4"),
        (
            {"dp_replicate": 2, "dp_shard": 64, "cp": 2, "tp": 8, "pp": 8},
            [9999],
            "mesh_cp:2 mesh_dp_replicate:2 mesh_pp:8 mesh_shard:128 mesh_tp:8",
        ),
    ],
)
def test_axes_that_exchange_have_the_groups_of_the_formula_and_no_other_is_opened(
    tmp_path: Path, degrees: dict[str, int], ranks: list[int], groups: str
) -> None:
    assert run_alone(tmp_path, PROGRAM, json.dumps(degrees), json.dumps(ranks)) == groups


def test_a_group_that_is_bound_to_its_gpu_is_split_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def split(backend: str | None = None, **options: Any) -> None:
        asked.append({"backend": backend, **options})

    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "split_group", split)
    parts = [(0, 1), (2, 3)]
    open_axis(parts, name="tp")
    open_axis(parts, name="tp", on_host=True)
    # torch 2.10 to 2.12 splits what there is.
    monkeypatch.setattr(dist, "split_group", lambda **options: asked.append(options))
    open_axis(parts, name="tp")
    same = {"split_ranks": [[0, 1], [2, 3]], "group_desc": "mesh_tp"}
    assert asked == [{"backend": "cuda:nccl", **same}, {"backend": None, **same}, same]


def test_another_order_of_the_axes_would_be_seen() -> None:
    layout = ParallelLayout(tp=2, pp=2)
    assert layout.members(("tp",), 0) == (0, 1) != layout.members(("pp",), 0)


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection, RunConfig, TrainSection
from slurm_train.distributed.parallelize import build_mesh, parallelize
from slurm_train.models import blocks
from slurm_train.models.gpt import GPT
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
layout = ParallelLayout(dp_shard=2)
mesh = build_mesh(layout, device=torch.device("cpu"))
seen, rotate = set(), blocks.Places.rotate
blocks.Places.rotate = lambda self, x: (seen.add((self.cos_TD.dtype, x.dtype)), rotate(self, x))[1]
for tied in (False, True):
    model = GPT(num_layers=2, width=32, num_heads=2, tied=tied)
    settings = ParallelSection(dp_shard=2, gather_dtype="bfloat16", activation_checkpointing="full")
    parallelize(model, layout=layout, mesh=mesh, roots=[model], settings=settings, compiles=False)
    parts = (model.embedding, model.norm, model.head, *model.blocks)
    assert [isinstance(part, FSDPModule) for part in parts] == [not tied] * 3 + [True] * 2, tied
    left = model._get_fsdp_state()._fsdp_param_group
    assert (left is None) == (not tied)
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
assert seen == {(torch.float32, torch.bfloat16)}, seen

class Order(TorchDispatchMode):
    # Gatherings are "+", matrix products ".".

    def __init__(self):
        super().__init__()
        self.text = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.text += "+" * ("allgather" in name) + "." * (name in ("aten.mm.default", "aten.addmm.default"))
        return func(*args, **(kwargs or {}))

for tied in (False, True):
    model = GPT(num_layers=3, width=32, num_heads=2, tied=tied)
    parallelize(model, layout=layout, mesh=mesh, roots=[model], settings=settings, compiles=False)
    with Order() as order, torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.int64))
    # A block has six products. Before them the next block's parameters are asked for, at the end those of the head; a
    # tied embedding is in the root, which is first.
    expected = "+++......+............." if tied else "+++......+......+......."
    assert order.text == expected, (tied, order.text)

class OwnLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    def training_loss(self, batch):
        inputs, targets = batch
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.float32)
        outputs = self.blocks[0](inputs)
        assert outputs.dtype == torch.bfloat16
        return torch.nn.functional.mse_loss(outputs, targets)

own = OwnLoss()
parallelize(own, layout=layout, mesh=mesh, roots=[own], settings=settings, compiles=False)
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = own.training_loss((torch.ones(2, 4), torch.ones(2, 4)))
assert loss.dtype == torch.float32, loss.dtype
print("right")
"""


def test_ends_are_gathered_apart_and_angles_and_own_losses_stay_precise(tmp_path: Path) -> None:
    assert run_alone(tmp_path, SHARDED) == "right"


LARGE = """
import json, resource, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.batch import solve_batch
from slurm_train.config.compose import compose
from slurm_train.config.parallel import solve_layout
from slurm_train.config.words import read_words
from slurm_train.distributed.parallelize import build_mesh, parallelize
from slurm_train.plan.memory import facts_of, rank_memory
from slurm_train.models.build import build_model

words = ["model=llama3-70b", "parallel.dp_replicate=1", "parallel.dp_shard=-1", *sys.argv[1:]]
config = compose(read_words(words)).config
layout = solve_layout(config.parallel, world_size=64)
plan = solve_batch(config.batch, ranks=layout.data_parallel_size, stages=layout.pp)
memory = rank_memory(facts_of(config, layout, plan, half=True), stage=0)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
model = build_model(config)
mesh = build_mesh(layout, device=torch.device("cpu"))
parallelize(model, layout=layout, mesh=mesh, roots=[model], settings=config.parallel, compiles=False)
print(json.dumps({
    "parameters": sum(one.numel() for one in model.parameters()),
    "own_bytes": sum(one.to_local().nbytes for one in model.parameters()),
    "planned_bytes": memory.weight_bytes,
    "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [[], ["parallel.tp=8"]])
def test_70b_is_planned_and_cut_for_64_ranks_in_little_memory(words: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LARGE, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == 70_553_706_496
    assert found["own_bytes"] == pytest.approx(found["planned_bytes"], rel=0.001)
    assert found["peak_gib"] < 2


SHARDS, REPLICAS = ParallelLayout(dp_shard=2), ParallelLayout(dp_replicate=2)


@pytest.mark.parametrize(
    ("asked", "autocast", "layout", "expected"),
    [
        ("auto", torch.bfloat16, SHARDS, True),
        ("auto", torch.float16, SHARDS, False),
        ("auto", torch.bfloat16, REPLICAS, False),
        ("float32", torch.bfloat16, SHARDS, False),
        ("bfloat16", None, SHARDS, True),
    ],
)
def test_shards_are_gathered_as_the_forward_pass_computes(
    asked: Any, autocast: torch.dtype | None, layout: ParallelLayout, expected: bool
) -> None:
    settings = ParallelSection(gather_dtype=asked)
    model, with_statistics = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    assert gathers_in_bfloat16(model, layout=layout, settings=settings, autocast=autocast) == expected
    found = gathers_in_bfloat16(with_statistics, layout=layout, settings=settings, autocast=autocast)
    assert found == (expected and asked == "bfloat16")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of torch itself
@pytest.mark.parametrize("kind", ["none", "full", "selective", "alternate"])
def test_blocks_are_compiled_whatever_they_compute_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Graphs are counted before a C++ compiler makes anything of them, which takes half a minute.
    compile_function, compile_module = torch.compile, nn.Module.compile
    monkeypatch.setattr(torch, "compile", partial(compile_function, backend="aot_eager"))
    monkeypatch.setattr(nn.Module, "compile", partialmethod(compile_module, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    model = GPT(num_layers=3, width=32, num_heads=2)
    prepare_blocks(model, settings=ParallelSection(activation_checkpointing=kind), compiles=True)  # type: ignore[arg-type]
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1, "one graph that all blocks share"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of torch itself
@pytest.mark.parametrize(("kind", "again"), [("selective", 0), ("alternate", 2), ("full", 5)])
def test_compiled_blocks_compute_the_same_products_again(kind: str, again: int) -> None:
    counts = []

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        counts.append(sum(node.target == torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    model = GPT(vocab_size=64, context=16, num_layers=2, num_heads=2, width=32)
    prepare_blocks(model, settings=ParallelSection(activation_checkpointing=kind), compiles=False)  # type: ignore[arg-type]
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    for block in model.blocks:
        block.compile(backend=backend)
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    # Both gradients of six products.
    assert counts == [6, 12 + again]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("form", "again"),
    # Of q, k, v, out, up, (gate,) out every second one. Of the last one's result nothing is needed but by dropout.
    [({}, {"alternate": 2, "full": 5}), ({"activation": "swiglu", "dropout": 0.1}, {"alternate": 3, "full": 7})],
    ids=["gelu", "swiglu with dropout"],
)
def test_what_is_computed_again_has_the_same_bits(
    form: dict[str, Any], again: dict[str, int], dtype: torch.dtype
) -> None:
    gradients, counts = {}, {}
    for kind in ("none", "selective", "alternate", "full"):
        torch.manual_seed(0)
        model = GPT(vocab_size=64, context=16, num_layers=2, num_heads=2, width=32, **form).to(dtype)
        prepare_blocks(model, settings=ParallelSection(activation_checkpointing=kind), compiles=False)  # type: ignore[arg-type]
        tokens = torch.arange(32).reshape(2, 16)
        with Products() as products:
            for _ in range(2):
                model(tokens, (tokens + 1) % 64)[0].backward()
        counts[kind] = products.count
        gradients[kind] = [parameter.grad for parameter in model.parameters()]
    for kind, found in gradients.items():
        assert all(map(torch.equal, found, gradients["none"])), kind
    # Two blocks, two passes.
    assert {kind: (count - counts["none"]) / 4 for kind, count in counts.items()} == {
        "none": 0,
        "selective": 0,
        **again,
    }


def test_equal_blocks_from_some_depth_on_are_compiled_one_by_one_in_replicas_too() -> None:
    with torch.device("meta"):
        shape = {"width": 8, "num_heads": 1}
        deep = [(num_layers, num) for num_layers in (3, 4, 23, 24) for num in (1, 2)]
        found = [is_deep(GPT(num_layers=num_layers, **shape), num_replicas=num) for num_layers, num in deep]
    assert found == [False, False, False, True, False, True, True, True]
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    for four, expected in (([nn.Linear(1, 1)] * 4, True), ([nn.LayerNorm(1)] * 4, False)):
        model = nn.ModuleDict({"a": layers, "b": nn.ModuleList(map(copy.deepcopy, four))})
        assert is_deep(model, num_replicas=1) is expected


def test_exchanges_overlap_in_compiled_blocks_on_gpus_alone() -> None:
    with inductor_config.patch(_micro_pipeline_tp=False):
        for kind, compiles in (("cpu", True), ("cuda", False)):
            mesh: Any = SimpleNamespace(device_type=kind)
            with pytest.raises(
                ConfigError, match=f"async_tp=true was asked, and this rank has a device of type {kind}"
            ):
                overlap_exchanges(mesh, compiles=compiles)
        assert not inductor_config._micro_pipeline_tp


OVERLAPPED = """
import torch, torch.distributed as dist
from types import SimpleNamespace
from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.parallelize import build_mesh, overlap_exchanges, parallelize
from slurm_train.models.gpt import GPT

class Seen(Exception):
    pass

def look(graph):
    apply(graph)
    # Nothing computes them on a CPU.
    raise Seen(sorted({str(node.target).split(".")[1] for node in graph.nodes if "symm_mem" in str(node.target)}))

apply = micro_pipeline_tp.micro_pipeline_tp_pass
dist.is_nccl_available = lambda: True
micro_pipeline_tp.micro_pipeline_tp_pass = post_grad.micro_pipeline_tp_pass = look
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
layout = ParallelLayout(tp=2)
mesh = build_mesh(layout, device=torch.device("cpu"))
overlap_exchanges(SimpleNamespace(device_type="cuda", get_group=mesh["tp"].get_group), compiles=True)
model = GPT(num_layers=1, width=32, num_heads=2)
settings = ParallelSection(tp=2, sequence_parallel=True)
parallelize(model, layout=layout, mesh=mesh, roots=[model], settings=settings, compiles=True)
try:
    model(torch.zeros(2, 8, dtype=torch.int64))
except Exception as err:
    print(str(err).splitlines()[0])
"""


def test_gathers_and_sums_of_a_compiled_block_become_parts_that_overlap_with_its_products(tmp_path: Path) -> None:
    found = run_alone(tmp_path, OVERLAPPED)
    assert "fused_all_gather_matmul" in found and "fused_matmul_reduce_scatter" in found, found


SELECTIVE = """
import torch, torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection, RunConfig, TrainSection
from slurm_train.distributed.parallelize import build_mesh, parallelize
from slurm_train.models.gpt import GPT

class Sums(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "_c10d_functional" and "reduce" in str(func)
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
layout = ParallelLayout(tp=2)
mesh = build_mesh(layout, device=torch.device("cpu"))
for by_positions in (False, True):
    sums = {}
    for kind in ("none", "selective", "alternate", "full"):
        model = GPT(num_layers=2, width=32, num_heads=2)
        settings = ParallelSection(tp=2, sequence_parallel=by_positions, activation_checkpointing=kind)
        parallelize(model, layout=layout, mesh=mesh, roots=[model], settings=settings, compiles=False)
        with Sums() as seen:
            model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        sums[kind] = seen.count
    assert sums["none"] == sums["selective"] == sums["alternate"] < sums["full"], sums
print("right")
"""


def test_selective_checkpointing_repeats_no_exchange_of_sums(tmp_path: Path) -> None:
    assert run_alone(tmp_path, SELECTIVE) == "right"


# torchao says at its import which of its kernels this machine has not.
QUIET = "ignore::DeprecationWarning"


@pytest.mark.full
@NEEDS_TORCHAO
@pytest.mark.filterwarnings(QUIET)
def test_products_of_blocks_are_in_float8_and_train_nearly_as_in_bfloat16() -> None:
    losses = []
    for lowers in (False, True):
        torch.manual_seed(0)
        model = GPT(vocab_size=32, context=16, num_layers=2, num_heads=2, width=32, hidden=72, tied=False)
        before = dict(model.named_parameters())
        if lowers:
            to_float8(model, blocks=units(model), emulate=True)
            kinds = {name: type(module).__name__ for name, module in model.blocks[0].named_modules()}
            # 72 is no multiple of 16.
            assert kinds["attention.q"] == kinds["attention.out"] == "Float8Linear" != kinds["feed_forward.up"]
            assert type(model.head) is Head
        after = dict(model.named_parameters())
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tokens = torch.arange(64).reshape(4, 16) % 32
        found = []
        for _ in range(12):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(tokens, (tokens + 1) % 32)[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    plain, lowered = losses
    assert lowered == pytest.approx(plain, rel=0.05) and lowered != plain and plain[-1] < plain[0] / 2


@pytest.mark.full
@NEEDS_TORCHAO
@pytest.mark.filterwarnings(QUIET)
def test_a_model_without_matrices_that_suit_float8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no block of CNN has an nn\.Linear whose sizes are multiples of 16"):
        to_float8(CNN(), blocks=units(CNN()))


def test_cards_that_cannot_multiply_in_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    require_float8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    for kind, found in (("cpu", "a CPU"), ("cuda", r"NVIDIA A100 of compute capability 8\.0")):
        with pytest.raises(ConfigError, match=f"precision=fp8 was asked, and this rank has {found}"):
            require_float8(torch.device(kind))


@pytest.mark.parametrize(("architecture", "is_able"), [("gfx942:sramecc+:xnack-", True), ("gfx90a:sramecc+", False)])
def test_of_amd_only_mi300_and_later_multiply_in_float8(
    architecture: str, is_able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ROCm gives MI250X, which is gfx90a, the capability (9, 0).
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "AMD Instinct")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    card = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    with contextlib.nullcontext() if is_able else pytest.raises(ConfigError, match=r"AMD Instinct \(gfx90a\)"):
        require_float8(torch.device("cuda"))


def test_a_block_that_stands_in_several_places_is_one_unit() -> None:
    block = nn.Linear(2, 2)
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, nn.Linear(2, 2), block]), "again": nn.ModuleList([block])})
    assert [id(unit) for unit in units(model)] == [id(model["blocks"][0]), id(model["blocks"][1])]


def test_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="0 of Sequential gives sparse gradients, which cannot be spread over ranks"):
        require_dimensions(nn.Sequential(nn.Embedding(3, 2, sparse=True)), layout=ParallelLayout(dp_shard=2))


@pytest.mark.parametrize(
    ("layout", "offloads", "said"),
    [
        (ParallelLayout(dp_shard=2, tp=2), False, r"parallel\.tp=2"),
        (ParallelLayout(dp_shard=2, pp=2), False, r"parallel\.pp=2"),
        (ParallelLayout(dp_shard=2), True, r"parallel\.cpu_offload=true"),
    ],
    ids=["tp", "pp", "offload"],
)
def test_scalars_are_refused_by_name_where_they_cannot_stay_whole(
    layout: ParallelLayout, offloads: bool, said: str
) -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0))})
    with pytest.raises(ConfigError, match=f"scale of ParameterDict is a scalar parameter.*{said}"):
        require_dimensions(model, layout=layout, offloads=offloads)
    require_dimensions(model, layout=ParallelLayout(dp_replicate=2, dp_shard=2, cp=2))


def test_what_several_units_have_in_common_is_a_part_of_its_own() -> None:
    shared = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    blocks = nn.ModuleList(nn.Sequential(shared, nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
    assert [id(part) for part in shared_parts(nn.ModuleDict({"blocks": blocks}))] == [id(shared)]
    assert not shared_parts(nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))}))
    nested = nn.ModuleList([nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(2, 2)])})])
    assert not shared_parts(nn.ModuleDict({"blocks": nested}))


@pytest.mark.parametrize(("release", "needs_newer"), [("2.8.0+cpu", True), ("2.9.1", False), ("2.15.0+cu132", False)])
def test_shards_on_cpus_need_a_torch_that_computes_means(
    release: str, needs_newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    require_gloo_means("cuda")
    with pytest.raises(ConfigError) if needs_newer else contextlib.nullcontext():
        require_gloo_means("cpu")


@pytest.mark.parametrize(("release", "needs_newer"), [("2.9.1", True), ("2.10.0", False)])
def test_pipelines_on_cpus_need_a_torch_whose_stages_can_exchange(
    release: str, needs_newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    require_gloo_pipelines(torch.device("cuda"))
    with pytest.raises(ConfigError) if needs_newer else contextlib.nullcontext():
        require_gloo_pipelines(torch.device("cpu"))
