"""The memory that `plan` states for a rank, beside what a rank takes: torch's allocations and the process's own size.

Each case is trained a few steps on the CPU in a process of its own, with everything of a rank but the network: DDP over
one gloo rank, the stepper, AdamW and the copy that background saves are written from. Allocations are summed up from
torch's profiler over one step; the size of the process is VmHWM, less what it was after a tiny model's first steps. The
second one also holds what glibc's allocator keeps for later, so it is the larger one; "trimmed" is the same with an
allocator that keeps nothing. MiB of one rank.

    python tests/benchmarks/bench_memory.py [--threads 1]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

# name: arguments of the GPT, samples of a micro-batch, micro-batches of a step, matrix products in bfloat16.
CASES: dict[str, tuple[dict[str, int], int, int, bool]] = {
    "shipped, 16 samples": ({"context": 128}, 16, 1, False),
    "shipped, 64 samples": ({"context": 128}, 64, 1, False),
    "wide": ({"context": 128, "num_layers": 8, "num_heads": 8, "width": 512}, 8, 1, False),
    "wide, accumulated": ({"context": 128, "num_layers": 8, "num_heads": 8, "width": 512}, 8, 2, False),
    "wide, bfloat16": ({"context": 128, "num_layers": 8, "num_heads": 8, "width": 512}, 8, 1, True),
    "many words": ({"context": 256, "num_layers": 2, "width": 128, "vocab_size": 50304}, 8, 1, False),
}
STEPS = 4
# Makes glibc give every larger block back to the system as soon as it is free.
TRIMMED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", help="run one case in this process and print it as JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, threads=options.threads)))
        return
    print(
        f"{'case':<22}{'estimate':>10}{'allocated':>11}{'ratio':>7}{'process':>10}{'ratio':>7}{'trimmed':>10}{'ratio':>7}"
    )
    for name in CASES:
        plain, trimmed = (measure(name, options.threads, env) for env in ({}, TRIMMED))
        row = f"{name:<22}{plain['estimate'] / MIB:>10.1f}"
        for found, key, width in ((plain, "allocated", 11), (plain, "process", 10), (trimmed, "process", 10)):
            row += f"{found[key] / MIB:>{width}.1f}{found['estimate'] / found[key]:>7.3f}"
        print(row, flush=True)


def measure(name: str, threads: int, env: dict[str, str]) -> dict[str, float]:
    words = [sys.executable, "-W", "ignore", __file__, "--case", name, "--threads", str(threads)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, **env})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_case(name: str, *, threads: int) -> dict[str, float]:
    """Returns bytes: the estimate, torch's allocations at the peak of a step, the growth of the process."""
    import torch
    import torch.distributed as dist

    kwargs, batch_size, accumulation, half = CASES[name]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.set_num_threads(threads)
    # What the first steps of any model load stays out of the account.
    warm = build(
        {"context": 8, "num_layers": 1, "width": 32}, torch.zeros(1, 8, dtype=torch.int64), accumulation=1, half=half
    )
    take_step(warm[0], warm[1], 1)
    before = process_bytes("VmRSS")
    tokens = torch.randint(0, 257, (batch_size, kwargs["context"]))
    stepper, batches, kept = build(kwargs, tokens, accumulation=accumulation, half=half)
    for step in range(STEPS):
        take_step(stepper, batches, step)
    peak = process_bytes("VmHWM") - before
    gc.collect()
    allocated = sum(one.nbytes for one in kept) + step_peak(lambda: take_step(stepper, batches, STEPS))
    return {"estimate": estimate(kwargs, batch_size, accumulation, half), "allocated": allocated, "process": peak}


def build(kwargs: dict[str, int], tokens: Any, *, accumulation: int, half: bool) -> tuple[Any, Any, list[Any]]:
    """Returns a stepper, its batches, and the tensors that live from step to step."""
    import itertools

    import torch

    from slurm_train.checkpoint.state import StagingBuffers
    from slurm_train.config.batch import BatchPlan
    from slurm_train.config.schema import DdpSection, OptimSection
    from slurm_train.data.batches import MicroBatch
    from slurm_train.models.gpt import GPT
    from slurm_train.models.objective import Objective
    from slurm_train.train.optimizer import build_optimizer
    from slurm_train.train.signals import StopFlag
    from slurm_train.train.step import ReplicaPasses, Stepper, TrainingModule, build_ddp
    from tests.support.ranks import make_rank

    device = torch.device("cpu")
    model = GPT(**kwargs)
    autocast = torch.bfloat16 if half else None
    module = TrainingModule(Objective(model), stop=StopFlag(), device=device, autocast=autocast)
    optimizer = build_optimizer(model, optim=OptimSection())
    rank = make_rank(plan=BatchPlan(local_size=len(tokens), ranks=1, accumulation=accumulation))
    stepper = Stepper(rank, ReplicaPasses(rank, module, build_ddp(module, ddp=DdpSection(), device=device)), optimizer)
    batches = itertools.repeat(MicroBatch(None, (tokens, tokens.clone())))  # type: ignore[arg-type]  # no indices
    take_step(stepper, batches, 0)
    moments = [one for state in optimizer.state.values() for one in (state["exp_avg"], state["exp_avg_sq"])]
    weights = list(model.parameters())
    staging = StagingBuffers(device)
    staging.prepare([*weights, *moments])
    copies = [one for of_kind in staging._buffers.values() for one in of_kind]
    # DDP's buckets are as large as the gradients, which lie in them.
    return stepper, batches, [*weights, *model.buffers(), *weights, *moments, *copies]


def take_step(stepper: Any, batches: Any, step: int) -> None:
    from slurm_train.train.step import StepFacts

    stepper.step(StepFacts(step + 1, 0, 1e-3), batches)


def step_peak(run: Any) -> float:
    """Returns the most bytes that torch has allocated on top while something ran."""
    from torch.profiler import profile

    with profile(profile_memory=True) as profiler:
        run()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def process_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def estimate(kwargs: dict[str, int], batch_size: int, accumulation: int, half: bool) -> int:
    from slurm_train.config.batch import BatchPlan
    from slurm_train.config.parallel import ParallelLayout
    from slurm_train.config.schema import ParallelSection
    from slurm_train.estimate.memory import GptShape, LayoutFacts, rank_memory

    shape = GptShape.of({"_target_": "slurm_train.models.gpt.GPT", **kwargs})
    assert shape is not None
    facts = LayoutFacts(
        shape=shape,
        layout=ParallelLayout(),
        batch=BatchPlan(local_size=batch_size, ranks=1, accumulation=accumulation),
        settings=ParallelSection(),
        half=half,
        positions=shape.context,
    )
    # And the copy that background saves are written from.
    return rank_memory(facts, stage=0).total_bytes + 12 * shape.parameters + shape.buffer_bytes


if __name__ == "__main__":
    main()
