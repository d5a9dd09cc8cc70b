"""What a rank's memory really holds at its fullest, by torch's own profiler: every allocation on the host, in a step.

Real gloo ranks, built by the trainer's own functions, take a few steps; the highest sum of what is allocated in a step,
after the first, is the measured peak. What gloo itself allocates is not counted.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tests.support.warm_ranks import start_rank

NUM_STEPS = 3
MODEL = {
    "_target_": "slurm_train.models.gpt.GPT",
    "vocab_size": 512,
    "context": 128,
    "num_layers": 4,
    "num_heads": 4,
    "width": 256,
    "tied": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's bytes under one layout."""

    case: str
    rank: int
    peak: int
    between_steps: int
    """Held all the time: parameters, optimizer state, and what the wrappers keep."""
    estimated: int
    parts: dict[str, int]
    """What the estimate is made of."""


def measure_layouts(cases: dict[str, dict[str, Any]], *, ranks: int, timeout_s: float = 600) -> list[Measured]:
    """Returns what each rank measured under each of the layouts, which all have the same number of ranks.

    Args:
        cases: by name the sections "parallel", and where they matter "model", "batch" and "train".
        ranks: how many.
        timeout_s: for all of it.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    orders = [json.dumps({"cases": cases, "rank": rank, "ranks": ranks, "port": port}) for rank in range(ranks)]
    processes = [start_rank(Path(__file__), order, env=os.environ) for order in orders]
    texts = [process.communicate(timeout=timeout_s)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), texts
    # The profiler has things to say, too.
    return [Measured(**json.loads(line)) for text in texts for line in text.splitlines() if line.startswith("{")]


def main() -> None:
    """One rank: measures all cases, a line of JSON each."""
    import torch.distributed as dist

    orders = json.loads(sys.argv[1])
    address = f"tcp://127.0.0.1:{orders['port']}"
    dist.init_process_group("gloo", init_method=address, rank=orders["rank"], world_size=orders["ranks"])
    for name, case in orders["cases"].items():
        print(json.dumps({"case": name, "rank": orders["rank"], **_measure(case, orders)}), flush=True)
        gc.collect()


def _measure(case: dict[str, Any], orders: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from slurm_train.train.step import StepFacts

    torch.set_num_threads(1)
    rank, facts = make_case_rank(case, rank=orders["rank"], ranks=orders["ranks"])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        stepper, batches = build_case(rank)[1:]
        for step in range(1, 2 + NUM_STEPS):
            with record_function(f"step {step}"):
                stepper.step(StepFacts(step, step, 1e-3, float("inf")), batches)
    peak, between = _peak(found.profiler.kineto_results)  # type: ignore[union-attr]
    return {"peak": peak, "between_steps": between, **_estimate(facts, rank)}


def _peak(results: Any) -> tuple[int, int]:
    """Returns the highest sum within a step, of the step where it is lowest, and the sum before that step.

    A gloo thread that is the last to let go of a buffer frees it unseen. Such a buffer counts until its address is
    given out again, so of several steps the one that such accidents hit least says most.
    """
    marks = sorted((one.start_ns(), one.end_ns()) for one in results.events() if one.name().startswith("step "))[1:]
    found = [(0, 0)] * len(marks)
    live: dict[int, int] = {}
    total = 0
    for time_ns, address, num_bytes in _allocations(results.experimental_event_tree()):
        total -= live.pop(address, 0)
        if num_bytes > 0:
            live[address] = num_bytes
            total += num_bytes
        for number, (start_ns, end_ns) in enumerate(marks):
            peak, before = found[number]
            if time_ns < start_ns:
                found[number] = (0, total)
            elif time_ns <= end_ns:
                found[number] = (max(peak, total), before)
    return min(found)


def _allocations(roots: Any) -> list[tuple[int, int, int]]:
    """Returns (time, address, bytes) of all allocations in the order of time; bytes are negative where one ends."""
    found, left = [], list(roots)
    while left:
        event = left.pop()
        left += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found, key=lambda one: one[0])


def make_case_rank(case: dict[str, Any], *, rank: int, ranks: int) -> Any:
    """Returns a rank of a case, and the facts that its memory is estimated from."""
    from slurm_train.config.batch import solve_batch
    from slurm_train.config.parallel import solve_layout
    from slurm_train.config.schema import RunConfig, build_config
    from slurm_train.estimate.memory import facts_of
    from tests.support.ranks import make_rank

    sections = {**case, "model": {**MODEL, **case.get("model", {})}}
    config = build_config(RunConfig, sections)
    layout = solve_layout(config.parallel, world_size=ranks)
    plan = solve_batch(config.batch, ranks=layout.data_parallel_size, stages=layout.pp)
    facts = facts_of(config, layout, plan, half=config.train.precision == "bfloat16")
    assert facts is not None
    return make_rank(config=config, plan=plan, rank=rank, ranks=ranks), facts


def build_case(rank: Any) -> tuple[Any, Any, Any]:
    """Returns the parts of a rank's training, its stepper and endless batches."""
    import torch

    from slurm_train.models.objective import Objective
    from slurm_train.train.build import apply_parallelism, build_model, build_stepper
    from slurm_train.train.context import Parts
    from slurm_train.train.optimizer import build_optimizer
    from slurm_train.train.step import Exchange

    config, plan = rank.config, rank.plan
    model, unused = build_model(config), cast("Any", None)
    optimizer = build_optimizer(model, optim=config.optim)
    parts = Parts(
        rank=rank, model=model, optimizer=optimizer, train_data=unused, heldout=None, flops_per_token=(0.0, 0.0)
    )
    del model, optimizer
    apply_parallelism(parts)
    stepper = build_stepper(parts, Objective(parts.model), exchange=Exchange(), before_change=lambda: None)
    tokens = torch.randint(0, config.model["vocab_size"], (plan.local_size, config.model["context"]))
    return parts, stepper, itertools.repeat(_Batch((tokens, tokens.clone())))


@dataclass(frozen=True, slots=True)
class _Batch:
    tensors: tuple[Any, ...]


def _estimate(facts: Any, rank: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from slurm_train.estimate.memory import rank_memory

    place = rank.layout.coordinates(rank.place.rank)
    memory = rank_memory(facts, stage=place.pp)
    return {"estimated": memory.total_bytes + memory.offloaded_bytes, "parts": asdict(memory)}


if __name__ == "__main__":
    main()
