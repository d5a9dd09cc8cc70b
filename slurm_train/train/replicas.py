"""Whether all data-parallel ranks still hold the same parameters: a digest of each, compared in one small exchange.

A flipped bit in one GPU's memory, a kernel that is not the same everywhere or a forgotten broadcast lets replicas
drift apart, and nothing fails: the loss only gets worse. The digest is integer arithmetic on the device, so it depends
on every bit and on no order of summation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.errors import SlurmTrainError
from slurm_train.train.update import local_part

_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@torch.no_grad()
def digest_of_parameters(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a digest (int64 scalar on the device) of all parameters, bit for bit.

    The sum of every element's bits times an odd number of its own, modulo 2**64: a change of any single element always
    changes it, since an odd factor loses no bit.
    """
    tensors = [local_part(parameter).detach().reshape(-1) for parameter in parameters]
    # Elements of 8 bytes count as two of 4.
    longest = 2 * min(_CHUNK, max((tensor.numel() for tensor in tensors), default=0))
    weights = torch.arange(1, 2 * longest, 2, dtype=torch.int64, device=device) * -7046029254386353131
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        for chunk in torch.split(tensor, _CHUNK):
            bits = chunk.view(_INTEGERS[chunk.element_size()]).long()
            # Multiplied on, so that equal chunks in another order do not give the same.
            total = total * 3 + (bits * weights[: bits.numel()]).sum()
    return total


def find_divergent(digests: list[int]) -> list[int]:
    """Returns the ranks whose digest is not that of the majority; of two equal camps, the one without rank 0."""
    counts = Counter(digests)
    most = max(counts.values())
    majority = next(digest for digest in digests if counts[digest] == most)
    return [rank for rank, digest in enumerate(digests) if digest != majority]


def check_replicas(
    parameters: Iterable[Tensor],
    *,
    step: int,
    device: torch.device,
    host: str,
    groups: Sequence[Sequence[int]] | None = None,
) -> None:
    """Compares the parameters of all ranks. Collective: one exchange of 8 bytes a rank.

    Args:
        parameters: this rank's.
        step: for the message.
        device: where they are.
        host: name of this node.
        groups: ranks that hold the same part of the parameters; None: all hold all of them.

    Raises:
        SlurmTrainError: they differ; on every rank, with the same words.
    """
    own = digest_of_parameters(parameters, device).reshape(1)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    digests = [int(digest) for digest in torch.cat(gathered).tolist()]
    alike = [range(len(digests))] if groups is None else groups
    divergent = [ranks[number] for ranks in alike for number in find_divergent([digests[rank] for rank in ranks])]
    if not divergent:
        return
    hosts: list[Any] = [None] * len(gathered)
    dist.all_gather_object(hosts, host)
    names = ", ".join(f"{rank} on {hosts[rank]}" for rank in divergent[:8]) + (", ..." if len(divergent) > 8 else "")
    rest = len(gathered) - len(divergent)
    raise SlurmTrainError(
        f"the replicas differ at step {step}: rank {names} holds other parameters than the other {rest}",
        hint="resume goes on from a checkpoint from before; if it comes back, exclude that node (cluster.exclude)",
    )
