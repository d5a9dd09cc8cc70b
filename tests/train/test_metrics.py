"""What is kept and said of steps: the display, the result, the last lines, measures, arithmetic, and a step's pace."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from slurm_train.assets import read_asset
from slurm_train.config.compose import ADVICE_OF_MODEL
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.config.target import instantiate
from slurm_train.data.source import Description
from slurm_train.distributed.pace import PaceProbe
from slurm_train.errors import ConfigError, RunError
from slurm_train.metrics import Display
from slurm_train.models.gpt import GPT
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.heartbeat import AwakeClock, Heartbeat
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import Spent
from slurm_train.train.context import Rank
from slurm_train.train.ending import say_stopped, write_result
from slurm_train.train.evaluate import _as_numbers, measures
from slurm_train.train.metrics import (
    GpuReader,
    flops_per_token,
    peak_flops,
)
from slurm_train.train.position import Position
from slurm_train.train.progress import TrainingProgress
from slurm_train.train.step import StepFacts, StepResult
from slurm_train.train.texts import printable, sample_text, say_text
from tests.support.ranks import make_parts, make_rank


def progress_of(rank: Rank, source: Any, clock: Callable[[], float]) -> TrainingProgress:
    """Returns the record of steps that nothing else measures."""
    rank = replace(rank, heartbeat=Heartbeat(clock=AwakeClock(monotonic=clock)))
    none: Any = None
    probe = PaceProbe(None, rank.heartbeat, every=None, data_wait_s=lambda: 0.0, on_device=False)
    spent = Spent(begin_unix_s=0.0)
    return TrainingProgress(make_parts(rank, none, none, source), spent=spent, probe=probe, data_wait_s=lambda: 0.0)


def test_the_display_ends_at_the_newest_step(tmp_path: Path) -> None:
    stream, clock, source = io.StringIO(), count(0.0, 1.0).__next__, range(64)
    display = Display(stream, max_steps=3, every_s=1e9, clock=clock)
    recorder = progress_of(make_rank(tmp_path, display=display), source, clock)
    for step in (1, 2, 3):
        recorder.count(StepResult(StepFacts(step, 4 * step, 0.1), False, 4, 1.0 / step, 0, 0.5))
    recorder.close()
    assert stream.getvalue().splitlines()[-1].startswith("step 3/3  loss 0.3333")


@pytest.mark.parametrize("is_text", [False, True], ids=["images whose pixels count in the loss", "text"])
def test_a_rate_is_of_samples_or_of_tokens_whatever_else_took_time(tmp_path: Path, is_text: bool) -> None:
    """Steps of 4 samples in 2 s each, of which each loss counts 400 items.

    An evaluation of 5 s behind each, and the start-up of 60 s in the first, are left out.
    """
    now = [100.0]
    description = Description(bytes_per_target=1.0 if is_text else None)
    source = type("Source", (), {"__len__": lambda _: 64, "describe": lambda _: description})()
    recorder = progress_of(make_rank(tmp_path), source, lambda: now[0])
    for step in (1, 2, 3):
        now[0] += 60.0 if step == 1 else 2.0
        result = StepResult(StepFacts(step, 4 * step, 0.1, size=4), False, 400, 1.0, 0, 0.5)
        recorder.count(result)
        now[0] += 5.0
        recorder.leave_out(5.0, "evaluate_s")
    recorder.write(result, items=1200, digest=None)
    recorder.close()
    (line,) = [json.loads(words) for words in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["step_time_s"] == 2.0
    assert {key: line.get(key) for key in ("tokens_per_s", "samples_per_s", "tokens")} == (
        {"tokens_per_s": 200.0, "samples_per_s": None, "tokens": 1200}
        if is_text
        else {"tokens_per_s": None, "samples_per_s": 2.0, "tokens": None}
    )


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2J\n\tb\x00\u00e9") == "a\ufffd[2J\n\tb\ufffd\u00e9"


def trainer_of(rank: Rank, **facts: Any) -> Any:
    position = Position(3, 48, loss=0.5)
    stops = SimpleNamespace(not_saved="")
    return SimpleNamespace(rank=rank, position=position, measures={"eval_loss": 0.25}, stops=stops, **facts)


def test_only_the_newest_attempt_writes_the_result(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    start = Start(job_id="7", restart_count=0, nodes=("node1",), world_size=1)
    older, newer = open_attempt(run, start), open_attempt(run, start)
    facts = {"step": 3, "eval_loss": 0.25, "eval_fid": math.nan}
    with pytest.raises(RunError, match="overtaken by attempt 1"):
        write_result(make_rank(tmp_path, attempt=older), facts)
    assert not run.result.exists()
    write_result(make_rank(tmp_path, attempt=newer), facts)
    result = json.loads(run.result.read_text(), parse_constant=pytest.fail)
    assert (result["step"], result["eval_loss"], result["eval_fid"], result["attempt"]) == (3, 0.25, None, 1)


@pytest.mark.parametrize("cluster", [ClusterSection(), None])
def test_a_stopped_rank_says_what_comes_by_itself(cluster: ClusterSection | None, tmp_path: Path) -> None:
    said: list[str] = []
    display = SimpleNamespace(say=said.append)
    say_stopped(trainer_of(make_rank(tmp_path / "a" / "b", RunConfig(cluster=cluster), display=display)))
    assert ("requeued automatically" in said[1]) is (cluster is not None)
    assert said[-1].endswith("slurm_train resume b")


@pytest.mark.parametrize(
    ("ranks", "bytes_per_item", "expected"),
    [
        (
            [{"loss": 30.0, "count": 10.0, "correct": 9.0}, {"loss": 2.0, "count": 2.0, "correct": 0.0}, {}],
            None,
            {"eval_loss": 32 / 12, "eval_accuracy": 9 / 12},
        ),
        (
            [{"loss": 4 * math.log(2), "count": 2.0, "correct": 1.0}],
            4.0,
            {"eval_loss": 2 * math.log(2), "eval_bits_per_byte": 0.5},
        ),
        ([{"loss": 1.0, "count": 2.0, "distance": 3.0}], None, {"eval_loss": 0.5, "eval_distance": 1.5}),
        ([{}, {}], None, {}),
    ],
    ids=["ranks weigh as much as they have items", "text in bits per byte", "sums of one's own", "nothing"],
)
def test_measures_are_sums_by_items(ranks: Any, bytes_per_item: float | None, expected: dict[str, float]) -> None:
    assert measures(ranks, bytes_per_item=bytes_per_item) == pytest.approx(expected)


def shipped_model(name: str) -> dict[str, Any]:
    mapping = yaml.safe_load(read_asset("conf/model", f"{name}.yaml"))
    return {key: value for key, value in mapping.items() if key not in ADVICE_OF_MODEL}


@pytest.mark.parametrize("name", ["gpt", "gpt2-124m", "llama3-8b"])
def test_a_token_costs_what_torch_counts_of_the_matrix_products(name: str) -> None:
    mapping = shipped_model(name)
    with torch.device("meta"):
        model = instantiate({**mapping, "num_layers": 2, "context": 16})
        tokens = torch.zeros((2, 16), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    # Attention's own products, which the formula leaves out, are of another operation.
    products = sum(counts.get(operation, 0) for operation in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products > 0 and flops_per_token(model)[0] == products / 32


@pytest.mark.parametrize("trained", ["block 2 of 3", "all but block 2", "embedding", "head"])
def test_a_token_of_a_model_with_frozen_weights_costs_what_torch_counts(trained: str) -> None:
    mapping = {**shipped_model("gpt"), "num_layers": 3, "context": 16, "tied": False}
    with torch.device("meta"):
        model = instantiate(mapping)
        tokens = torch.zeros((2, 16), dtype=torch.int64)
    for name, parameter in model.named_parameters():
        is_in_block = name.startswith("blocks.1.")
        in_place = {"block 2 of 3": is_in_block, "all but block 2": not is_in_block}
        parameter.requires_grad_(in_place.get(trained, name.startswith(trained)))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts.get(operation, 0) for operation in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products > 0 and flops_per_token(model)[0] == pytest.approx(products / 32, rel=0.05)


@pytest.mark.parametrize(("positions", "billions"), [(4096, 51.5), (8192, 57.9), (0, 0.0)])
def test_a_token_of_llama_8b_costs_what_papers_say(positions: int, billions: float) -> None:
    with torch.device("meta"):
        model = instantiate(shipped_model("llama3-8b"))
    assert flops_per_token(model, positions=positions) == pytest.approx((45.0e9, billions * 1e9), rel=2e-3)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI250", 181),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_each_card_has_its_own_peak(name: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == (None if teraflops is None else teraflops * 1e12)


def test_the_text_at_the_end_compiles_nothing() -> None:
    compiled, said = [], []
    model = GPT(num_layers=1, width=16, num_heads=2, context=8)
    model.compile(backend=lambda graph, _: compiled.append(1) or graph.forward)
    encoding = SimpleNamespace(
        vocab_size=256, begin_of_document=(), end_of_document=0, decode=lambda tokens: "x" * len(tokens)
    )
    description: Any = Description(encoding=lambda: encoding, shards=list)  # type: ignore[arg-type, return-value]
    source: Any = SimpleNamespace(describe=lambda: description)
    say_text(said.append, model, train=source, heldout=None, num_tokens=5)
    assert (said, compiled) == (["the model writes:\nxxxxx"], [])


@pytest.mark.parametrize(("begin", "start"), [((1, 3), [1, 3]), ((), [2])])
def test_a_text_begins_as_documents_of_the_data_do(begin: tuple[int, ...], start: list[int]) -> None:
    given: list[list[int]] = []

    class Writes(nn.Linear):
        def generate(self, tokens: Tensor, **_: Any) -> Tensor:
            given.append(tokens[0].tolist())
            return torch.cat((tokens, torch.tensor([[7]])), dim=1)

    encoding: Any = SimpleNamespace(
        begin_of_document=begin, end_of_document=2, encode=lambda _: iter([np.array([5, 6])]), decode=str
    )
    assert [sample_text(Writes(1, 1), encoding, prompt) for prompt in ("ab", "")] == ["[7]", "[7]"]
    assert given == [[*start, 5, 6], start]


class Nvml(ModuleType):
    """NVML of one GPU that does not tell its clock."""

    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        assert handle == "GPU-aa-bb"
        return 512_345

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="aa-bb"))
    return torch.device("cuda", 0)


def test_a_gpu_is_read_as_far_as_it_answers_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch, gpu: torch.device
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    times = iter([10.0, 11.9, 12.0])
    reader = GpuReader(gpu, clock=lambda: next(times))
    known = {"gpu_memory_gb": 3.0, "gpu_power_w": 512.345, "gpu_temperature_c": 61.0}
    assert [reader.read() for _ in range(3)] == [known, {}, known]


def test_without_nvml_the_memory_that_torch_counts_is_left(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader(gpu, clock=lambda: 10.0).read() == {"gpu_memory_gb": 3.0}


def test_sums_that_are_vectors_become_measures_with_their_places() -> None:
    sums = _as_numbers({"loss": torch.tensor(3.0), "hits": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert sums == {"loss": 3.0, "hits_0_0": 1.0, "hits_0_1": 2.0, "hits_1_0": 3.0, "hits_1_1": 4.0}
    for wrong in ({"loss": torch.ones(2)}, {"many": torch.ones(2000)}):
        with pytest.raises(ConfigError, match=r"evaluation_sums gave \w+ as a tensor of \("):
            _as_numbers(wrong)
