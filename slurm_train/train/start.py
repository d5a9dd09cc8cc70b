"""What one rank is told when it starts: one value, the same for the built-in trainer and for a user's function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import ParallelLayout, solve_layout
from slurm_train.config.schema import RunConfig
from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import check_gloo_address, open_store
from slurm_train.rundir.heartbeat import AwakeClock, Heartbeat
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise.monitor import limits_of
from slurm_train.supervise.signals import StopFlag

if TYPE_CHECKING:
    import torch


_LONGEST_SUSPENSION_S = 7 * 86400.0


def patient(config: RunConfig, timeout_s: float) -> float:
    """Returns the time-out of collectives: a long one where somebody watches the ranks.

    A rank that hangs is to be named by the watchdog, not by whoever gives up waiting for it first. And the watchdog
    knows of suspended jobs; gloo and NCCL take the time in which they were stopped for a peer that does not answer.

    Args:
        config: says whether anybody watches.
        timeout_s: where nobody does.
    """
    return timeout_s if limits_of(config) is None else max(timeout_s, _LONGEST_SUSPENSION_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """Who this rank is, which run it belongs to, and where its peers are."""

    config: RunConfig
    """The frozen configuration."""
    plan: BatchPlan
    """Batch arithmetic for this world size."""
    run: RunDirectory
    """Where everything is kept."""
    place: RankPlace
    """This rank."""
    point: MeetingPoint
    """Where the ranks of this attempt meet."""
    attempt: int
    """Number of the attempt, counted over the run."""
    stop: StopFlag
    """Set by the signal handlers, which are installed already."""
    env: Mapping[str, str]
    """The process's environment."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """What this rank says about its progress."""

    @property
    def layout(self) -> ParallelLayout:
        """Which rank stands where."""
        return solve_layout(self.config.parallel, world_size=self.place.world_size)

    @property
    def clock(self) -> AwakeClock:
        """Seconds in which this process ran."""
        return self.heartbeat.clock

    @property
    def job(self) -> str:
        """Slurm's id of the job in letters, digits and "_"; "local" without Slurm."""
        return self.env.get("SLURM_JOB_ID", "local")

    def join(self, *, device: torch.device) -> None:
        """Opens the process group. Collective over all ranks.

        Raises:
            RendezvousError: the ranks do not find each other, or cannot exchange anything; the message names the node
                that saw it.
        """
        from slurm_train.distributed.flight import newest_collectives
        from slurm_train.distributed.group import init_group

        if device.type == "cpu":
            check_gloo_address(self.place, self.env)
        store, _ = open_store(self.place, self.point)
        init_group(self.place, store, device=device, timeout_s=patient(self.config, self.config.train.start_timeout_s))
        self.heartbeat.record = newest_collectives
        if "SLURM_STEP_ID" in self.env and self.config.preflight.enabled and self.place.world_size > 1:
            from slurm_train.distributed.first_exchange import exchange_once

            exchange_once(self.place, device=device, timeout_s=self.config.preflight.collective_timeout_s)
