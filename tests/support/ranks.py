"""What a rank knows, for parts of a training that are built by themselves; and the end of its process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurm_train.config.batch import BatchPlan, solve_batch
from slurm_train.config.parallel import solve_layout
from slurm_train.config.schema import RunConfig
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag
from slurm_train.train.context import Parts, Rank
from slurm_train.train.layout import build_inputs


def make_rank(
    run: Path = Path("/nowhere/run"),
    config: RunConfig | None = None,
    *,
    plan: BatchPlan | None = None,
    rank: int = 0,
    ranks: int = 1,
    port: int = 1,
    attempt: int = 0,
    **facts: Any,
) -> Rank:
    """Returns a rank of `ranks` on this machine, on the CPU.

    Args:
        run: the run directory; need not exist.
        config: the defaults if absent.
        plan: batch arithmetic; solved from the configuration if absent.
        rank: its number.
        ranks: how many there are.
        port: where they meet.
        attempt: number of the attempt.
        **facts: other fields of `Rank`.
    """
    config = RunConfig() if config is None else config
    layout = solve_layout(config.parallel, world_size=ranks)
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return Rank(
        config=config,
        plan=plan or solve_batch(config.batch, ranks=layout.data_parallel_size, stages=layout.pp),
        run=RunDirectory(run),
        place=RankPlace.from_env(env),
        point=MeetingPoint(master_addr="127.0.0.1", ports=[port], run_id="test", attempt=attempt, timeout_s=60),
        attempt=attempt,
        **{"stop": StopFlag(), "env": {}, **facts},
    )


def make_parts(rank: Rank, model: Any, optimizer: Any, data: Any = None, *, heldout: Any = None) -> Parts:
    """Returns the parts of a rank's training, whole, without operations."""
    return Parts(
        rank=rank,
        model=model,
        optimizer=optimizer,
        train_data=data,
        heldout=heldout,
        flops_per_token=(0.0, 0.0),
        inputs=build_inputs(rank),
    )


# gloo's threads end with their group. The garbage collector may be what ends it: it waits for them and holds the
# interpreter's lock, for which they wait in turn (torch 2.13). So a group that was used stays until the process ends.
_LEFT: list[Any] = []


def leave_group() -> None:
    """Makes room for another default group."""
    _LEFT.append(dist.group.WORLD)
    dist.destroy_process_group()
