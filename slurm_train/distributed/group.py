"""The process group of one attempt: opened on an agreed store, closed only when all went well.

After an error nobody tears the group down: destroying it waits for peers that will never come, which has held
allocations for hours. The error path is traceback, flush, `os._exit`.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from slurm_train.distributed.place import RankPlace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def choose_device(place: RankPlace) -> torch.device:
    """Returns this rank's device: local rank modulo the visible GPUs, or the CPU where there is none.

    CUDA_VISIBLE_DEVICES is Slurm's to set and stays as it is.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """Returns gloo for CPU ranks; on a GPU NCCL for its tensors, and gloo for those that stay on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def init_group(place: RankPlace, store: Store, *, device: torch.device, timeout_s: float) -> None:
    """Opens the default process group. Collective over all ranks.

    Args:
        place: this rank.
        store: what `rendezvous.open_store` gave.
        device: what `choose_device` gave.
        timeout_s: seconds a collective may take until `use_steady_timeout`.
    """
    dist.init_process_group(
        backend_for(device),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def open_side_group(timeout_s: float) -> dist.ProcessGroup:
    """Returns a gloo group of all ranks for exchanges beside the training. Collective over all ranks.

    Args:
        timeout_s: seconds that one of its collectives may take.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def use_steady_timeout(timeout_s: float) -> None:
    """Sets the time-out of later collectives of the default group; compile and rendezvous are over by now."""
    # Private in torch up to 2.13, and the only way to change it without a second group.
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timedelta(seconds=timeout_s))


def shutdown() -> None:
    """Waits until every rank is done; the process may then end with `os._exit`. Collective over all ranks.

    The group is not destroyed: with gloo on a busy node its threads have kept a rank alive after the last step until
    srun killed it, and an orderly interpreter exit has aborted in them (both seen with torch 2.13).
    """
    if dist.is_initialized():
        dist.barrier()


def die(code: int) -> NoReturn:
    """Prints the exception being handled, flushes, and ends the process without any clean-up."""
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
