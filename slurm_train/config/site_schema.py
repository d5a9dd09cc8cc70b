"""The keys of a site's profile: what its file may hold, which `config.site_profile` puts into a run's configuration.

Apart from what is done with them, since reading a YAML file needs the types of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GROUP = "site"
SIZE = ("nodes", "gpus_per_node")
"""Keys of `cluster` that each run is given, and no site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePartition:
    """A partition: what its nodes have, and what a run in it is asked for with."""

    num_nodes: int | None = None
    gpus_per_node: int | None = None
    max_time_min: int | None = None
    """Longest time limit; None if unlimited."""
    preemption: str | None = None
    """What becomes of a preempted job: never, requeued, cancelled or suspended."""
    grace_s: float | None = None
    """From the first TERM of a preemption to the last."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Values of `cluster.*`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteQos:
    """A QOS that a run may ask for."""

    preempted_by: list[str] = field(default_factory=list)
    """QOS whose jobs may take its nodes."""
    preemption: str | None = None
    grace_s: float | None = None
    max_time_min: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFile:
    """A site file, read."""

    slurm_version: str = ""
    requeue: str = ""
    """How a run comes back here, in words."""
    refuses_requeue: bool = False
    """Whether a submit filter refuses --requeue: runs here have requeue.enabled=false."""
    kill_wait_s: float | None = None
    """From the last TERM to KILL."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Values of `cluster.*` for every partition."""
    partitions: dict[str, SitePartition] = field(default_factory=dict)
    qos: dict[str, SiteQos] = field(default_factory=dict)
