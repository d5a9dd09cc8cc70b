"""The memory that `plan` states for a rank, beside what a rank takes: torch's allocations and the process's own size.

Each case is trained a few steps on the CPU in a process of its own, with the trainer's own parts over one gloo rank and
the copy that background saves are written from. Allocations are the profiler's peak within a step; the size of the
process is VmHWM, less what it was after a tiny model's first steps. The second one also holds what glibc's allocator
keeps for later, so it is the larger one; "trimmed" is the same with an allocator that keeps nothing. MiB of one rank.

    python -m tests.benchmarks.bench_memory
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.measured_memory import build_case, make_case_rank, measure_layouts
from tests.support.options import json_of, read_options


def _case(batch_size: int, *, accumulation: int = 1, precision: str = "float32", **model: int) -> dict[str, Any]:
    return {
        "parallel": {"dp_replicate": 1},
        "model": {"vocab_size": 257, "width": 160, "tied": True, **model},
        "batch": {"local_size": batch_size, "accumulation": accumulation},
        "train": {"precision": precision},
    }


WIDE = {"num_layers": 8, "num_heads": 8, "width": 512}
CASES = {
    "shipped, 16 samples": _case(16),
    "shipped, 64 samples": _case(64),
    "wide": _case(8, **WIDE),
    "wide, accumulated": _case(8, accumulation=2, **WIDE),
    "wide, bfloat16": _case(8, precision="bfloat16", **WIDE),
    "many words": _case(8, context=256, num_layers=2, width=128, vocab_size=50304),
}
STEPS = 4
# Makes glibc give every larger block back to the system as soon as it is free.
TRIMMED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
MIB = 1 << 20


def main() -> None:
    """Prints a line for each case."""
    asked = read_options(case=str)
    if asked.case:
        print(json.dumps(run_case(CASES[asked.case])))
        return
    print(
        f"{'case':<22}{'estimate':>10}" + "".join(f"{name:>11}  ratio" for name in ("allocated", "process", "trimmed"))
    )
    # Case by case, so that each line is printed as soon as it is measured.
    for name, case in CASES.items():
        (measured,) = measure_layouts({name: case}, ranks=1)
        plain = json_of(__spec__.name, "--case", name, env={})
        trimmed = json_of(__spec__.name, "--case", name, env=TRIMMED)
        estimate = measured.estimated + plain["copies"]
        allocated = measured.peak + plain["copies"]
        row = f"{name:<22}{estimate / MIB:>10.1f}"
        for num_bytes in (allocated, plain["process"], trimmed["process"]):
            row += f"{num_bytes / MIB:>11.1f}{estimate / num_bytes:>7.3f}"
        print(row, flush=True)


def run_case(case: dict[str, Any]) -> dict[str, float]:
    """Returns bytes: the growth of this process, and the copy for background saves in it."""
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.set_num_threads(1)
    # What the first steps of any model load stays out of the account.
    tiny = _case(1, precision=case["train"]["precision"], context=8, num_layers=1, width=32)
    kept = [train(tiny, steps=2)]
    before = process_bytes("VmRSS")
    kept.append(train(case, steps=1 + STEPS))
    return {"process": process_bytes("VmHWM") - before, "copies": kept[1][0]}


def train(case: dict[str, Any], *, steps: int) -> tuple[int, Any]:
    """Takes a few steps; returns the bytes of the copy for background saves, and what a rank holds on to."""
    from slurm_train.checkpoint.state import StagingBuffers
    from slurm_train.train.step import StepFacts

    rank, _ = make_case_rank(case, rank=0, ranks=1)
    parts, stepper, batches = build_case(rank)
    stepper.step(StepFacts(1, 0, 1e-3), batches)
    state = parts.optimizer.state.values()
    tensors = [*parts.model.parameters(), *(one for its in state for one in (its["exp_avg"], its["exp_avg_sq"]))]
    staging = StagingBuffers(rank.device)
    staging.prepare(tensors)
    for step in range(1, steps):
        stepper.step(StepFacts(step + 1, 0, 1e-3), batches)
    return sum(tensor.nbytes for tensor in tensors), (stepper, staging)


def process_bytes(key: str) -> int:
    """Returns a figure of this process, e.g. "VmHWM", its highest resident size."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
