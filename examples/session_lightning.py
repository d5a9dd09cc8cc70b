"""A Lightning Trainer that is part of its run: a callback, and what to resume from.

From this folder; stop it with Ctrl-C and type the same again:

    python -m slurm_train "script=[session_lightning.py,--steps,200]"
    python -m slurm_train +cluster=2x2 "script=[session_lightning.py,--steps,200]"
"""

import argparse
import os
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from slurm_train.adapters.lightning import SessionCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a batch takes at least")
options = parser.parse_args()


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(options.step_s)
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


L.seed_everything(42)
callback = SessionCallback(every_steps=options.save_every, log_every_steps=1)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x @ torch.arange(8.0).unsqueeze(1))
run = callback.session
# The order of each epoch follows from its number; with shuffle=True it would be drawn anew after a resume.
sampler = DistributedSampler(data, num_replicas=run.world_size, rank=run.rank)
# A plain DataLoader begins an epoch anew when it is resumed in the middle; this one knows where it was.
loader = StatefulDataLoader(data, batch_size=8, sampler=sampler)
ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = L.Trainer(
    devices=ranks_here,
    num_nodes=run.world_size // ranks_here,
    accelerator="auto",
    strategy="ddp",
    max_steps=options.steps,
    logger=False,
    enable_progress_bar=False,
    callbacks=[callback],
)
trainer.fit(Model(), loader, ckpt_path=callback.newest())
print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps", flush=True)
