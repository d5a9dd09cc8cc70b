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
from torch.utils.data import DataLoader, TensorDataset

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
# Lightning divides it among the ranks; the callback continues an epoch where it was.
loader = DataLoader(data, batch_size=8, shuffle=True)
ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = L.Trainer(
    devices=ranks_here,
    num_nodes=callback.session.world_size // ranks_here,
    accelerator="auto",
    strategy="ddp",
    max_steps=options.steps,
    logger=False,
    enable_progress_bar=False,
    callbacks=[callback],
)
trainer.fit(Model(), loader, ckpt_path=callback.newest())
print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps", flush=True)
