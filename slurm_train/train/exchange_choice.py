"""From a configuration to the way in which gradients are exchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.config.schema import DdpSection, RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError
from slurm_train.rundir.events import ExchangeFacts, write_exchange
from slurm_train.train.exchange import Exchange, LocalSteps
from slurm_train.train.start import RankStart


def build_exchange(config: RunConfig, *, place: RankPlace, device: torch.device) -> Exchange | None:
    """Returns how gradients are exchanged, None for DDP's own way. Collective over all ranks."""
    ddp = config.ddp
    if ddp.comm == "none":
        return None
    if ddp.comm == "bf16":
        return Exchange()
    if ddp.comm == "powersgd":
        from slurm_train.train.powersgd import PowerSgd

        return PowerSgd(start_step=ddp.comm_start_step, rank=ddp.powersgd_rank, seed=config.seed, device=device)
    return LocalSteps(start_step=ddp.comm_start_step, every=ddp.average_every_steps, node_group=open_node_group(place))


def note_exchange(start: RankStart, model: nn.Module, exchange: Exchange | None) -> None:
    """Writes down how many bytes a step sends where ranks hold whole replicas. Rank 0 only."""
    if not start.layout.is_replicated:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = float(sum(parameter.numel() * parameter.element_size() for parameter in parameters))
    sent = whole if exchange is None else exchange.sent_bytes(parameters)
    facts = ExchangeFacts(comm=start.config.ddp.comm, gradient_bytes=whole, sent_bytes=sent)
    write_exchange(start.run, start.attempt, facts)


def open_node_group(place: RankPlace) -> dist.ProcessGroup:
    """Returns the group of this node's ranks. Collective over all ranks."""
    nodes: list[Any] = [None] * place.world_size
    dist.all_gather_object(nodes, place.node_rank)
    members = [[rank for rank, node in enumerate(nodes) if node == one] for one in sorted(set(nodes))]
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]  # torch says no types here
    return group


def fitting_buckets(ddp: DdpSection, model: nn.Module, *, device: torch.device) -> DdpSection:
    """Returns the settings of DDP with buckets that the exchange can deal with.

    Raises:
        ConfigError: PowerSGD between CPU ranks needs one bucket, and the parameters are of several types.
    """
    if ddp.comm != "powersgd" or device.type != "cpu":
        return ddp
    from slurm_train.train.powersgd import one_bucket_mb

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = sorted({str(parameter.dtype) for parameter in parameters})
    if len(kinds) > 1:
        raise ConfigError(
            f"ddp.comm=powersgd between CPU ranks needs parameters of one type, these are {' and '.join(kinds)}",
            hint="convert the model to one type, or choose another ddp.comm",
        )
    return replace(ddp, bucket_cap_mb=one_bucket_mb(parameters))
