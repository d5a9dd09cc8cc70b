"""Trainings that the checks take apart: a GPT on random tokens, built by the trainer's own functions on one rank."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slurm_train.config.schema import RunConfig, build_config
from slurm_train.data.source import Description
from slurm_train.metrics import SILENT, Display
from slurm_train.rundir.timing import Spent
from slurm_train.train.build import build_parts, build_trainer
from slurm_train.train.callbacks import build_callbacks
from slurm_train.train.context import Rank
from slurm_train.train.layout import apply_parallelism
from slurm_train.train.trainer import Trainer
from tests.support.ports import free_port, rank_environments
from tests.support.ranks import make_rank

Sections = dict[str, dict[str, Any]]
SMALL = {"vocab_size": 512, "context": 128, "num_layers": 2, "num_heads": 4, "width": 128}
GPT2 = {
    "vocab_size": 50257, "context": 1024, "num_layers": 12, "num_heads": 12, "width": 768,
    "norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "bias": True,
}  # fmt: skip
"""GPT-2 124M, as conf/model/gpt2-124m.yaml has it."""


class RandomTokens:
    """Sequences of random tokens, always the same.

    Args:
        vocab_size: number of token ids.
        context: tokens of a sequence.
    """

    def __init__(self, *, vocab_size: int, context: int) -> None:
        self.context = context
        generator = np.random.default_rng(0)
        self._tokens = generator.integers(0, vocab_size, (512, context + 1), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, indices: Any) -> tuple[torch.Tensor, ...]:
        rows = torch.from_numpy(self._tokens[indices])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def fingerprint(self) -> str:
        return "0" * 32

    def describe(self) -> Description:
        return Description(context=self.context, bytes_per_target=1.0)


def random_tokens(*, vocab_size: int, context: int, split: str = "train") -> RandomTokens | None:
    """Returns the samples of a split; there are no held-out ones."""
    return RandomTokens(vocab_size=vocab_size, context=context) if split == "train" else None


def sections_of(model: Mapping[str, Any] = SMALL, *, local_size: int = 8, **changes: Mapping[str, Any]) -> Sections:
    """Returns a configuration: no saves by themselves, no evaluation, a thousand steps.

    Args:
        model: arguments of the GPT.
        local_size: sequences of a micro-batch.
        **changes: sections, key by key on top of these.
    """
    tokens = {name: model[name] for name in ("vocab_size", "context")}
    found: Sections = {
        "model": {"_target_": "slurm_train.models.gpt.GPT", **model},
        "data": {"_target_": "tests.gpu.training.random_tokens", **tokens},
        "batch": {"local_size": local_size, "accumulation": 1},
        "train": {"max_steps": 1000, "eval_every_steps": None, "sample_tokens": 0, "compile": False},
        "checkpoint": {"every_steps": None},
        "parallel": {},
        "optim": {"warmup_samples": 0, "schedule": "constant"},
    }
    for name, section in changes.items():
        found[name] = {**found.get(name, {}), **section}
    return found


def open_rank(sections: Sections, folder: Path, *, rank: int = 0, ranks: int = 1, attempt: int = 0) -> Rank:
    """Returns a rank on its device; the first one of a process that is alone opens the process group as a worker does.

    Args:
        sections: of the configuration.
        folder: becomes the run directory.
        rank: its number.
        ranks: how many there are; with several, their group is open already.
        attempt: number of the attempt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = build_config(RunConfig, sections)
    place = {"rank": rank, "ranks": ranks, "port": free_port(), "attempt": attempt}
    display = Display(io.StringIO(), max_steps=1000) if rank == 0 else SILENT
    made = make_rank(folder, config, **place, env=dict(os.environ), display=display).enter_device()
    if not dist.is_initialized():
        return made.join()
    is_half = made.device.type == "cuda" and config.train.precision == "auto"
    return replace(made, precision="bfloat16") if is_half else made


def build_of(rank: Rank) -> Trainer:
    """Returns the trainer of a rank, at its newest checkpoint. Collective."""
    parts = apply_parallelism(rank, build_parts(rank))
    callbacks = build_callbacks(rank.config.callbacks)
    return build_trainer(parts, callbacks=callbacks, spent=Spent(begin_unix_s=time.time()))


def training_of(sections: Sections, folder: Path, **place: Any) -> Trainer:
    """Returns the trainer of a configuration; see `open_rank`. Collective."""
    return build_of(open_rank(sections, folder, **place))


def next_losses(trainer: Trainer, count: int) -> list[float]:
    """Returns the losses of so many steps more. Collective."""
    losses = []
    for _ in range(count):
        trainer.advance(trainer.position.step + 1)
        result = trainer.stepper.drain() or trainer.newest
        assert result is not None
        losses.append(result.loss)
    return losses


def farthest(one: Iterable[float], other: Iterable[float]) -> float:
    """Returns how far two series are from each other."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def save_soon(trainer: Trainer) -> None:
    """Begins a periodic save of a trainer, as its loop does. Collective."""
    copied = trainer.saver.copy(trainer.position.step)
    trainer._read_pending()
    trainer.saver.write(trainer.position.step, copied=copied)


def release(trainer: Trainer) -> None:
    """Lets a trainer's memory go: after its first step it is out of the garbage collector's sight."""
    trainer.saves.finish()
    gc.unfreeze()
    gc.enable()
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_two_ranks(scene: str, folder: Path, *, timeout_s: float) -> list[dict[str, Any]]:
    """Returns what the function of this name in `two_rank_checks` gives on each of two ranks on the same device."""
    processes = start_two_ranks(scene, folder)
    for process in processes:
        process.wait(timeout=timeout_s)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


def start_two_ranks(scene: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Starts two ranks; see `run_two_ranks`."""
    words = [sys.executable, "-m", "tests.gpu.two_rank_checks", scene, str(folder)]
    return [subprocess.Popen(words, env=env) for env in rank_environments(2)]
