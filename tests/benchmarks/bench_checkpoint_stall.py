"""Time that a save keeps the training thread waiting, against torch's own ways and against the bare copy in memory.

    python -m tests.benchmarks.bench_checkpoint_stall --rounds 5

The state is that of a model with 124 M float32 parameters and AdamW's two moments: 1.5 GB in 300 tensors and 100 step
counts, in one process. Rounds are interleaved, and each way first waits until the one before is on disk. "first" is a
way's first call in a process that has trained a step; "warm" is the median of the later ones. The copy is `clone` when
first and a copy into existing memory when warm. Wants about 8 GB of memory and 5 GB of disk below --folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from slurm_train.checkpoint.saver import Saver
from slurm_train.config.schema import CheckpointSection, RunConfig
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import Spent
from slurm_train.train.facts import build_facts, build_saver
from slurm_train.train.position import Position
from tests.support.options import read_options
from tests.support.ranks import make_parts, make_rank

NUM_MATRICES, NUM_VECTORS = 50, 50
NUM_PARAMETERS = 124_000_000
PROMISE = 1.3


class Bench:
    """The ways to save, on one state."""

    def __init__(self, folder: Path, *, num_parameters: int) -> None:
        self.folder = folder
        self.model = build_model(num_parameters)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.copies: list[Tensor] = []
        self.future: Any = None
        self.number = 0
        self.saver = self._build_saver()

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the state."""
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [parameter.detach() for parameter in self.model.parameters()] + moments

    def copy(self) -> None:
        """The floor: the bytes, once, in memory."""
        if not self.copies:
            self.copies = [tensor.clone() for tensor in self.tensors()]
            return
        for target, source in zip(self.copies, self.tensors(), strict=True):
            target.copy_(source)

    def ours(self) -> None:
        """A periodic save."""
        self.number += 1
        self.saver.write(self.number)

    def torch_save(self) -> None:
        """torch.save of both state dicts and fsync."""
        path = self._fresh("torch_save")
        with (path / "state.pt").open("wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save(self) -> None:
        """torch.distributed.checkpoint.save, which fsyncs."""
        dcp.save(self._state(), checkpoint_id=self._fresh("dcp_save"))

    def dcp_async_save(self) -> None:
        """torch.distributed.checkpoint.async_save."""
        self.future = dcp.async_save(self._state(), checkpoint_id=self._fresh("dcp_async"))

    def settle(self) -> None:
        """Waits until nothing is being written."""
        if self.future is not None:
            self.future.result()
            self.future = None
        self.saver.saves.finish()
        assert not self.saver.saves.news(), "a save failed"

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _fresh(self, name: str) -> Path:
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def _build_saver(self) -> Saver:
        run = RunDirectory(self.folder / "run")
        run.path.mkdir()
        rank = make_rank(run.path, RunConfig(checkpoint=CheckpointSection(keep=1)))
        parts = make_parts(rank, self.model, self.optimizer, Data(range(1000)))
        facts = build_facts(parts, Position(), callbacks={}, peak_lr=0.1)
        return build_saver(facts, spent=Spent(begin_unix_s=0.0))


class Data(list[int]):
    """What a checkpoint says of its data: how much, and no digest, since nothing is read."""

    def fingerprint(self) -> str:
        return "none"


def build_model(num_parameters: int) -> nn.Module:
    """Returns parameters of a transformer's sizes: matrices and as many vectors."""
    rows = num_parameters // NUM_MATRICES // 768
    matrices = [nn.Parameter(torch.randn(rows, 768)) for _ in range(NUM_MATRICES)]
    vectors = [nn.Parameter(torch.randn(768)) for _ in range(NUM_VECTORS)]
    model = nn.Module()
    model.parts = nn.ParameterList(matrices + vectors)
    return model


Times = dict[str, list[tuple[float, float]]]
"""By way, round after round: seconds that it blocked, and until all was on disk."""


def measure(bench: Bench, ways: dict[str, Callable[[], None]], *, rounds: int) -> Times:
    """Takes all ways in turns; the first round is each way's first call."""
    found: Times = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            blocked_s = time.perf_counter() - start
            bench.settle()
            found[name].append((blocked_s, time.perf_counter() - start))
    return found


def report(found: Times) -> None:
    """Prints one line per way, and the ratio that is promised."""
    print(f"{'':28}{'first s':>9}{'warm s':>9}{'x copy':>8}{'on disk s':>11}")
    for name, ((first_s, _), *warm) in found.items():
        ratio = median(own[0] / copy[0] for own, copy in zip(warm, found["copy in memory"][1:], strict=True))
        blocked_s, total_s = (median(column) for column in zip(*warm, strict=True))
        ended = "" if name == "copy in memory" else f"{total_s:11.3f}"
        print(f"{name:28}{first_s:9.3f}{blocked_s:9.3f}{ratio:8.2f}{ended}")
    print(f"promise: slurm_train blocks at most {PROMISE} x the copy once warm")


def main() -> None:
    """Prints the table."""
    asked = read_options(rounds=5, parameters=NUM_PARAMETERS, folder=str)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="slurm_train-bench-", dir=asked.folder) as folder:
        bench = Bench(Path(folder), num_parameters=asked.parameters)
        size_gb = sum(tensor.nbytes for tensor in bench.tensors()) / 1e9
        print(
            f"checkpoint stall: {size_gb:.2f} GB in {len(bench.tensors())} tensors, {torch.get_num_threads()} threads"
        )
        bench.saver.prepare()  # as the trainer does after its first step
        bench.settle()
        ways = {
            "copy in memory": bench.copy,
            "slurm_train, background": bench.ours,
            "dcp.async_save": bench.dcp_async_save,
            "torch.save + fsync": bench.torch_save,
            "dcp.save": bench.dcp_save,
        }
        report(measure(bench, ways, rounds=asked.rounds))


if __name__ == "__main__":
    main()
