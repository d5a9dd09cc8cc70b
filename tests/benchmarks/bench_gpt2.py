"""GPT-2 124M on one GPU: this trainer against a tuned plain loop, Lightning and accelerate, in turns in one run.

    python -m tests.benchmarks.bench_gpt2 --out DIR            # the peers, then each of our items switched off
    python -m tests.benchmarks.bench_gpt2 --with train.compile=false --only ours
    python -m tests.benchmarks.bench_gpt2 --tiny               # on a CPU: shows that every line runs, no speed

The plain loop has what a tuned script of its kind has: one compiled module with loss, fused query, key and value,
flash attention, bfloat16 autocast, TF32, a vocabulary padded to 50,304, fused AdamW, batches copied while the GPU
works, the loss read every ten steps. Lightning and accelerate train the same module. All have the same batch, and the
operations per token of the published model count for all, so a padded vocabulary is no gain by itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slurm_train.config.schema import nested
from slurm_train.models import blocks
from slurm_train.models.gpt import GPT
from slurm_train.rundir.heartbeat import Limits
from slurm_train.train.metrics import flops_per_token, peak_flops
from tests.benchmarks.loops import Figures, Run, keep, left_out, machine, markdown, row, serve, start_loops, take_turns
from tests.gpu.training import GPT2, RandomTokens, build_of, open_rank, sections_of
from tests.support.options import read_options

MODULE = "tests.benchmarks.bench_gpt2"
TINY = {"vocab_size": 500, "context": 32, "num_layers": 1, "num_heads": 2, "width": 32}
ITEMS: dict[str, dict[str, Any]] = {
    # These change nothing that is compiled, so they start from what the first loops have left.
    "fused AdamW": {"optim.fused": False, "optim.foreach": True},
    "clipping": {"optim.grad_clip_norm": None},
    "log every step": {"train.log_every_steps": 1},
    "sample digests": {"train.samples_digest": True},
    "spikes are watched": {"health.spike_factor": 3.0, "health.on_spike": "skip"},
    "compile": {"train.compile": False},
    "bfloat16": {"train.precision": "float32"},
    "deterministic": {"train.deterministic": True},
    "one product for q, k, v": {"without": "_is_special"},
    "bfloat16 residual stream": {"without": "_as_stream"},
}
"""What is switched off, or on, one by one: settings on top of ours; or what `models.blocks` does without a setting."""
_TOGETHER = 6
"""Loops that are alive at the same time: each keeps a model and its moments on the device."""
_PADDED = 128


def main() -> None:
    """Measures and prints."""
    asked = read_options(
        out=Path, tiny=False, only=(), rounds=6, steps=10, local_size=16, accumulation=2, budget_s=540.0, trace=False,
        loop=str, **{"with": ()},
    )  # fmt: skip
    if asked.loop:
        order = json.loads(asked.loop)
        serve(LOOPS[order["kind"]], order)
    until_s = time.monotonic() + asked.budget_s
    order = {"tiny": asked.tiny, "local_size": asked.local_size, "accumulation": asked.accumulation}
    if asked.tiny:
        order |= {"local_size": 2}
        asked.rounds, asked.steps = min(asked.rounds, 2), min(asked.steps, 2)
    how = {"rounds": asked.rounds, "steps": asked.steps, "until_s": until_s}
    with tempfile.TemporaryDirectory() as scratch:
        kinds: dict[str, Any] = {name: {"kind": name} for name in asked.only or LOOPS}
        rows, notes = compare(kinds, order, Path(scratch), trace=asked.trace, **how)
        given = {text: text.partition("=") for text in getattr(asked, "with")}
        extra = {f"ours, {text}": {key: _value(value)} for text, (key, _, value) in given.items()}
        items = {} if asked.only else {f"ours, {name}": settings for name, settings in ITEMS.items()}
        changed = list({**items, **extra}.items())
        late, ablation = [], []
        for start in range(0, len(changed), _TOGETHER - 1):
            wave = dict(changed[start : start + _TOGETHER - 1])
            if time.monotonic() > until_s:
                late += list(wave)
                continue
            kinds = {name: {"kind": "ours", "settings": settings} for name, settings in wave.items()}
            found, own = compare({"ours": {"kind": "ours"}, **kinds}, order, Path(scratch), **how)
            ablation += found if not ablation else found[1:]
            notes += own
    facts = machine() | {"model": "GPT-2 124M" if not asked.tiny else "tiny", "batch": dict(order)}
    tables = {"GPT-2 124M: training loops in turns": rows, "One setting at a time": ablation}
    pages = [markdown(title, facts, own) for title, own in tables.items() if own]
    text = "\n\n".join([*pages, *notes, *left_out(late)])
    keep(asked.out, "bench_gpt2", {"facts": facts, "loops": rows, "ablation": ablation, "left_out": late}, text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def compare(
    kinds: Mapping[str, Mapping[str, Any]],
    order: Mapping[str, Any],
    scratch: Path,
    *,
    rounds: int,
    steps: int,
    until_s: float = math.inf,
    trace: bool = False,
) -> tuple[list[Figures], list[str]]:
    """Measures loops in turns; returns the rows of a table, the first loop being the base, and what else to print.

    Args:
        kinds: by name of the loop, what is added to its order: "kind" and, of ours, "settings" by key.
        order: for all of them.
        scratch: a folder for logs and run directories.
        rounds: turns of each.
        steps: of a turn.
        until_s: time after which no further round begins.
        trace: whether to take a trace at the end.
    """
    with contextlib.ExitStack() as undo:
        loops, notes = start_loops(MODULE, {name: {**order, **own} for name, own in kinds.items()}, scratch, undo)
        take_turns(loops, rounds=rounds, steps=steps, until_s=until_s)
        tokens = order["local_size"] * order["accumulation"] * _shape(order)["context"]
        rows = [row(loop, base=loops[0], tokens=tokens) for loop in loops]
        notes += [loop.trace() for loop in loops if trace]
    return rows, notes


def _shape(order: Mapping[str, Any]) -> dict[str, Any]:
    return TINY if order["tiny"] else GPT2


def _facts(order: Mapping[str, Any]) -> Figures:
    """Returns the operations per token of the published model, and the peak of the device."""
    shape = _shape(order)
    with torch.device("meta"):
        model = GPT(**shape)
    return {"flops": flops_per_token(model, positions=shape["context"]), "peak": peak_flops(_device())}


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def ours(order: Mapping[str, Any]) -> tuple[Run, Figures]:
    """Builds this trainer, everything on, but evaluation and saves."""
    changes: dict[str, Any] = nested(order.get("settings", {}))
    if without := changes.pop("without", None):
        # Every layer is special, or the stream is as it comes; a loop has its own process.
        setattr(blocks, without, {"_is_special": lambda _layer: True, "_as_stream": lambda x: x}[without])
    changes["train"] = {"max_steps": 10**6, "compile": not order["tiny"], **changes.get("train", {})}
    changes["batch"] = {"accumulation": order["accumulation"], **changes.get("batch", {})}
    model = {**_shape(order), **changes.pop("model", {})}
    sections = sections_of(model, local_size=order["local_size"], **changes)
    rank = open_rank(sections, Path(order["folder"], "run"))
    rank.heartbeat.start(rank.run, 0, rank=0, host="here", limits=Limits(600.0, 300.0, 1800.0))
    trainer = build_of(rank)
    return lambda steps: trainer.advance(trainer.position.step + steps), _facts(order)


def _module(order: Mapping[str, Any]) -> Any:
    """Returns the plain model: loss of (tokens, targets), in GPT-2's shape with a padded vocabulary."""
    shape = _shape(order)
    width, heads, context = shape["width"], shape["num_heads"], shape["context"]
    vocabulary = -(-shape["vocab_size"] // _PADDED) * _PADDED

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            parts = self.qkv(self.norms[0](x)).view(batch, length, 3, heads, width // heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.layers = nn.ModuleList(Layer() for _ in range(shape["num_layers"]))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
                elif name.endswith("bias"):
                    nn.init.zeros_(parameter)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for layer in self.layers:
                x = layer(x)
            return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    return Model()


def _adamw(model: Any) -> Any:
    by_decay: dict[float, list[Any]] = {0.1: [], 0.0: []}
    for parameter in model.parameters():
        by_decay[0.1 if parameter.dim() >= 2 else 0.0].append(parameter)
    groups = [{"params": own, "weight_decay": decay} for decay, own in by_decay.items()]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)


def _batches(order: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields batches on the host, in pinned memory where there is a GPU."""
    shape = _shape(order)
    source = RandomTokens(vocab_size=shape["vocab_size"], context=shape["context"])
    generator = torch.Generator().manual_seed(1)
    while True:
        chosen = torch.randint(0, len(source), (order["local_size"],), generator=generator).numpy()
        inputs, targets = source.batch(chosen)
        yield (inputs.pin_memory(), targets.pin_memory()) if torch.cuda.is_available() else (inputs, targets)


def plain(order: Mapping[str, Any]) -> tuple[Run, Figures]:
    """Builds the tuned loop without any toolkit."""
    device = _device()
    model = _module(order).to(device)
    optimizer = _adamw(model)
    forward = model if order["tiny"] else torch.compile(model)
    count, batches = order["accumulation"], _batches(order)

    def fetch() -> tuple[Any, Any]:
        inputs, targets = next(batches)
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    state: dict[str, Any] = {"next": fetch(), "step": 0}

    def run(steps: int) -> None:
        for _ in range(steps):
            for _ in range(count):
                inputs, targets = state["next"]
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = forward(inputs, targets) / count
                state["next"] = fetch()  # copied while the forward pass runs
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            state["step"] += 1
            if state["step"] % 10 == 0:
                loss.item()

    return run, _facts(order)


def accelerate(order: Mapping[str, Any]) -> tuple[Run, Figures]:
    """Builds accelerate's loop around the same module."""
    from accelerate import Accelerator

    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(cpu=not on_gpu, mixed_precision="bf16", gradient_accumulation_steps=order["accumulation"])
    bare = _module(order)
    if not order["tiny"]:
        bare = torch.compile(bare)
    model, optimizer = accelerator.prepare(bare, _adamw(bare))
    batches, device, done = _batches(order), accelerator.device, [0]

    def run(steps: int) -> None:
        for _ in range(steps):
            for _ in range(order["accumulation"]):
                inputs, targets = next(batches)
                with accelerator.accumulate(model):
                    loss = model(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            done[0] += 1
            if done[0] % 10 == 0:
                loss.item()

    return run, _facts(order)


def import_lightning() -> Any:
    """Returns Lightning's module, which has the same classes under the name that it had first."""
    import importlib
    from importlib.util import find_spec

    return importlib.import_module("lightning" if find_spec("lightning") is not None else "pytorch_lightning")


def lightning(order: Mapping[str, Any]) -> tuple[Run, Figures]:
    """Builds Lightning's loop around the same module; it runs in a thread that waits between turns."""
    import logging
    import queue
    import threading
    import warnings

    L = import_lightning()
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    asked, done = queue.Queue[int](), queue.Queue[str]()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            bare = _module(order)
            self.net = bare if order["tiny"] else torch.compile(bare)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(*batch)

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            # Its own clipping refuses a fused optimizer.
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)

        def configure_optimizers(self) -> Any:
            return _adamw(self.net)

    class Turns(L.Callback):
        left = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if self.left == 0 and index % order["accumulation"] == 0:
                done.put("")
                self.left = asked.get()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.left -= (index + 1) % order["accumulation"] == 0

    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=10**9,
        accumulate_grad_batches=order["accumulation"],
        log_every_n_steps=10,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        callbacks=[Turns()],
        default_root_dir=order["folder"],
    )

    def fit() -> None:
        try:
            trainer.fit(Module(), train_dataloaders=_Endless(order))
        except BaseException as err:
            done.put(repr(err))
            raise

    threading.Thread(target=fit, daemon=True).start()

    def check() -> None:
        if text := done.get(timeout=240):
            raise RuntimeError(text)

    check()

    def run(steps: int) -> None:
        asked.put(steps)
        check()

    return run, _facts(order)


class _Endless:
    """Batches as a loader that never ends; Lightning asks for an iterator anew."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return _batches(self.order)


LOOPS = {"plain": plain, "ours": ours, "lightning": lightning, "accelerate": accelerate}
"""What builds each loop; the first is what the others are compared with."""


def quick(folder: Path, *, tiny: bool) -> Sequence[Figures]:
    """Returns the rows of ours and of the plain loop, quickly: for the acceptance checks."""
    order = {"tiny": tiny, "local_size": 2 if tiny else 16, "accumulation": 1}
    kinds = {"plain": {"kind": "plain"}, "ours": {"kind": "ours"}}
    rows, notes = compare(kinds, order, folder, rounds=1 if tiny else 4, steps=2 if tiny else 15)
    if len(rows) < 2:
        raise RuntimeError("\n".join(notes))
    return rows


if __name__ == "__main__":
    main()
