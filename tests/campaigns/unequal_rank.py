"""A rank of the campaign `equal-or-named`: a loop with a session, an optimizer and a loader as people write them.

Words: the optimizer, the loader, the last step. With "generator" and "exact generator" the loader is a function of the
program; all others are a `DataLoader` of torch, but for "batches".
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from slurm_train import session
from slurm_train.session.loader_workers import tell_of_loader_workers

SAMPLES = 24
LOCAL = 2


class ByHand(torch.optim.Optimizer):
    """Shards its state by hand; the parameters are whole and equal on all ranks after each step.

    Args:
        kind: what a rank keeps: "zero" the moment of its rows; "signs" the signs of its rows, which have equal norms;
            "owners" the moment of the parameters that it owns; "idle owners" zeros for the others as well.
    """

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            dist.all_reduce(parameter.grad)
            if "owners" in self.kind:
                self._step_of_owner(number, parameter)
            else:
                self._step_of_rows(parameter)

    def _step_of_owner(self, number: int, parameter: Any) -> None:
        owner = number % dist.get_world_size()
        if self.kind == "idle owners" or owner == dist.get_rank():
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            if owner == dist.get_rank():
                moment.mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.02 * moment)
        dist.broadcast(parameter, owner)

    def _step_of_rows(self, parameter: Any) -> None:
        rows = parameter.shape[0] // dist.get_world_size()
        mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter[mine]))
        if self.kind == "zero":
            moment.mul_(0.9).add_(parameter.grad[mine])
            changed = parameter[mine] - 0.02 * moment
        else:
            changed = parameter[mine] - 0.02 * (parameter.grad[mine] + moment)
            moment.copy_(parameter.grad[mine].sign())
        parts = [torch.empty_like(changed) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, changed)
        parameter.copy_(torch.cat(parts))


class Numbers(Dataset[torch.Tensor]):
    """Samples that may be flipped at random."""

    def __init__(self, *, flips: bool) -> None:
        self.flips = flips
        self.samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        sample = self.samples[number]
        return sample.flip(0) if self.flips and torch.rand(()) < 0.5 else sample


class Place(Sampler[int]):
    """Counts the steps, as an engine does; as a sampler it begins behind the samples that were used."""

    def __init__(self) -> None:
        self.step = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.step * LOCAL % SAMPLES, SAMPLES))

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def endless(loader: DataLoader[torch.Tensor], *, first: int) -> Iterator[torch.Tensor]:
    """Yields the batches of epoch after epoch, in the first one from some batch on."""
    yield from itertools.islice(loader, first, None)
    while True:
        yield from loader


def read(samples: torch.Tensor, step: int) -> Iterator[torch.Tensor]:
    """Yields batches of a function of the program."""
    while True:
        yield samples[[(step * LOCAL + number) % SAMPLES for number in range(LOCAL)]]
        step += 1


def batches_of(run: Any, kind: str, place: Place, last: int) -> Iterator[torch.Tensor]:
    """Returns what the loop reads from its step on."""
    numbers = Numbers(flips="flips" in kind)
    in_epoch = place.step % (SAMPLES // LOCAL)
    if kind == "batches":
        world_size = dist.get_world_size()
        order = run.batches(SAMPLES, global_size=LOCAL * world_size, steps=last, seed=1)
        return (numbers.samples[ids] for ids in order)
    if kind in ("generator", "exact generator"):
        # As nanochat's: the state names a row group, and what was read of it is not known.
        return read(numbers.samples, place.step if kind == "exact generator" else place.step // 4 * 4)
    if kind == "sampler" or kind.startswith("skipped"):
        # A new iterator draws from the generator of its loader.
        own = torch.Generator() if "exact" in kind else None
        num_workers = int("worker" in kind)
        loader = DataLoader(numbers, batch_size=LOCAL, sampler=place, generator=own, num_workers=num_workers)
        return endless(loader, first=0)
    shuffles = kind in ("new order", "skips")
    generator = torch.Generator().manual_seed(3) if kind == "skips" else None
    loader = DataLoader(numbers, batch_size=LOCAL, shuffle=shuffles, generator=generator)
    return endless(loader, first=in_epoch if kind in ("skips", "flips") else 0)


def main() -> None:
    """Trains to the last step and saves it."""
    optimizer_kind, loader_kind, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # As every rank of a run does.
    tell_of_loader_workers()
    run = session.join()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    optimizer: torch.optim.Optimizer = ByHand(model.parameters(), optimizer_kind)
    if optimizer_kind == "whole":
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]  # a module in a module
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    place = Place()
    training = run.training(model, optimizer, place=place)
    step = training.resume()
    place.step = step
    run.restore_random()
    for batch in batches_of(run, loader_kind, place, last):
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        place.step = step
        run.report(step, loss=loss.item())
        if step == last:
            break
    training.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
