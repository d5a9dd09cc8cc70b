"""Checks of the training itself, each on one rank with NCCL: bits, masks, saves, FSDP, compilation."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slurm_train.checkpoint.load import load_tensors, read_model, weights_digest
from slurm_train.checkpoint.state import training_state
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.float8 import gather_in_float8, to_float8
from slurm_train.distributed.parallelize import build_mesh, prepare_blocks, shard, units
from slurm_train.metrics import read_metrics
from slurm_train.models.blocks import Places
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.train.build import TURN_OF_A_THREAD_S
from slurm_train.train.layout import build_inputs
from slurm_train.train.optimizer import build_optimizer
from slurm_train.train.passes import ShardPasses
from slurm_train.train.step import StepFacts, Stepper
from slurm_train.train.trainer import Trainer
from tests.gpu.catalogue import Stage, require
from tests.gpu.training import (
    GPT2,
    SMALL,
    RandomTokens,
    Sections,
    farthest,
    next_losses,
    open_rank,
    release,
    save_soon,
    sections_of,
    training_of,
)
from tests.support.sessions import join_alone

# Dropout is on, so that random streams are compared as well.
_DROPPING = {**SMALL, "dropout": 0.1}
# With eight sequences of 128 tokens these are more scores than are computed at once: the head works in chunks.
_MANY_IDS = {**SMALL, "vocab_size": 8192}
_MANY_IDS_DROPPING = {**_DROPPING, "vocab_size": 8192}
_ROPE = {**SMALL, "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "tied": False}


def no_sync(stage: Stage) -> dict[str, Any]:
    """No step waits for the device, in any setting that changes what a step does."""
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "no clipping": {"optim": {"grad_clip_norm": None}},
        "spikes are skipped": {"health": {"spike_factor": 3.0, "on_spike": "skip", "on_non_finite": "skip"}},
        "two micro-batches": {"batch": {"accumulation": 2}},
        "dropout": {"model": _DROPPING},
        "compiled": {"train": {"compile": True}},
        "scores in chunks": {"model": _MANY_IDS},
        "scores in chunks, compiled": {"model": _MANY_IDS, "train": {"compile": True}},
    }
    for name, changes in settings.items():
        trainer = training_of(sections_of(**changes), stage.folder / name.replace(" ", "_"))
        trainer.advance(3)
        stage.sync()
        with _refused_syncs(stage):
            trainer.advance(12)
        trainer.stepper.drain()
        release(trainer)
    return {"settings": len(settings), "steps": 9}


@contextlib.contextmanager
def _refused_syncs(stage: Stage) -> Iterator[None]:
    """torch raises where the host would wait for the GPU; `Event.synchronize` of the step before is not among them."""
    if stage.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if stage.on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def resume_bits(stage: Stage) -> dict[str, Any]:
    """20 steps give the bits of 10, a stop, a resume and 10 more; without `train.deterministic` it is only reported."""
    found: dict[str, Any] = {}
    for name, train in (
        ("default", {}),
        ("deterministic", {"deterministic": True}),
        ("deterministic, compiled", {"deterministic": True, "compile": True}),
    ):
        steps = {"max_steps": stage.size(20, 6), "log_every_steps": 1}
        model = {**_MANY_IDS_DROPPING, "num_layers": stage.size(2, 1)}
        sections = sections_of(model, train={**steps, **train})
        folder = stage.folder / name.replace(", ", "_")
        whole = _train(sections, folder / "whole")
        _train(sections, folder / "parts", stop_at=stage.size(10, 3))
        parts = _train(sections, folder / "parts", attempt=1)
        found[name] = {"equal": whole == parts, "farthest_loss": farthest(whole[1], parts[1])}
        if name != "default":
            require(whole[1] == parts[1], f"{name}: losses differ by up to {found[name]['farthest_loss']:.3g}")
            require(whole[0] == parts[0], f"{name}: the weights differ after equal losses")
    return {**found, "equal_by_default": found["default"]["equal"]}


def _train(sections: Sections, folder: Path, *, stop_at: int = 0, attempt: int = 0) -> tuple[str, list[float]]:
    """Returns the digest of the weights at the end, and the losses of the run's steps so far."""
    trainer = training_of(sections, folder, attempt=attempt)
    if stop_at:
        trainer.advance(stop_at - 1)
        trainer.rank.stop.request()
    finished = trainer.run()
    require(finished != bool(stop_at), f"the run ended at step {trainer.position.step}: {trainer.stops.not_saved}")
    if attempt:
        first = read_metrics(trainer.rank.run.metrics)
        require({line["attempt"] for line in first} == {0, attempt}, "the second attempt did not resume")
    digest = weights_digest(trainer.model.named_parameters())
    losses = [line["loss"] for line in read_metrics(trainer.rank.run.metrics)]
    release(trainer)
    return digest, losses


def program_saves(stage: Stage) -> dict[str, Any]:
    """A program's background saves have the values of their steps, and a resume has the bits of its training."""
    width = stage.size(2048, 16)
    heart = Heartbeat()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) if number % 3 else nn.Dropout(0.1) for number in range(12)]
        model = nn.Sequential(*layers).to(stage.device)
        return model, torch.optim.AdamW(model.parameters(), fused=stage.on_gpu)

    def train(run: RunDirectory, *, last: int) -> list[float]:
        mine = join_alone(run, heartbeat=heart)
        model, optimizer = build()
        training = mine.training(model, optimizer)
        losses = []
        for step in range(training.resume() + 1, last + 1):
            loss = model(torch.ones(8, width, device=stage.device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            mine.report(step, loss=losses[-1])
            training.save(step)
            digests[run.name, step] = weights_digest(model.named_parameters())
            with torch.no_grad():
                # What comes at once after a save.
                torch._foreach_mul_(list(model.parameters()), 1.0)
        mine.close()
        newest = list_checkpoints(run.checkpoints)[0]
        saved = weights_digest(read_model(newest)[1].items())
        require(saved == digests[run.name, last], f"{newest.name} has other values than those of its step")
        return losses

    digests: dict[tuple[str, int], str] = {}
    whole, parts = (RunDirectory(stage.folder / name / "0123456789ab") for name in ("whole", "parts"))
    for run in (whole, parts):
        run.path.mkdir(parents=True)
    expected = train(whole, last=stage.size(20, 6))
    losses = train(parts, last=stage.size(10, 3)) + train(parts, last=stage.size(20, 6))
    heart.stop()
    require(losses == expected, f"losses differ by up to {farthest(expected, losses):.3g}")
    return {"steps": len(losses), "saves": len(digests)}


def nan_is_masked(stage: Stage) -> dict[str, Any]:
    """An infinite gradient leaves parameters, moments and step counts as they are, and the next step works again."""
    trainer = training_of(sections_of(health={"on_non_finite": "skip"}), stage.folder / "run")
    trainer.advance(3)
    trainer.stepper.drain()
    before = _copies(trainer)
    parameter = next(trainer.model.parameters())
    hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    trainer.advance(4)
    result = trainer.stepper.drain() or trainer.newest
    hook.remove()
    require(result is not None and not result.applied, f"the step was applied: {result}")
    changed = [name for name, tensor in _copies(trainer).items() if not torch.equal(tensor, before[name])]
    require(not changed, f"changed by a step that is not finite: {', '.join(changed[:5])}")
    trainer.advance(6)
    trainer.stepper.drain()
    after = _copies(trainer)
    same = [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
    broken = [name for name, tensor in after.items() if not tensor.isfinite().all()]
    require(not same and not broken, f"after it: {len(same)} tensors stand still, {len(broken)} are not finite")
    return {"tensors": len(before)}


def _copies(trainer: Trainer) -> dict[str, Tensor]:
    """Returns copies of parameters and optimizer state by name."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    found = dict(trainer.model.named_parameters())
    for parameter, state in trainer.parts.optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def save_race(stage: Stage) -> dict[str, Any]:
    """What is saved in the background is the state of its step, though the next update and poison follow at once."""
    model = stage.size({**SMALL, "width": 1024, "num_heads": 16, "num_layers": 12, "vocab_size": 32768}, SMALL)
    trainer = training_of(sections_of(model, local_size=2), stage.folder / "run")
    trainer.advance(2)
    parts = trainer.parts
    saves = trainer.saves
    for _ in range(3):
        trainer.stepper.drain()
        live = _tensors_to_save(parts)
        expected = tree_map(_clone, live)
        save_soon(trainer)
        trainer.advance(trainer.position.step + 1)
        saves.buffers.hold_changes()
        with torch.no_grad():
            # No update may follow this: only the copy of the save protects what is written.
            tree_map(lambda value: value.fill_(-7) if isinstance(value, Tensor) else value, _tensors_to_save(parts))
        saves.finish()
        newest = list_checkpoints(trainer.rank.run.checkpoints)[0]
        read = tree_map(
            lambda value: torch.zeros_like(value, device="cpu") if isinstance(value, Tensor) else value, live
        )
        load_tensors(newest, read)
        _require_equal(read, expected, where=newest.name)
        with torch.no_grad():
            tree_map(lambda to, value: to.copy_(value) if isinstance(to, Tensor) else to, live, expected)
    num_bytes = saves.buffers.num_bytes
    return {"saves": 3, "copied_gb": num_bytes / 1e9, "stall_s_per_save": saves.times.blocked_s / 3}


def _tensors_to_save(parts: Any) -> dict[str, Any]:
    state = training_state(parts.model, parts.optimizer)
    return {"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}}


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _require_equal(read: Any, expected: Any, *, where: str, name: str = "") -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            _require_equal(read[key], value, where=where, name=f"{name}.{key}")
    elif isinstance(expected, Tensor):
        require(torch.equal(read, expected.cpu()), f"{where} has other values of {name} than those of its step")


def save_overlaps(stage: Stage) -> dict[str, Any]:
    """A save costs a training at most one step, 1 % of the hundred between two saves, and 25 ms of an idle GPU.

    What it costs is what forty steps in a row take longer if a save begins before the first and is written meanwhile.
    The ratio of two single steps, each on an idle GPU, is reported besides.
    """
    found: dict[str, Any] = {}
    for compiles in (True, False):
        name = "compiled" if compiles else "eager"
        found |= {f"{name}_{key}": value for key, value in _steps_with_saves(stage, name, compiles=compiles).items()}
    print(found, flush=True)
    if stage.on_gpu:
        for name in ("compiled", "eager"):
            step_ms = found[f"{name}_window_ms"] / found[f"{name}_window_steps"]
            require(found[f"{name}_save_costs_ms"] <= step_ms, f"a save costs more than a step: {found}")
            require(found[f"{name}_idle_ms"] <= 25, f"the GPU is idle for longer than 25 ms: {found}")
    return found


def _steps_with_saves(stage: Stage, name: str, *, compiles: bool) -> dict[str, float]:
    """Returns what steps take: plain ones, those with a save, and those with nothing but its copy."""
    model, local_size = stage.size((GPT2, 24), (SMALL, 2))
    # As the ranks of a run have it.
    sys.setswitchinterval(TURN_OF_A_THREAD_S)
    changes = {"batch": {"accumulation": 2}, "train": {"compile": compiles}}
    trainer = training_of(sections_of(model, local_size=local_size, **changes), stage.folder / name)
    saves = trainer.saves
    trainer.advance(5)
    trainer.saver.prepare()
    cost = _cost_of_a_save(stage, trainer)
    kinds = ("plain", "saving", "plain", "copying", "plain", "plain")
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    stalls = []
    for number in range(30):
        kind = kinds[number % len(kinds)]
        trainer.stepper.drain()
        saves.finish()
        stage.sync()
        before_s = saves.times.blocked_s
        with _timed(stage) as took:
            if kind == "saving":
                save_soon(trainer)
            if kind == "copying":
                saves.buffers.stage(_tensors_to_save(trainer.parts))
            trainer.advance(trainer.position.step + 1)
        # What was saved first had its memory made.
        if number >= len(kinds):
            steps[kind].append(1e3 * took[0]())
            stalls += [1e3 * (saves.times.blocked_s - before_s)] if kind == "saving" else []
    saves.finish()
    stage.sync()
    begin_s = time.perf_counter()
    saves.buffers.stage(_tensors_to_save(trainer.parts))
    stage.sync()
    copy_ms = 1e3 * (time.perf_counter() - begin_s)
    medians = {f"{kind}_ms": statistics.median(values) for kind, values in steps.items()}
    found = {
        **medians,
        **cost,
        "ratio": medians["saving_ms"] / medians["plain_ms"],
        "host_stall_ms": statistics.median(stalls),
        "copy_ms": copy_ms,
        "state_gb": saves.buffers.num_bytes / 1e9,
        "save_s": saves.times.longest_s,
    }
    release(trainer)
    return found


def _cost_of_a_save(stage: Stage, trainer: Trainer) -> dict[str, float]:
    """Returns how much longer steps take in a row if a save begins after the first and is written meanwhile.

    "idle_ms" is the time from the end of the first step on the GPU until the save has given the host back.
    """
    num_steps = stage.size(40, 4)
    windows_ms: dict[str, list[float]] = {"plain": [], "saving": []}
    idle_ms = []
    # The first save makes what the later ones use again.
    for kind in ("saving", "plain", "saving", "saving", "plain"):
        stage.sync()
        with _timed(stage) as took:
            trainer.advance(trainer.position.step + 1)
            if kind == "saving":
                with _timed(stage, waits=False) as idle:
                    save_soon(trainer)
            trainer.advance(trainer.position.step + num_steps - 1)
        if kind == "saving":
            idle_ms.append(1e3 * idle[0]())
        trainer.saves.finish()
        windows_ms[kind].append(1e3 * took[0]())
    means = {kind: statistics.mean(values[-2:]) for kind, values in windows_ms.items()}
    return {
        "window_steps": num_steps,
        "window_ms": means["plain"],
        "save_costs_ms": means["saving"] - means["plain"],
        "idle_ms": statistics.mean(idle_ms[1:]),
    }


@contextlib.contextmanager
def _timed(stage: Stage, *, waits: bool = True) -> Iterator[list[Callable[[], float]]]:
    """Gives what says the seconds that a piece of work takes on the GPU, from its first to its last kernel.

    Args:
        stage: where.
        waits: whether to wait for the last one here; else the asking waits.
    """
    took: list[Callable[[], float]] = []
    if not stage.on_gpu:
        start = time.perf_counter()
        yield took
        seconds = time.perf_counter() - start
        took.append(lambda: seconds)
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    yield took
    end.record()

    def elapsed() -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    if waits:
        elapsed()
    took.append(elapsed)


def fsdp_one_rank(stage: Stage) -> dict[str, Any]:
    """FSDP with a bfloat16 policy stays near the unsharded model, turns by float32 angles, and can offload."""
    plain = training_of(sections_of(_ROPE, train={"precision": "bfloat16"}), stage.folder / "plain")
    plain.advance(1)
    expected = next_losses(plain, 6)
    release(plain)
    seen: set[torch.dtype] = set()
    rotate = Places.rotate

    def noted(self: Places, x_BHTD: Tensor) -> Tensor:
        seen.add(self.cos_TD.dtype)
        return rotate(self, x_BHTD)

    Places.rotate = noted  # type: ignore[method-assign]
    found = {}
    try:
        for name, offload in (("sharded", False), ("offloaded", True)):
            losses = _sharded_losses(stage, stage.folder / name, steps=7, offload=offload)[1:]
            found[name] = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    finally:
        Places.rotate = rotate  # type: ignore[method-assign]
    require(seen == {torch.float32}, f"angles came as {seen}")
    for name, off in found.items():
        require(off < 0.02, f"{name}: losses are up to {off:.1%} from the unsharded model's")
    return {f"{name}_farthest": off for name, off in found.items()}


def float8(stage: Stage) -> dict[str, Any]:
    """Products in float8 train nearly as those in bfloat16, with weights that FSDP gathers in float8, and without."""
    require(importlib.util.find_spec("torchao") is not None, "torchao is not installed: pip install torchao")
    plain = training_of(sections_of(_ROPE, train={"precision": "bfloat16"}), stage.folder / "plain")
    plain.advance(1)
    expected = next_losses(plain, 6)
    release(plain)
    losses = {}
    for name, gathers in (("bfloat16", False), ("float8", True)):
        lowers = Lowers(gathers=gathers)
        losses[name] = _sharded_losses(stage, stage.folder / name, steps=7, offload=False, lowers=lowers)[1:]
    found = {name: max(abs(a - b) / b for a, b in zip(own, expected, strict=True)) for name, own in losses.items()}
    for name, off in found.items():
        require(0 < off < 0.02, f"gathered in {name}: losses are up to {off:.1%} from those in bfloat16")
    return {f"gathered_in_{name}_farthest": off for name, off in found.items()}


class Lowers(NamedTuple):
    """That products are in float8."""

    gathers: bool
    """Whether FSDP gathers their matrices so, too."""


def _sharded_losses(
    stage: Stage, folder: Path, *, steps: int, offload: bool, lowers: Lowers | None = None
) -> list[float]:
    """Returns the losses of a model that FSDP has wrapped over a mesh of one rank."""
    sections = sections_of(_ROPE, train={"precision": "bfloat16"})
    rank = open_rank(sections, folder)
    # Every batch in the order in which the trainer takes them.
    reference = training_of(sections, folder / "order")
    torch.manual_seed(rank.config.seed)
    model = GPT(**{key: value for key, value in sections["model"].items() if key != "_target_"})
    if lowers is not None:
        to_float8(model, blocks=units(model), emulate=not stage.on_gpu)
        if lowers.gathers:
            gather_in_float8(model.to(stage.device), num_shards=1)
    _shard_alone(model, ParallelSection(gather_dtype="bfloat16", cpu_offload=offload), stage)
    inputs = build_inputs(rank, gathers_half=True, casts_shards=True)
    optimizer = build_optimizer(model, optim=rank.config.optim)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if offload:
        require(parameters[0].device.type == "cpu", "the parameters are not on the host")
    passes = ShardPasses(rank, inputs, model=model, objective=Objective(model), parameters=parameters)
    stepper = Stepper(rank, passes, optimizer)
    losses = []
    for step in range(1, steps + 1):
        lr = reference.schedule.lr_at(step * rank.plan.global_size)
        result = stepper.step(StepFacts(step, step, lr), reference.samples) or stepper.drain()
        assert result is not None
        losses.append(result.loss)
    release(reference)
    return losses


def _shard_alone(model: GPT, settings: ParallelSection, stage: Stage) -> None:
    """Wraps a model for FSDP over a mesh of one rank."""
    layout = ParallelLayout()
    mesh = build_mesh(layout, device=stage.device)
    shard(model, layout=layout, mesh=mesh, roots=[model], settings=settings)


def compiled_everywhere(stage: Stage) -> dict[str, Any]:
    """Whatever is recomputed and however parameters are held, blocks are compiled, and the loss with them."""
    from torch._dynamo.utils import counters

    found: dict[str, Any] = {}
    for kind in ("none", "selective", "alternate", "full"):
        for layout in ("replica", "sharded"):
            torch._dynamo.reset()
            counters.clear()
            name = f"{layout}, {kind}"
            operations = _compiled_step(stage, kind=kind, layout=layout)
            graphs = counters["stats"].get("unique_graphs", 0)
            found[name] = graphs
            require(graphs > 0, f"{name}: nothing was compiled")
            if layout == "replica" and kind == "none":
                eager = [one for one in operations if one in ("aten::_log_softmax", "aten::nll_loss_forward")]
                found["eager_operations_of_the_loss"] = len(eager)
                if stage.on_gpu:
                    require(not eager, f"the loss is not compiled: {', '.join(eager)} ran by themselves")
    return {**found, "graphs": sum(value for key, value in found.items() if ", " in key)}


def _compiled_step(stage: Stage, *, kind: str, layout: str) -> list[str]:
    """Returns the names of torch's own operations in a compiled step."""
    folder = stage.folder / f"{layout}_{kind}"
    settings = {"activation_checkpointing": kind}
    # One block says as much as many, and a CPU takes long to compile.
    model = {**SMALL, "num_layers": stage.size(2, 1)}
    if layout == "replica":
        trainer = training_of(sections_of(model, train={"compile": True}, parallel=settings), folder)
        trainer.advance(2)
        stage.sync()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            trainer.advance(3)
            stage.sync()
        release(trainer)
        return [event.key for event in profiled.key_averages()]
    rank = open_rank(sections_of(model), folder)
    module = GPT(**model)  # type: ignore[arg-type]
    section = ParallelSection(gather_dtype="bfloat16", activation_checkpointing=kind)  # type: ignore[arg-type]
    prepare_blocks(module, settings=section, compiles=True)
    _shard_alone(module, section, stage)
    batch = RandomTokens(vocab_size=512, context=128).batch(torch.arange(2).numpy())
    objective: nn.Module = Objective(module)
    objective(tuple(tensor.to(rank.device) for tensor in batch))[0].backward()
    return []
