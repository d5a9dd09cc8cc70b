"""Trainings whose products are in float8, emulated on gloo ranks: shards that travel in float8, cut matrices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_train.checkpoint.tensors import tensor_shapes
from tests.support.extras import NEEDS_TORCHAO
from tests.support.small_checkpoints import checkpoint_of
from tests.support.warm_ranks import run_alone
from tests.train.small_runs import digest_of, run_to_end, steps_of, weights_of
from tests.train.test_layouts import STEPS, layout_config, ranks_of

pytestmark = [NEEDS_TORCHAO, pytest.mark.distributed, pytest.mark.timeout(900), pytest.mark.full]
SHAPE = {"vocab_size": 32, "context": 16, "num_layers": 2, "width": 64, "hidden": 128, "tied": False}
SHARDS = {"dp_shard": 2}
AS_BFLOAT16 = {"dp_shard": 2, "gather_dtype": "bfloat16"}


def float8(run: Path, parallel: dict[str, Any], *, train: dict[str, Any] | None = None, **how: Any) -> list[float]:
    """Runs a training and returns the losses of its steps."""
    model = how.pop("model", {})
    config = layout_config(parallel, precision="fp8", dtype="float32", **SHAPE, **model)
    config["train"] |= train or {}
    config |= how.pop("sections", {})
    run_to_end(run, config, ranks=ranks_of(parallel), fault={"emulates_float8": True}, **how)
    return [line["loss"] for line in steps_of(run)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("float8") / "shards"
    float8(run, SHARDS)
    return run


def test_shards_that_travel_in_float8_train_nearly_as_in_bfloat16(shards: Path, tmp_path: Path) -> None:
    others = float8(tmp_path / "others", AS_BFLOAT16)
    losses = [line["loss"] for line in steps_of(shards)]
    assert losses == pytest.approx(others, rel=0.005) and losses != others
    assert losses[-1] < losses[0] - 0.5
    # A checkpoint does not show how shards travelled.
    shapes = [tensor_shapes(checkpoint_of(run / "checkpoints", STEPS)) for run in (shards, tmp_path / "others")]
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in shapes[0].items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in shapes[1].items()
    }
    assert {tensor.dtype for tensor in weights_of(shards).values()} == {torch.float32}


@pytest.mark.campaign
def test_the_first_weights_are_those_of_a_run_without_float8(tmp_path: Path) -> None:
    # So small a rate changes no float32.
    still: dict[str, Any] = {"sections": {"optim": {"lr": 1e-30}}, "train": {"max_steps": 1}}
    float8(tmp_path / "shards", SHARDS, **still)
    config = layout_config({}, dtype="float32", **SHAPE)
    config["train"] |= still["train"]
    run_to_end(tmp_path / "one", {**config, **still["sections"]}, ranks=1)
    assert digest_of(tmp_path / "shards") == digest_of(tmp_path / "one")


@pytest.mark.campaign
def test_a_run_is_continued_with_shards_that_travel_in_another_type(shards: Path, tmp_path: Path) -> None:
    uninterrupted = [line["loss"] for line in steps_of(shards)]
    for name, before, after in (("to float8", AS_BFLOAT16, SHARDS), ("from float8", SHARDS, AS_BFLOAT16)):
        stop = {"model": {"signal_at": 7, "only_in": str(tmp_path / f"sent {name}")}}
        float8(tmp_path / name, before, code=75, **stop)
        losses = float8(tmp_path / name, after, attempt=1, **stop)
        assert losses == pytest.approx(uninterrupted, rel=0.005), name


def test_an_interrupted_run_ends_with_the_same_bits(shards: Path, tmp_path: Path) -> None:
    stop = {"model": {"signal_at": 7, "only_in": str(tmp_path / "sent")}}
    float8(tmp_path / "cut", SHARDS, code=75, **stop)
    float8(tmp_path / "cut", SHARDS, attempt=1, **stop)
    assert digest_of(tmp_path / "cut") == digest_of(shards)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"dp_shard": 2, "tp": 2},
    "tp by positions": {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "activation_checkpointing": "selective"},
    "pp": {"dp_shard": 2, "pp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "reshard_after_forward": False},
    "cp": {"cp": 2},
    "offloaded": {"dp_shard": 2, "cpu_offload": True},
}
# Shards alone are above; the others take two minutes.
IN_SUITE = {"tp by positions", "offloaded"}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(parallel, id=name, marks=[] if name in IN_SUITE else pytest.mark.campaign)
        for name, parallel in LAYOUTS.items()
    ],
)
def test_layouts_train_alike_in_float8(parallel: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    expected = [line["loss"] for line in steps_of(shards)]
    # Of one step up to 0.0056 where the CPU multiplies in bfloat16 itself (avx512_bf16).
    assert float8(tmp_path / "run", parallel) == pytest.approx(expected, rel=0.01)


@pytest.mark.campaign
def test_averages_evaluations_and_other_optimizers_see_ordinary_numbers(shards: Path, tmp_path: Path) -> None:
    average = [{"_target_": "slurm_train.train.callbacks.EMA", "decay": 0.9}]
    losses = float8(tmp_path / "averaged", {**SHARDS, "reshard_after_forward": False}, sections={"callbacks": average})
    assert losses == [line["loss"] for line in steps_of(shards)], "the average is no part of the training"
    plain = float8(tmp_path / "plain", AS_BFLOAT16, sections={"optim": {"_target_": "torch.optim.SGD", "lr": 0.1}})
    lowered = float8(tmp_path / "lowered", SHARDS, sections={"optim": {"_target_": "torch.optim.SGD", "lr": 0.1}})
    assert lowered == pytest.approx(plain, rel=0.005)


GATHERS = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.float8 import ScalesOfStep, to_float8
from slurm_train.distributed.parallelize import build_mesh, parallelize, units
from slurm_train.models.gpt import GPT

class Gathers(TorchDispatchMode):
    num_bytes = 0
    num_sums = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            # What it is made of is seen after it.
            return NotImplemented
        if "allgather" in str(func):
            self.num_bytes += args[0].nbytes if isinstance(args[0], torch.Tensor) else args[0][0].nbytes
        self.num_sums += "reduce" in str(func)
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
layout = ParallelLayout(dp_shard=4)
mesh = build_mesh(layout, device=torch.device("cpu"))
settings = ParallelSection(dp_shard=4, gather_dtype="bfloat16")
seen = {}
for lowers in (False, True):
    # 48 rows make four equal parts of matrices; 72 is no multiple of 16, and stays in bfloat16.
    model = GPT(num_layers=2, width=48, num_heads=4, hidden=72)
    to_float8(model, blocks=units(model), emulate=True)
    parallelize(
        model, layout=layout, mesh=mesh, roots=[model], settings=settings, compiles=False, gathers_float8=lowers
    )
    scales = ScalesOfStep(model)
    for name in ("computed", "not computed"):
        with Gathers() as gathers, torch.no_grad():
            if name == "computed":
                with scales.computed():
                    model(torch.zeros(2, 16, dtype=torch.int64))
            else:
                model(torch.zeros(2, 16, dtype=torch.int64))
        seen[lowers, name] = (gathers.num_bytes, gathers.num_sums)
bytes_saved = seen[False, "computed"][0] - seen[True, "computed"][0]
assert bytes_saved == 2 * 4 * 48 * 48, (bytes_saved, seen)
# Scales that are found before the passes take one exchange for all matrices, others one exchange per matrix.
assert [numbers[1] for numbers in seen.values()] == [0, 0, 1, 8], seen
print("right")
"""


def test_a_matrix_travels_as_a_byte_a_number_and_all_scales_in_one_exchange(tmp_path: Path) -> None:
    assert run_alone(tmp_path, GATHERS) == "right"


COMPILED = """
import torch, torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.float8 import ScalesOfStep, to_float8
from slurm_train.distributed.parallelize import build_mesh, parallelize, units
from slurm_train.models.gpt import GPT

compile_module = nn.Module.compile
# No C++ compiler is needed.
nn.Module.compile = lambda self: compile_module(self, backend="aot_eager")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
for degrees in ({"dp_shard": 4}, {"dp_shard": 2, "tp": 2}):
    torch._dynamo.reset()
    counters.clear()
    layout = ParallelLayout(**degrees)
    mesh = build_mesh(layout, device=torch.device("cpu"))
    settings = ParallelSection(gather_dtype="bfloat16", activation_checkpointing="selective", **degrees)
    model = GPT(vocab_size=32, context=16, num_layers=3, num_heads=4, width=64, hidden=128, tied=False)
    to_float8(model, blocks=units(model), tp=layout.tp, emulate=True)
    parallelize(model, layout=layout, mesh=mesh, roots=[model], settings=settings, compiles=True, gathers_float8=True)
    scales = ScalesOfStep(model)
    for _ in range(2):
        with scales.computed():
            model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], (degrees, counters)
print("right")
"""


def test_blocks_in_float8_are_one_compiled_graph() -> None:
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.stdout == "right\n", done.stderr
