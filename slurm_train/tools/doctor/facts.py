"""Plain values of the preflight: what ranks and nodes report of themselves and of each other, and findings about it.

A rank reports little, since there are many; the first rank of each node reports for the node. Reports are sent as JSON:
`asdict` makes it, `to_records` reads it. "" and None mean not known; a rule makes no finding of what is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_train.rundir.events import Finding

_ORDER = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank, as it sees itself."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: str
    """Slurm's name of the node."""
    slurm_rank: int | None = None
    """The rank that Slurm gave to this task."""
    visible_gpus: int | None = None
    """GPUs that this process may use."""
    unnamed_gpus: int | None = None
    """GPUs of the node where neither Slurm nor a vendor's variable names one to this task; None where one does."""
    cpus: list[int] = field(default_factory=list)
    """CPUs that it may run on."""
    max_open_files: int | None = None
    """Soft limit; None: unlimited or not known."""
    max_locked_mb: int | None = None
    """Soft limit of locked memory in MiB, likewise."""
    limits: dict[str, int] = field(default_factory=dict)
    """The finite limits of its processes, see `slurm.limits`."""


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
class NodeFacts:
    """One node, as its first rank sees it.

    Wide because it is a record that ranks exchange: each rule reads the few fields that it needs.
    """

    node: str
    node_rank: int
    num_cpus: int = 0
    """Of the machine."""
    load: float = 0.0
    """Load average of the last minute."""
    versions: dict[str, str] = field(default_factory=dict)

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

    hashes: dict[str, str] = field(default_factory=dict)
    """Of what all nodes must see alike: "code", "config", "data"."""
    code_changes: list[str] = field(default_factory=list)
    """Files that differ from the list of the code's files, e.g. "train.py", "model.py (gone)"."""
    data_missing: list[str] = field(default_factory=list)
    """What of the configured data is not there or cut short, e.g. "/data/train is not there"."""
    data_empty: list[str] = field(default_factory=list)
    """Folders of the configured data with nothing in them, as a mount point without its mount."""
    disks: list[DiskFacts] = field(default_factory=list)

    compile_obstacles: list[str] = field(default_factory=list)
    """Why torch cannot compile kernels here though the run wants that, e.g. "no Python.h in /usr/include"."""

    lacks_scontrol: bool = False
    """Whether the job's own Slurm has no scontrol here."""

    gpus: list[GpuFacts] | None = None
    """None where there is no NVML."""
    num_gpus: int | None = None
    """GPUs that NVML counts on the node."""
    gpu_errors: list[str] = field(default_factory=list)
    """What the driver has logged, e.g. "Xid 79 on 0000:3b:00"."""

    @property
    def gloo_address(self) -> str:
        """The address that gloo would announce, "" where none is known."""
        if self.gloo_interface:
            return self.addresses.get(self.gloo_interface, "")
        return self.own_addresses[0] if self.own_addresses else ""


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
    mb_per_s: float | None = None
    """Speed of its fastest connection; None where it has none."""
    latency_us: float | None = None
    """Half a round trip to the nearest node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """What one GPU measured, on request."""

    name: str
    """Its index on the node."""
    kind: str
    """E.g. "NVIDIA H200"."""
    tflops: float
    """Of a matrix product in bfloat16."""
    copy_gb_per_s: float
    """Read and written by a copy within its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeeds:
    """What the GPUs of one node measured, on request."""

    node: str
    gpus: list[GpuSpeed] = field(default_factory=list)
    all_reduce_gb_per_s: float | None = None
    """Over the busiest link between them; None for one GPU."""
    diagnosis: str = ""
    """What DCGM found, "" where it found nothing or is not installed."""
    error: str = ""
    """Why there are no figures."""


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
    answers: dict[str, str] = field(default_factory=dict)
    """Interface -> address of rank 0's node where rank 0 answers instead."""


@dataclass(slots=True, kw_only=True)
class JobFacts:
    """What a job should be like, and everything that rank 0 knows of it.

    Wide because it is the one value that all rules get; each reads the few fields that it needs.
    """

    names: tuple[str, ...]
    """Its nodes in rank order; the first is rank 0's."""
    master: str = ""
    """Name or address where the ranks meet rank 0, if it is not the name of its node."""
    world_size: int
    gpus_per_node: int = 0
    """GPUs asked of Slurm, on the node that has most; 0: none."""
    cpus_per_gpu: int | None = None
    run_s: float | None = None
    """How long a rank runs at most; None: not known."""
    must_compile: bool = False
    """Whether it was typed that model and loss are compiled; else a default decides."""
    needs_port: bool = False
    """Whether MASTER_PORT itself has to be free, as a script of one's own expects."""
    port: int = 0
    """MASTER_PORT, the first candidate."""
    bound_port: int | None = None
    """Where rank 0 listens; 0: every candidate is taken; None: it has not tried yet."""
    ranks: list[RankFacts] = field(default_factory=list)
    nodes: list[NodeFacts] = field(default_factory=list)
    probes: list[ProbeFacts] = field(default_factory=list)
    speeds: list[SpeedFacts] = field(default_factory=list)
    gpu_speeds: list[GpuSpeeds] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
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
        by_node: dict[str, list[RankFacts]] = {}
        for rank in sorted(self.ranks, key=lambda rank: rank.rank):
            by_node.setdefault(rank.node, []).append(rank)
        return by_node

    def node(self, name: str) -> NodeFacts:
        """Returns a node by name, with nothing known of one that has not reported."""
        return next((node for node in self.nodes if node.node == name), NodeFacts(node=name, node_rank=0))


def error(code: str, node: str, seen: str, *, blames: bool = False, hint: str = "") -> Finding:
    """Returns a finding that keeps the ranks from starting; without a hint it gets that of its code."""
    return Finding(code=code, level="error", seen=seen, todo=hint, node=node, blames_node=blames)


def warning(code: str, node: str, seen: str, *, hint: str = "") -> Finding:
    """Returns a finding that is printed, and the ranks start."""
    return Finding(code=code, level="warning", seen=seen, todo=hint, node=node)


def note(code: str, seen: str) -> Finding:
    """Returns a finding that says how things are here."""
    return Finding(code=code, level="note", seen=seen, todo="")


def merge(findings: Iterable[Finding], *, hints: Mapping[str, str], nodes: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Returns the worst first, and what several nodes have in common as one finding.

    Args:
        findings: as found, one per node.
        hints: code -> what to do, for those that do not say it themselves.
        nodes: all nodes; what all of several have is the fault of none.
    """
    alike: dict[Finding, list[Finding]] = {}
    for reported in findings:
        finding = replace(reported, todo=reported.todo or hints[reported.code])
        alike.setdefault(replace(finding, node="", blames_node=False), []).append(finding)
    merged = []
    for common, group in alike.items():
        names = list(dict.fromkeys(finding.node for finding in group))
        if len(names) == 1:
            merged.append(group[0])
        elif set(nodes) <= set(names):
            merged.append(common)
        else:
            # What most nodes have is no fault of theirs.
            blames = 2 * len(names) < len(nodes) and all(finding.blames_node for finding in group)
            merged.append(replace(common, node=", ".join(names), blames_node=blames))
    return tuple(sorted(merged, key=lambda finding: _ORDER.index(finding.level)))
