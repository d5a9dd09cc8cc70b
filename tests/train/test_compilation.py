"""What was compiled is kept in the run directory and found again on a node that has nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from slurm_train.config.schema import BatchSection, ParallelSection, RunConfig, TrainSection
from slurm_train.errors import ConfigError, PreflightError
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective
from slurm_train.train.compilation import (
    CompileCache,
    compile_in_place,
    mark_compilations,
    require_compiler,
    require_graphs_fit,
)
from tests.support.ranks import make_rank
from tests.support.refusals import refusal

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
            rank = make_rank(tmp_path / f"rank{number}", config, rank=number, ranks=8)
            rank.place = replace(rank.place, local_rank=number % 2, local_world_size=2)
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


GRAPHS = TrainSection(compile=True, cuda_graphs=True)


@pytest.mark.parametrize(
    ("config", "place", "problem", "remedy"),
    [
        (RunConfig(train=TrainSection(cuda_graphs=True)), {}, "nothing is compiled", "train.compile=true"),
        (RunConfig(train=GRAPHS), {"ranks": 2}, "the run has 2 ranks", "one rank"),
        (RunConfig(train=GRAPHS), {"accumulation": 4}, "a step has up to 4 micro-batches", "batch.accumulation=1"),
        (
            RunConfig(train=GRAPHS, batch=BatchSection(growth={"10": 2})),
            *({}, "a step has up to 2 micro-batches", "batch.accumulation=1, without batch.growth"),
        ),
        (
            RunConfig(train=GRAPHS, batch=BatchSection(by_length=True)),
            *({}, "batch.by_length=true gives batches of many shapes", "batch.by_length=false"),
        ),
    ],
)
def test_cuda_graphs_are_refused_where_they_would_be_wrong(
    config: RunConfig, place: dict[str, Any], problem: str, remedy: str
) -> None:
    accumulation = place.pop("accumulation", 1)
    rank = make_rank(config=config, **place)
    rank.plan = replace(rank.plan, accumulation=accumulation)
    error = refusal(ConfigError, require_graphs_fit, rank)
    assert error.message == f"train.cuda_graphs=true was asked, and {problem}"
    assert f"use {remedy}" in error.hint


def test_cuda_graphs_are_off_unless_typed_and_said_to_be_none_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    require_graphs_fit(make_rank(config=COMPILES, ranks=2))
    require_graphs_fit(make_rank(config=RunConfig(train=GRAPHS), device=torch.device("cuda")))
    assert not capsys.readouterr().err
    require_graphs_fit(make_rank(config=RunConfig(train=GRAPHS)))
    assert "this rank has a CPU, where torch makes no graphs" in capsys.readouterr().err


@pytest.mark.parametrize("uses_graphs", [False, True])
def test_torch_gets_its_options_for_cuda_graphs_for_the_training_alone(
    uses_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **words: asked.append((type(self).__name__, words.get("options")))
    )
    config = RunConfig(train=replace(COMPILES.train, cuda_graphs=uses_graphs))
    model = nn.Sequential(nn.Linear(2, 2))
    compile_in_place(cast("Any", SimpleNamespace(rank=make_rank(config=config), model=model)), Objective(model))
    graphs = {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": True}
    assert asked == [("Objective", graphs if uses_graphs else None), ("Sequential", None)]
    # As torch.compile takes them: a name that it does not know is refused.
    assert set(graphs) <= set(torch._inductor.list_options())


ON_GPU: dict[str, Any] = {"device": torch.device("cuda")}


@pytest.mark.parametrize(
    ("place", "sections", "width", "said"),
    [
        (ON_GPU, {}, 4, "used, since the model has 20 parameters, of at most 10,000,000"),
        (ON_GPU, {}, 4000, "left out, since the model has 16,004,000 parameters, of at most 10,000,000"),
        ({}, {}, 4, "left out, since this rank has no GPU of CUDA"),
        (ON_GPU, {"batch": BatchSection(by_length=True)}, 4, "left out, since batch.by_length=true gives batches of"),
        ({**ON_GPU, "accumulation": 4}, {}, 4, "left out, since a step has up to 4 micro-batches"),
        (ON_GPU, {"callbacks": [{"_target_": "mine.Callback"}]}, 4, "left out, since the run has callbacks"),
    ],
    ids=["small", "large", "cpu", "shapes", "micro-batches", "callbacks"],
)
def test_cuda_graphs_are_chosen_where_they_are_known_to_be_right(
    place: dict[str, Any],
    sections: dict[str, Any],
    width: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    facts = dict(place)
    accumulation = facts.pop("accumulation", 1)
    rank = make_rank(config=RunConfig(train=TrainSection(compile=True, cuda_graphs="auto"), **sections), **facts)
    rank.plan = replace(rank.plan, accumulation=accumulation)
    require_graphs_fit(rank)
    model = nn.Sequential(nn.Linear(width, width))
    compile_in_place(cast("Any", SimpleNamespace(rank=rank, model=model)), Objective(model))
    printed = capsys.readouterr().err
    assert printed.startswith(f"train.cuda_graphs=auto: CUDA graphs are {said}")
    assert rank.uses_graphs == ("are used" in printed)


def test_cuda_graphs_of_single_blocks_are_refused() -> None:
    model = GPT(vocab_size=8, context=4, num_layers=24, num_heads=1, width=2)
    parts: Any = SimpleNamespace(rank=make_rank(config=RunConfig(train=GRAPHS)), model=model)
    error = refusal(ConfigError, compile_in_place, parts, Objective(model))
    assert error.message.endswith("the model is so deep that it is compiled block by block")
