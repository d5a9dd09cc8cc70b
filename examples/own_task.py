"""A function of your own on every rank: the process group is ready, everything else is yours.

From this folder:

    python -m slurm_train task._target_=own_task.main task.rounds=3
    python -m slurm_train +cluster=2x2 task._target_=own_task.main task.rounds=3
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slurm_train.train.context import TaskContext


def main(context: TaskContext, *, rounds: int = 3) -> None:
    """Adds up the ranks, `rounds` times; rank 0 prints the sum."""
    for number in range(rounds):
        total = torch.tensor([float(context.place.rank)], device=context.device)
        if context.place.world_size > 1:
            dist.all_reduce(total)
        if context.stop.requested:
            break
        if context.place.rank == 0:
            print(f"round {number}: the ranks add up to {total.item():.0f}", flush=True)
