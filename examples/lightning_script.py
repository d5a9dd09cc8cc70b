"""A Lightning script of the usual kind, unmodified for the toolkit (needs `pip install lightning`).

python -m slurm_train +cluster=2x2 "script=[lightning_script.py,--nodes,2,--devices,2]"
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--devices", type=int, default=2)
arguments = parser.parse_args()


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x @ torch.arange(8.0).unsqueeze(1)), batch_size=16)
trainer = L.Trainer(
    accelerator="cpu",
    devices=arguments.devices,
    num_nodes=arguments.nodes,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Model(), loader)
print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps", flush=True)
