"""Context parallelism: each rank of `cp` computes a part of the positions of every sequence.

A sequence is cut into twice as many chunks as there are ranks. Rank r has chunk r from the front and chunk r from the
back, so under a causal mask all ranks have the same amount of attention to compute. Keys and values are gathered before
attention; everything else works on a rank's own positions.

torch's own `context_parallel` is not used: in 2.13 it swaps one GPU kernel for another and ends on CPU ranks, with the
flash kernel ("does not have a sharding strategy registered") as with the plain one. This way needs a differentiable
gather alone, which gloo and NCCL both have, so what runs on a cluster is what the tests run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.distributed.pipeline import model_plan, require_default_loss
from slurm_train.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

POSITIONS_DIM = 1
"""Of the tensors of a batch: (samples, positions, ...)."""


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Which positions of each sequence a rank has."""

    place: int
    num_ranks: int

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of its two chunks, of 2 x `num_ranks`."""
        return self.place, 2 * self.num_ranks - 1 - self.place

    def positions(self, length: int) -> Tensor:
        """Returns its positions of a sequence, int64, in the order in which it has them.

        Raises:
            ConfigError: the sequence cannot be cut into equal chunks.
        """
        size, left = divmod(length, 2 * self.num_ranks)
        if left or not size:
            raise ConfigError(
                f"parallel.cp={self.num_ranks} cannot cut a sequence of {length} positions into "
                f"{2 * self.num_ranks} equal chunks",
                hint=f"use sequences of a multiple of {2 * self.num_ranks} positions",
            )
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in self.chunks])

    def cut(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns this rank's positions of each tensor (samples, positions, ...) of a batch."""
        positions = self.positions(batch[0].shape[POSITIONS_DIM]).to(batch[0].device)
        return tuple(tensor.index_select(POSITIONS_DIM, positions) for tensor in batch)


def share_context(model: nn.Module, *, roots: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Lets a model compute a part of each sequence, in place, by its `context_parallel_plan`.

    Args:
        model: all that this rank has.
        roots: what is called: the model itself, or its stages.
        mesh: the `cp` axis.

    Raises:
        ConfigError: the model has no plan, or one that names nothing.
    """
    # Dynamo cannot make the mask and would cut a compiled block there (2.13); what comes after it can trace it.
    torch.compiler.allow_in_graph(_attend_lower_right)  # type: ignore[no-untyped-call]  # torch says no types here
    plan = model_plan(model, "context_parallel_plan", key="parallel.cp", names=("positions", "attention"))
    require_default_loss(model, key="parallel.cp")
    part = SequencePart(mesh.get_local_rank(), mesh.size())
    for root in {id(root): root for root in (model, *roots)}.values():
        tables = {name: table for name, table in root.named_buffers() if name in plan["positions"]}
        root.register_forward_pre_hook(functools.partial(_take_rows, tables=tables, part=part))
    # One for all, or equal blocks would not share a graph.
    shared = functools.partial(attend, part=part, mesh=mesh)
    for pattern in plan["attention"]:
        modules = [module for name, module in model.named_modules() if fnmatchcase(name, pattern)]
        if not modules:
            raise ConfigError(
                f"{type(model).__name__}.context_parallel_plan() has {pattern!r}, which names no part of the model",
                hint="patterns are names with *, e.g. 'blocks.*.attention.mix'",
            )
        for module in modules:
            # The method is replaced rather than the module wrapped, so names stay.
            module.forward = shared


def _take_rows(root: nn.Module, inputs: tuple[Tensor, ...], *, tables: dict[str, Tensor], part: SequencePart) -> None:
    """Gives a model those rows of its tables that are for this rank's positions of what comes in.

    Raises:
        ConfigError: the sequences are longer than a table.
    """
    own_length = inputs[0].shape[POSITIONS_DIM]
    length = own_length * part.num_ranks
    for name, table in tables.items():
        owner, _, own_name = name.rpartition(".")
        module = root.get_submodule(owner)
        if length > len(table):
            raise ConfigError(
                f"a sequence of {length} positions was given to a model of context {len(table)}",
                hint=f"set model.context={length} or data.context={len(table)}",
            )
        taken = module.get_buffer(own_name)
        # Equally many rows are the same rows: a rank never has the whole table.
        if len(taken) != own_length:
            rows = table[part.positions(length).to(table.device)]
            module.register_buffer(own_name, rows.to(taken.device), persistent=False)


def attend(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, part: SequencePart, mesh: DeviceMesh, **options: Any
) -> Tensor:
    """Returns causal attention of this rank's positions over all before them. Collective along `cp`.

    Args:
        q_BHTD: queries of this rank's positions.
        k_BHTD: keys of the same positions; as many heads as the queries, or fewer with `enable_gqa`.
        v_BHTD: values, of the shape of the keys.
        part: which positions.
        mesh: the `cp` axis.
        **options: what torch's `scaled_dot_product_attention` takes; `is_causal` must be true.
    """
    is_causal = options.pop("is_causal", False)
    # The mask of causal attention is made here, for each chunk.
    assert is_causal and options.pop("attn_mask", None) is None, "only causal attention can be shared"
    keys, values = _gather_chunks(torch.stack((k_BHTD, v_BHTD)), part=part, mesh=mesh)
    mixed = []
    for chunk, query in zip(part.chunks, q_BHTD.chunk(2, dim=2), strict=True):
        key = torch.cat(keys[: chunk + 1], dim=2)
        value = torch.cat(values[: chunk + 1], dim=2)
        mixed.append(_attend_lower_right(query, key, value, **options))
    return torch.cat(mixed, dim=2)


def _attend_lower_right(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Returns attention in which the last query sees the last key, however many come before."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.utils._python_dispatch import _disable_current_modes

    # The mask holds two lengths and no memory, and cannot be made of tensors that a compiler traces.
    with _disable_current_modes():
        mask: Any = causal_lower_right(query.shape[2], key.shape[2])
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _gather_chunks(both: Tensor, *, part: SequencePart, mesh: DeviceMesh) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the keys and the values (2, B, H, T, D) of all ranks as chunks in the order of the positions."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    spread = DTensor.from_local(both.contiguous(), mesh, [Shard(3)], run_check=False)
    whole = spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    num_chunks = 2 * part.num_ranks
    gathered = whole.chunk(num_chunks, dim=3)
    # Rank r's come as r, then its mirror image.
    order = [2 * min(chunk, num_chunks - 1 - chunk) + (chunk >= part.num_ranks) for chunk in range(num_chunks)]
    keys, values = zip(*(gathered[slot].unbind(0) for slot in order), strict=True)
    return list(keys), list(values)
