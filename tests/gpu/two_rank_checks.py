"""Checks that need two ranks: two processes on the same GPU, over gloo. `tests/gpu/multi` has those over NCCL.

As a program it is one of these ranks: `python -m tests.gpu.two_rank_checks SCENE FOLDER`, placed by its environment.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_train.checkpoint.load import weights_digest
from slurm_train.distributed.group import newest_collectives
from slurm_train.errors import SlurmTrainError
from slurm_train.rundir.heartbeat import Limits, read_beats
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.hang import Observer, read_flights, recording_environment
from slurm_train.train.trainer import Trainer
from tests.gpu.catalogue import Stage, end_with, require
from tests.gpu.training import (
    build_of,
    farthest,
    next_losses,
    open_rank,
    release,
    run_two_ranks,
    sections_of,
    start_two_ranks,
    training_of,
)

_STEPS = 8
_HANGS_AT = 5
_LIMITS = Limits(start_s=120.0, steady_s=6.0)
# float32 products, so that layouts differ by the order of additions alone.
_PRECISE = {"precision": "float32"}


def two_ranks(stage: Stage) -> dict[str, Any]:
    """DDP over two ranks equals accumulation on one; stops are agreed on; a flipped bit is seen; less can be sent."""
    first, second = run_two_ranks("all_of_two", stage.folder, timeout_s=stage.size(110, 600))
    for rank in (first, second):
        require("error" not in rank, rank.get("error", ""))
    alone = training_of(sections_of(local_size=4, batch={"accumulation": 2}, train=_PRECISE), stage.folder / "alone")
    expected = next_losses(alone, _STEPS)
    off = farthest(first["losses"], expected)
    require(off < 1e-3, f"losses of two ranks are up to {off:.2g} from those of one: {first['losses']}")
    for name in ("digest", "bf16"):
        require(first[name] == second[name], f"{name}: the ranks hold other weights: {first[name]} {second[name]}")
    require(first["stopped_at"] == second["stopped_at"], f"stopped at {first['stopped_at']}, {second['stopped_at']}")
    require(all("replicas differ" in rank["flipped"] for rank in (first, second)), f"a flipped bit: {first['flipped']}")
    return {"farthest_loss": off, "stopped_at": first["stopped_at"]}


def all_of_two(folder: Path, rank: int) -> dict[str, Any]:
    """One of the two ranks."""

    def build(name: str, **changes: dict[str, Any]) -> Trainer:
        sections = sections_of(local_size=4, train={**_PRECISE, "max_steps": 20}, **changes)
        return training_of(sections, folder / name, rank=rank, ranks=2)

    plain = build("plain", health={"check_replicas_every_steps": 1})
    losses = next_losses(plain, _STEPS)
    digest = weights_digest(plain.model.named_parameters())
    flipped = ""
    if rank == 1:
        next(plain.model.parameters()).data.view(torch.int32)[0, 0] ^= 1
    try:
        plain.health.compare_replicas(plain.model, step=_STEPS + 1)
    except SlurmTrainError as err:
        flipped = str(err)
    release(plain)
    stopping = build("stopping")
    stopping.advance(3)
    if rank == 1:
        stopping.rank.stop.request()
    stopping.run()
    stopped_at = stopping.position.step
    release(stopping)
    rounded = build("bf16", ddp={"comm": "bf16"})
    rounded_losses = next_losses(rounded, 6)
    require(all(loss == loss for loss in rounded_losses), f"ddp.comm=bf16: losses {rounded_losses}")
    rounded_digest = weights_digest(rounded.model.named_parameters())
    release(rounded)
    return {"losses": losses, "digest": digest, "flipped": flipped, "stopped_at": stopped_at, "bf16": rounded_digest}


def hang_sentence(stage: Stage) -> dict[str, Any]:
    """A rank whose GPU does not come to an end is named, by heartbeats, stacks and flight records alone."""
    run = RunDirectory(stage.folder / "run")
    processes = start_two_ranks("hang", stage.folder)
    observer, deadline = Observer(_LIMITS, world_size=2), time.monotonic() + stage.size(75, 400)
    try:
        while not observer.is_hung() or len(_records(run)[0]) < 2:
            require(time.monotonic() < deadline, f"no hang was seen; heartbeats: {read_beats(run, 0)}")
            time.sleep(0.3)
            began_s = time.monotonic()
            observer.look(read_beats(run, 0), began_s=began_s, ended_s=time.monotonic())
        stacks, flights = _records(run)
    finally:
        for process in processes:
            process.kill()
    hang = observer.explain(stacks, {rank: read_flights(text) for rank, text in flights.items()})
    require(hang.ranks == (1,), f"rank 1 hangs, and the sentence is: {hang}")
    return {"sentence": str(hang), "flight_records": len(flights)}


def _records(run: RunDirectory) -> tuple[dict[int, str], dict[int, bytes]]:
    stacks = {rank: path.read_text() for rank in range(2) if (path := run.stacks(0, rank)).exists()}
    flights = {rank: path.read_bytes() for rank in range(2) if (path := run.flight(0, rank)).exists()}
    return {rank: text for rank, text in stacks.items() if "File" in text}, flights


def hang(folder: Path, rank: int) -> dict[str, Any]:
    """One of the two ranks: from a step on, the second waits for its own GPU, which is busy for ten minutes."""
    opened = open_rank(sections_of(local_size=4, train=_PRECISE), folder / "run", rank=rank, ranks=2)
    opened.heartbeat.start(opened.run, 0, rank=rank, host=os.uname().nodename, limits=_LIMITS)
    opened.heartbeat.record = newest_collectives
    trainer = build_of(opened)

    def block(*_: object) -> None:
        if trainer.position.step + 1 == _HANGS_AT:
            if opened.device.type == "cuda":
                torch.cuda._sleep(10**12)
                torch.cuda.synchronize()
            time.sleep(600)

    if rank == 1:
        trainer.model.register_forward_pre_hook(block)
    trainer.run()
    return {}


def main() -> None:
    """One rank: opens the group over gloo, with tensors on the GPU where there is one, and plays its scene."""
    scene: Callable[[Path, int], dict[str, Any]] = globals()[sys.argv[1]]
    folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])

    def work() -> dict[str, Any]:
        os.environ.update(recording_environment(torch.__version__))
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:gloo" if on_gpu else "gloo", timeout=timedelta(minutes=10))
        return scene(folder, rank)

    end_with(folder / f"rank_{rank}.json", work)


if __name__ == "__main__":
    main()
