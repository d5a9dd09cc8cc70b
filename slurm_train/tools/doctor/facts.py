"""What ranks and nodes report of themselves and of each other: plain values that travel as JSON, without a judgement.

A rank reports little, since there are many; the first rank of each node reports for the node. "" and None mean not
known, and what is not known is no finding.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """By others, without what the driver reserves for itself."""
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
    """Whether there was no room for it."""
    is_readonly: bool = False
    """Whether it was not allowed."""


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
    gloo_interface: str = ""
    """GLOO_SOCKET_IFNAME."""
    nccl_interface: str = ""
    """NCCL_SOCKET_IFNAME."""
    has_infiniband: bool = False
    link_mbit_per_s: int | None = None
    """The nominal speed of the interface."""
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
    """Files that differ from that list, e.g. "train.py", "model.py (gone)"."""
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
    """What one node found when it probed others, once all were there."""

    node: str
    unreached: dict[str, str] = field(default_factory=dict)
    """Peer -> why it was not reached at the address of its route, e.g. "timed out"."""
    unreached_gloo: dict[str, str] = field(default_factory=dict)
    """Peer -> why it was not reached at the address that gloo would announce."""
    seen_after_s: dict[str, float] = field(default_factory=dict)
    """Peer -> seconds until its file was seen here."""
    unseen: list[str] = field(default_factory=list)
    """Peers whose file was not seen in the time for it."""
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
    """Written into a shared file by a node whose ranks cannot connect to rank 0."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """Where rank 0 listens."""

    asked: int
    """The first candidate: MASTER_PORT."""
    bound: int
    """The one that was free; 0 if none."""
    holder: str = ""
    """Which process holds the first one, as far as /proc shows it, e.g. "pid 7 (python)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the job should be like."""

    nodes: tuple[str, ...]
    """In rank order; the first is rank 0's."""
    world_size: int
    gpus_per_node: int = 0
    """GPUs asked of Slurm, on the node that has most; 0: none."""
    cpus_per_gpu: int | None = None
    needs_port: bool = False
    """Whether MASTER_PORT itself has to be free, as a script of one's own expects."""


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the job should be like, and everything that rank 0 knows of it."""

    asked: Asked
    ranks: list[RankFacts] = field(default_factory=list)
    nodes: list[NodeFacts] = field(default_factory=list)
    probes: list[ProbeFacts] = field(default_factory=list)
    speeds: list[SpeedFacts] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    port: PortFacts | None = None
    silent: list[str] = field(default_factory=list)
    """Nodes of which some ranks never connected."""
    mute: list[str] = field(default_factory=list)
    """Nodes that connected, and whose reports did not arrive."""
    late: list[str] = field(default_factory=list)
    """Nodes that connected, and did not answer a question in time."""
    waited_s: float = 0.0
    """How long was waited for those."""

    @property
    def ranks_by_node(self) -> dict[str, list[RankFacts]]:
        """The ranks of each node, in rank order."""
        found: dict[str, list[RankFacts]] = {}
        for rank in sorted(self.ranks, key=lambda rank: rank.rank):
            found.setdefault(rank.node, []).append(rank)
        return found

    def node(self, name: str) -> NodeFacts:
        """Returns a node by name, with nothing known of one that has not reported."""
        return next((node for node in self.nodes if node.node == name), NodeFacts(node=name, node_rank=0))
