"""What was compiled is kept in the run directory and found again on a node that has nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurm_train.config.schema import ParallelSection, RunConfig, TrainSection
from slurm_train.errors import PreflightError
from slurm_train.train.compilation import (
    CompileCache,
    mark_compilations,
    require_compiler,
    set_compile_mode,
)
from tests.support.ranks import make_rank
from tests.support.refusals import refusal
from tests.support.warm_ranks import run_alone

COMPILES = RunConfig(train=TrainSection(compile=True))
PROGRAM = """
import sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from tests.train.test_compilation import COMPILES, CompileCache, make_rank

cache = CompileCache(make_rank(Path(sys.argv[1]), COMPILES))
cache.load()
weights = torch.ones(8, requires_grad=True)
torch.compile(lambda values: (values * 2).sum())(weights).backward()
cache.keep()
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_an_attempt_on_another_node_finds_what_the_one_before_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits, times = [], []
    for node in range(2):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"node{node}"))
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=True)
        hits.append(int(done.stdout))
        (kept,) = (tmp_path / "compiled").iterdir()
        found = kept.stat()
        assert (kept.name, found.st_mode & 0o777) == ("stage_0_gpu_0", 0o600)
        times.append(found.st_mtime_ns)
    assert hits == [0, 1] and times[0] == times[1], "the second one adds nothing"


REPLICAS = """
import json
import torch, torch.distributed as dist
from types import SimpleNamespace
from torch._dynamo.backends.registry import lookup_backend
from torch.testing._internal.distributed.fake_pg import FakeStore
from slurm_train.config.schema import DdpSection, ParallelSection
from slurm_train.distributed.parallelize import is_deep, prepare_blocks
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective
from slurm_train.session.signals import StopFlag
from slurm_train.train.compilation import compile_in_place
from slurm_train.train.ddp import TrainingModule, build_ddp
from tests.support.ranks import make_rank
from tests.train.test_compilation import COMPILES

def count(graph, inputs):
    pieces.append(graph)
    return aot_eager(graph, inputs)

def sent(bucket):
    # A pretended group gives DDP no tensor back.
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

aot_eager, compile, found = lookup_backend("aot_eager"), torch.compile, {}
torch.compile = lambda function, **how: compile(function, **how | {"backend": count})
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
rank = make_rank(config=COMPILES, ranks=2)
for num_layers in (3, 6):
    torch._dynamo.reset()
    pieces = []
    model = GPT(vocab_size=64, context=32, num_layers=num_layers, num_heads=2, width=192)
    if is_deep(model, num_replicas=2):
        prepare_blocks(model, settings=ParallelSection(), compiles=True)
    objective = Objective(model)
    compile_in_place(SimpleNamespace(rank=rank, model=model), objective)
    module = TrainingModule(objective, stop=StopFlag(), device=rank.device, autocast=None)
    # A block has 1.8 MB.
    ddp = build_ddp(module, ddp=DdpSection(bucket_cap_mb=1.6), device=rank.device)
    ddp.register_comm_hook(None, lambda _, bucket: sent(bucket))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    module.backward(ddp((tokens, tokens)))
    assert all(one.grad is not None for one in model.parameters())
    found[num_layers] = len(pieces)
print(json.dumps(found))
"""


def test_replicas_of_several_ranks_are_compiled_by_blocks_and_not_cut_at_the_buckets(tmp_path: Path) -> None:
    # Three blocks are a whole, which torch cuts; six are the graph of one and the loss.
    assert json.loads(run_alone(tmp_path, REPLICAS)) == {"3": 4, "6": 2}


def test_what_is_no_cache_of_torch_is_passed_over(tmp_path: Path) -> None:
    cache = CompileCache(make_rank(tmp_path, COMPILES))
    path = tmp_path / "compiled" / "stage_0_gpu_0"
    path.parent.mkdir()
    path.write_bytes(b"torn")
    cache.load()
    path.unlink()
    path.mkdir()
    cache.load()


def test_the_first_node_of_each_stage_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.compiler, "save_cache_artifacts", lambda: (b"", SimpleNamespace(artifacts={"inductor": ["a graph"]}))
    )
    written: dict[int, str] = {}
    for config in (replace(COMPILES, parallel=ParallelSection(dp_replicate=4, pp=2)), RunConfig()):
        for number in range(8):
            (tmp_path / f"rank{number}").mkdir(exist_ok=True)
            rank = make_rank(tmp_path / f"rank{number}", config, rank=number, ranks=8)
            rank = replace(rank, place=replace(rank.place, local_rank=number % 2, local_world_size=2))
            CompileCache(rank).keep()
    for path in tmp_path.glob("rank*/compiled/*"):
        written[int(path.parts[-3].removeprefix("rank"))] = path.name
    assert written == {0: "stage_0_gpu_0", 1: "stage_0_gpu_1", 4: "stage_1_gpu_0", 5: "stage_1_gpu_1"}


@pytest.mark.parametrize(("compile_", "kind", "is_refused"), [("auto", "cuda", True), (True, "cpu", False)])
def test_a_node_that_cannot_compile_is_named_before_the_first_step(
    compile_: Any, kind: str, is_refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(train=TrainSection(compile=compile_))
    # A folder without compilers.
    rank = make_rank(config=config, device=torch.device(kind), env={"PATH": str(tmp_path)})
    problem = f"torch cannot compile kernels on {rank.place.host}: no C"
    if is_refused:
        assert "train.compile=false" in refusal(PreflightError, require_compiler, rank).hint
    else:
        require_compiler(rank)
        assert f"warning: {problem}" in capsys.readouterr().err
    require_compiler(make_rank(config=RunConfig(), env=rank.env))
    assert not capsys.readouterr().err, "the CPU compiles nothing by default"


def test_each_graph_that_is_compiled_is_progress() -> None:
    rank = make_rank(config=COMPILES)
    torch._dynamo.reset()
    mark_compilations(rank)
    seen = []
    for size in (2, 3):
        # "eager": dynamo has graphs, and no compiler is needed.
        torch.compile(lambda values, size=size: values * size, backend="eager")(torch.ones(size))
        seen.append(rank.heartbeat.marks)
    torch._dynamo.reset()
    assert seen == [2, 4], "when it begins and when it ends"
    assert rank.heartbeat.phase == "start"


def test_a_mode_is_that_of_torch_for_every_graph() -> None:
    from torch._inductor import config

    before = config.max_autotune, config.coordinate_descent_tuning
    try:
        set_compile_mode("default")
        assert (config.max_autotune, config.coordinate_descent_tuning) == before
        set_compile_mode("max-autotune-no-cudagraphs")
        assert config.max_autotune and not config.triton.cudagraphs
    finally:
        config.max_autotune, config.coordinate_descent_tuning = before
