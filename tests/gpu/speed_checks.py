"""Checks of kernels, speed and memory."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from slurm_train.config.batch import solve_batch
from slurm_train.config.parallel import solve_layout
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.data.batches import MicroBatch
from slurm_train.distributed import sequence
from slurm_train.models import head
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective
from slurm_train.plan.memory import facts_of, rank_memory
from slurm_train.train.buckets import RecordedOrder
from slurm_train.train.build import build_parts
from slurm_train.train.layout import apply_parallelism
from slurm_train.train.step import StepFacts, build_stepper
from tests.gpu.catalogue import Stage, require
from tests.gpu.training import SMALL, release, sections_of, training_of
from tests.support.ranks import leave_group, make_rank

_MOST_UNITS = 4.0
_FUSED = ("flash", "fmha", "cudnn")


def gpt2_quick(stage: Stage) -> dict[str, Any]:
    """GPT-2 124M takes no longer than a tuned plain loop of equal work, in turns in one run."""
    from tests.benchmarks.bench_gpt2 import quick

    plain, ours = quick(stage.folder, tiny=not stage.on_gpu)
    ratio = ours["tokens_per_s"] / plain["tokens_per_s"]
    if stage.on_gpu:
        require(ratio >= 1.0, f"ours makes {ratio:.3f} of the tokens per second of the plain loop")
    keys = ("tokens_per_s", "mfu", "mfu_6n_12ltc", "peak_gb", "host_cpu_ms")
    return {"ratio": ratio, **{key: ours[key] for key in keys}, "plain": plain, "ours": ours}


def attention_kernels(stage: Stage) -> dict[str, Any]:
    """Attention runs in a fused kernel, forward and backward; in chunks of the positions it gives the same."""
    torch.manual_seed(0)
    model = GPT(**{**SMALL, "width": 512, "num_heads": 8, "context": 256}).to(stage.device)  # type: ignore[arg-type]
    tokens = torch.randint(0, 512, (4, 256), device=stage.device)
    with torch.profiler.profile() as found, torch.autocast(stage.device.type, dtype=torch.bfloat16):
        model(tokens).float().square().mean().backward()
        stage.sync()
    fused = [event for event in found.key_averages() if any(word in event.key.lower() for word in _FUSED)]
    kernels = sorted({event.key for event in fused})
    require(kernels, f"no fused attention among {len(found.key_averages())} names")
    if stage.on_gpu:
        on_device = [event.key for event in fused if event.device_type.name == "CUDA"]
        require(len(on_device) >= 2, f"fused kernels on the device: {on_device}; all fused: {kernels}")
    farthest = max(_chunk_error(stage, heads=heads) for heads in (8, 2))
    require(farthest <= _MOST_UNITS, f"attention by chunks is up to {farthest:.1f} units of bfloat16 from the whole")
    return {"farthest_of_chunks_in_units": farthest, "kernels": [name[:100] for name in kernels[:6]]}


def _chunk_error(stage: Stage, *, heads: int) -> float:
    """Returns how far context parallelism's attention of both of two parts is from the whole, in units of bfloat16.

    Parts of a sequence are rounded by themselves and joined, so results differ by a few units of the last place. Below
    1 the unit is that of 1: weights of attention are rounded, too, and do not get smaller with the result.
    """
    generator = torch.Generator(device=stage.device).manual_seed(1)
    how = {"device": stage.device, "generator": generator, "dtype": torch.bfloat16}
    query = torch.randn(2, 8, 128, 64, **how)  # type: ignore[call-overload]
    key, value = (torch.randn(2, heads, 128, 64, **how) for _ in range(2))  # type: ignore[call-overload]
    whole = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads < 8)
    gather = sequence._gather_chunks
    # What the ranks would give each other.
    sequence._gather_chunks = lambda _both, **_: (list(key.chunk(4, dim=2)), list(value.chunk(4, dim=2)))
    try:
        farthest = 0.0
        for place in range(2):
            part = sequence.SequencePart(place, 2)
            rows = part.positions(128).to(stage.device)
            own = (tensor.index_select(2, rows) for tensor in (query, key, value))
            found = sequence.attend(*own, part=part, mesh=None, is_causal=True, enable_gqa=heads < 8)  # type: ignore[arg-type]
            expected = whole.index_select(2, rows).float()
            # A number between 1 and 2 has seven digits after the point.
            units = (found.float() - expected).abs() * 2**7 / expected.abs().clamp(min=1).log2().floor().exp2()
            farthest = max(farthest, units.max().item())
        return farthest
    finally:
        sequence._gather_chunks = gather


_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "tied": False, "rope_theta": 5e5}
_SIZES = {
    "8B": {"vocab_size": 128256, "num_heads": 32, "num_kv_heads": 8, "width": 4096, "hidden": 14336, "num_layers": 4},
    "70B": {"vocab_size": 128256, "num_heads": 64, "num_kv_heads": 8, "width": 8192, "hidden": 28672, "num_layers": 2},
}
_SMALL_SIZE = {"vocab_size": 512, "num_heads": 16, "num_kv_heads": 8, "width": 128, "hidden": 256, "num_layers": 2}
_WORLD = 64
_LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("8B", {"dp_shard": 64}),
    ("8B", {"dp_replicate": 8, "dp_shard": 8}),
    ("8B", {"dp_shard": 64, "activation_checkpointing": "selective"}),
    ("70B", {"dp_shard": 64, "activation_checkpointing": "full"}),
    ("70B", {"dp_shard": 8, "tp": 8}),
    ("70B", {"dp_shard": 8, "tp": 8, "sequence_parallel": True, "activation_checkpointing": "full"}),
)


def memory_plan(stage: Stage) -> dict[str, Any]:
    """What a rank of 64 takes on the device is within 10 % of the plan: slices of 8B and 70B, in six layouts."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD)
    found, off = dict[str, Any](), dict[str, float]()
    for size, parallel in _LAYOUTS:
        name = f"{size} {' '.join(f'{key}={value}' for key, value in parallel.items())}"
        peak, planned, alive = _peak_of(stage, size, parallel)
        found[name] = {"peak_gb": peak / 1e9, "planned_gb": planned / 1e9, "alive_at_peak": alive}
        off[name] = peak / planned - 1 if stage.on_gpu else 0.0
    leave_group()
    worst = max(off, key=lambda name: abs(off[name]))
    far = {name: f"{value:+.1%}" for name, value in off.items() if abs(value) > 0.1}
    alive = {name: found[name].pop("alive_at_peak") for name in list(off)}
    shown = "\n".join(f"{name}: {json.dumps(alive[name], indent=1)}" for name in off if name in far or name == worst)
    print(shown)
    require(not far, f"the peak is farther from the plan than 10 %: {far}; {found}; alive at the peak:\n{shown}")
    return {"layouts": len(off), "farthest": off[worst], "farthest_layout": worst, **found}


def _peak_of(stage: Stage, size: str, parallel: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """Returns the most bytes that a third step has allocated, 0 without a GPU, the bytes planned, and both by part.

    Apart: MB by the lines of code that have allocated them, the largest first, and by the plan's parts.
    """
    shape = {**_LLAMA, **stage.size(_SIZES[size], _SMALL_SIZE), "context": stage.size(4096, 64)}
    sections = sections_of(
        shape, local_size=1, parallel={"dp_replicate": 1, **parallel}, train={"precision": "bfloat16"}
    )
    config = build_config(RunConfig, sections)
    layout = solve_layout(config.parallel, world_size=_WORLD)
    plan = solve_batch(config.batch, ranks=layout.data_parallel_size, stages=layout.pp)
    rank = make_rank(config=config, plan=plan, ranks=_WORLD, device=stage.device)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    if stage.on_gpu:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    parts = apply_parallelism(rank, build_parts(rank))
    stepper = build_stepper(parts, Objective(parts.model), hold_changes=lambda: None, scale=None, order=RecordedOrder())
    indices = torch.arange(1).numpy()
    batch = MicroBatch(indices=indices, tensors=parts.train_data.batch(indices))
    for step in range(1, 4):
        stage.reset_peak()
        stepper.step(StepFacts(step, step, 1e-4), iter([batch]))
    stepper.drain()
    stage.sync()
    peak = torch.cuda.max_memory_allocated() - before
    alive = _alive_at_peak() if stage.on_gpu else {}
    facts = facts_of(config, layout, plan, half=True)
    assert facts is not None
    memory = rank_memory(facts, stage=0)
    alive["planned"] = {key: round(value / 1e6) for key, value in asdict(memory).items() if isinstance(value, int)}
    return peak, memory.total_bytes, alive


def _alive_at_peak() -> dict[str, Any]:
    """Returns the megabytes that were allocated when most were, by the innermost lines that asked for them."""
    (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    torch.cuda.memory._record_memory_history(enabled=None)
    alive: dict[int, tuple[int, str]] = {}
    total = most = 0
    at_peak: dict[int, tuple[int, str]] = {}
    events = [event for event in trace if event["action"] in ("alloc", "free_completed")]
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], _lines_of(event["frames"])
            total += event["size"]
            if total > most:
                most, at_peak = total, dict(alive)
        elif event["addr"] in alive:
            total -= alive.pop(event["addr"])[0]
    by_line: defaultdict[str, int] = defaultdict(int)
    for size, line in at_peak.values():
        by_line[line] += size
    largest = sorted(by_line.items(), key=lambda item: -item[1])[:24]
    return {line: round(size / 1e6, 1) for line, size in largest} | {"all": round(most / 1e6, 1)}


def _lines_of(frames: Sequence[Mapping[str, Any]]) -> str:
    shown = [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames]
    own = [text for frame, text in zip(frames, shown, strict=True) if "slurm_train" in frame["filename"]]
    return " < ".join([*shown[:2], *own[:2]])


def loss(stage: Stage) -> dict[str, Any]:
    """How long head and loss of GPT-2 take, forward and backward, and how much memory, by the scores of a chunk.

    Also how long one chunk's part of the weight's gradient takes: added up in float32 after a product that is rounded
    to bfloat16, as it is, or within the product.
    """
    rows, shape = stage.size((32, {"vocab_size": 50257, "context": 1024, "width": 768}), (1, SMALL))
    shape = {**shape, "num_layers": 1, "num_heads": 4}
    torch.manual_seed(0)
    tokens = torch.randint(0, shape["vocab_size"], (rows, shape["context"]), device=stage.device)
    found: dict[str, Any] = {}
    values = []
    key = "_CHUNK_SCORES" if stage.on_gpu else "_CHUNK_SCORES_ON_CPU"
    usual = getattr(head, key)
    ways = [("eager", 1), *(("compiled", factor) for factor in (1, 2, 4))]
    for kind, factor in ways:
        setattr(head, key, factor * usual)
        name = f"{kind}_{factor}x"
        torch.compiler.reset()
        torch.manual_seed(1)
        model = GPT(**shape).to(stage.device)
        model.blocks = torch.nn.ModuleList()
        objective: Any = Objective(model)
        if kind == "compiled":
            objective.compile()
        times = []
        for _ in range(stage.size(12, 2)):
            model.zero_grad(set_to_none=True)
            stage.sync()
            stage.reset_peak()
            start = time.perf_counter()
            with torch.autocast(stage.device.type, dtype=torch.bfloat16):
                total, count = objective((tokens, tokens))
            total.backward()
            stage.sync()
            times.append(time.perf_counter() - start)
        values.append((total / count).item())
        found[f"{name}_ms"] = 1e3 * statistics.median(times)
        found[f"{name}_gb"] = torch.cuda.max_memory_allocated() / 1e9
        del model, objective, total
    setattr(head, key, usual)
    require(max(values) - min(values) < 0.02, f"the losses are {values}")
    return found | (_sums_of_products(stage) if stage.on_gpu else {})


def _sums_of_products(stage: Stage) -> dict[str, float]:
    """Returns the milliseconds of one chunk's part of the gradient of GPT-2's head, in two ways."""
    scores = torch.randn(2668, 50304, device=stage.device, dtype=torch.bfloat16)
    x = torch.randn(2668, 768, device=stage.device, dtype=torch.bfloat16)
    total = torch.zeros(50304, 768, device=stage.device)

    def rounded() -> None:
        total.add_(scores.T @ x)

    def within() -> None:
        torch.addmm(total, scores.T, x, out_dtype=torch.float32, out=total)

    found = {}
    for function in (rounded, within):
        times = []
        try:
            for _ in range(10):
                stage.sync()
                start = time.perf_counter()
                function()
                stage.sync()
                times.append(time.perf_counter() - start)
        except (TypeError, RuntimeError, NotImplementedError) as err:
            print(f"{function.__name__}: {err}", flush=True)
            continue
        found[f"sum_{function.__name__}_ms"] = 1e3 * statistics.median(times)
    return found


def small_step(stage: Stage) -> dict[str, Any]:
    """What a step of a small model takes, and what of it the host computes: it is what a host cannot hide."""
    shape = {"vocab_size": 512, "context": 128, "num_layers": 4, "num_heads": 4, "width": 128}
    shape |= stage.size({}, {"context": 16, "num_layers": 1, "width": 32})
    found: dict[str, Any] = {}
    for name, compiles in (("eager", False), ("compiled", True)):
        settings = {"compile": compiles, "precision": "float32"}
        sections = sections_of(shape, local_size=stage.size(8, 1), train=settings)
        trainer = training_of(sections, stage.folder / name)
        trainer.advance(stage.size(5, 1))
        steps = stage.size(200, 2)
        stage.sync()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        trainer.advance(trainer.position.step + steps)
        stage.sync()
        found[f"{name}_step_ms"] = 1e3 * (time.perf_counter() - start_s) / steps
        found[f"{name}_host_cpu_ms"] = 1e3 * (time.process_time() - cpu_s) / steps
        release(trainer)
    return found
