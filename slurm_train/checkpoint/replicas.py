"""Whether ranks hold the same values: digests of whole states; norms and sums of tensors that each rank holds whole.

A checkpoint has what all ranks hold alike once. What looks alike and is not (parameters without DDP, an optimizer that
keeps a part of its state on each rank under the name of the whole) would come back as one rank's on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from slurm_train.checkpoint.agreement import on_every_rank
from slurm_train.checkpoint.state import local_part, plain_names
from slurm_train.checkpoint.tree import full_name, leaves_of
from slurm_train.errors import RunError, SlurmTrainError
from slurm_train.formatting import shorten

# Ranks that hold the same numbers get norms that differ by less, also where their GPUs are of different models.
_NORM_TOLERANCE = 1e-5
# The same of a weighted sum, as a part of the norm: of other numbers it differs by about the norm.
_SUM_TOLERANCE = 1e-3
# Up to so many bytes a tensor of a GPU is compared byte by byte.
_LARGE_BYTES = 1 << 16
# Integers of quantized models, float8 and bool have no norms.
_TYPES_WITH_NORMS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# A prime: rows of a common width begin at other columns each time.
_SKETCH_COLUMNS = 1021
# Ranks that an error names, at most.
_MOST_NAMED = 8
# Elements whose digest is computed at once, and the integer type of an element by its bytes.
_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def digest(state: Mapping[str, Any]) -> str:
    """Returns what is equal for equal states; shards count by how they are cut."""
    hasher = xxhash.xxh3_128()
    large: list[Tensor] = []

    def add(value: Any) -> None:
        # Lengths keep [1, 23] and [12, 3] apart.
        if isinstance(value, Mapping):
            hasher.update(f"{len(value)} keys ".encode())
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, (list, tuple)):
            hasher.update(f"{len(value)} items ".encode())
            for item in value:
                add(item)
        elif not isinstance(value, Tensor):
            text = repr(value).encode()
            hasher.update(f"{len(text)} bytes ".encode() + text)
        else:
            hasher.update(f"{value.dtype} {tuple(value.shape)} {getattr(value, 'placements', '')}".encode())
            if hasattr(value, "placements"):
                return
            is_remote = value.device.type != "cpu"
            if is_remote and value.nbytes > _LARGE_BYTES and value.is_floating_point():
                large.append(value.detach())
            else:
                hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    add(state)
    if large:
        hasher.update(sketch(large).cpu().numpy().data)
    return hasher.hexdigest()


def differing_states(states: Mapping[str, Mapping[str, Any]], *, group: ProcessGroup | None) -> list[str]:
    """Returns the names of the objects whose states differ from rank to rank. Collective.

    Raises:
        RunError: on every rank: the ranks have other objects.
    """
    digests = on_every_rank(group, lambda: {name: digest(state) for name, state in states.items()})
    names = {name for of_rank in digests for name in of_rank}
    missing = sorted(name for name in names if any(name not in of_rank for of_rank in digests))
    if missing:
        raise RunError(
            f"some ranks have handed over {shorten(missing)}, and others have not",
            hint="call `training` alike on all ranks",
        )
    return sorted(name for name in names if len({of_rank[name] for of_rank in digests}) > 1)


def sketch(tensors: Sequence[Tensor]) -> Tensor:
    """Returns numbers that differ where large tensors do, with two passes over the device's memory and no copy of it.

    The norm alone is the same for rows of norm 1 and for other orders of the same rows.
    """
    norms = _norms(tensors)
    sums = []
    for tensor in tensors:
        numbers = tensor.reshape(-1)
        num_whole = tensor.numel() // _SKETCH_COLUMNS * _SKETCH_COLUMNS
        sums.append(numbers[:num_whole].view(-1, _SKETCH_COLUMNS).sum(0, dtype=torch.float32))
        sums.append(numbers[num_whole:].float())
    return torch.cat([norms, *sums])


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm of each tensor, (n,) on their device; n is at least 1.

    Norms are float32, or float64 where one of the tensors has that type: torch refuses to narrow it.
    """
    values = [_as_floats(tensor) for tensor in tensors]
    has_double = any(value.dtype == torch.float64 for value in values)
    return torch.stack(torch._foreach_norm(values, 2, dtype=torch.float64 if has_double else torch.float32))


def _as_floats(tensor: Tensor) -> Tensor:
    """Returns a tensor of a type that torch computes norms of: complex numbers in pairs, integers as float32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in _TYPES_WITH_NORMS else tensor.float()


def require_replicas(
    model: nn.Module,
    *,
    group: ProcessGroup | None,
    host: str,
    moment: str,
    hint: str,
    exact_on: torch.device | None = None,
    replicas: Iterable[Sequence[int]] | None = None,
) -> None:
    """Checks that ranks hold the same values of the parameters that they are to hold alike. Collective.

    A flipped bit in one GPU's memory, a kernel that is not the same everywhere or a forgotten broadcast lets replicas
    drift apart, and nothing fails: the loss only gets worse.

    Args:
        model: this rank's.
        group: of all ranks; None for one process.
        host: name of this rank's node.
        moment: for the error, e.g. "at step 4".
        hint: what to do.
        exact_on: device of an exchange of 8 bytes a rank, after which each bit counts. None: norms and sums are
            compared, which takes less time and allows for GPUs of different models.
        replicas: groups of ranks that hold the same parts of DTensors; None: all ranks, and DTensors are left out.

    Raises:
        SlurmTrainError: on every rank: naming ranks and parameters that differ.
    """
    if group is None:
        return
    plain = plain_names(model)
    tensors = {
        plain(name): local_part(parameter.detach())
        for name, parameter in model.named_parameters()
        if replicas is not None or not hasattr(parameter, "placements")
    }
    groups = [range(group.size())] if replicas is None else list(replicas)
    if exact_on is None:
        tensors = {name: tensors[name] for name in names_that_differ(tensors, group=group)}
    elif not _divergent(groups, _digests_of_ranks(tensors.values(), device=exact_on, group=group)):
        return
    if not tensors:
        return
    named = {name: int(digest_of_parameters([tensor])) for name, tensor in tensors.items()}
    answers = on_every_rank(group, lambda: (host, named))
    by_name = {name: _divergent(groups, [numbers.get(name) for _, numbers in answers]) for name in named}
    ranks = sorted(set().union(*by_name.values()))
    names = ", ".join(f"{rank} on {answers[rank][0]}" for rank in ranks[:_MOST_NAMED])
    if len(ranks) > _MOST_NAMED:
        names += ", ..."
    raise SlurmTrainError(
        f"the replicas differ {moment}: rank {names} holds other values of "
        f"{shorten(name for name, ranks in by_name.items() if ranks)} than the other {len(answers) - len(ranks)}",
        hint=hint,
    )


def _digests_of_ranks(tensors: Iterable[Tensor], *, device: torch.device, group: ProcessGroup) -> list[int]:
    here = digest_of_parameters(tensors).reshape(1).to(device)
    gathered = [torch.empty_like(here) for _ in range(group.size())]
    dist.all_gather(gathered, here, group=group)
    return [int(number) for number in torch.cat(gathered).tolist()]


def _divergent(groups: Iterable[Sequence[int]], numbers: Sequence[int | None]) -> set[int]:
    """Returns the ranks whose number is not that of most ranks of their group."""
    return {ranks[place] for ranks in groups for place in find_divergent([numbers[rank] for rank in ranks])}


@torch.no_grad()
def digest_of_parameters(parameters: Iterable[Tensor]) -> Tensor:
    """Returns a digest (int64 scalar on their device) of all parameters, bit for bit.

    The sum of every element's bits times an odd number of its own, modulo 2**64: a change of any single element always
    changes it, since an odd factor loses no bit. Integer arithmetic depends on no order of summation.
    """
    tensors = [local_part(parameter).detach().reshape(-1) for parameter in parameters]
    # An element of 8 bytes is two integers, one of 16 bytes four. A rank may hold no element of a small model.
    lengths = (min(_CHUNK, tensor.numel()) * max(1, tensor.element_size() // 4) for tensor in tensors)
    longest = max(lengths, default=0)
    device = tensors[0].device if tensors else None
    odd_numbers = 2 * torch.arange(longest, dtype=torch.int64, device=device) + 1
    weights = odd_numbers * -7046029254386353131
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        for chunk in torch.split(tensor, _CHUNK):
            bits = chunk.view(_INTEGERS[chunk.element_size()]).long()
            # The factor makes the digest depend on the order of equal chunks.
            total = total * 3 + (bits * weights[: bits.numel()]).sum()
    return total


def find_divergent(digests: Sequence[int | None]) -> list[int]:
    """Returns the ranks whose digest is not the most frequent one; of equally frequent ones the first rank's counts."""
    counts = Counter(digests)
    most = max(counts.values())
    majority = next(digest for digest in digests if counts[digest] == most)
    return [rank for rank, digest in enumerate(digests) if digest != majority]


def parts_of_ranks(state: Mapping[str, Any], *, group: ProcessGroup | None) -> list[str]:
    """Returns the full names of what optimizers keep as tensors of one name and shape, and other numbers on each rank.

    Collective; the ranks have agreed that they hold the same names and shapes.

    Args:
        state: what the optimizers keep, by parameter.
        group: a gloo group of all ranks; None for one process.
    """
    if group is None:
        return []
    leaves = leaves_of(state, ("optimizer", "state"))
    return names_that_differ({full_name(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}, group=group)


def names_that_differ(tensors: Mapping[str, Tensor], *, group: ProcessGroup) -> list[str]:
    """Returns the names of those tensors whose values differ from rank to rank; DTensors never do. Collective.

    Args:
        tensors: the same names with the same shapes on all ranks.
        group: a gloo group of all ranks.
    """
    whole = {
        name: local_part(tensor.detach())
        for name, tensor in tensors.items()
        if not hasattr(tensor, "placements") and tensor.numel()
    }
    if not whole:
        return []
    # Parts of one norm, e.g. of signs or of orthogonal rows, differ in their sums.
    numbers = torch.empty(2, len(whole), dtype=torch.float64)
    parts = list(whole.values())
    # Optimizers of GPUs have their count of steps on the host.
    for device in {part.device for part in parts}:
        places = [place for place, part in enumerate(parts) if part.device == device]
        here = [parts[place] for place in places]
        numbers[0, places] = _norms(here).double().cpu()
        numbers[1, places] = torch.stack([_weighted_sum(part) for part in here]).double().cpu()
    bounds = torch.stack([numbers, -numbers])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds
    norms = most[0]
    norm_gaps, sum_gaps = most + least
    differs = (norm_gaps > _NORM_TOLERANCE * norms) | (sum_gaps > _SUM_TOLERANCE * norms)
    return [name for name, is_other in zip(whole, (differs & ~norms.isnan()).tolist(), strict=True) if is_other]


def _weighted_sum(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's numbers with fixed weights of its columns, without a copy of the tensor."""
    values = _as_floats(tensor).reshape(-1)
    weights = torch.arange(_SKETCH_COLUMNS, dtype=torch.float32, device=values.device).cos()
    num_whole = values.numel() // _SKETCH_COLUMNS * _SKETCH_COLUMNS
    sums = values[:num_whole].view(-1, _SKETCH_COLUMNS).sum(0, dtype=torch.float32)
    rest = values[num_whole:].float()
    return sums @ weights + rest @ weights[: rest.numel()]
