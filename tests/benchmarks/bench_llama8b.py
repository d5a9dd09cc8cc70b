"""Llama 3 8B on one GPU: a slice of it, the whole where parameters can be bfloat16, and the stall of a save.

    python -m tests.benchmarks.bench_llama8b --out DIR
    python -m tests.benchmarks.bench_llama8b --tiny            # on a CPU: shows that every line runs, no speed

Eight of 32 layers have the widths, the vocabulary and the sequences of the whole model, and its kernels; embedding and
head weigh more in it. Each variant is a process of its own; both formulas of the MFU count the slice's own operations.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.loops import (
    Figures,
    Loop,
    Run,
    keep,
    left_out,
    machine,
    markdown,
    not_measured,
    row,
    serve,
    start_loops,
    take_turns,
)
from tests.support.options import read_options

MODULE = "tests.benchmarks.bench_llama8b"
LLAMA = {
    "vocab_size": 128256, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "width": 4096, "hidden": 14336,
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "rope_theta": 5e5, "tied": False,
}  # fmt: skip
"""Llama 3 8B, as conf/model/llama3-8b.yaml has it."""
TINY = {**LLAMA, "vocab_size": 512, "num_heads": 4, "num_kv_heads": 2, "width": 64, "hidden": 128}
_OF_A_SAVE = ("save_stall_s", "two_steps_with_save_s", "save_s", "state_gb")


def variants(*, tiny: bool, context: int, local_size: int) -> dict[str, dict[str, Any]]:
    """Returns the variants by name: layers, sequences of a micro-batch and settings by key."""
    few, whole = (2, 4) if tiny else (8, 32)
    kinds = {kind: {"parallel.activation_checkpointing": kind} for kind in ("none", "selective", "alternate", "full")}
    found: dict[str, tuple[int, dict[str, Any]]] = {f"{few} layers, {kind}": (few, kinds[kind]) for kind in kinds}
    found[f"{few} layers, not compiled"] = few, {"train.compile": False}
    for kind in ("selective", "full"):
        settings = {"train.param_dtype": "bfloat16", **kinds[kind]}
        found[f"whole, bfloat16 parameters, {kind}"] = whole, settings
    size = {"local_size": local_size, "context": context}
    return {name: {"num_layers": layers, "settings": settings, **size} for name, (layers, settings) in found.items()}


def main() -> None:
    """Measures and prints."""
    asked = read_options(
        out=Path, tiny=False, context=4096, local_size=2, only=(), rounds=3, steps=5, budget_s=520.0, no_save=False,
        trace=False, loop=str,
    )  # fmt: skip
    if asked.loop:
        serve(build, json.loads(asked.loop))
    if asked.tiny:
        asked.context, asked.rounds, asked.steps = 32, 1, 2
    until_s, rows, notes, late = time.monotonic() + asked.budget_s, list[Figures](), list[str](), list[str]()
    chosen = variants(tiny=asked.tiny, context=asked.context, local_size=asked.local_size)
    with tempfile.TemporaryDirectory() as scratch:
        for name, variant in chosen.items():
            if asked.only and not any(word in name for word in asked.only):
                continue
            if time.monotonic() > until_s:
                late.append(name)
                continue
            with contextlib.ExitStack() as undo:
                loops, failed = start_loops(MODULE, {name: {**variant, "tiny": asked.tiny}}, Path(scratch), undo)
                notes += failed
                try:
                    rows += [_measure(loop, variant, asked, is_first=not rows, notes=notes) for loop in loops]
                except RuntimeError as err:
                    notes.append(not_measured(name, err))
    notes += left_out(late)
    facts = machine() | {"model": "Llama 3 8B" if not asked.tiny else "tiny", "context": asked.context}
    text = "\n\n".join([markdown("Llama 3 8B on one device", facts, rows), *notes])
    keep(asked.out, "bench_llama8b", {"facts": facts, "variants": rows, "notes": notes, "left_out": late}, text)


def _measure(loop: Loop, variant: Mapping[str, Any], asked: Any, *, is_first: bool, notes: list[str]) -> Figures:
    take_turns([loop], rounds=asked.rounds, steps=asked.steps)
    found = row(loop, tokens=variant["local_size"] * variant["context"])
    found |= {"parameters": loop.facts["parameters"], **dict.fromkeys(_OF_A_SAVE)}
    if is_first and not asked.no_save:
        found |= loop.ask({"save": True}, timeout_s=400)
    if asked.trace:
        notes.append(loop.trace())
    return found


def build(order: Mapping[str, Any]) -> tuple[Run, Figures]:
    """Builds this trainer for a variant."""
    import torch

    from slurm_train.config.schema import nested
    from slurm_train.train.metrics import flops_per_token, peak_flops
    from tests.gpu.training import save_soon, sections_of, training_of

    changes: dict[str, Any] = nested(order["settings"])
    # Saves are asked for here; one checkpoint at a time has room on the disk.
    changes["checkpoint"] = {"every_steps": None, "keep": 1}
    changes["train"] = {"max_steps": 10**6, "compile": not order["tiny"], **changes.get("train", {})}
    shape = {**(TINY if order["tiny"] else LLAMA), "num_layers": order["num_layers"], "context": order["context"]}
    sections = sections_of(shape, local_size=order["local_size"], **changes)
    trainer = training_of(sections, Path(order["folder"], "run"))
    device = trainer.rank.device
    facts = {
        "flops": flops_per_token(trainer.model, positions=order["context"]),
        "peak": peak_flops(device),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }

    def run(steps: int) -> None:
        trainer.advance(trainer.position.step + steps)

    def save() -> Figures:
        saves = trainer.saves
        trainer.saver.prepare()
        saves.finish()
        trainer.stepper.drain()
        before_s, began_s = saves.times.blocked_s, time.perf_counter()
        save_soon(trainer)
        run(2)
        if device.type == "cuda":
            torch.cuda.synchronize()
        stepped_s = time.perf_counter() - began_s
        saves.finish()
        return {
            "save_stall_s": saves.times.blocked_s - before_s,
            "two_steps_with_save_s": stepped_s,
            "save_s": saves.times.newest_s,
            "state_gb": saves.buffers.num_bytes / 1e9,
        }

    return run, {**facts, "save": save}


if __name__ == "__main__":
    main()
