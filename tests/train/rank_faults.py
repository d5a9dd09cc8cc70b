"""Faults of one rank of a small training, by rank and step; training_rank.py installs what its orders name."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurm_train.checkpoint import local, save
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.local import LocalSaves
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.saves import Saves
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.paths import RunDirectory
from slurm_train.train import context, layout
from slurm_train.train.step import StepFacts, Stepper, StepResult


def install(fault: dict[str, Any], *, run: RunDirectory, rank: int) -> None:
    """Installs a fault.

    Args:
        fault: {"full_rank", "full_step"}: the disk is full in that save; {"slow_s"}: rank 1's disk takes longer;
            {"overtake_step"}: a newer attempt appears in that save; {"kill_rank", "kill_step"}: SIGKILL in that step;
            {"stop_step"}: rank 1 gets TERM in that step;
            {"own_disks"}: each rank takes itself for a node of its own where local disks are concerned;
            {"dark_step"}: the power of rank 0 is cut when the checkpoint of that step is committed, and what
            metrics.jsonl has got since its last fsync is gone;
            {"tells_opened"}: none, but each file of this name that is opened is printed;
            {"reads_late"}: none, but a CPU gives the result of a step with the next one, as a GPU does, and it is
            printed when results are read, and when a save copies and writes;
            {"emulates_float8"}: none, but a CPU takes itself for a device that multiplies in float8.
        run: the run.
        rank: this rank.
    """
    if fault.get("kill_rank") == rank:
        _send_in(fault["kill_step"], signal.SIGKILL)
    if "stop_step" in fault and rank == 1:
        _send_in(fault["stop_step"], signal.SIGTERM)
    if "dark_step" in fault and rank == 0:
        _cut_power_after(fault["dark_step"], run)
    if fault.get("own_disks"):
        _give_own_disk(rank)
    if "tells_opened" in fault:
        _tell_opened(fault["tells_opened"])
    if fault.get("reads_late"):
        _read_late(rank)
    if fault.get("emulates_float8"):
        _emulate_float8()
    write_file = save.write_file

    def write(path: Path, data: bytes) -> Any:
        step = int(path.parent.name.split("_")[1])
        if (rank, step) == (fault.get("full_rank"), fault.get("full_step")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if step == fault.get("overtake_step") and rank == 0:
            run.epochs.mkdir(exist_ok=True)
            (run.epochs / "attempt_1").touch()
        if rank == 1:
            time.sleep(fault.get("slow_s", 0.0))
        return write_file(path, data)

    save.write_file = write


def _give_own_disk(rank: int) -> None:
    build_local_saves = local.build_local_saves

    def build_for_node(run: RunDirectory, base: Path, *, rank_place: RankPlace, **settings: Any) -> LocalSaves:
        node_of_its_own = replace(rank_place, node_rank=rank, local_rank=0)
        return build_local_saves(run, base, rank_place=node_of_its_own, **settings)

    local.build_local_saves = build_for_node


def _cut_power_after(step: int, run: RunDirectory) -> None:
    """Only for metrics.jsonl: what a power cut leaves of a checkpoint is tried call by call elsewhere."""
    durable, fsync, commit = [0], os.fsync, Place.commit

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), run.metrics.stat()):
            durable[0] = os.fstat(descriptor).st_size

    def commit_and_end(self: Place, staging: Path, manifest: Manifest, **facts: Any) -> Path:
        final = commit(self, staging, manifest, **facts)
        if manifest.step == step:
            os.truncate(run.metrics, durable[0])
            os.kill(os.getpid(), signal.SIGKILL)
        return final

    os.fsync, Place.commit = sync, commit_and_end  # type: ignore[method-assign]


def _tell_opened(name: str) -> None:
    def tell(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and Path(str(args[0])).name == name:
            print(f"opened {name}", file=sys.stderr)

    sys.addaudithook(tell)


def _send_in(step: int, sent: signal.Signals) -> None:
    take_step = Stepper.step

    def take(self: Stepper, facts: StepFacts, batches: Any) -> Any:
        if facts.step == step:
            os.kill(os.getpid(), sent)
        return take_step(self, facts, batches)

    Stepper.step = take  # type: ignore[method-assign]


def _read_late(rank: int) -> None:
    pending: list[StepResult] = []
    take_step, copy, write = Stepper.step, Saves.copy, Saves._write

    def tell(what: str) -> None:
        print(f"rank {rank} {what}", file=sys.stderr)

    def take(self: Stepper, facts: StepFacts, batches: Any) -> StepResult | None:
        result = take_step(self, facts, batches)
        assert result is not None
        previous = drain(self)
        pending.append(result)
        return previous

    def drain(_: Stepper) -> StepResult | None:
        if not pending:
            return None
        result = pending.pop()
        tell(f"reads {result.facts.step}" + ("" if result.applied else ", bad"))
        return result

    def tell_copy(self: Saves, *args: Any, **how: Any) -> Any:
        tell("copies")
        return copy(self, *args, **how)

    def tell_write(self: Saves, *args: Any, step: int, **how: Any) -> Any:
        tell(f"writes {step}")
        return write(self, *args, step=step, **how)

    Stepper.step, Stepper.drain = take, drain  # type: ignore[method-assign]
    Stepper.forget = lambda _: pending.clear()  # type: ignore[method-assign]
    Saves.copy, Saves._write = tell_copy, tell_write  # type: ignore[method-assign]


def _emulate_float8() -> None:
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    context.require_float8 = lambda _device: None
    layout.to_float8 = partial(layout.to_float8, emulate=True)  # type: ignore[assignment]
    packet = torch.ops._c10d_functional.all_gather_into_tensor
    gather = FLOAT8_OPS_TABLE[packet.default]

    def gather_bytes(operation: Any, args: Any, kwargs: Any = None) -> Any:
        # gloo does not know the type; NCCL does.
        def as_bytes(data: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            gathered: torch.Tensor = operation(data.view(torch.uint8), *rest, **options)
            return gathered.view(data.dtype)

        return gather(as_bytes, args, kwargs)

    FLOAT8_OPS_TABLE[packet.default] = gather_bytes
