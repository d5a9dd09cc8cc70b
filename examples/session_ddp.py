"""A plain DDP loop that is part of its run: watched, stopped at a step boundary, resumed exactly.

From this folder; stop it with Ctrl-C and type the same again:

    python -m slurm_train "script=[session_ddp.py,--steps,400]"
    python -m slurm_train +cluster=2x2 "script=[session_ddp.py,--steps,400]"

On another number of ranks it goes on with the same samples in each step.

The lines with `run` are all that was added. Without them, or under plain `python`, it is the same program.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from slurm_train import session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a step takes at least")
options = parser.parse_args()

run = session.join()
if run.world_size > 1:
    dist.init_process_group("nccl" if run.device.type == "cuda" else "gloo")
torch.manual_seed(run.rank)
x = torch.linspace(-3, 3, 1024).unsqueeze(1)
data = TensorDataset(x, x.sin())
net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)).to(run.device)
model = DistributedDataParallel(net) if run.world_size > 1 else net
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

# All that a checkpoint has, also the random generators of each rank: dropout goes on with its numbers.
training = run.training(net, optimizer)
done = training.resume()

# Each step has its 64 samples, whoever reads them; the first step is the one after the checkpoint.
batches = run.batches(len(data), global_size=64, steps=options.steps, seed=1)
# A generator of its own: a new iterator draws from it, and would else draw from the one that dropout uses.
loader = DataLoader(data, batch_sampler=batches, num_workers=2, generator=torch.Generator())
for step, (inputs, targets) in enumerate(loader, start=done + 1):
    loss = nn.functional.mse_loss(model(inputs.to(run.device)), targets.to(run.device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(options.step_s)
    run.report(step, loss=loss.item(), max_steps=options.steps)
    stop = run.should_stop()
    if stop or step % options.save_every == 0 or step == options.steps:
        training.save(step)
    if stop and step < options.steps:
        run.leave()
print(f"rank {run.rank} of {run.world_size}: {options.steps} steps", flush=True)
if run.world_size > 1:
    dist.destroy_process_group()
