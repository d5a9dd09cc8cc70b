"""What it costs that all ranks agree at every step whether to stop. Two gloo ranks.

    python -m tests.benchmarks.bench_stop_agreement [--rounds 15] [--out result.json]

The same bare loop (DDP, backward, fused AdamW) in turns: without any agreement; with a parameter whose gradient has
the wish to stop through a bucket that is sent anyway, read after each step; and with an all-reduce of a flag of its
own, as most loops do it. torch's profiler counts the collectives of a step. The ratios are medians over rounds, each
to the bare loop of the same round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from slurm_train.session.signals import StopFlag
from slurm_train.train.ddp import STOP, TrainingModule
from tests.benchmarks.bench_step_time import Case, make_data, make_model
from tests.benchmarks.turns import Facts, in_turns, main, show_table, summary, timed

CASES = {"1 ms": Case(64, 1, 16, 150), "20 ms": Case(768, 4, 96, 10)}
COUNTED_STEPS = 8
Step = Callable[[], bool]


class SummedLoss(nn.Module):
    """The objective: sum of the losses, and how many there are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns both for a batch."""
        inputs, targets = batch
        return cross_entropy(self.model(inputs), targets, reduction="sum"), torch.tensor(len(targets))


def measure(name: str, rounds: int) -> Facts:
    """One rank: all ways in turns."""
    case = CASES[name]
    ways = {way: make(case) for way, make in WAYS.items()}
    for step in ways.values():
        for _ in range(5):
            step()
    counts = {name: count_collectives(step) for name, step in ways.items()}

    def run(step: Step, count: int) -> None:
        for _ in range(count):
            assert not step()

    turns = {name: (lambda step=step: timed(lambda count: run(step, count), case.steps)) for name, step in ways.items()}
    facts = summary(in_turns(turns, rounds=rounds), base="none")
    return {name: {**facts[name], "collectives": counts[name]} for name in ways}


def show(results: dict[str, Facts]) -> None:
    """Prints the table; ends with 1 if agreeing adds a collective."""
    show_table(results, {"ms": ".3f", "ratio": ".3f", "collectives": "g"})
    if any(ways["parameter"]["collectives"] != ways["none"]["collectives"] for ways in results.values()):
        sys.exit("the agreement adds collectives")


def count_collectives(step: Step) -> float:
    """Returns the collectives of a step as torch's profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(COUNTED_STEPS):
            step()
    found = [event for event in profile.events() or [] if event.name.startswith("gloo:")]
    assert found, "the profiler saw no collective at all"
    return len(found) / COUNTED_STEPS


def bare(case: Case) -> Step:
    """Returns a step without agreement."""
    ddp = DistributedDataParallel(SummedLoss(make_model(case)), gradient_as_bucket_view=True)
    optimizer = make_optimizer(ddp)
    batch = make_data(case.batch)  # used again and again: reading data is not what is measured

    def step() -> bool:
        loss, _ = ddp(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return False

    return step


def with_parameter(case: Case) -> Step:
    """Returns a step that agrees through the parameter of the training's own module."""
    objective = SummedLoss(make_model(case))
    module = TrainingModule(objective, stop=StopFlag(), device=torch.device("cpu"), autocast=None)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = make_optimizer(objective)
    batch = make_data(case.batch)  # used again and again: reading data is not what is measured

    def step() -> bool:
        module.backward(ddp(batch))
        optimizer.step()
        optimizer.zero_grad()
        assert module.stats_param.grad is not None
        stop = module.stats_param.grad[STOP].item() > 0
        module.stats_param.grad = None
        return stop

    return step


def with_all_reduce(case: Case) -> Step:
    """Returns a step that agrees with a collective of its own."""
    inner = bare(case)
    flag = torch.zeros(1)

    def step() -> bool:
        inner()
        flag.zero_()
        dist.all_reduce(flag)
        return flag.item() > 0

    return step


WAYS = {"none": bare, "parameter": with_parameter, "all-reduce": with_all_reduce}


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW in one kernel, slow enough to stay finite on summed losses."""
    return torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)


if __name__ == "__main__":
    main(measure, show, rounds=15, cases=CASES)
