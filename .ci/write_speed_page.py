"""Writes the tables of docs/how-fast.md: models' shapes, the trainer's count of operations, the cards' peaks.

    python .ci/write_speed_page.py            # writes the tables into the page

Everything here is arithmetic; nothing is measured. A test compares the page with what this gives.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import yaml

from slurm_train.config.compose import compose
from slurm_train.config.words import Words
from slurm_train.models.gpt import GPT
from slurm_train.plan.cards import PEAK_FLOPS
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.plan import plan_run
from slurm_train.plan.speed import estimate_run
from slurm_train.train.metrics import flops_per_token

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "how-fast.md"
MODELS = {"gpt2-124m": "GPT-2 124M", "llama3-8b": "Llama 3 8B", "llama3-70b": "Llama 3 70B"}
# Memory bandwidth in bytes per second, from the vendors' data sheets.
BANDWIDTH = {
    "A100": 2.04e12,
    "H100 PCIe": 2.0e12,
    "H100 NVL": 3.9e12,
    "H100": 3.35e12,
    "H20": 4.0e12,
    "H200": 4.8e12,
    "B200": 8.0e12,
    "L40S": 0.864e12,
}
GPU = "cluster.gpu_type=h100"
CASES = (
    "model=gpt2-124m +cluster=1x1",
    "model=gpt2-124m +cluster=1x8",
    "model=llama3-8b +cluster=1x8",
    "model=llama3-8b +cluster=2x8",
    "model=llama3-70b +cluster=8x8",
    "model=cnn data=digits +cluster=1x1",
)
# float32: the gradient is read; parameter and two moments are read and written.
UPDATE_BYTES = 4 * (1 + 2 * 3)


def counts() -> dict[str, tuple[int, int, float, float]]:
    """Returns parameters, tokens of a sequence, and operations per token in both ways, by model."""
    found = {}
    for name in MODELS:
        settings = yaml.safe_load((REPOSITORY / "conf" / "model" / f"{name}.yaml").read_text())
        shape = {key: value for key, value in settings.items() if not key.startswith("_")}
        with torch.device("meta"):
            model = GPT(**shape)
        own, papers = flops_per_token(model, positions=shape["context"])
        found[name] = sum(one.numel() for one in model.parameters()), shape["context"], own, papers
    return found


def tables() -> dict[str, str]:
    """Returns the tables of the page by name."""
    models = counts()
    operations = [
        f"| {MODELS[name]} | {size:,} | {context:,} | {own / 1e9:.2f} | {papers / 1e9:.2f} | {papers / own:.2f} |"
        for name, (size, context, own, papers) in models.items()
    ]
    limits = [
        f"| {', '.join(card for card in PEAK_FLOPS if PEAK_FLOPS[card] == peak)} | {peak / 1e12:,.0f} | "
        + " | ".join(f"{peak / papers:,.0f}" for _, _, _, papers in models.values())
        + " |"
        for peak in sorted(set(PEAK_FLOPS.values()), reverse=True)
    ]
    size, *_ = models["llama3-8b"]
    memory = [
        f"| {card} | {rate / 1e12:.2f} | {PEAK_FLOPS[card] / rate:,.0f} | {1e3 * UPDATE_BYTES * size / rate:,.1f} |"
        for card, rate in BANDWIDTH.items()
    ]
    return {
        "defaults": defaults(),
        "operations": _table(
            ["model", "parameters", "context", "`mfu`: GFLOP per token", "`mfu_6n_12ltc`: GFLOP per token", "ratio"],
            operations,
        ),
        "limits": _table(
            ["cards", "peak, TFLOP/s", *MODELS.values()],
            limits,
        ),
        "memory": _table(
            ["card", "TB/s", "tokens per weight", f"{MODELS['llama3-8b']}: update, ms"],
            memory,
        ),
    }


def defaults() -> str:
    """Returns the table of what a plan chooses where nothing but model and GPUs is typed."""
    rows = []
    for words in CASES:
        overrides = [*words.split(), GPU]
        plan = plan_run(compose(Words(overrides=overrides)), cwd=REPOSITORY, env={}, settle=settle_parallel)
        memory = estimate_run(plan, facts=None, env={}).memory
        layout, config, batch = plan.layout, plan.config, plan.batch
        ways = {(False, False): "one rank", (True, False): "DDP", (False, True): "FSDP2", (True, True): "HSDP"}
        way = ways[layout.dp_replicate > 1, layout.dp_shard > 1]
        tokens = batch.local_size * (config.data or {}).get("context", 0)
        cells = [
            f"`{words}`",
            way if layout.world_size == 1 else f"{way}: {layout}",
            f"{batch.local_size} x {batch.ranks} x {batch.accumulation}",
            f"{tokens:,}" if tokens else "-",
            f"{plan.lr:g}",
            config.parallel.activation_checkpointing,
            "-" if memory is None else f"{memory.total_bytes / 2**30:.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    head = [
        "words",
        "layout",
        "batch: local x ranks x accumulation",
        "tokens of a micro-batch",
        "peak lr",
        "recomputed",
        "GiB per rank",
    ]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows])


def _table(head: list[str], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1), *rows])


def render() -> str:
    """Returns the page with the tables as they are now."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        mark = f"<!-- {name}: written by .ci/write_speed_page.py -->\n"
        text, number = re.subn(rf"{re.escape(mark)}(\|.*\n)*", lambda _, t=f"{mark}{table}\n": t, text)
        assert number == 1, f"{PAGE} has no place for the table {name!r}"
    return text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
