"""A plain PyTorch script as torchrun would start it; it knows nothing of the toolkit.

From this folder:

    python -m slurm_train "script=[torchrun_script.py,--steps,20]"
    python -m slurm_train +cluster=2x2 "script=[torchrun_script.py,--steps,20]"
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
steps = parser.parse_args().steps

dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
target = torch.arange(8.0).unsqueeze(1)
for _ in range(steps):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(model(x), x @ target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} of {world_size} (local rank {local_rank}): loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
