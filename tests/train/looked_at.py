"""A model of parts that keep a state of every kind, and a plain DDP loop that trains it; run as a program of one rank.

Each part has weights of its own, so weights that differ name the part.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

SIZE = 4
SEED, NUM_SAMPLES, GLOBAL_SIZE, STEPS, LR = 5, 30, 12, 6, 0.05


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str = "train") -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        self.inputs = torch.randn(NUM_SAMPLES, SIZE, generator=generator, dtype=torch.float64) * 2 + 1

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.inputs[index, :1] ** 2


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
        self.between: nn.Module = nn.Tanh()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.between(self.first(inputs)))


class BatchNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.between = nn.BatchNorm1d(SIZE)

    def forward(self, inputs: Tensor) -> Tensor:
        # The running statistics are read in training as well.
        return super().forward(inputs - self.between.running_mean.clone())


class Centre(Part):
    """A buffer that is replaced at each pass, also in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(SIZE))

    def forward(self, inputs: Tensor) -> Tensor:
        self.centre = self.centre * 0.8 + inputs.detach().mean(0) * 0.2
        return super().forward(inputs - self.centre)


class Queue(Part):
    """The features of earlier samples, and where the next one goes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, SIZE))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.queue[int(self.place)] = inputs[0]
            self.place[0] = (self.place + 1) % 8
        return super().forward(inputs - self.queue.mean(0))


class Teacher(Part):
    """Frozen parameters that follow at each pass, also in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        for own, others in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            own.data = own.data * 0.9 + others.data * 0.1
        return super().forward(inputs) + self.teacher(inputs).mean(1, keepdim=True)


class Counter(Part):
    """A counter and a list, in extra state, that count passes of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.recent: list[int] = []

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "recent": self.recent}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes, self.recent = state["passes"], list(state["recent"])

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        self.recent.append(self.passes % 5)
        return super().forward(inputs) * (1 + sum(self.recent) / 10)


class Backbone(BatchNorm):
    """A layer that is held in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.between.eval()


class Dropout(Part):
    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Dropout(0.3)


class SpectralNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.between = spectral_norm(nn.Linear(SIZE, SIZE))


class Noise(Part):
    """Draws from the generators of Python and numpy at each pass, and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(0)
        self.state = {"drawn": 0.0}

    def get_extra_state(self) -> Any:
        version, words, gauss = self.own.getstate()
        return {"own": [version, list(words), gauss], **self.state}

    def set_extra_state(self, state: Any) -> None:
        version, words, gauss = state["own"]
        self.own.setstate((version, tuple(words), gauss))
        self.state["drawn"] = state["drawn"]

    def forward(self, inputs: Tensor) -> Tensor:
        self.state["drawn"] += self.own.random()
        return super().forward(inputs) + random.random() + np.random.rand() + self.state["drawn"]


PARTS = (BatchNorm, Centre, Queue, Teacher, Counter, Backbone, Dropout, SpectralNorm, Noise)


class Table(nn.Module):
    """All parts, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({part.__name__: part() for part in PARTS}).double()
        with torch.no_grad():
            # The same in any process, however it is built.
            for number, tensor in enumerate((*self.parameters(), *self.parts["SpectralNorm"].buffers())):
                tensor.copy_(torch.linspace(-0.5, 0.6, tensor.numel()).roll(number).view(tensor.shape))

    def training_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        losses = [(part(inputs) - targets).square().clamp(max=9.0).sum() for part in self.parts.values()]
        return torch.stack(losses).sum(), len(inputs)


def train_plainly(rank: int, ranks: int) -> dict[str, list[float]]:
    """Returns the weights after a loop as torch's tutorial has it."""
    from slurm_train.data.order import SampleOrder
    from slurm_train.distributed.seeds import mix, seed_everything

    model, data = Table(), Data()
    wrapped = torch.nn.parallel.DistributedDataParallel(Loss(model))
    optimizer = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=LR)
    seed_everything(SEED, data_parallel_rank=rank)
    order, share = SampleOrder(NUM_SAMPLES, seed=SEED), GLOBAL_SIZE // ranks
    for step in range(STEPS):
        indices = order.indices(step * GLOBAL_SIZE + rank * share, share)
        torch.manual_seed(mix(SEED, step + 1, rank))
        loss, count = wrapped(tuple(torch.stack(parts) for parts in zip(*(data[i] for i in indices), strict=True)))
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    return {name: one.detach().flatten().tolist() for name, one in model.named_parameters()}


class Loss(nn.Module):
    def __init__(self, model: Table) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.model.training_loss(batch)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    weights = train_plainly(rank, ranks)
    if rank == 0:
        Path(os.environ["OUT"]).write_text(json.dumps(weights))
    os._exit(0)
