"""A training loop of your own on the toolkit's parts: order of samples, checkpoints, stop flag.

From this folder; stop it with Ctrl-C and type the same again:

    python -m slurm_train task._target_=own_loop.main task.steps=400
    python -m slurm_train +cluster=2x2 task._target_=own_loop.main task.steps=400
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.manifest import CheckpointHeader
from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.data.order import SampleOrder
from slurm_train.train.context import TaskContext

NUM_SAMPLES, GLOBAL_SIZE = 1000, 32
AGAIN = 75


def main(context: TaskContext, *, steps: int = 200, save_every: int = 50) -> int:
    """Fits a sine; returns 75 if it was asked to stop and has saved."""
    world_size = context.place.world_size
    group = dist.new_group(backend="gloo") if world_size > 1 else None
    torch.manual_seed(context.config.seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = SampleOrder(NUM_SAMPLES, seed=context.config.seed)
    step = resume(context, model, group)
    while step < steps:
        loss = train_step(context, model, optimizer, order, step)
        step += 1
        stops = agree(context.stop.requested, context.device)
        if stops or step % save_every == 0 or step == steps:
            save(context, model, step, group)
            if context.place.is_first:
                print(f"step {step}/{steps}: loss {loss:.4f}, saved", flush=True)
        if stops and step < steps:
            return AGAIN
    return 0


def train_step(
    context: TaskContext, model: nn.Module, optimizer: torch.optim.Optimizer, order: SampleOrder, step: int
) -> float:
    """Takes one step of the global batch that is next, whatever the number of ranks."""
    share = GLOBAL_SIZE // context.place.world_size
    numbers = order.indices(step * GLOBAL_SIZE + context.place.rank * share, share)
    x = (torch.from_numpy(numbers).float() / NUM_SAMPLES * 6 - 3).unsqueeze(1).to(context.device)
    loss = (model(x) - x.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            total(parameter.grad).div_(context.place.world_size)
    optimizer.step()
    return loss.item()


def agree(requested: int, device: torch.device) -> bool:
    """Returns whether any rank was asked to stop; ranks hear of it at different moments."""
    return total(torch.tensor([float(requested)], device=device)).item() > 0


def total(value: Tensor) -> Tensor:
    """Adds a tensor up over all ranks, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def resume(context: TaskContext, model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Loads the newest checkpoint that verifies and returns its step, 0 where there is none."""
    choice = choose_checkpoint(context.run.checkpoints, group=group, attempt=context.attempt)
    if choice is None:
        return 0
    load_tensors(choice.path, model.state_dict(), group=group)
    if context.place.is_first:
        print(f"resuming from step {choice.manifest.step}", flush=True)
    return choice.manifest.step


def save(context: TaskContext, model: nn.Module, step: int, group: dist.ProcessGroup | None) -> None:
    """Saves durably; a checkpoint that was cut off is never trusted. All ranks call it."""
    header = CheckpointHeader(
        step=step,
        samples=step * GLOBAL_SIZE,
        epoch=step * GLOBAL_SIZE // NUM_SAMPLES,
        world_size=context.place.world_size,
        mesh={"dp_replicate": context.place.world_size},
        batch_plan={"global_size": GLOBAL_SIZE},
        config_hash=context.run.run_id,
        data_fingerprint="a sine",
        torch_version=str(torch.__version__),
        attempt=context.attempt,
    )
    save_checkpoint(
        context.run.checkpoints, tensors=model.state_dict(), rank_state={}, header=header, group=group, keep=2
    )
