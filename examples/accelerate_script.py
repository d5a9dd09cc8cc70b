"""An accelerate script of the usual kind, unmodified for the toolkit (needs `pip install accelerate`).

python -m slurm_train +cluster=2x2 "script=[accelerate_script.py]"
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=not torch.cuda.is_available())
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x @ torch.arange(8.0).unsqueeze(1)), batch_size=16)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
total = accelerator.gather(loss.detach().reshape(1))
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: loss {loss.item():.4f}", flush=True)
accelerator.end_training()
