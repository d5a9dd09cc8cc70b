"""What ranks and nodes report of themselves and of each other: plain values that travel as JSON, without a judgement.

A rank reports little, since there are many; the first rank of each node reports for the node. "" and None mean that
nobody says, and what nobody says is no finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_train.config.schema import build_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank, as it sees itself."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    node: str
    """Slurm's name of the node."""
    pid: int = 0
    slurm_rank: int | None = None
    """The rank that Slurm gave to this task."""
    visible_gpus: int | None = None
    """GPUs that this process may use."""
    cpus: list[int] = field(default_factory=list)
    """CPUs that it may run on."""
    max_open_files: int | None = None
    """Soft limit; None: unlimited or not known."""
    max_locked_mb: int | None = None
    """Soft limit of locked memory in MiB, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU that the job was given, as NVML sees it before any rank of ours has touched it."""

    name: str
    """As the job knows it: index or UUID."""
    total_mb: int = 0
    used_mb: int = 0
    """By others, what the driver keeps to itself not counted."""
    holders: list[str] = field(default_factory=list)
    """Processes that hold memory, e.g. "pid 4711 (40960 MiB)"."""
    errors: list[str] = field(default_factory=list)
    """Why it must not be used, e.g. "3 uncorrected memory errors"."""
    warnings: list[str] = field(default_factory=list)
    """Why it is not at its best, e.g. "slowed down by heat"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """One place that ranks of a node write to."""

    role: str
    """What it is for: "run directory", "checkpoint.local_dir", "temporary files", "shared memory"."""
    path: str
    free_mb: int | None = None
    total_mb: int | None = None
    free_inodes: int | None = None
    error: str = ""
    """How a small file could not be written, e.g. "Read-only file system"."""
    is_full: bool = False
    """Whether that was for want of room."""
    is_readonly: bool = False
    """Whether it was because nothing may be written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """How a node is reached and whom it can resolve."""

    addresses: dict[str, str] = field(default_factory=dict)
    """Interface -> address, without the loopback."""
    interface: str = ""
    """The one that the route to the other nodes leaves by."""
    address: str = ""
    """Its address: where the others reach this node."""
    own_name: str = ""
    own_addresses: list[str] = field(default_factory=list)
    """What the node's own name resolves to here; gloo announces it where no interface is named."""
    master_addresses: list[str] = field(default_factory=list)
    """What rank 0's name resolves to here."""
    master_error: str = ""
    """Why it does not."""
    gloo_interface: str = ""
    """GLOO_SOCKET_IFNAME."""
    nccl_interface: str = ""
    """NCCL_SOCKET_IFNAME."""
    has_infiniband: bool = False
    link_mbit_per_s: int | None = None
    """What the interface claims to do."""
    probe_port: int = 0
    """Where this node answers the others' probes."""

    @property
    def gloo_address(self) -> str:
        """The address that gloo would announce, "" where none is known."""
        if self.gloo_interface:
            return self.addresses.get(self.gloo_interface, "")
        return self.own_addresses[0] if self.own_addresses else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesFacts:
    """What a node sees of the run."""

    code_index: str = ""
    """Hash of the list of the code's files, as this node reads it."""
    code_changes: list[str] = field(default_factory=list)
    """Files that are not what that list says, e.g. "train.py: changed"."""
    config: str = ""
    """Hash of the frozen configuration and plan."""
    data: str = ""
    """Fingerprint of the data set."""
    data_missing: list[str] = field(default_factory=list)
    """Paths of the configured data that are not there, or cut short."""
    data_empty: list[str] = field(default_factory=list)
    """Folders of the configured data with nothing in them, as a mount point without its mount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node, as its first rank sees it."""

    node: str
    node_rank: int
    num_cpus: int = 0
    """Of the machine."""
    load: float = 0.0
    """Load average of the last minute."""
    network: NetworkFacts = field(default_factory=NetworkFacts)
    files: FilesFacts = field(default_factory=FilesFacts)
    disks: list[DiskFacts] = field(default_factory=list)
    gpus: list[GpuFacts] | None = None
    """None where there is no NVML."""
    num_gpus: int | None = None
    """GPUs that NVML counts on the node."""
    gpu_errors: list[str] = field(default_factory=list)
    """What the driver has logged, e.g. "Xid 79 on 0000:3b:00"."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFacts:
    """What one node found when it looked at others, once all were there."""

    node: str
    unreached: dict[str, str] = field(default_factory=dict)
    """Peer -> why it was not reached at the address of its route, e.g. "timed out"."""
    unreached_gloo: dict[str, str] = field(default_factory=dict)
    """Peer -> why it was not reached at the address that gloo would announce."""
    reached: list[str] = field(default_factory=list)
    """Peers that answered."""
    seen_after_s: dict[str, float] = field(default_factory=dict)
    """Peer -> seconds until its file was seen here."""
    unseen: list[str] = field(default_factory=list)
    """Peers whose file was not seen while somebody waited for it."""
    clock_offset_s: float | None = None
    """How far this clock is ahead of rank 0's."""
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """What one node measured, on request."""

    node: str
    work_ms: float
    """Time for a fixed piece of computing."""
    mb_per_s: dict[str, float] = field(default_factory=dict)
    """Peer -> speed of one connection, the slower direction."""
    latency_us: dict[str, float] = field(default_factory=dict)
    """Peer -> half a round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A node whose ranks do not get to rank 0 says so in a shared file."""

    node: str
    tries: int
    """Grows while it goes on."""
    address: str = ""
    """Where rank 0 was looked for, "" where its name does not resolve."""
    port: int = 0
    error: str = ""
    """E.g. "timed out"."""
    reached: list[str] = field(default_factory=list)
    """Other nodes that answer."""
    unreached: list[str] = field(default_factory=list)
    """Other nodes that do not."""


def read_node(value: Mapping[str, Any]) -> NodeFacts:
    """Returns facts that came as JSON.

    Raises:
        ConfigError: they have another form.
    """
    return build_config(NodeFacts, value)


def read_rank(value: Mapping[str, Any]) -> RankFacts:
    """Returns facts that came as JSON; see `read_node`."""
    return build_config(RankFacts, value)


def read_probe(value: Mapping[str, Any]) -> ProbeFacts:
    """Returns facts that came as JSON; see `read_node`."""
    return build_config(ProbeFacts, value)


def read_speed(value: Mapping[str, Any]) -> SpeedFacts:
    """Returns facts that came as JSON; see `read_node`."""
    return build_config(SpeedFacts, value)


def read_trouble(value: Mapping[str, Any]) -> Trouble:
    """Returns facts that came as JSON; see `read_node`."""
    return build_config(Trouble, value)
