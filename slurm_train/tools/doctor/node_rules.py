"""The rules of the preflight: what is wrong with the ranks, network, files and GPUs of a job's nodes. Pure.

To add one, write a function under `@rules.add(CODE, hint=...)` that takes the evidence and yields a finding for each
node that is affected, add what it needs to `facts` and `gather`, and describe the code in docs/troubleshooting.md.

A node is blamed where leaving it out would help, so only where most of the others agree: of two nodes that differ, or
cannot reach each other, either may be at fault.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slurm_train.distributed.rendezvous import files_needed, is_loopback
from slurm_train.formatting import shorten
from slurm_train.rundir.events import Finding
from slurm_train.tools.doctor.facts import Evidence, GpuFacts, NetworkFacts, SpeedFacts, Trouble
from slurm_train.tools.doctor.findings import Rules, error, warning

rules = Rules[Evidence]()
OTHER_CODES = ("FS_MISSING", "COLLECTIVE")
"""Codes that are found outside of these rules: before there are ranks, and when the process group is open."""

_FEW_FILES = 1024
_LITTLE_LOCKED_MB = 64
# So many CPUs for each rank must be idle before one bound CPU is called too few.
_PLENTY = 4
_SKEW_S = 2.0
_LATE_S = 1.0
# Free MiB below which a place is called full, or soon full; 0: it only makes some things slower.
_FULL_MB = {
    "run directory": (64, 1024),
    "checkpoint.local_dir": (64, 1024),
    "temporary files": (0, 64),
    "shared memory": (0, 16),
}
# What ranks of one run cannot have in different versions; the rest is worth a warning.
_MUST_AGREE = ("torch", "nccl", "cuda", "slurm_train")
_BUSY_MB = 2048
_SLOW = 1.6
_SLOW_LINK = 0.5
# One connection alone reaches a fraction of a fast network.
_SHARE_OF_NOMINAL = 0.05
_HIGH_LATENCY_US = 500.0
_HIGH_LATENCY = 5.0


# Ranks: who they are, what they may use.


@rules.add(
    "RANK_MISMATCH",
    hint="look for RANK, WORLD_SIZE or SLURM_* set by a module, a prolog or a shell's start file on the nodes",
)
def mismatched_ranks(job: Evidence) -> Iterator[Finding]:
    """The ranks do not agree about who is who. Each rank also checks itself alone, before it looks for others."""
    places = defaultdict(list)
    for rank in job.ranks:
        places[rank.node, rank.local_rank].append(rank.rank)
        if rank.slurm_rank not in (None, rank.rank):
            seen = f"the task that Slurm calls rank {rank.slurm_rank} has RANK={rank.rank} in its environment"
            yield error(rank.node, seen)
        elif rank.world_size != job.asked.world_size:
            seen = f"rank {rank.rank} counts {rank.world_size} ranks, the run was planned for {job.asked.world_size}"
            yield error(rank.node, seen)
    for (node, local_rank), numbers in places.items():
        if len(numbers) > 1:
            seen = f"ranks {as_ranges(numbers)} all have local rank {local_rank}, so they would share a GPU"
            yield error(node, seen)


@rules.add(
    "GPU_COUNT",
    hint="see CUDA_VISIBLE_DEVICES and the srun flags there; `scontrol show node` says what Slurm counts",
)
def few_visible_gpus(job: Evidence) -> Iterator[Finding]:
    """A node has fewer GPUs than ranks."""
    for node, ranks in job.ranks_by_node.items():
        visible = [rank.visible_gpus for rank in ranks if rank.visible_gpus is not None]
        # There is a rank for each GPU, and not every node need have as many as another.
        wanted = min(job.asked.gpus_per_node, *(rank.local_world_size for rank in ranks))
        if visible and max(visible) < wanted:
            yield error(node, f"{max(visible)} GPUs are visible to the ranks, {wanted} were asked for", blames=True)


@rules.add("CPU_AFFINITY", hint="set cluster.cpus_per_gpu, and look at --cpu-bind and TaskPlugin where it is set")
def few_bound_cpus(job: Evidence) -> Iterator[Finding]:
    """Ranks are bound to too few CPUs."""
    asked = job.asked.cpus_per_gpu
    for node, ranks in job.ranks_by_node.items():
        num_cpus, bound = job.node(node).num_cpus, {cpu for rank in ranks for cpu in rank.cpus}
        fewest = min(ranks, key=lambda rank: len(rank.cpus))
        if not bound or not num_cpus:
            continue
        if len(bound) < min(len(ranks), num_cpus):
            yield warning(node, f"{len(ranks)} ranks may use nothing but CPU {as_ranges(bound)} of {num_cpus}")
        elif len(fewest.cpus) < min(asked or 1, num_cpus):
            seen = f"rank {fewest.rank} may use {len(fewest.cpus)} CPUs, cluster.cpus_per_gpu={asked} asked"
            yield warning(node, seen)
        elif asked is None and len(fewest.cpus) == 1 and num_cpus >= _PLENTY * len(ranks):
            yield warning(node, f"each rank has 1 of {num_cpus} CPUs, for its loader workers as well")


@rules.add(
    "LIMITS",
    hint="Slurm passes the limits of the shell that submits on: `ulimit -n 65536` there, or in cluster.setup",
)
def few_open_files(job: Evidence) -> Iterator[Finding]:
    """The limit of open files is too low."""
    for node, ranks in job.ranks_by_node.items():
        lowest = min((rank.max_open_files for rank in ranks if rank.max_open_files is not None), default=None)
        needed = files_needed(max(rank.world_size for rank in ranks))
        if lowest is not None and lowest < needed:
            yield error(node, f"a rank may open {lowest} files, it needs {max(needed, _FEW_FILES)}")
        elif lowest is not None and lowest < _FEW_FILES:
            yield warning(node, f"a rank may open {lowest} files, usual are {_FEW_FILES}")


@rules.add(
    "LIMITS", hint="`ulimit -l unlimited` before submitting, or ask for LimitMEMLOCK=infinity in slurmd's service"
)
def little_locked_memory(job: Evidence) -> Iterator[Finding]:
    """The limit of locked memory is too low for InfiniBand."""
    for node, ranks in job.ranks_by_node.items():
        locked = [rank.max_locked_mb for rank in ranks if rank.max_locked_mb is not None]
        if locked and min(locked) < _LITTLE_LOCKED_MB and job.node(node).network.has_infiniband:
            yield warning(node, f"a rank may lock {min(locked)} MiB of memory, and InfiniBand has to lock its buffers")


# Network: rank 0's address, ports, absent nodes, interfaces, clocks.


def _wrong_address(trouble: Trouble, job: Evidence) -> Finding | None:
    """Returns what is wrong with the address at which a node looks for rank 0, None where it is rank 0's."""
    master = job.asked.nodes[0]
    network = job.node(master).network
    known = {*network.addresses.values(), network.address} - {""}
    if not trouble.address:
        code, seen = "NAME_RESOLUTION", f"cannot resolve {master}, where rank 0 is: {trouble.error}"
    elif is_loopback(trouble.address):
        code, seen = "LOOPBACK", f"resolves {master}, where rank 0 is, to itself ({trouble.address})"
    elif known and trouble.address not in known:
        seen = f"looks for rank 0 at {trouble.address}, but {master} has {shorten(sorted(known))}"
        code = "WRONG_MASTER"
    else:
        return None
    hint = f"compare `getent hosts {master}` there and on {master}, mend /etc/hosts or the name server"
    return error(trouble.node, seen, blames=True, hint=hint, code=code)


@rules.add("WRONG_MASTER", "NAME_RESOLUTION", "LOOPBACK")
def wrong_address_of_rank_0(job: Evidence) -> Iterator[Finding]:
    """A node looks for rank 0 at an address that is not rank 0's, or cannot resolve its name."""
    yield from filter(None, (_wrong_address(trouble, job) for trouble in job.troubles))


@rules.add(
    "PORT_BLOCKED",
    hint="open the ports between the nodes in firewall and routing (`nft list ruleset`, `ip route get` on both)",
)
def unreached_rank_0(job: Evidence) -> Iterator[Finding]:
    """Packets to rank 0's port do not arrive."""
    master = job.asked.nodes[0]
    blocked = [trouble for trouble in job.troubles if _wrong_address(trouble, job) is None]
    if len(blocked) > 1 and len(blocked) == len(job.asked.nodes) - 1:
        first, reach = blocked[0], any(trouble.reached for trouble in blocked)
        seen = f"no other node reaches rank 0 at {first.address}:{first.port}: {first.error}"
        yield error(master, seen + ("; they reach each other" if reach else ""), blames=reach)
        return
    for one in blocked:
        others = f"; it reaches {shorten(one.reached)}" if one.reached else ""
        others += f"; it does not reach {shorten(one.unreached)}" if one.unreached else ""
        # Another node has connected to rank 0, and this one reaches none.
        is_alone = bool({rank.node for rank in job.ranks} - {master, one.node}) and not one.reached
        seen = f"does not reach rank 0 at {one.address}:{one.port} ({master}): {one.error}{others}"
        yield error(one.node, seen, blames=is_alone)


@rules.add("PORT_IN_USE")
def taken_port(job: Evidence) -> Iterator[Finding]:
    """Another process holds the port at which the ranks were to meet."""
    port = job.port
    if port is None or not port.asked or port.bound == port.asked:
        return
    holder = f" by {port.holder}" if port.holder else ""
    instead = f", the ranks meet at {port.bound}" if port.bound else ", and so are all others on the list"
    seen = f"port {port.asked} was free and is held{holder} now{instead}"
    if job.asked.needs_port or not port.bound:
        yield error(job.asked.nodes[0], seen, hint="the next attempt takes another port")
    else:
        yield warning(job.asked.nodes[0], seen, hint="nothing: your own code should not count on it")


@rules.add(
    "NODE_MISSING", hint="look at their logs and at the node; a slow start is given more time by train.start_timeout_s"
)
def missing_node(job: Evidence) -> Iterator[Finding]:
    """Ranks of a node never connected, and it wrote no reason into the shared folder."""
    for node in job.silent:
        seen = f"some of its ranks have not come within {job.waited_s:.0f} s, and it gave no reason"
        yield error(node, seen, blames=True)


@rules.add(
    "PORT_BLOCKED", hint="compare the MTU of the nodes and of what lies between them (`ip link`, `ping -M do -s 1472`)"
)
def lost_report(job: Evidence) -> Iterator[Finding]:
    """Small packets of a node arrive and large ones do not."""
    for node in job.mute:
        seen = "connects to rank 0, and nothing larger arrives from it: a report of a few kB was lost"
        yield error(node, seen, blames=len(job.mute) == 1 and len(job.nodes) > 2)


@rules.add("NODE_MISSING", hint="raise preflight.budget_s if the nodes are busy at the start")
def late_answer(job: Evidence) -> Iterator[Finding]:
    """A node connected and did not answer rank 0's questions."""
    for node in job.late:
        yield warning(node, f"did not answer rank 0's questions within {job.waited_s:.0f} s, so less is known of it")


@rules.add("WRONG_INTERFACE")
def missing_interface(job: Evidence) -> Iterator[Finding]:
    """An interface that was named for gloo or NCCL is not there."""
    for node in job.nodes:
        if missing := _missing_interface(node.network):
            names, there = shorten(list(node.network.addresses)) or "none", node.network.interface or "NAME"
            seen = f"{missing}: there is no such interface with an address, but {names}"
            yield error(node.node, seen, hint=f"set cluster.network_interface={there}, or drop it")


def _missing_interface(network: NetworkFacts) -> str:
    """Returns the setting that names an interface without an address, e.g. "GLOO_SOCKET_IFNAME=ib0"; "" for none."""
    for name in network.gloo_interface.split(","):
        if name and name not in network.addresses:
            return f"GLOO_SOCKET_IFNAME={name}"
    asked = network.nccl_interface
    # "^docker,lo" excludes, "=eth0" is exact, "eth" is any that begins so.
    if asked and not asked.startswith("^"):
        exact, names = asked.startswith("="), asked.lstrip("=").split(",")
        if not any(own == name if exact else own.startswith(name) for own in network.addresses for name in names):
            return f"NCCL_SOCKET_IFNAME={asked}"
    return ""


@rules.add("LOOPBACK", "NAME_RESOLUTION")
def misleading_own_name(job: Evidence) -> Iterator[Finding]:
    """A node's own name, which gloo announces where no interface is named, leads nowhere."""
    for node in job.nodes:
        problem = _own_name_problem(node.network)
        if problem and not node.network.gloo_interface and not _missing_interface(node.network):
            interface = node.network.interface
            hint = f"mend /etc/hosts there; until then GLOO_SOCKET_IFNAME={interface} is set for the ranks"
            yield warning(node.node, problem[1], hint=hint, code=problem[0])


def _own_name_problem(network: NetworkFacts) -> tuple[str, str] | None:
    """Returns code and text for a node whose own name misleads gloo, None where it does not."""
    name, found = network.own_name, network.own_addresses
    if not name or not network.interface:
        return None
    if not found:
        return "NAME_RESOLUTION", f"cannot resolve its own name {name}, which gloo announces"
    if all(map(is_loopback, found)):
        return "LOOPBACK", f"resolves its own name {name} to itself ({shorten(found)}), which gloo would announce"
    if not set(found) & set(network.addresses.values()):
        own = shorten([f"{interface} ({address})" for interface, address in network.addresses.items()]) or "none"
        seen = f"resolves its own name {name} to {shorten(found)}, which is no address of it ({own})"
        return "NAME_RESOLUTION", seen
    return None


@rules.add("WRONG_INTERFACE")
def unreached_interface(job: Evidence) -> Iterator[Finding]:
    """No node reaches the addresses that gloo would announce; one finding for each interface that was named."""
    callers = {peer: probe.node for probe in job.probes for peer in probe.unreached_gloo}
    # A misleading name is a finding already, and an interface that is not there has no address.
    explained = {found.node for check in (missing_interface, misleading_own_name) for found in check(job)}
    unreached = [node for node in job.nodes if node.node in callers and node.node not in explained]
    for name in dict.fromkeys(node.network.gloo_interface for node in unreached):
        nodes = [node for node in unreached if node.network.gloo_interface == name]
        where = "" if len(nodes) == len(job.nodes) else ", ".join(node.node for node in nodes)
        first = nodes[0].network
        addresses = shorten([node.network.gloo_address for node in nodes])
        seen = (
            f"gloo would announce {f'{name} ({addresses})' if name else addresses}, which {callers[nodes[0].node]} "
            f"cannot reach; {first.interface} ({first.address}) answers"
        )
        hint = f"set cluster.network_interface={first.interface}"
        if name:
            yield error(where, seen, hint=hint)
        else:
            until_then = f"until then GLOO_SOCKET_IFNAME={first.interface} is set for the ranks"
            yield warning(where, seen, hint=f"{hint}; {until_then}")


def interface_choices(job: Evidence) -> dict[str, dict[str, str]]:
    """Returns by node the variables that its ranks should have so that collectives take the route to their peers.

    A setting of the user is not changed. gloo's is set where its own choice leads nowhere; NCCL's where the node has
    several interfaces and no InfiniBand, since NCCL then takes the first one that it finds.
    """
    choices: dict[str, dict[str, str]] = {}
    for node in job.nodes:
        network, chosen = node.network, dict[str, str]()
        unreached = any(node.node in probe.unreached_gloo for probe in job.probes)
        if network.interface and not network.gloo_interface and (_own_name_problem(network) or unreached):
            chosen["GLOO_SOCKET_IFNAME"] = network.interface
        several = len(network.addresses) > 1 and not network.has_infiniband
        if network.interface and not network.nccl_interface and several:
            chosen["NCCL_SOCKET_IFNAME"] = f"={network.interface}"
        if chosen:
            choices[node.node] = chosen
    return choices


@rules.add(
    "PORT_BLOCKED",
    hint="the collectives take ports from /proc/sys/net/ipv4/ip_local_port_range: open them between the nodes",
)
def unreached_peers(job: Evidence) -> Iterator[Finding]:
    """Packets between nodes do not arrive."""

    def shown(pairs: Iterable[tuple[str, str, str]]) -> str:
        texts = []
        for caller, peer, why in pairs:
            network = job.node(peer).network
            texts.append(f"{caller} does not reach {peer} at {network.address}:{network.probe_port} ({why})")
        return shorten(texts, most=3)

    pairs = [(probe.node, peer, why) for probe in job.probes for peer, why in probe.unreached.items()]
    if culprit := common_end([pair[:2] for pair in pairs], num_nodes=len(job.nodes)):
        yield error(culprit, shown(pairs), blames=True)
        return
    for two in dict.fromkeys(tuple(sorted(pair[:2])) for pair in pairs):
        yield error(", ".join(two), shown(pair for pair in pairs if {*pair[:2]} == {*two}))


@rules.add(
    "CLOCK_SKEW",
    hint="see `chronyc tracking` or `timedatectl` there; times in logs and files of the two do not compare",
)
def skewed_clock(job: Evidence) -> Iterator[Finding]:
    """A node's clock is wrong."""
    for probe in job.probes:
        offset = probe.clock_offset_s or 0.0
        if abs(offset) - probe.clock_error_s > _SKEW_S:
            way = "ahead of" if offset > 0 else "behind"
            yield warning(probe.node, f"its clock is {abs(offset):.1f} s {way} rank 0's")


# Files: code, configuration, data, versions, places to write to.


@rules.add("CODE_DRIFT", hint="the node has another copy of the run directory: look at its mounts")
def other_code(job: Evidence) -> Iterator[Finding]:
    """A node sees other code than was submitted."""
    for node in job.nodes:
        if changes := node.files.code_changes:
            yield error(node.node, f"sees other code than was submitted: {shorten(changes, most=3)}", blames=True)
    known = {node.node: node.files.code_index for node in job.nodes if not node.files.code_changes}
    for name, _, _, is_clear in odd_ones(known):
        seen = "reads another list of the code's files (code.json) than the other nodes"
        yield error(name, seen, blames=is_clear)


@rules.add("CONFIG_DRIFT", hint="compare the files from both nodes; a mount or a cache there is old")
def other_config(job: Evidence) -> Iterator[Finding]:
    """A node sees another frozen configuration."""
    for name, _, _, is_clear in odd_ones({node.node: node.files.config for node in job.nodes if node.files.config}):
        yield error(name, "reads another config.yaml or plan.json than the other nodes", blames=is_clear)


@rules.add("DATA_MISSING", hint="mount it there, or name a path that every node sees in data.path")
def missing_data(job: Evidence) -> Iterator[Finding]:
    """A node does not see the data."""
    seen_by_some = any(not node.files.data_missing for node in job.nodes)
    for node in job.nodes:
        if missing := node.files.data_missing:
            yield error(node.node, f"does not see {shorten(missing, most=3)}", blames=seen_by_some)


@rules.add("DATA_MISSING", hint="mount it there")
def empty_data(job: Evidence) -> Iterator[Finding]:
    """A folder of the data is empty on one node, as a mount point without its mount."""
    for node in job.nodes:
        empty = [path for path in node.files.data_empty if any(path not in one.files.data_empty for one in job.nodes)]
        if empty:
            seen = f"sees nothing in {shorten(empty, most=3)}, where other nodes see something"
            yield error(node.node, seen, blames=True)


@rules.add("DATA_MISSING", hint="copy the same data to every node, or name a path that all share in data.path")
def other_data(job: Evidence) -> Iterator[Finding]:
    """A node sees other data."""
    for name, value, usual, is_clear in odd_ones({node.node: node.files.data for node in job.nodes if node.files.data}):
        seen = f"sees other data than the other nodes (fingerprint {value[:8]}, there {usual[:8]})"
        yield error(name, seen, blames=is_clear)


@rules.add("VERSION_DRIFT", hint="install the same environment on every node, or use one on a path that all share")
def other_versions(job: Evidence) -> Iterator[Finding]:
    """A node has another version of something."""
    for name in dict.fromkeys(name for node in job.nodes for name in node.versions):
        versions = {node.node: node.versions.get(name, "none") for node in job.nodes if node.versions}
        for node, value, usual, is_clear in odd_ones(versions):
            seen = f"has {name} {value}, the other nodes have {usual}"
            yield error(node, seen, blames=is_clear) if name in _MUST_AGREE else warning(node, seen)


@rules.add(
    "FS_STALE", hint="the path is not shared, or its cache is late: see `findmnt -T RUN_DIRECTORY` on both nodes"
)
def unseen_files(job: Evidence) -> Iterator[Finding]:
    """A node does not see what another one has written."""
    pairs = [(probe.node, peer) for probe in job.probes for peer in probe.unseen]
    culprit = common_end(pairs, num_nodes=len(job.nodes))
    if pairs:
        shown = shorten([f"{reader} does not see what {writer} wrote" for reader, writer in pairs], most=2)
        where = culprit or ", ".join(dict.fromkeys(reader for reader, _ in pairs))
        yield error(where, f"{shown} into the run directory", blames=bool(culprit))


@rules.add("FS_STALE", hint="shorten the attribute cache of that mount (actimeo), or expect late logs and stop files")
def late_files(job: Evidence) -> Iterator[Finding]:
    """A node sees late what another one has written."""
    for probe in job.probes:
        late_s, peer = max(((seconds, peer) for peer, seconds in probe.seen_after_s.items()), default=(0.0, ""))
        if late_s > _LATE_S:
            yield warning(probe.node, f"saw what {peer} wrote into the run directory {late_s:.1f} s late")


@rules.add("DISK_FULL", "FS_READONLY")
def unwritable_places(job: Evidence) -> Iterator[Finding]:
    """A node cannot write where it must, or there is no room left."""
    for node, disk in ((one.node, disk) for one in job.nodes for disk in one.disks):
        place, (full_mb, low_mb) = f"{disk.path} ({disk.role})", _FULL_MB.get(disk.role, (0, 0))
        is_full = disk.is_full or disk.free_inodes == 0
        if disk.is_readonly:
            seen, code = f"cannot write to {place}: {disk.error}", "FS_READONLY"
            hint = "look at the mount, the quota and the permissions there"
        elif is_full or (disk.free_mb is not None and disk.free_mb < full_mb):
            room = f"{disk.free_mb} MiB are left" if disk.free_inodes != 0 else "no inodes are left"
            seen, code = f"{place} is full: {disk.error or room}", "DISK_FULL"
            hint = "free some room, lower checkpoint.keep, or name another place"
        else:
            if disk.free_mb is not None and disk.free_mb < low_mb:
                seen = f"{place} has {disk.free_mb} MiB left of {disk.total_mb}"
                yield warning(node, seen, hint="free some room before the checkpoints need it")
            continue
        if full_mb:
            # The file system of the run is shared; where it is full, no node is to blame.
            is_shared = code == "DISK_FULL" and disk.role == "run directory"
            yield error(node, seen, blames=not is_shared, hint=hint, code=code)
        else:
            yield warning(node, seen, hint=hint, code=code)


# GPUs and speed.


@rules.add("GPU_COUNT", hint="a GPU has fallen off the bus: have the node drained and restarted")
def lost_gpu(job: Evidence) -> Iterator[Finding]:
    """The driver counts fewer GPUs than Slurm has given."""
    for node in job.nodes:
        given = len(node.gpus or [])
        if node.num_gpus is not None and node.num_gpus < given:
            yield error(node.node, f"the driver counts {node.num_gpus} GPUs, Slurm has given {given}", blames=True)


@rules.add(
    "GPU_BUSY",
    hint="end what is left over there (`nvidia-smi`), or ask for whole nodes: cluster.sbatch.exclusive=true",
)
def busy_gpu(job: Evidence) -> Iterator[Finding]:
    """Another process holds memory of a GPU."""
    for node in job.nodes:
        busy = [gpu for gpu in node.gpus or () if gpu.used_mb >= _BUSY_MB]
        if busy:
            worst = max(busy, key=lambda gpu: gpu.used_mb)
            holders = f" by {shorten(worst.holders, most=3)}" if worst.holders else ""
            seen = f"{worst.used_mb} of {worst.total_mb} MiB of GPU {_names(busy)} are taken{holders}"
            is_most = 2 * worst.used_mb > worst.total_mb
            yield error(node.node, seen, blames=True) if is_most else warning(node.node, seen)


def _names(gpus: Iterable[GpuFacts]) -> str:
    return shorten([gpu.name for gpu in gpus], most=8)


@rules.add("GPU_SICK")
def sick_gpu(job: Evidence) -> Iterator[Finding]:
    """A GPU reports errors or is slowed down; GPUs of a node with the same complaint are one finding."""
    for node in job.nodes:
        errors, warnings = defaultdict(list), defaultdict(list)
        for gpu in node.gpus or ():
            errors[shorten(gpu.errors, most=3)].append(gpu)
            warnings[shorten(gpu.warnings, most=3)].append(gpu)
        for text, gpus in errors.items():
            if text:
                hint = "have the node drained; the GPU needs a reset or has to be replaced"
                yield error(node.node, f"GPU {_names(gpus)}: {text}", blames=True, hint=hint)
        for text, gpus in warnings.items():
            if text:
                hint = "expect it to be slower; tell the administrators of the cluster"
                yield warning(node.node, f"GPU {_names(gpus)}: {text}", hint=hint)


@rules.add("GPU_SICK", hint="have the node drained; `nvidia-smi -q` and `dmesg` there say more")
def logged_gpu_errors(job: Evidence) -> Iterator[Finding]:
    """The driver has logged an error of the hardware."""
    for node in job.nodes:
        if node.gpu_errors:
            yield error(node.node, f"the driver has logged {shorten(node.gpu_errors, most=3)}", blames=True)


@rules.add(
    "SLOW_NODE", hint="look for other processes and for clock limits there, or leave it out with cluster.exclude"
)
def slow_node(job: Evidence) -> Iterator[Finding]:
    """A node computes more slowly than the others."""
    work = {speed.node: speed.work_ms for speed in job.speeds}
    for node, work_ms in work.items():
        usual = median_of_others(work, node)
        if usual is not None and work_ms > _SLOW * usual:
            seen = (
                f"computes {work_ms / usual:.1f} times as long as the others ({work_ms:.0f} ms for {usual:.0f} ms of "
                f"work, load {job.node(node).load:.1f})"
            )
            yield warning(node, seen)


@rules.add("SLOW_LINK", hint="look at the cable, the switch port and the speed that was agreed on (`ethtool`)")
def slow_link(job: Evidence) -> Iterator[Finding]:
    """A node's network is slower than the others'."""
    # A node that computes slowly sends slowly, too.
    slow = {found.node for found in slow_node(job)}
    # The best connection of a node: a slow partner makes the other ones slow, too.
    best = {speed.node: max(speed.mb_per_s.values()) for speed in job.speeds if speed.mb_per_s}
    nearest = {speed.node: min(speed.latency_us.values()) for speed in job.speeds if speed.latency_us}
    for node, rate in best.items():
        usual, nominal = median_of_others(best, node), (job.node(node).network.link_mbit_per_s or 0) / 8
        if node in slow:
            continue
        if usual is not None and len(best) > 2 and rate < _SLOW_LINK * usual:
            yield warning(node, f"{rate:.0f} MB/s at best, the other nodes {usual:.0f}")
        elif rate < _SHARE_OF_NOMINAL * nominal:
            yield warning(node, f"{rate:.0f} MB/s at best, its interface claims {nominal:.0f}")
    for node, latency in nearest.items():
        usual = median_of_others(nearest, node)
        if node not in slow and usual is not None and latency > max(_HIGH_LATENCY * usual, _HIGH_LATENCY_US):
            yield warning(node, f"{latency:.0f} us to the nearest node, the other nodes {usual:.0f}")


def best_speeds(speeds: Iterable[SpeedFacts]) -> list[SpeedFacts]:
    """Returns the best of several measurements of each node."""
    best: dict[str, SpeedFacts] = {}
    for new in speeds:
        old = best.get(new.node, new)
        best[new.node] = SpeedFacts(
            node=new.node,
            work_ms=min(new.work_ms, old.work_ms),
            mb_per_s=old.mb_per_s | {peer: max(one, old.mb_per_s.get(peer, one)) for peer, one in new.mb_per_s.items()},
            latency_us=old.latency_us
            | {peer: min(one, old.latency_us.get(peer, one)) for peer, one in new.latency_us.items()},
        )
    return list(best.values())


# Who differs from the others.


def odd_ones(values: Mapping[str, str]) -> list[tuple[str, str, str, bool]]:
    """Returns (node, its value, the usual value, whether most nodes have the usual one) for nodes that differ.

    Args:
        values: node -> value, in rank order; of two values that are equally frequent the first node's is the usual one.
    """
    # Counter keeps the order of first sight.
    ((usual, number),) = Counter(values.values()).most_common(1) or [("", 0)]
    return [(node, value, usual, 2 * number > len(values)) for node, value in values.items() if value != usual]


def median_of_others(values: Mapping[str, float], node: str) -> float | None:
    """Returns the median over all nodes but one, None where it is alone."""
    others = [value for name, value in values.items() if name != node]
    return statistics.median(others) if others else None


def common_end(pairs: Sequence[tuple[str, ...]], *, num_nodes: int) -> str:
    """Returns the one node that all pairs have in common and that has several partners, "" where there is none.

    Args:
        pairs: nodes that do not reach each other, in either order.
        num_nodes: of the job; of two either may be at fault.
    """
    partners: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        partners[one].add(other)
        partners[other].add(one)
    common = [node for node, others in partners.items() if len(others) > 1 and all(node in pair for pair in pairs)]
    return common[0] if len(common) == 1 and num_nodes > 2 else ""


def as_ranges(numbers: Iterable[int]) -> str:
    """Returns numbers in short: [0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
