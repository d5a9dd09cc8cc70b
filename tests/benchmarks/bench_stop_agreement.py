"""What it costs that all ranks agree at every step whether to stop. Two gloo ranks.

    python -m tests.benchmarks.bench_stop_agreement [--rounds 15] [--out result.json]

The same bare loop (DDP, backward, fused AdamW) in turns: without any agreement; with a parameter whose gradient has
the wish to stop through a bucket that is sent anyway, read after each step; and with an all-reduce of a flag of its
own, as most loops do it. torch's profiler counts the collectives of a step. The ratios are medians over rounds, each
to the bare loop of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
INPUTS, CLASSES = 64, 10
# name: (hidden width, hidden layers, samples per rank, steps per turn)
CASES = {"1 ms": (64, 1, 16, 150), "20 ms": (768, 4, 96, 10)}
COUNTED_STEPS = 8
Step = Callable[[], bool]


class SummedLoss(nn.Module):
    """The objective: sum of the losses, and how many there are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both for a batch."""
        return cross_entropy(self.model(inputs), targets, reduction="sum"), torch.tensor(len(targets))


def main() -> None:
    """Starts the ranks of each case and prints rank 0's table; in a rank, measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.case:
        measure(options.case, rounds=options.rounds, out=options.out)
        return
    results = {case: _run_ranks(case, options.rounds) for case in CASES}
    print(f"{'step of':<10}{'agreement':<14}{'median ms':>10}{'x bare':>8}{'collectives a step':>20}")
    for case, ways in results.items():
        for name, facts in ways.items():
            print(f"{case:<10}{name:<14}{facts['ms']:>10.3f}{facts['ratio']:>8.3f}{facts['collectives']:>20g}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if any(ways["parameter"]["collectives"] != ways["none"]["collectives"] for ways in results.values()):
        sys.exit("the agreement adds collectives")


def _run_ranks(case: str, rounds: int) -> dict[str, dict[str, float]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        words = [sys.executable, "-m", "tests.benchmarks.bench_stop_agreement", "--case", case]
        words += ["--rounds", str(rounds), "--out", str(out)]
        env = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [subprocess.Popen(words, env={**env, "RANK": str(rank)}) for rank in range(RANKS)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
        found: dict[str, dict[str, float]] = json.loads(out.read_text())
        return found


def measure(case: str, *, rounds: int, out: Path) -> None:
    """One rank: all ways in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hidden, layers, batch, steps = CASES[case]
    ways = {name: make(hidden, layers, batch) for name, make in WAYS.items()}
    for step in ways.values():
        for _ in range(5):
            step()
    counts = {name: count_collectives(step) for name, step in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                assert not ways[name]()
            taken[name].append((time.perf_counter() - start) / steps)
    if dist.get_rank() == 0:
        facts = {
            name: {
                "ms": 1e3 * statistics.median(times),
                "ratio": statistics.median(a / b for a, b in zip(times, taken["none"], strict=True)),
                "collectives": counts[name],
            }
            for name, times in taken.items()
        }
        out.write_text(json.dumps(facts))
    dist.barrier()
    os._exit(0)


def count_collectives(step: Step) -> float:
    """Returns the collectives of a step as torch's profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(COUNTED_STEPS):
            step()
    found = [event for event in profile.events() or [] if event.name.startswith("gloo:")]
    assert found, "the profiler saw no collective at all"
    return len(found) / COUNTED_STEPS


def bare(hidden: int, layers: int, batch: int) -> Step:
    """Returns a step without agreement."""
    ddp = DistributedDataParallel(SummedLoss(make_model(hidden, layers)), gradient_as_bucket_view=True)
    optimizer = make_optimizer(ddp)
    inputs, targets = make_batch(batch)

    def step() -> bool:
        loss, _ = ddp(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return False

    return step


def with_parameter(hidden: int, layers: int, batch: int) -> Step:
    """Returns a step that agrees through the parameter of the training's own module."""
    from slurm_train.supervise.signals import StopFlag
    from slurm_train.train.passes import STOP, TrainingModule

    objective = SummedLoss(make_model(hidden, layers))
    module = TrainingModule(objective, stop=StopFlag(), device=torch.device("cpu"), autocast=None)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = make_optimizer(objective)
    inputs, targets = make_batch(batch)

    def step() -> bool:
        module.backward(ddp(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        assert module.stats_param.grad is not None
        stop = module.stats_param.grad[STOP].item() > 0
        module.stats_param.grad = None
        return stop

    return step


def with_all_reduce(hidden: int, layers: int, batch: int) -> Step:
    """Returns a step that agrees with a collective of its own."""
    inner = bare(hidden, layers, batch)
    flag = torch.zeros(1)

    def step() -> bool:
        inner()
        flag.zero_()
        dist.all_reduce(flag)
        return flag.item() > 0

    return step


WAYS = {"none": bare, "parameter": with_parameter, "all-reduce": with_all_reduce}


def make_model(hidden: int, layers: int) -> nn.Module:
    """Returns the same weights on every rank."""
    torch.manual_seed(0)
    middle = [part for _ in range(layers) for part in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), *middle, nn.Linear(hidden, CLASSES))


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW in one kernel, slow enough to stay finite on summed losses."""
    return torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Returns one batch, used again and again: reading data is not what is measured."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, INPUTS, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


if __name__ == "__main__":
    main()
