"""An FSDP2 loop that is part of its run: each rank saves its shards, and any number of ranks resumes.

From this folder; stop it with Ctrl-C and type the same again:

    python -m slurm_train "script=[session_fsdp2.py,--steps,200]"
    python -m slurm_train +cluster=2x2 "script=[session_fsdp2.py,--steps,200]"
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slurm_train import session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a step takes at least")
options = parser.parse_args()

run = session.join()
device = run.device
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(42)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
mesh = init_device_mesh(device.type, (run.world_size,))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's samples of a step, which follow from the step alone."""
    generator = torch.Generator().manual_seed(number * run.world_size + run.rank)
    x = torch.randn(16, 8, generator=generator)
    return x.to(device), (x @ torch.arange(8.0).unsqueeze(1)).to(device)


training = run.training(model, optimizer)
step = training.resume()
while step < options.steps:
    inputs, targets = batch(step)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(options.step_s)
    run.report(step, loss=loss.item(), max_steps=options.steps)
    stop = run.should_stop()
    if stop or step % options.save_every == 0 or step == options.steps:
        training.save(step)
    if stop and step < options.steps:
        run.leave()
print(f"rank {run.rank} of {run.world_size}: {step} steps", flush=True)
dist.destroy_process_group()
