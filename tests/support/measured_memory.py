"""What a rank's memory really holds at its fullest, by torch's own profiler: every allocation on the host, in a step.

Real gloo ranks, built by the trainer's own functions, take a few steps; the highest sum of what is allocated in a step,
after the first, is the measured peak. What gloo itself allocates is not counted.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.support.ports import rank_environments
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


class Measured(NamedTuple):
    """One rank's bytes under one layout."""

    case: str
    rank: int
    peak: int
    estimated: int


def measure_layouts(cases: dict[str, dict[str, Any]], *, ranks: int, timeout_s: float = 600) -> list[Measured]:
    """Returns what each rank measured under each of the layouts, which all have the same number of ranks.

    Args:
        cases: by name the sections "parallel", and where they matter "model", "batch" and "train".
        ranks: how many.
        timeout_s: for all of it.
    """
    processes = [start_rank(Path(__file__), json.dumps(cases), env=env) for env in rank_environments(ranks)]
    texts = [process.communicate(timeout=timeout_s)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), texts
    # The profiler has things to say, too.
    return [Measured(**json.loads(line)) for text in texts for line in text.splitlines() if line.startswith("{")]


def main() -> None:
    """One rank: measures all cases, a line of JSON each."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name, case in json.loads(sys.argv[1]).items():
        measured = _measure(name, case, rank=dist.get_rank(), ranks=dist.get_world_size())
        print(json.dumps(measured._asdict()), flush=True)
        gc.collect()


def _measure(name: str, case: dict[str, Any], *, rank: int, ranks: int) -> Measured:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from slurm_train.models import head
    from slurm_train.plan import memory as estimate
    from slurm_train.train.step import StepFacts

    # The estimate is that of a GPU, where a chunk of scores is larger.
    estimate.CHUNK_SCORES = head._CHUNK_SCORES_ON_CPU
    torch.set_num_threads(1)
    made, facts = make_case_rank(case, rank=rank, ranks=ranks)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        stepper, batches = build_case(made)[1:]
        for step in range(1, 2 + NUM_STEPS):
            with record_function(f"step {step}"):
                stepper.step(StepFacts(step, step, 1e-3, float("inf")), batches)
    peak = _peak(found.profiler.kineto_results)  # type: ignore[union-attr]
    memory = estimate.rank_memory(facts, stage=made.layout.coordinates(rank).pp)
    return Measured(name, rank, peak, memory.total_bytes + memory.offloaded_bytes)


def _peak(results: Any) -> int:
    """Returns the highest sum within a step, of the step where it is lowest.

    A gloo thread that is the last to let go of a buffer frees it unseen. Such a buffer counts until its address is
    given out again, so of several steps the one that such accidents hit least says most.
    """
    marks = sorted((one.start_ns(), one.end_ns()) for one in results.events() if one.name().startswith("step "))[1:]
    found = [0] * len(marks)
    live: dict[int, int] = {}
    total = 0
    for time_ns, address, num_bytes in _allocations(results.experimental_event_tree()):
        total -= live.pop(address, 0)
        if num_bytes > 0:
            live[address] = num_bytes
            total += num_bytes
        for number, (start_ns, end_ns) in enumerate(marks):
            if start_ns <= time_ns <= end_ns:
                found[number] = max(found[number], total)
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
    from slurm_train.plan.memory import facts_of
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

    from slurm_train.models.build import build_model
    from slurm_train.models.objective import Objective
    from slurm_train.train.buckets import RecordedOrder
    from slurm_train.train.layout import apply_parallelism
    from slurm_train.train.optimizer import build_optimizer
    from slurm_train.train.step import build_stepper
    from tests.support.ranks import make_parts

    config, plan = rank.config, rank.plan
    model = build_model(config)
    parts = make_parts(rank, model, build_optimizer(model, optim=config.optim))
    del model
    parts = apply_parallelism(rank, parts)
    order = RecordedOrder()
    stepper = build_stepper(parts, Objective(parts.model), hold_changes=lambda: None, scale=None, order=order)
    tokens = torch.randint(0, config.model["vocab_size"], (plan.local_size, config.model["context"]))
    return parts, stepper, itertools.repeat(SimpleNamespace(tensors=(tokens, tokens.clone())))


if __name__ == "__main__":
    main()
