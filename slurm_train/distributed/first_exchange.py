"""The first collective of a process group, with a time-out of its own: large packets, devices, and all ranks at once.

What the preflight asks over sockets is small. A network that loses large packets (MTU) lets it pass, and so would the
group's own time-out, which is long where somebody watches for hangs.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RendezvousError

_NUM_VALUES = 1 << 18


def exchange_once(place: RankPlace, *, device: torch.device, timeout_s: float) -> None:
    """Adds up a mebibyte over all ranks. Collective over all ranks.

    Args:
        place: this rank.
        device: where the values are: the backend of the training's gradients is the one that is tried.
        timeout_s: seconds that it may take.

    Raises:
        RendezvousError: it did not end in time, failed, or the sum is wrong.
    """
    values = torch.ones(_NUM_VALUES, device=device)
    began_s = time.monotonic()
    try:
        dist.all_reduce(values, async_op=True).wait(timedelta(seconds=timeout_s))
    except RuntimeError as err:
        raise _failed(place, f"failed after {time.monotonic() - began_s:.0f} s: {str(err).splitlines()[0]}") from err
    if not bool((values == place.world_size).all()):
        raise _failed(place, f"gave another sum than {place.world_size}")


def _failed(place: RankPlace, how: str) -> RendezvousError:
    return RendezvousError(
        f"COLLECTIVE {place.host}: the first all_reduce of 1 MiB over {place.world_size} ranks {how}",
        hint="the sockets were fine: compare the MTU of the nodes (`ip link`), and the interface that is used "
        "(cluster.env.NCCL_DEBUG=INFO); see docs/troubleshooting.md#collective",
    )
