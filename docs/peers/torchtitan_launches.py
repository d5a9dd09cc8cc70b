"""Counts what the host launches for the same small Llama here and with the parts of torchtitan 0.2.2, on the CPU.

    pip install --no-deps --target PARTS torchtitan==0.2.2 tyro einops docstring_parser typeguard shtab
    PYTHONPATH=PARTS:. python docs/peers/torchtitan_launches.py

A step is what the tests of host work count: operations that may reach a kernel. FSDP2, clipping, fused AdamW. A layer
is one block, forward and backward; under torch.compile it has fused kernels, matrix products and what the compiler
leaves alone. A step with compiled layers has those in place of the operations of a layer that is not compiled.
torchtitan's data sets and Triton kernels are not needed and not installed.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from slurm_train.models.blocks import Angles
from slurm_train.models.gpt import GPT
from tests.train.test_host_work import counted, make_batch, ours

WIDTH, HIDDEN, HEADS, CONTEXT, VOCAB, LAYERS = 64, 176, 2, 16, 64, 4


def import_titan() -> tuple[Any, ...]:
    """Returns torchtitan's model, its arguments, sharding, loss, and tools of its training loop."""
    for name in ("datasets", "datasets.distributed", "torchtitan.models.moe.kernels"):
        sys.modules.setdefault(name, MagicMock())
    llama = "torchtitan.models.llama3"
    return (
        import_module(f"{llama}.model.model").Transformer,
        import_module(f"{llama}.model.args").TransformerModelArgs,
        import_module(f"{llama}.infra.parallelize").apply_fsdp,
        import_module("torchtitan.components.loss").cross_entropy_loss,
        import_module("torchtitan.distributed.utils"),
    )


TRANSFORMER, ARGUMENTS, APPLY_FSDP, LOSS, TOOLS = import_titan()


def titan_model(layers: int) -> Any:
    """Returns torchtitan's Llama with its first weights."""
    sizes = {"dim": WIDTH, "n_layers": layers, "n_heads": HEADS, "vocab_size": VOCAB}
    model = TRANSFORMER(ARGUMENTS(**sizes, multiple_of=16, max_seq_len=CONTEXT))
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def own_model(layers: int) -> GPT:
    """Returns the same shape here."""
    shape: dict[str, Any] = {"width": WIDTH, "hidden": HIDDEN, "num_heads": HEADS, "num_layers": layers}
    return GPT(**shape, vocab_size=VOCAB, context=CONTEXT, norm="rmsnorm", activation="swiglu", tied=False)


def titan_step(model: Any) -> Callable[[], object]:
    """Returns a step as torchtitan's trainer makes it, of one micro-batch."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    APPLY_FSDP(model, mesh, torch.float32, torch.float32, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, labels = (part.contiguous() for part in make_batch())

    def step() -> None:
        optimizer.zero_grad()
        valid = torch.tensor(0, dtype=torch.int64)
        valid += (labels != -100).sum()
        loss = LOSS(model(inputs), labels) / TOOLS.dist_sum(valid, mesh)
        loss.backward()
        TOOLS.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        torch.sum(torch.stack([loss.detach()]))

    return step


def launches(block: Any, *arguments: Any) -> dict[str, int]:
    """Returns how often a compiled block calls what, forward and backward."""
    x = torch.randn(2, CONTEXT, WIDTH, requires_grad=True)
    compiled = torch.compile(block)
    _, codes = run_and_get_code(lambda: compiled(x, *arguments).sum().backward())
    text = "\n".join(codes)
    kinds = {"fused": r"^\s+cpp_\w+\(", "products": r"^\s+extern_kernels\.", "left alone": r"^\s*buf\d+ = torch\.ops\."}
    return {kind: len(re.findall(pattern, text, re.MULTILINE)) for kind, pattern in kinds.items()}


def operations(block: Any, *arguments: Any) -> int:
    """Returns how many operations a block dispatches without the compiler, forward and backward."""
    x = torch.randn(2, CONTEXT, WIDTH, requires_grad=True)
    return counted(lambda: block(x, *arguments).backward(torch.ones_like(x))).total() - 1  # ones_like


def report(name: str, step: Counter[str], block: Any, *arguments: Any) -> None:
    """Prints the counts of one of the two."""
    layer, compiled = operations(block, *arguments), launches(block, *arguments)
    inside = sum(compiled.values())
    print(f"{name}: a layer {layer} operations, compiled {inside} launches {compiled}")
    print(f"{name}: a step {step.total()} operations, with compiled layers {step.total() - LAYERS * (layer - inside)}")


def main() -> None:
    """Prints all counts for both."""
    warnings.filterwarnings("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    titan, own = titan_model(1), own_model(1)
    assert own.cos_TD is not None and own.sin_TD is not None
    theirs, own_calls = counted(titan_step(titan_model(LAYERS))), counted(ours(own_model(LAYERS)))
    report("torchtitan", theirs, next(iter(titan.layers.values())), titan.freqs_cis[:CONTEXT], None)
    report("here", own_calls, own.blocks[0], Angles(own.cos_TD[:CONTEXT], own.sin_TD[:CONTEXT]))
    print("more here:", (own_calls - theirs).most_common(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
