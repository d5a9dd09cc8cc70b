"""Which rank writes what of a training state: all ranks agree on it before anything is copied.

The writing of a tensor is shared out among the ranks that hold it. That takes the same view on all of them: a rank that
goes by what it holds itself leaves to others what nobody else has, and the checkpoint verifies without it. So names,
shapes and number types are compared first. While no rank holds anything else than at the save before, that costs one
number; otherwise the ranks compare digests, and send only what differs.

A difference that cannot be saved is refused by name. Allowed are tensors of callbacks on some of the ranks, and the
stages of a pipeline, each with layers of its own.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from slurm_train.checkpoint.agreement import on_every_rank, on_rank, rank_in, size_of
from slurm_train.checkpoint.manifest import MODEL, text_of_tensor
from slurm_train.checkpoint.state import Optimizers, training_state
from slurm_train.checkpoint.tree import filtered, full_name, leaves_of
from slurm_train.errors import RunError
from slurm_train.formatting import shorten

OTHERS = "callbacks"
"""Key of what is saved beside model and optimizers in a training state, as checkpoints have it."""

_SMALL = 1024
"""A replicated tensor of up to so many bytes is written by the first rank that holds it."""


class Leaf(NamedTuple):
    """What a rank holds under a name."""

    kind: str
    """Number type and shape, e.g. "float32[3,16]", or "a value"."""
    num_bytes: int = 0
    """Of the whole tensor."""
    shards: str = ""
    """How it is cut, "" where each rank that has the name holds all of it."""

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor by itself, not a value nor one inside of a value."""
        return self.kind != _VALUE

    def __str__(self) -> str:
        return f"{self.kind} {self.shards}".rstrip()


_VALUE = "a value"
Holdings = dict[str, dict[str, Leaf]]
"""What a rank holds: by part ("model", "optimizer", "callbacks") and full name, e.g. "model.head.weight"."""


class Variant(NamedTuple):
    """What some ranks hold of a part, all of them the same."""

    ranks: tuple[int, ...]
    leaves: Mapping[str, Leaf]


@dataclass(frozen=True)
class Agreement:
    """What the ranks have agreed on."""

    left_out: frozenset[str]
    """Names that this rank holds and others write."""
    tensors: Mapping[str, str]
    """Every tensor that some rank holds, by full name, with number type and shape."""

    @cached_property
    def weights(self) -> dict[str, str]:
        """Parameters and buffers of the whole model, by their names in it."""
        return _of_model(self.tensors)


class Division:
    """Divides the states of a run's saves among the ranks.

    Args:
        group: a gloo group of all ranks; None for one process.
        stage: the pipeline stage that this rank has layers of; ranks of a stage hold the same layers.
    """

    def __init__(self, *, group: ProcessGroup | None, stage: int = 0) -> None:
        self._group = group
        self._stage = stage
        self._held: Holdings = {}
        # What `_held` was found out of.
        self._signs: list[Any] = []
        # On what is held; None where it was refused, or not yet compared.
        self._agreed: Agreement | None = None

    def agree(
        self, state: Mapping[str, Any], *, values: Mapping[str, Any], of_first_rank: Sequence[str] = ()
    ) -> Agreement:
        """Returns what this rank writes of a training state. Collective.

        Args:
            state: tensors and values, nested; its first keys are the parts.
            values: of the callbacks: rank 0 writes all of them.
            of_first_rank: full names of tensors that the first rank that holds them writes, as it does small ones.

        Raises:
            RunError: on every rank: the ranks hold different things, and what cannot be saved is named.
        """
        signs = [*_signs_of([state, values]), *of_first_rank]
        if signs != self._signs:
            held = describe(state, values=values)
            for name in of_first_rank:
                part = held.get(name.partition(".")[0], {})
                if name in part:
                    part[name] = part[name]._replace(num_bytes=0)
            if held != self._held:
                self._agreed = None
            self._signs, self._held = signs, held
        if not self._have_all_agreed():
            # None until there is a new one: a refused state is compared again.
            self._agreed = None
            self._agreed = self._compare(self._held, copies=copies_of_shards(state, rank=rank_in(self._group)))
        assert self._agreed is not None
        return self._agreed

    def check(self, state: Mapping[str, Any]) -> None:
        """Finds early what `agree` would find in a part of a training state. Collective.

        Args:
            state: see `agree`.

        Raises:
            RunError: see `agree`.
        """
        self._compare(describe(state))

    def _have_all_agreed(self) -> bool:
        """Returns whether every rank holds what it held when the ranks agreed last. Collective."""
        has_agreed = torch.tensor(int(self._agreed is not None))
        if self._group is not None:
            dist.all_reduce(has_agreed, op=dist.ReduceOp.MIN, group=self._group)
        return bool(has_agreed.item())

    def _compare(self, held: Holdings, *, copies: Mapping[str, tuple[int, ...]] | None = None) -> Agreement:
        digests = {part: _digest(leaves) for part, leaves in held.items()}
        answers = on_every_rank(self._group, lambda: (self._stage, digests))
        parts = sorted({part for _, of_rank in answers for part in of_rank})
        variants = {}
        for part in parts:
            digests_of_part = [of_rank.get(part, "") for _, of_rank in answers]
            variants[part] = self._variants_of(part, held, digests_of_part)
        require_savable(variants, stages=[stage for stage, _ in answers])
        return divide(variants, rank=rank_in(self._group), copies=copies)

    def _variants_of(self, part: str, held: Holdings, digests: Sequence[str]) -> list[Variant]:
        """Returns what the ranks hold of a part; what all hold alike is not sent."""
        ranks_of: defaultdict[str, list[int]] = defaultdict(list)
        for rank, digest in enumerate(digests):
            ranks_of[digest].append(rank)
        leaves = held.get(part, {})
        if len(ranks_of) == 1:
            return [Variant(tuple(range(size_of(self._group))), leaves)]
        return [
            Variant(tuple(ranks), on_rank(ranks[0], self._group, lambda: leaves))
            for _, ranks in sorted(ranks_of.items())
        ]


def _signs_of(state: Any) -> list[Any]:
    """Returns what is equal as long as `describe` gives the same: names, and shape, type and cut of tensors.

    No full name is made and no text of a shape, so it takes a tenth of the time.
    """
    signs: list[Any] = []
    waiting = [state]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is dict:
            signs += (len(value), *value)
            waiting += value.values()
        elif kind in (Tensor, nn.Parameter):
            signs += (value.dtype, value.shape)
        elif kind in (list, tuple):
            signs.append(len(value))
            waiting += value
        elif isinstance(value, Tensor):
            signs += (kind, value.dtype, value.shape, getattr(value, "_spec", None))
        else:
            signs.append(kind)
    return signs


def describe(state: Mapping[str, Any], *, values: Mapping[str, Any] | None = None) -> Holdings:
    """Returns what a rank holds.

    Args:
        state: see `Division.agree`.
        values: see `Division.agree`.
    """
    holdings: Holdings = {}
    for path, value in leaves_of(state):
        holdings.setdefault(path[0], {})[full_name(path)] = _leaf_of(value)
    for path, _ in leaves_of({OTHERS: values or {}}):
        holdings.setdefault(OTHERS, {})[full_name(path)] = Leaf(_VALUE)
    return holdings


def require_savable(variants: Mapping[str, Sequence[Variant]], *, stages: Sequence[int]) -> None:
    """Checks that what the ranks hold can be saved whole and given back.

    Args:
        variants: of each part.
        stages: the pipeline stage of each rank.

    Raises:
        RunError: naming what differs, and the ranks.
    """
    problems = [text for part, of_part in variants.items() for text in _differences(part, of_part, stages)]
    if problems:
        shown = shorten(problems, separator="; ")
        raise RunError(
            f"the ranks hold different states, which no checkpoint can keep: {shown}",
            hint="of a model and an optimizer all ranks need the same names, shapes and types; what state_dict of a "
            "callback may give on some ranks only is in docs/callbacks.md",
        )


def divide(
    variants: Mapping[str, Sequence[Variant]], *, rank: int, copies: Mapping[str, tuple[int, ...]] | None = None
) -> Agreement:
    """Returns what one rank writes of what all ranks hold: each whole tensor, and each shard, is one rank's.

    Large tensors are spread over the ranks that hold them, and shards over those that hold the same ones. Small tensors
    and values are the first such rank's: who loads opens the file of each rank that has written something it needs, and
    everybody needs them, e.g. the optimizer's count of steps for each parameter.

    Args:
        variants: of each part.
        rank: number of the one.
        copies: what `copies_of_shards` gave on it; None where no shard has a copy.
    """
    copies = copies or {}
    kinds: dict[str, str] = {}
    written_here: set[str] = set()
    held: set[str] = set()
    large: defaultdict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
    for of_part in variants.values():
        for holders, leaves in _by_holders(of_part):
            kinds |= {name: leaf.kind for name, leaf in leaves.items() if leaf.is_tensor}
            if rank not in holders:
                continue
            whole = {name: leaf for name, leaf in leaves.items() if not leaf.shards}
            held |= whole.keys()
            large[holders] |= {name: leaf.num_bytes for name, leaf in whole.items() if leaf.num_bytes > _SMALL}
            for name in leaves.keys() & copies.keys():
                held.add(name)
                large[tuple(sorted(set(copies[name]).intersection(holders)))][name] = leaves[name].num_bytes
            if rank == holders[0]:
                written_here |= {name for name, leaf in whole.items() if leaf.num_bytes <= _SMALL}
    for holders, sizes in large.items():
        written_here |= share_of(sizes, rank=holders.index(rank), num_ranks=len(holders))
    return Agreement(frozenset(held - written_here), kinds)


def share_of(sizes: Mapping[str, int], *, rank: int, num_ranks: int) -> set[str]:
    """Returns the names that one rank writes of what some ranks hold alike; the shares' bytes are about equal.

    Args:
        sizes: bytes by name, the same on all these ranks.
        rank: position among them of the rank whose share it is.
        num_ranks: ranks that share the work.
    """
    loads = [(0, number) for number in range(num_ranks)]
    share: set[str] = set()
    for name, num_bytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, lightest = loads[0]
        heapq.heapreplace(loads, (load + num_bytes, lightest))
        if lightest == rank:
            share.add(name)
    return share


def copies_of_shards(state: Mapping[str, Any], *, rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the ranks that hold the same part of a tensor as this one, by full name; of tensors that are cut.

    A tensor that is cut along one axis of its mesh and copied along another (HSDP) has each shard several times.

    Args:
        state: see `Division.agree`.
        rank: this rank's number among those that save together; the others are counted from it.
    """
    copies: dict[str, tuple[int, ...]] = {}
    for path, value in leaves_of(state):
        placements = () if type(value) in (Tensor, nn.Parameter) else getattr(value, "placements", ())
        if placements:
            mesh: Any = value.device_mesh
            index = [
                slice(None) if placement.is_replicate() else place
                for placement, place in zip(placements, mesh.get_coordinate(), strict=True)
            ]
            holders = mesh.mesh[tuple(index)].flatten().tolist()
            copies[full_name(path)] = tuple(holder - mesh.get_rank() + rank for holder in sorted(holders))
    return copies


def own_part(state: dict[str, Any], agreed: Agreement) -> dict[str, Any]:
    """Returns the part of a training state that this rank has to save, so that it copies no more than it writes."""
    return filtered(state, lambda name: name not in agreed.left_out) if agreed.left_out else state


def part_if_alike(state: dict[str, Any], *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Returns that part without asking the ranks: right where all of them hold the same names."""
    alike = tuple(range(num_ranks))
    held = {part: [Variant(alike, leaves)] for part, leaves in describe(state).items()}
    return own_part(state, divide(held, rank=rank, copies=copies_of_shards(state, rank=rank)))


def own_tensors(model: nn.Module, optimizers: Optimizers, *, rank: int, num_ranks: int) -> list[Tensor]:
    """Returns the tensors that a rank will probably have to save; not collective.

    Args:
        model: this rank's.
        optimizers: with their state.
        rank: number among the ranks that hold the same layers.
        num_ranks: how many they are.
    """
    part = part_if_alike(training_state(model, optimizers, makes_state=False), rank=rank, num_ranks=num_ranks)
    return [value for _, value in leaves_of(part) if isinstance(value, Tensor)]


def weights_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Returns number type and shape of the tensors of the model in a training state, by their names in it."""
    leaves = describe(state).get("model", {})
    return _of_model({name: leaf.kind for name, leaf in leaves.items() if leaf.is_tensor})


def _of_model(tensors: Mapping[str, str]) -> dict[str, str]:
    weights = ((name, kind) for name, kind in tensors.items() if name.startswith(MODEL))
    return {name.removeprefix(MODEL): kind for name, kind in weights}


def _leaf_of(value: Any) -> Leaf:
    if not isinstance(value, Tensor):
        return Leaf(_VALUE, shards="with shards" if _holds_shards(value) else "")
    kind = _kind_of(value.dtype, value.shape)
    # Asking a tensor for what it lacks takes longer than all the rest.
    placements = () if type(value) in (Tensor, nn.Parameter) else getattr(value, "placements", ())
    if not placements:
        return Leaf(kind, num_bytes=value.nbytes)
    return Leaf(kind, num_bytes=value.nbytes, shards=f"cut {tuple(placements)}")


@lru_cache(maxsize=4096)
def _kind_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return text_of_tensor(str(dtype), shape)


def _holds_shards(value: Any) -> bool:
    """Returns whether there is a shard in what is no dictionary."""
    if isinstance(value, (list, tuple, dict)):
        return any(_holds_shards(item) for item in (value.values() if isinstance(value, dict) else value))
    return hasattr(value, "placements")


def _digest(leaves: Mapping[str, Leaf]) -> str:
    text = "\n".join(f"{name!r} {leaf!r}" for name, leaf in sorted(leaves.items()))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _by_holders(variants: Sequence[Variant]) -> list[tuple[tuple[int, ...], dict[str, Leaf]]]:
    """Returns the leaves by the ranks that hold them, ascending."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, (_, leaves) in enumerate(variants):
        for name in leaves:
            numbers[name].append(number)
    by_holding: defaultdict[tuple[int, ...], dict[str, Leaf]] = defaultdict(dict)
    for name, holding in numbers.items():
        by_holding[tuple(holding)][name] = variants[holding[0]].leaves[name]
    by_holders = []
    for members, leaves in by_holding.items():
        holders = sorted(rank for number in members for rank in variants[number].ranks)
        by_holders.append((tuple(holders), leaves))
    return by_holders


def _differences(part: str, variants: Sequence[Variant], stages: Sequence[int]) -> list[str]:
    """Returns what cannot be saved of a part, one text for each name."""
    if len(variants) == 1:
        return []
    ranks_of: defaultdict[str, defaultdict[Leaf, list[int]]] = defaultdict(lambda: defaultdict(list))
    for ranks, leaves in variants:
        for name, leaf in leaves.items():
            ranks_of[name][leaf] += ranks
    texts = []
    for name, kinds in sorted(ranks_of.items()):
        if len(kinds) > 1:
            texts.append(f"{name} is " + " and ".join(f"{leaf} on {_ranks(ranks)}" for leaf, ranks in kinds.items()))
            continue
        ((leaf, holders),) = kinds.items()
        missing = _lacking(part, leaf, frozenset(holders), stages)
        if missing:
            texts.append(f"{name} ({leaf}) is on {_ranks(holders)} and not on {_ranks(missing)}")
    return texts


def _lacking(part: str, leaf: Leaf, holders: frozenset[int], stages: Sequence[int]) -> list[int]:
    """Returns the ranks that do not hold what they have to."""
    if leaf.shards:
        return []  # whether the parts make up the whole is seen when they are planned
    if part == OTHERS:
        return [] if leaf.is_tensor or 0 in holders else [0]
    of_stages = {stages[rank] for rank in holders}
    return [rank for rank, stage in enumerate(stages) if stage in of_stages and rank not in holders]


def _ranks(ranks: Sequence[int]) -> str:
    """Returns ranks in words, e.g. "rank 0" or "ranks 1-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"
