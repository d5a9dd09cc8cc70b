"""What needs two GPUs and more: NCCL between them, layouts that send, copies of shards, and the end of a hang.

    python -m pytest tests/gpu/multi -m gpu
    GPU_TESTS_SHARE=1 python -m pytest tests/gpu/multi -m gpu   # all ranks on one GPU, NCCL over sockets: no speed
    GPU_TESTS_ON_CPU=1 python -m pytest tests/gpu/multi         # the same programs with gloo ranks: tries the tests

Each test starts the command line as a person does. Losses are compared with those of one rank of the same global batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurm_train.metrics import read_metrics
from tests.gpu.multi.environment import ON_CPU as ON_CPU_KEY
from tests.gpu.multi.environment import SHARES as SHARES_KEY
from tests.gpu.multi.environment import rank_environment

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.full]
ON_CPU = bool(os.environ.get(ON_CPU_KEY))
SHARES = bool(os.environ.get(SHARES_KEY))
STEPS = 12
WORDS = (
    *("model.width=64", "model.num_layers=4", "data.context=64", "batch.global_size=16", f"train.max_steps={STEPS}"),
    *("train.log_every_steps=1", "train.evaluate=false", "train.sample_tokens=0", "checkpoint.every_steps=null"),
    # Of a pipeline the embedding of the first stage cannot be the head of the last.
    *("optim.warmup_samples=0", "train.precision=float32", "model.tied=false"),
)
# Of rounding alone: the order of additions differs.
CLOSE = 5e-3
# As a run on GPUs is by default: matrix products, and shards that are gathered, in bfloat16, and compiled.
BY_DEFAULT = ("train.precision=bfloat16", "train.compile=true")
# Losses of some 5 with seven binary digits.
CLOSE_BY_DEFAULT = 0.05
# Products in float8, and shards that travel so.
IN_FLOAT8 = ("train.precision=fp8", "train.compile=true")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    # What a cluster meets first comes first: a card that is lent may be gone before the end.
    "DDP, by default": (2, BY_DEFAULT),
    "FSDP, by default": (2, (*BY_DEFAULT, "parallel.dp_shard=2")),
    "HSDP, by default": (4, (*BY_DEFAULT, "parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "pipeline": (2, ("parallel.pp=2", "batch.local_size=4")),
    "tensor by positions": (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "context": (2, ("parallel.cp=2",)),
    "DDP, gradients in bfloat16": (2, ("ddp.comm=bf16",)),
    "FSDP, two micro-batches": (2, ("parallel.dp_shard=2", "batch.local_size=4")),
    "FSDP, alternate": (2, (*BY_DEFAULT, "parallel.dp_shard=2", "parallel.activation_checkpointing=alternate")),
    "pipeline of FSDP": (4, ("parallel.pp=2", "parallel.dp_shard=2", "batch.local_size=4")),
    "DDP": (2, ()),
    "DDP, compiled": (2, ("train.compile=true",)),
    "FSDP": (2, ("parallel.dp_shard=2",)),
    "tensor": (2, ("parallel.tp=2",)),
    "pipeline, two stages each": (2, ("parallel.pp=2", "parallel.stages_per_rank=2", "batch.local_size=4")),
    "HSDP": (4, ("parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "tensor, by default": (2, (*BY_DEFAULT, "parallel.tp=2")),
    "FSDP, float8": (2, (*IN_FLOAT8, "parallel.dp_shard=2")),
    "FSDP of tensor, float8": (4, (*IN_FLOAT8, "parallel.dp_shard=2", "parallel.tp=2")),
    "tensor by positions, float8": (2, (*IN_FLOAT8, "parallel.tp=2", "parallel.sequence_parallel=true")),
    "pipeline of tensor": (4, ("parallel.pp=2", "parallel.tp=2", "batch.local_size=4")),
}


def environment(num_gpus: int) -> dict[str, str]:
    """Returns the environment of so many ranks; skips with what is missing."""
    needed = 1 if SHARES else num_gpus
    if not ON_CPU and (found := torch.cuda.device_count()) < needed:
        pytest.skip(f"{needed} GPUs are needed, torch finds {found}")
    return rank_environment(os.environ)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the standard library's text is kept, made once."""
    return tmp_path_factory.mktemp("text") / "stdlib"


def command(folder: Path, text: Path, *words: str, ranks: int) -> list[str]:
    where = (f"run.root={folder / 'runs'}", f"data.path={text}", f"run.processes={ranks}")
    return [sys.executable, "-m", "slurm_train", *WORDS, *where, *words]


def losses_of(folder: Path, text: Path, *words: str, ranks: int) -> list[float]:
    """Trains; returns the losses of all steps."""
    code = folder / "code"
    code.mkdir(parents=True)
    words = tuple(command(folder, text, *words, ranks=ranks))
    done = subprocess.run(words, env=environment(ranks), capture_output=True, text=True, cwd=code)
    assert done.returncode == 0, done.stderr[-4000:]
    (metrics,) = folder.glob("runs/*/*/metrics.jsonl")
    losses = [line["loss"] for line in read_metrics(metrics)]
    assert len(losses) == STEPS
    return losses


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[float]:
    """The losses of one rank."""
    return losses_of(tmp_path_factory.mktemp("one"), text, ranks=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_one_rank(
    name: str, tmp_path: Path, text: Path, request: pytest.FixtureRequest
) -> None:
    ranks, words = LAYOUTS[name]
    if ON_CPU and "train.precision=fp8" in words:
        pytest.skip("a CPU has no products in float8")
    environment(ranks)
    expected: list[float] = request.getfixturevalue("expected")
    found = losses_of(tmp_path, text, *words, ranks=ranks)
    farthest = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    is_precise = words[:2] not in (BY_DEFAULT, IN_FLOAT8)
    assert farthest < (CLOSE if is_precise else CLOSE_BY_DEFAULT), f"{found} instead of {expected}"


STOPPING = """
from slurm_train.train.callbacks import Callback


class Stop(Callback):
    def on_step_end(self, trainer):
        if trainer.position.step == 5:
            trainer.rank.stop.request()
"""


def test_shards_are_saved_at_a_stop_and_go_on_with_the_losses_of_one_rank(
    tmp_path: Path, text: Path, expected: list[float]
) -> None:
    env, code = environment(2), tmp_path / "code"
    code.mkdir()
    (code / "stopping.py").write_text(STOPPING)
    words = command(tmp_path, text, "parallel.dp_shard=2", "callbacks=[{_target_: stopping.Stop}]", ranks=2)
    stopped = subprocess.run(words, env=env, capture_output=True, text=True, cwd=code, timeout=240)
    (run,) = tmp_path.glob("runs/*/*/metrics.jsonl")
    assert len(read_metrics(run)) < STEPS, stopped.stderr[-3000:]
    resume = [sys.executable, "-m", "slurm_train", "resume", str(run.parent)]
    done = subprocess.run(resume, env=env, capture_output=True, text=True, cwd=code, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = {line["step"]: line["loss"] for line in read_metrics(run)}
    assert list(losses) == list(range(1, STEPS + 1))
    assert list(losses.values()) == pytest.approx(expected, abs=CLOSE)


COPIES = """
import json, time, torch
count, size, found = torch.cuda.device_count(), 1 << 28, {}

def wait():
    for device in range(count):
        torch.cuda.synchronize(device)

for a in range(count):
    for b in range(count):
        if a == b:
            continue
        source = torch.ones(size, dtype=torch.uint8, device=f"cuda:{a}")
        target = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{b}")
        for _ in range(3):
            wait()
            began_s = time.perf_counter()
            target.copy_(source)
            wait()
            took_s = time.perf_counter() - began_s
        assert bool((target == 1).all())
        found[f"{a} to {b}"] = [torch.cuda.can_device_access_peer(a, b), size / took_s / 1e9]
print(json.dumps(found))
"""


def test_gpus_copy_to_each_other_and_no_link_is_far_slower() -> None:
    if ON_CPU or SHARES:
        pytest.skip("there is one device or none: copies between GPUs have no meaning")
    env = environment(2)
    done = subprocess.run([sys.executable, "-c", COPIES], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    links = json.loads(done.stdout)
    rates = [rate for _, rate in links.values()]
    assert min(rates) > 0.5 * max(rates), f"direct access and GB/s from GPU to GPU: {links}"


BLOCKING = """
import time
from slurm_train.train.callbacks import Callback


class Block(Callback):
    def on_step_end(self, trainer):
        if trainer.position.step == 5 and trainer.rank.place.rank == 1:
            if trainer.rank.device.type == "cuda":
                import torch

                torch.cuda._sleep(10**12)
                torch.cuda.synchronize()
            time.sleep(600)
"""


def test_a_hang_is_named_and_ended_and_frees_the_gpus(tmp_path: Path, text: Path) -> None:
    env, code = environment(2), tmp_path / "code"
    code.mkdir()
    (code / "blocking.py").write_text(BLOCKING)
    words = ("callbacks=[{_target_: blocking.Block}]", "health.hang_timeout_s=20")
    done = subprocess.run(
        command(tmp_path, text, *words, ranks=2), env=env, capture_output=True, text=True, cwd=code, timeout=240
    )
    assert done.returncode != 0, done.stderr[-3000:]
    lines = [line for path in tmp_path.glob("runs/*/*/events@*") for line in path.read_text().splitlines()]
    (hang,) = [event for event in map(json.loads, lines) if event["event"] == "hang"]
    assert hang["ranks"] == [1], hang
    # The next run gets the GPUs at once.
    assert len(losses_of(tmp_path / "next", text, ranks=2)) == STEPS
