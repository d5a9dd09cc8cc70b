"""An accelerate loop that is part of its run: `save_state` and `load_state` with the run's checkpoints.

From this folder; stop it with Ctrl-C and type the same again:

    python -m slurm_train "script=[session_accelerate.py,--steps,200]"
    python -m slurm_train +cluster=2x2 "script=[session_accelerate.py,--steps,200]"
"""

import argparse
import time

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slurm_train import session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a batch takes at least")
options = parser.parse_args()

run = session.join()
# The order of each epoch follows from its number; else it would be drawn anew after a resume.
loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=loading)
set_seed(42)
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x @ torch.arange(8.0).unsqueeze(1))
# A generator of its own: a new iterator draws from it, and would else draw from the one that dropout uses.
loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)

step = 0
checkpoint = run.newest()
if checkpoint is not None:
    accelerator.load_state(str(checkpoint.path))
    step = checkpoint.step

while step < options.steps:
    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    batches = skip_first_batches(loader, done) if done else loader
    # What is left of an epoch is a loader of its own; before 1.14 it would take the order of the first epoch.
    batches.set_epoch(epoch)
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        time.sleep(options.step_s)
        run.report(step, loss=loss.item(), max_steps=options.steps)
        stop = run.should_stop()
        if stop or step % options.save_every == 0 or step == options.steps:
            with run.save(step) as folder:
                accelerator.save_state(str(folder))
        if stop and step < options.steps:
            run.leave()
        if step == options.steps:
            break
accelerator.print(f"{step} steps on {accelerator.num_processes} ranks")
