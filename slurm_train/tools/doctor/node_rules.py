"""The rules of the preflight: what is wrong with the ranks, network, files and GPUs of a job's nodes. Pure.

To add one, write a function that takes the job and yields a finding for each node that is affected; add it to `_RULES`,
its code with what to do about it to `HINTS`, what it needs to `facts` and `gather`, and a section for the code to
docs/troubleshooting.md.

A node is blamed where leaving it out would help, so only where most of the others agree: of two nodes that differ, or
cannot reach each other, either may be at fault.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from slurm_train.distributed.rendezvous import files_needed, is_loopback
from slurm_train.formatting import ranges, shorten
from slurm_train.rundir.events import Finding
from slurm_train.rundir.node_disk import has_room_for_sockets
from slurm_train.slurm.limits import in_words, tight, way_out
from slurm_train.tools.doctor.facts import JobFacts, NodeFacts, Trouble, error, merge, warning

HINTS = {
    "RANK_MISMATCH": "look for RANK, WORLD_SIZE or SLURM_* set by a module, a prolog or a shell's start file there",
    "GPU_COUNT": "see CUDA_VISIBLE_DEVICES and the srun flags there; `scontrol show node` says what Slurm counts",
    "CPU_AFFINITY": "set cluster.cpus_per_gpu, and look at --cpu-bind and TaskPlugin where it is set",
    "LIMITS": "Slurm passes the limits of the shell that submits on: `ulimit -n 65536` there, or in cluster.setup",
    "WRONG_MASTER": "compare `getent hosts` of that name on both nodes, correct /etc/hosts or the name server",
    "NAME_RESOLUTION": "compare `getent hosts` of that name on both nodes, correct /etc/hosts or the name server",
    "LOOPBACK": "correct the line of that name in /etc/hosts there",
    "PORT_BLOCKED": "open the ports between the nodes, those of ip_local_port_range as well, in firewall and routing "
    "(`nft list ruleset`, `ip route get` on both), or name open ones: cluster.rendezvous_ports=20000-20100",
    "PORT_IN_USE": "`ss -ltnp` there shows who holds it; the ranks, or the next attempt, take another port",
    "NODE_MISSING": "look at their logs and at the node; a slow start is given more time by train.start_timeout_s",
    "WRONG_INTERFACE": "set cluster.network_interface to the one that answers",
    "CLOCK_SKEW": "see `chronyc tracking` or `timedatectl` there; times in logs and files of the two do not compare",
    "CODE_DRIFT": "the node has another copy of the run directory: look at its mounts",
    "CONFIG_DRIFT": "compare the files from both nodes; a mount or a cache there is old",
    "DATA_MISSING": "mount the same data there, or name a path that every node sees",
    "NO_SCONTROL": "nothing; with it a job keeps its id and its place: ask for Slurm's commands on the nodes",
    "VERSION_DRIFT": "install the same environment on every node, or use one on a path that all share",
    "FS_STALE": "the path is not shared, or its cache is late: see `findmnt -T RUN_DIRECTORY` on both nodes",
    "DISK_FULL": "free some room, lower checkpoint.keep, or name another place",
    "FS_READONLY": "look at the mount, the quota and the permissions there",
    "NO_COMPILER": 'install it there (gcc, python3-dev), or load it: cluster.setup=["module load gcc"]; a folder for '
    "kernels: cluster.env.TMPDIR; train.compile=false trains without compiling, and more slowly",
    "GPU_BUSY": "end what is left over there (`nvidia-smi`), or ask for whole nodes: cluster.sbatch.exclusive=true",
    "GPU_SICK": "have the node drained; `nvidia-smi -q` and `dmesg` there say more",
    "SLOW_NODE": "look for other processes and for clock limits there, or leave it out with cluster.exclude",
    "SLOW_GPU": "`nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE` there shows limits, `nvidia-smi topo -m` the links; "
    "leave the node out with cluster.exclude",
    "SLOW_LINK": "look at the cable, the switch port and the speed that was agreed on (`ethtool`)",
}
"""Each code, and what to do about it unless a finding says something else."""
_NO_GPU_NAMED = (
    "look for flags of GPUs in submit.sh, cluster.sbatch and cluster.srun, and for gres/gpu in `scontrol show job`; "
    "to train on CPUs: cluster.gpu_flag=none"
)
OTHER_CODES = ("FS_MISSING", "STEP_REFUSED", "COLLECTIVE")
"""Codes that are found outside of these rules: before there are ranks, and when the process group is open."""

_FEW_FILES = 1024
_LITTLE_LOCKED_MB = 64
# So many CPUs for each rank must be idle before one bound CPU is called too few.
_PLENTY = 4
_SKEW_S = 2.0
_LATE_S = 1.0
# Free MiB below which a place is full, an error, and below which it is soon full, a warning. Places that a run may do
# without are never an error: 0.
_FULL_MB = {
    "run directory": (64, 1024),
    "checkpoint.local_dir": (64, 1024),
    "temporary files": (0, 64),
    "shared memory": (0, 16),
}
_ALIKE = {
    "code": ("CODE_DRIFT", "reads another list of the code's files (code.json) than the other nodes"),
    "config": ("CONFIG_DRIFT", "reads another config.yaml or plan.json than the other nodes"),
    "data": ("DATA_MISSING", "sees other data than the other nodes"),
}
# What ranks of one run cannot have in different versions; the rest is worth a warning.
_MUST_AGREE = ("torch", "nccl", "cuda", "slurm_train")
_BUSY_MB = 2048
_SLOW = 1.6
_SLOW_LINK = 0.5
# GPUs of a kind differ by a few percent; all_reduce within a node also by what else the node does.
_SLOW_GPU = 0.85
_SLOW_ALL_REDUCE = 0.7
_FEW_OTHERS = 2
# One connection alone reaches a fraction of a fast network.
_SHARE_OF_NOMINAL = 0.05
_HIGH_LATENCY_US = 500.0
_HIGH_LATENCY = 5.0


def find_faults(job: JobFacts) -> tuple[Finding, ...]:
    """Returns one finding per fault, the worst first; empty where nothing is wrong."""
    findings = list[Finding]()
    for rule in _RULES:
        findings += rule(job)
    return merge(findings, hints=HINTS, nodes=job.names)


def find_mismatched_ranks(job: JobFacts) -> tuple[Finding, ...]:
    """Returns where ranks do not agree about who is who. Each rank asks this of itself, before it looks for others."""
    return merge(_mismatched_ranks(job), hints=HINTS, nodes=job.names)


# Ranks: who they are, what they may use.


def _mismatched_ranks(job: JobFacts) -> Iterator[Finding]:
    places = defaultdict(list)
    for rank in job.ranks:
        places[rank.node, rank.local_rank].append(rank.rank)
        if rank.slurm_rank not in (None, rank.rank):
            seen = f"the task that Slurm calls rank {rank.slurm_rank} has RANK={rank.rank} in its environment"
            yield error("RANK_MISMATCH", rank.node, seen)
        elif rank.world_size != job.world_size:
            seen = f"rank {rank.rank} counts {rank.world_size} ranks, the attempt was opened for {job.world_size}"
            yield error("RANK_MISMATCH", rank.node, seen)
    for (node, local_rank), numbers in places.items():
        if len(numbers) > 1:
            seen = f"ranks {ranges(numbers)} all have local rank {local_rank}, so they would share a GPU"
            yield error("RANK_MISMATCH", node, seen)


def _scarce_resources(job: JobFacts) -> Iterator[Finding]:
    for name, ranks in job.ranks_by_node.items():
        node = job.node(name)
        gpus = max((rank.visible_gpus for rank in ranks if rank.visible_gpus is not None), default=None)
        # There is a rank for each GPU, and not every node need have as many as another.
        wanted = min(job.gpus_per_node, *(rank.local_world_size for rank in ranks))
        if gpus is not None and gpus < wanted:
            yield error(
                "GPU_COUNT", name, f"{gpus} GPUs are visible to the ranks, {wanted} were asked for", blames=True
            )
        unnamed = next((rank.unnamed_gpus for rank in ranks if rank.unnamed_gpus is not None), None)
        if wanted and unnamed is not None:
            # The request is at fault, not the node: Slurm gives GPUs to a job and to a step that ask for them.
            report = warning if unnamed else error
            instead = f"they may use all {unnamed} of the node, other jobs' too" if unnamed else "they would use CPUs"
            seen = f"Slurm names no GPU to the ranks, {wanted} were asked for: {instead}"
            yield report("GPU_COUNT", name, seen, hint=_NO_GPU_NAMED)

        bound = {cpu for rank in ranks for cpu in rank.cpus}
        fewest = min(len(rank.cpus) for rank in ranks)
        asked = job.cpus_per_gpu
        is_starved = len(bound) < min(len(ranks), node.num_cpus) or fewest < min(asked or 1, node.num_cpus)
        is_tight = asked is None and fewest == 1 and node.num_cpus >= _PLENTY * len(ranks)
        if bound and node.num_cpus and (is_starved or is_tight):
            share = f"{len(ranks)} ranks may use CPUs {ranges(bound)} of {node.num_cpus}, one of them {fewest}"
            yield warning("CPU_AFFINITY", name, f"{share}; cluster.cpus_per_gpu={asked or 'null'}")

        files = min((rank.max_open_files for rank in ranks if rank.max_open_files is not None), default=None)
        needed = files_needed(max(rank.world_size for rank in ranks))
        if files is not None and files < max(needed, _FEW_FILES):
            report = error if files < needed else warning
            yield report("LIMITS", name, f"a rank may open {files} files, it should have {max(needed, _FEW_FILES)}")

        locked = min((rank.max_locked_mb for rank in ranks if rank.max_locked_mb is not None), default=None)
        if locked is not None and locked < _LITTLE_LOCKED_MB and node.has_infiniband:
            seen = f"a rank may lock {locked} MiB of memory, and InfiniBand has to lock its buffers"
            hint = "`ulimit -l unlimited` before submitting, or ask for LimitMEMLOCK=infinity in slurmd's service"
            yield warning("LIMITS", name, seen, hint=hint)

        first = ranks[0]
        names = tight(first.limits, run_s=job.run_s, cpus=len(first.cpus) or None)
        if names:
            found = ", ".join(in_words(first.limits, limit) for limit in names)
            yield warning("LIMITS", name, f"each process of a rank may have {found}", hint=way_out(names))


# Network: rank 0's address, ports, absent nodes, interfaces, what nodes see of each other.


def _unreached_rank_0(job: JobFacts) -> Iterator[Finding]:
    master = job.names[0]
    node = job.node(master)
    blocked = []
    addresses = {*node.addresses.values(), node.address} - {""}
    name = job.master or master
    for trouble in job.troubles:
        if not trouble.address:
            code = "NAME_RESOLUTION"
            seen = f"cannot resolve {name}, where rank 0 is: {trouble.error}"
        elif is_loopback(trouble.address):
            code = "LOOPBACK"
            seen = f"resolves {name}, where rank 0 is, to itself ({trouble.address})"
        elif addresses and trouble.address not in addresses:
            seen = f"looks for rank 0 at {trouble.address}, but {master} has {shorten(sorted(addresses))}"
            code = "WRONG_MASTER"
        else:
            blocked.append(trouble)
            continue
        yield error(code, trouble.node, seen, blames=True)
    if len(blocked) > 1 and len(blocked) == len(job.names) - 1:
        # No node reaches it: the fault is at rank 0's node if the others reach each other.
        first = blocked[0]
        reach = any(trouble.reached for trouble in blocked)
        seen = f"no other node reaches rank 0 at {first.address}:{first.port}: {first.error}"
        seen += "; they reach each other" if reach else ""
        code, elsewhere, hint = _answer_elsewhere(node, blocked)
        yield error(code, master, seen + elsewhere, blames=reach and not elsewhere, hint=hint)
        return
    for trouble in blocked:
        reachability = f"; it reaches {shorten(trouble.reached)}" if trouble.reached else ""
        reachability += f"; it does not reach {shorten(trouble.unreached)}" if trouble.unreached else ""
        # Another node has connected to rank 0, and this one reaches none.
        is_alone = bool({rank.node for rank in job.ranks} - {master, trouble.node}) and not trouble.reached
        code, elsewhere, hint = _answer_elsewhere(node, [trouble])
        seen = f"does not reach rank 0 at {trouble.address}:{trouble.port} ({master}): {trouble.error}{reachability}"
        yield error(code, trouble.node, seen + elsewhere, blames=is_alone and not elsewhere, hint=hint)


def _answer_elsewhere(node: NodeFacts, blocked: Sequence[Trouble]) -> tuple[str, str, str]:
    """Returns the code of a rank 0 that is not reached, at which of its interfaces it is, in words, and the setting.

    Args:
        node: of rank 0.
        blocked: the nodes that do not reach it, all at one address.
    """
    for interface, address in blocked[0].answers.items():
        if any(trouble.answers.get(interface) != address for trouble in blocked):
            continue
        words = f"; its {interface} ({address}) answers"
        if node.gloo_interface and blocked[0].address == node.gloo_address:
            announced = f"; gloo would announce {node.gloo_interface}, too"
            return "WRONG_INTERFACE", announced + words, f"set cluster.network_interface={interface}"
        hint = f"set cluster.rendezvous_address={interface}, or open the ports between the nodes"
        return "PORT_BLOCKED", words, hint
    return "PORT_BLOCKED", "", ""


def _taken_port(job: JobFacts) -> Iterator[Finding]:
    if job.port and job.bound_port not in (None, job.port):
        instead = f", the ranks meet at {job.bound_port}" if job.bound_port else ", and so are all others on the list"
        report = error if job.needs_port or not job.bound_port else warning
        yield report("PORT_IN_USE", job.names[0], f"port {job.port} was free and is taken now{instead}")


def _absent_nodes(job: JobFacts) -> Iterator[Finding]:
    for node in job.silent:
        seen = f"some of its ranks have not come within {job.waited_s:.0f} s, and it gave no reason"
        yield error("NODE_MISSING", node, seen, blames=True)
    for node in job.mute:
        # Small packets arrive and large ones do not.
        seen = "connects to rank 0, and nothing larger arrives from it: a report of a few kB was lost"
        hint = "compare the MTU of the nodes and of what lies between them (`ip link`, `ping -M do -s 1472`)"
        yield error("PORT_BLOCKED", node, seen, blames=len(job.mute) == 1 and len(job.nodes) > 2, hint=hint)
    for node in job.late:
        seen = f"did not answer rank 0's questions within {job.waited_s:.0f} s, so less is known of it"
        yield warning("NODE_MISSING", node, seen, hint="raise preflight.budget_s if the nodes are busy at the start")


def _misleading_interfaces(job: JobFacts) -> Iterator[Finding]:
    callers = {peer: probe.node for probe in job.probes for peer in probe.unreached_gloo}
    unreached = defaultdict(list)
    for node in job.nodes:
        interfaces = shorten([f"{name} ({address})" for name, address in node.addresses.items()]) or "none"
        missing = _missing_interface(node)
        name_problem = _own_name_problem(node)
        if missing:
            # Without addresses, which differ: the same mistake on several nodes is one finding.
            names = shorten(list(node.addresses)) or "none"
            seen = f"{missing}: there is no such interface with an address, but {names}"
            hint = f"set cluster.network_interface={node.interface or 'NAME'}, or drop it"
            yield error("WRONG_INTERFACE", node.node, seen, hint=hint)
        elif name_problem and not node.gloo_interface:
            own_addresses = shorten(node.own_addresses) or "nothing"
            seen = (
                f"resolves its own name {node.own_name} to {own_addresses}, which gloo would announce; "
                f"it has {interfaces}"
            )
            hint = f"correct /etc/hosts there; until then GLOO_SOCKET_IFNAME={node.interface} is set for the ranks"
            yield warning(name_problem, node.node, seen, hint=hint)
        elif node.node in callers:
            unreached[node.gloo_interface].append(node)
    for name, nodes in unreached.items():
        first = nodes[0]
        addresses = shorten([node.gloo_address for node in nodes])
        where = "" if len(nodes) == len(job.nodes) else ", ".join(node.node for node in nodes)
        seen = (
            f"gloo would announce {f'{name} ({addresses})' if name else addresses}, which {callers[first.node]} "
            f"cannot reach; {first.interface} ({first.address}) answers"
        )
        if name:
            yield error("WRONG_INTERFACE", where, seen, hint=f"set cluster.network_interface={first.interface}")
        else:
            hint = f"set cluster.network_interface; until then GLOO_SOCKET_IFNAME={first.interface} is set"
            yield warning("WRONG_INTERFACE", where, seen, hint=hint)


def _missing_interface(node: NodeFacts) -> str:
    """Returns the setting that names an interface without an address, e.g. "GLOO_SOCKET_IFNAME=ib0"; "" for none."""
    for name in node.gloo_interface.split(","):
        if name and name not in node.addresses:
            return f"GLOO_SOCKET_IFNAME={name}"
    asked = node.nccl_interface
    # "^docker,lo" excludes, "=eth0" is exact, "eth" is any that begins so.
    if asked and not asked.startswith("^"):
        exact = asked.startswith("=")
        names = asked.lstrip("=").split(",")
        if not any(
            interface == name if exact else interface.startswith(name) for interface in node.addresses for name in names
        ):
            return f"NCCL_SOCKET_IFNAME={asked}"
    return ""


def _own_name_problem(node: NodeFacts) -> str:
    """Returns the code for a node whose own name misleads gloo, "" for another one."""
    if not node.own_name or not node.interface or set(node.own_addresses) & set(node.addresses.values()):
        return ""
    return "LOOPBACK" if node.own_addresses and all(map(is_loopback, node.own_addresses)) else "NAME_RESOLUTION"


def interface_choices(job: JobFacts) -> dict[str, dict[str, str]]:
    """Returns by node the variables that its ranks should have so that collectives take the route to their peers.

    A setting of the user is not changed. gloo's is set where its own choice leads nowhere; NCCL's where the node has
    several interfaces and no InfiniBand, since NCCL then takes the first one that it finds.
    """
    unreached = {peer for probe in job.probes for peer in probe.unreached_gloo}
    choices: dict[str, dict[str, str]] = defaultdict(dict)
    for node in (node for node in job.nodes if node.interface):
        if not node.gloo_interface and (_own_name_problem(node) or node.node in unreached):
            choices[node.node]["GLOO_SOCKET_IFNAME"] = node.interface
        if not node.nccl_interface and len(node.addresses) > 1 and not node.has_infiniband:
            choices[node.node]["NCCL_SOCKET_IFNAME"] = f"={node.interface}"
    return dict(choices)


def _between_nodes(job: JobFacts) -> Iterator[Finding]:
    unreached = dict[tuple[str, str], str]()
    unseen = dict[tuple[str, str], str]()
    for probe in job.probes:
        for name, why in probe.unreached.items():
            peer = job.node(name)
            seen = f"{probe.node} does not reach {name} at {peer.address}:{peer.probe_port} ({why})"
            unreached[probe.node, name] = seen
        for name in probe.unseen:
            unseen[probe.node, name] = f"{probe.node} does not see what {name} wrote into the run directory"
        late_s, writer = max(((seconds, name) for name, seconds in probe.seen_after_s.items()), default=(0.0, ""))
        if late_s > _LATE_S:
            seen = f"saw what {writer} wrote into the run directory {late_s:.1f} s late"
            hint = "shorten the attribute cache of that mount (actimeo), or expect late logs and stop files"
            yield warning("FS_STALE", probe.node, seen, hint=hint)
        offset_s = probe.clock_offset_s or 0.0
        if abs(offset_s) - probe.clock_error_s > _SKEW_S:
            way = "ahead of" if offset_s > 0 else "behind"
            yield warning("CLOCK_SKEW", probe.node, f"its clock is {abs(offset_s):.1f} s {way} rank 0's")
    for code, pairs in (("PORT_BLOCKED", unreached), ("FS_STALE", unseen)):
        if pairs:
            culprit = common_end(pairs, num_nodes=len(job.nodes))
            where = culprit or ", ".join(sorted({name for pair in pairs for name in pair}))
            yield error(code, where, shorten(pairs.values(), most=3), blames=bool(culprit))


# Files: code, configuration, data, versions, places to write to.


def _other_files(job: JobFacts) -> Iterator[Finding]:
    seen_by_some = any(not node.data_missing for node in job.nodes)
    for node in job.nodes:
        if node.code_changes:
            seen = f"sees other code than was submitted: {shorten(node.code_changes, most=3)}"
            yield error("CODE_DRIFT", node.node, seen, blames=True)
        if node.data_missing:
            seen = f"the data: {shorten(node.data_missing, most=3)}"
            yield error("DATA_MISSING", node.node, seen, blames=seen_by_some)
        # A folder that is empty on every node may be meant so.
        empty = [path for path in node.data_empty if any(path not in other.data_empty for other in job.nodes)]
        if empty:
            seen = f"sees nothing in {shorten(empty, most=3)}, where other nodes see something"
            yield error("DATA_MISSING", node.node, seen, blames=True)


def _odd_nodes(job: JobFacts) -> Iterator[Finding]:
    for subject, (code, seen) in _ALIKE.items():
        hashes = {node.node: node.hashes[subject] for node in job.nodes if subject in node.hashes}
        for name, _, _, is_clear in odd_ones(hashes):
            yield error(code, name, seen, blames=is_clear)
    for subject in dict.fromkeys(subject for node in job.nodes for subject in node.versions):
        versions = {node.node: node.versions.get(subject, "none") for node in job.nodes if node.versions}
        for name, value, usual, is_clear in odd_ones(versions):
            seen = f"has {subject} {value}, the other nodes have {usual}"
            if subject in _MUST_AGREE:
                yield error("VERSION_DRIFT", name, seen, blames=is_clear)
            else:
                yield warning("VERSION_DRIFT", name, seen)


def _missing_scontrol(job: JobFacts) -> Iterator[Finding]:
    for node in job.nodes:
        if node.lacks_scontrol:
            yield warning("NO_SCONTROL", node.node, "has no scontrol: a run that is preempted goes on as another job")


def _unwritable_places(job: JobFacts) -> Iterator[Finding]:
    for node, disk in ((facts.node, disk) for facts in job.nodes for disk in facts.disks):
        if disk.role == "temporary files" and not has_room_for_sockets(disk.path):
            hint = "workers of a loader hand over tensors by them: a shorter one, e.g. cluster.env.TMPDIR=/tmp"
            seen = f"the path of temporary files has {len(disk.path)} characters, too many for sockets: {disk.path}"
            yield warning("LIMITS", node, seen, hint=hint)
        full_mb, low_mb = _FULL_MB.get(disk.role, (0, 0))
        free_mb = low_mb if disk.free_mb is None else disk.free_mb
        place = f"{disk.path} ({disk.role}): {disk.error or f'{disk.free_mb} MiB and {disk.free_inodes} inodes left'}"
        # The file system of the run is shared; where it is full, no node is to blame.
        code = "DISK_FULL"
        is_own = disk.role != "run directory"
        if disk.is_readonly:
            code = "FS_READONLY"
            is_own = True
            seen = f"cannot write to {place}"
        elif disk.is_full or disk.free_inodes == 0 or free_mb < full_mb:
            seen = f"no room in {place}"
        elif free_mb < low_mb:
            yield warning(code, node, f"little room in {place}")
            continue
        else:
            continue
        yield error(code, node, seen, blames=is_own) if full_mb else warning(code, node, seen)


# GPUs and speed.


def _obstacles_to_compiling(job: JobFacts) -> Iterator[Finding]:
    is_possible = any(not node.compile_obstacles for node in job.nodes)
    for node in job.nodes:
        if node.compile_obstacles:
            seen = f"torch cannot compile kernels: {', '.join(node.compile_obstacles)}; the first step would fail"
            if job.must_compile:
                # Kernels that were compiled elsewhere may be in a folder that all nodes share.
                yield warning("NO_COMPILER", node.node, seen)
            else:
                yield error("NO_COMPILER", node.node, seen, blames=is_possible)


def _faulty_gpus(job: JobFacts) -> Iterator[Finding]:
    for node in job.nodes:
        gpus = node.gpus or []
        name = node.node
        if node.num_gpus is not None and node.num_gpus < len(gpus):
            seen = f"the driver counts {node.num_gpus} GPUs, Slurm has given {len(gpus)}"
            hint = "a GPU has fallen off the bus: have the node drained and restarted"
            yield error("GPU_COUNT", name, seen, blames=True, hint=hint)
        busy = [gpu for gpu in gpus if gpu.used_mb >= _BUSY_MB]
        if busy:
            worst = max(busy, key=lambda gpu: gpu.used_mb)
            names = shorten([gpu.name for gpu in busy], most=8)
            holders = f" by {shorten(worst.holders, most=3)}" if worst.holders else ""
            seen = f"{worst.used_mb} of {worst.total_mb} MiB of GPU {names} are taken{holders}"
            is_most = 2 * worst.used_mb > worst.total_mb
            yield error("GPU_BUSY", name, seen, blames=True) if is_most else warning("GPU_BUSY", name, seen)
        errors = [f"GPU {gpu.name}: {text}" for gpu in gpus for text in gpu.errors]
        errors += [f"the driver has logged {text}" for text in node.gpu_errors]
        if errors:
            yield error("GPU_SICK", name, shorten(errors, most=3), blames=True)
        warnings = [f"GPU {gpu.name}: {text}" for gpu in gpus for text in gpu.warnings]
        if warnings:
            hint = "expect it to be slower; tell the administrators of the cluster"
            yield warning("GPU_SICK", name, shorten(warnings, most=3), hint=hint)


def slow_nodes(job: JobFacts) -> Iterator[Finding]:
    """Yields nodes that compute more slowly than the others, or whose network is slower."""
    work = {speed.node: speed.work_ms for speed in job.speeds}
    # The best connection of a node: a slow partner makes the other ones slow, too.
    best = {speed.node: speed.mb_per_s for speed in job.speeds if speed.mb_per_s is not None}
    nearest = {speed.node: speed.latency_us for speed in job.speeds if speed.latency_us is not None}
    for node, work_ms in work.items():
        usual = _median_of_others(work, node)
        if usual is not None and work_ms > _SLOW * usual:
            taken = f"{work_ms:.0f} ms for {usual:.0f} ms of work, load {job.node(node).load:.1f}"
            yield warning("SLOW_NODE", node, f"computes {work_ms / usual:.1f} times as long as the others ({taken})")
            continue  # it sends slowly, too
        if node in best:
            rate = best[node]
            usual = _median_of_others(best, node)
            nominal = (job.node(node).link_mbit_per_s or 0) / 8
            if usual is not None and len(best) > 2 and rate < _SLOW_LINK * usual:
                yield warning("SLOW_LINK", node, f"{rate:.0f} MB/s at best, the other nodes {usual:.0f}")
            elif rate < _SHARE_OF_NOMINAL * nominal:
                yield warning("SLOW_LINK", node, f"{rate:.0f} MB/s at best, its interface claims {nominal:.0f}")
        if node in nearest:
            latency = nearest[node]
            usual = _median_of_others(nearest, node)
            if usual is not None and latency > max(_HIGH_LATENCY * usual, _HIGH_LATENCY_US):
                yield warning("SLOW_LINK", node, f"{latency:.0f} us to the nearest node, the other nodes {usual:.0f}")


def _slow_gpus(job: JobFacts) -> Iterator[Finding]:
    """Yields GPUs that are slower than the others of their kind, and nodes whose GPUs exchange more slowly.

    Of two that differ either may be at fault, so there must be two others.
    """
    for speeds in job.gpu_speeds:
        if speeds.error:
            yield warning(
                "SLOW_GPU", speeds.node, speeds.error, hint="run `python -m slurm_train.tools.doctor.gpu_speed`"
            )
        if speeds.diagnosis:
            yield warning("GPU_SICK", speeds.node, f"DCGM: {speeds.diagnosis}")
    all_gpus = [(speeds.node, gpu) for speeds in job.gpu_speeds for gpu in speeds.gpus]
    for node, gpu in all_gpus:
        peers = [peer for _, peer in all_gpus if peer is not gpu and peer.kind == gpu.kind]
        if len(peers) < _FEW_OTHERS:
            continue
        tflops = statistics.median(peer.tflops for peer in peers)
        copied = statistics.median(peer.copy_gb_per_s for peer in peers)
        if gpu.tflops < _SLOW_GPU * tflops:
            seen = f"computes {gpu.tflops:.0f} TFLOP/s in bfloat16, the others {tflops:.0f}"
        elif gpu.copy_gb_per_s < _SLOW_GPU * copied:
            seen = f"copies {gpu.copy_gb_per_s:.0f} GB/s within its memory, the others {copied:.0f}"
        else:
            continue
        yield warning("SLOW_GPU", node, f"GPU {gpu.name} ({gpu.kind}) {seen}")
    yield from _slow_exchanges(job)


def _slow_exchanges(job: JobFacts) -> Iterator[Finding]:
    """Yields nodes whose GPUs exchange more slowly than those of other nodes with the same GPUs."""
    rates_of: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for speeds in job.gpu_speeds:
        if speeds.all_reduce_gb_per_s is not None:
            kinds = tuple(gpu.kind for gpu in speeds.gpus)
            rates_of[kinds][speeds.node] = speeds.all_reduce_gb_per_s
    for kinds, rates in rates_of.items():
        for node, rate in rates.items():
            others = [other_rate for other, other_rate in rates.items() if other != node]
            if len(others) >= _FEW_OTHERS and rate < _SLOW_ALL_REDUCE * statistics.median(others):
                usual = f"on the other nodes {statistics.median(others):.0f}"
                seen = f"all_reduce between its {len(kinds)} GPUs moves {rate:.0f} GB/s, {usual}"
                yield warning("SLOW_GPU", node, seen)


_RULES = (
    _mismatched_ranks,
    _scarce_resources,
    _unreached_rank_0,
    _taken_port,
    _absent_nodes,
    _misleading_interfaces,
    _between_nodes,
    _other_files,
    _odd_nodes,
    _missing_scontrol,
    _unwritable_places,
    _obstacles_to_compiling,
    _faulty_gpus,
    _slow_gpus,
    slow_nodes,
)


# Who differs from the others.


def odd_ones(values: Mapping[str, str]) -> list[tuple[str, str, str, bool]]:
    """Returns (node, its value, the usual value, whether most nodes have the usual one) for nodes that differ.

    Args:
        values: node -> value, in rank order; of two values that are equally frequent the first node's is the usual one.
    """
    # Counter keeps the order of first sight.
    ((usual, number),) = Counter(values.values()).most_common(1) or [("", 0)]
    return [(node, value, usual, 2 * number > len(values)) for node, value in values.items() if value != usual]


def _median_of_others(values: Mapping[str, float], node: str) -> float | None:
    other_values = [value for name, value in values.items() if name != node]
    return statistics.median(other_values) if other_values else None


def common_end(pairs: Collection[tuple[str, str]], *, num_nodes: int) -> str:
    """Returns the one node that all pairs have in common and that has several partners, "" where there is none.

    Args:
        pairs: nodes that do not reach each other, in either order.
        num_nodes: of the job; of two either may be at fault.
    """
    partners: dict[str, set[str]] = defaultdict(set)
    for node, partner in pairs:
        partners[node].add(partner)
        partners[partner].add(node)
    common = []
    for node, node_partners in partners.items():
        if len(node_partners) > 1 and all(node in pair for pair in pairs):
            common.append(node)
    return common[0] if len(common) == 1 and num_nodes > 2 else ""
