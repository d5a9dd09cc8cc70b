"""Llama 3 8B on one GPU: a slice of it, the whole where parameters can be bfloat16, and the stall of a save.

    python -m tests.benchmarks.bench_llama8b --out DIR
    python -m tests.benchmarks.bench_llama8b --tiny            # on a CPU: shows that every line runs, no speed

Eight of 32 layers have the widths, the vocabulary and the sequences of the whole model, and its kernels; embedding and
head weigh more in it. Each variant is a process of its own; both formulas of the MFU count the slice's own operations.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks import trace_summary
from tests.benchmarks.loops import Figures, Loop, Run, keep, machine, markdown, opened, row, serve, take_turns

MODULE = "tests.benchmarks.bench_llama8b"
LLAMA = {
    "vocab_size": 128256, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "width": 4096, "hidden": 14336,
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "rope_theta": 5e5, "tied": False,
}  # fmt: skip
"""Llama 3 8B, as conf/model/llama3-8b.yaml has it."""
TINY = {**LLAMA, "vocab_size": 512, "num_heads": 4, "num_kv_heads": 2, "width": 64, "hidden": 128}
_BFLOAT16_KEY = "param_dtype"
_OF_A_SAVE = ("save_stall_s", "two_steps_with_save_s", "save_s", "state_gb")


def variants(*, tiny: bool, context: int, local_size: int) -> dict[str, dict[str, Any]]:
    """Returns the variants by name: layers, sequences of a micro-batch and settings by key."""
    few = {"num_layers": 2 if tiny else 8, "local_size": local_size, "context": context}
    found: dict[str, dict[str, Any]] = {
        f"{few['num_layers']} layers, {kind}": {**few, "settings": {"parallel.activation_checkpointing": kind}}
        for kind in ("none", "selective", "full")
    }
    found[f"{few['num_layers']} layers, not compiled"] = {**few, "settings": {"train.compile": False}}
    if has_bfloat16_parameters():
        whole = {"num_layers": 4 if tiny else 32, "local_size": local_size, "context": context}
        half = {f"train.{_BFLOAT16_KEY}": "bfloat16"}
        for kind in ("selective", "full"):
            settings = {**half, "parallel.activation_checkpointing": kind}
            found[f"whole, bfloat16 parameters, {kind}"] = {**whole, "settings": settings}
    return found


def has_bfloat16_parameters() -> bool:
    """Returns whether the configuration can ask for parameters in bfloat16; in float32 8B needs 128 GB of state."""
    from slurm_train.config.schema import TrainSection

    return _BFLOAT16_KEY in TrainSection.__dataclass_fields__


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the table as Markdown and JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for the CPU")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--local-size", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--only", nargs="*", help="variants whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--budget-s", type=float, default=520.0, help="after it, no further variant is begun")
    parser.add_argument("--no-save", action="store_true", help="do not measure the stall of a save")
    parser.add_argument("--trace", action="store_true", help="add where the time of a step goes")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.loop:
        serve(build, json.loads(asked.loop))
    if asked.tiny:
        asked.context, asked.rounds, asked.steps = 32, 1, 2
    until_s, rows, notes, left_out = time.monotonic() + asked.budget_s, list[Figures](), list[str](), list[str]()
    chosen = variants(tiny=asked.tiny, context=asked.context, local_size=asked.local_size)
    with tempfile.TemporaryDirectory() as scratch:
        for name, variant in chosen.items():
            if asked.only and not any(word in name for word in asked.only):
                continue
            if time.monotonic() > until_s:
                left_out.append(name)
                continue
            folder = Path(tempfile.mkdtemp(dir=scratch))
            loop = Loop(MODULE, name, {**variant, "tiny": asked.tiny, "folder": str(folder)}, log=folder / "log.txt")
            try:
                with opened([loop]):
                    rows.append(_measure(loop, variant, asked, is_first=not rows, notes=notes, folder=folder))
            except RuntimeError as err:
                notes.append(f"`{name}` could not be measured:\n\n```\n{str(err)[-1500:]}\n```")
    if not has_bfloat16_parameters():
        notes.append("The whole model was not tried: parameters are always float32 here, which is 128 GB of state.")
    if left_out:
        notes.append(f"Left out, since the budget was spent: {', '.join(left_out)}.")
    facts = machine() | {"model": "Llama 3 8B" if not asked.tiny else "tiny", "context": asked.context}
    text = "\n\n".join([markdown("Llama 3 8B on one device", facts, rows), *notes])
    keep(asked.out, "bench_llama8b", {"facts": facts, "variants": rows, "notes": notes, "left_out": left_out}, text)


def _measure(
    loop: Loop, variant: Mapping[str, Any], asked: argparse.Namespace, *, is_first: bool, notes: list[str], folder: Path
) -> Figures:
    loop.await_ready(timeout_s=300)
    facts = loop.facts
    take_turns([loop], rounds=asked.rounds, steps=asked.steps)
    tokens = variant["local_size"] * variant["context"]
    found = row(loop, base=loop, tokens=tokens, flops=facts["flops"], peak=facts["peak"])
    for key in [key for key in found if key.startswith("speed_against")]:
        del found[key]
    found |= {"parameters": facts["parameters"], **dict.fromkeys(_OF_A_SAVE)}
    if is_first and not asked.no_save:
        found |= loop.ask({"save": True}, timeout_s=400)["save"]
    if asked.trace:
        path = folder / "trace.json"
        loop.ask({"steps": 2, "trace": str(path)})
        summary = trace_summary.summarise(trace_summary.read(path))
        notes.append(f"## {loop.name}: where a step's time goes\n\n{trace_summary.table(summary, steps=2)}")
    return found


def build(order: Mapping[str, Any]) -> tuple[Run, Figures]:
    """Builds this trainer for a variant."""
    import torch

    from slurm_train.config.schema import nested
    from slurm_train.train.metrics import flops_per_token, peak_flops
    from tests.gpu.training import sections_of, training_of

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
        checkpointer = trainer.checkpointer
        checkpointer.prepare()
        checkpointer.finish()
        trainer.stepper.drain()
        before_s, began_s = checkpointer.blocked_s, time.perf_counter()
        checkpointer.save_soon(trainer.position)
        run(2)
        if device.type == "cuda":
            torch.cuda.synchronize()
        stepped_s = time.perf_counter() - began_s
        checkpointer.finish()
        return {
            "save_stall_s": checkpointer.blocked_s - before_s,
            "two_steps_with_save_s": stepped_s,
            "save_s": checkpointer.last_save_s,
            "state_gb": checkpointer.buffers.num_bytes / 1e9,
        }

    return run, {**facts, "save": save}


if __name__ == "__main__":
    main()
