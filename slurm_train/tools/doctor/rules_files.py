"""What is wrong with what a node sees: code, configuration, data, versions, places to write to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slurm_train.tools.doctor.evidence import Evidence
from slurm_train.tools.doctor.facts import DiskFacts, NodeFacts
from slurm_train.tools.doctor.finding import Finding, Level
from slurm_train.tools.doctor.majority import common_end, listed, odd_ones

_LATE_S = 1.0
# Free MiB below which a place is called full, or soon full; none: it only makes some things slower.
_FULL_MB: Mapping[str, tuple[int, int]] = {
    "run directory": (64, 1024),
    "checkpoint.local_dir": (64, 1024),
    "temporary files": (0, 64),
    "shared memory": (0, 16),
}
# What ranks of one run cannot have in different versions; the rest is worth a word.
_MUST_AGREE = ("torch", "nccl", "cuda", "slurm_train")


def file_findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields CODE_DRIFT, CONFIG_DRIFT, DATA_MISSING, VERSION_DRIFT, FS_STALE, FS_READONLY and DISK_FULL."""
    yield from _code(evidence)
    yield from _config(evidence)
    yield from _data(evidence)
    yield from _versions(evidence)
    yield from _visibility(evidence)
    for node in evidence.nodes:
        for disk in node.disks:
            yield from _disk(node, disk)


def _code(evidence: Evidence) -> Iterator[Finding]:
    todo = "the node has another copy of the run directory: look at its mounts"
    for node in evidence.nodes:
        if node.files.code_changes:
            seen = f"sees other code than was submitted: {listed(node.files.code_changes, most=3)}"
            yield Finding(code="CODE_DRIFT", level="error", node=node.node, seen=seen, todo=todo, blames_node=True)
    known = {node.node: node.files.code_index for node in evidence.nodes if not node.files.code_changes}
    if odd := odd_ones(known):
        for name in odd.nodes:
            seen = "reads another list of the code's files (code.json) than the other nodes"
            yield Finding(code="CODE_DRIFT", level="error", node=name, seen=seen, todo=todo, blames_node=odd.is_clear)


def _config(evidence: Evidence) -> Iterator[Finding]:
    if odd := odd_ones({node.node: node.files.config for node in evidence.nodes if node.files.config}):
        for name in odd.nodes:
            yield Finding(
                code="CONFIG_DRIFT",
                level="error",
                node=name,
                seen="reads another config.yaml or plan.json than the other nodes",
                todo="compare the files from both nodes; a mount or a cache there is old",
                blames_node=odd.is_clear,
            )


def _data(evidence: Evidence) -> Iterator[Finding]:
    nodes = {node.node: node.files for node in evidence.nodes}
    for name, files in nodes.items():
        if files.data_missing:
            elsewhere = [other for other, its in nodes.items() if not its.data_missing]
            yield Finding(
                code="DATA_MISSING",
                level="error",
                node=name,
                seen=f"does not see {listed(files.data_missing, most=3)}",
                todo="mount it there, or name a path that every node sees in data.path",
                blames_node=bool(elsewhere),
            )
        empty = [path for path in files.data_empty if any(path not in its.data_empty for its in nodes.values())]
        if empty:
            yield Finding(
                code="DATA_MISSING",
                level="error",
                node=name,
                seen=f"sees nothing in {listed(empty, most=3)}, where other nodes see something",
                todo="mount it there",
                blames_node=True,
            )
    if odd := odd_ones({name: files.data for name, files in nodes.items() if files.data}):
        for name, value in odd.nodes.items():
            yield Finding(
                code="DATA_MISSING",
                level="error",
                node=name,
                seen=f"sees other data than the other nodes (fingerprint {value[:8]}, there {odd.usual[:8]})",
                todo="copy the same data to every node, or name a path that all share in data.path",
                blames_node=odd.is_clear,
            )


def _versions(evidence: Evidence) -> Iterator[Finding]:
    names = dict.fromkeys(name for node in evidence.nodes for name in node.versions)
    for name in names:
        odd = odd_ones({node.node: node.versions.get(name, "none") for node in evidence.nodes if node.versions})
        if odd is None:
            continue
        level: Level = "error" if name in _MUST_AGREE else "warning"
        for node, value in odd.nodes.items():
            yield Finding(
                code="VERSION_DRIFT",
                level=level,
                node=node,
                seen=f"has {name} {value}, the other nodes have {odd.usual}",
                todo="install the same environment on every node, or use one on a path that all share",
                blames_node=odd.is_clear and level == "error",
            )


def _visibility(evidence: Evidence) -> Iterator[Finding]:
    pairs = [(probe.node, peer) for probe in evidence.probes for peer in probe.unseen]
    culprit = common_end(pairs, num_nodes=len(evidence.nodes))
    if pairs:
        shown = [f"{reader} does not see what {writer} wrote" for reader, writer in pairs]
        yield Finding(
            code="FS_STALE",
            level="error",
            node=culprit or ", ".join(dict.fromkeys(reader for reader, _ in pairs)),
            seen=f"{listed(shown, most=2)} into the run directory",
            todo="the path is not shared, or its cache is late: see `findmnt -T RUN_DIRECTORY` on both nodes",
            blames_node=bool(culprit),
        )
    for probe in evidence.probes:
        late = {peer: seconds for peer, seconds in probe.seen_after_s.items() if seconds > _LATE_S}
        if late:
            peer = max(late, key=lambda name: late[name])
            seen = f"saw what {peer} wrote into the run directory {late[peer]:.1f} s late"
            todo = "shorten the attribute cache of that mount (actimeo), or expect late logs and stop files"
            yield Finding(code="FS_STALE", level="warning", node=probe.node, seen=seen, todo=todo)


def _disk(node: NodeFacts, disk: DiskFacts) -> Iterator[Finding]:
    place = f"{disk.path} ({disk.role})"
    full_mb, low_mb = _FULL_MB.get(disk.role, (0, 0))
    # The file system of the run is everybody's; what is full there is no node's fault.
    is_own = disk.role != "run directory"
    if disk.is_readonly:
        yield Finding(
            code="FS_READONLY",
            level="error" if full_mb else "warning",
            node=node.node,
            seen=f"cannot write to {place}: {disk.error}",
            todo="look at the mount, the quota and the permissions there",
            blames_node=bool(full_mb),
        )
    elif disk.is_full or (disk.free_mb is not None and disk.free_mb < full_mb) or disk.free_inodes == 0:
        room = f"{disk.free_mb} MiB are left" if disk.free_inodes != 0 else "no inodes are left"
        yield Finding(
            code="DISK_FULL",
            level="error" if full_mb else "warning",
            node=node.node,
            seen=f"{place} is full: {disk.error or room}",
            todo="free some room, lower checkpoint.keep, or name another place",
            blames_node=bool(full_mb) and is_own,
        )
    elif disk.free_mb is not None and disk.free_mb < low_mb:
        yield Finding(
            code="DISK_FULL",
            level="warning",
            node=node.node,
            seen=f"{place} has {disk.free_mb} MiB left of {disk.total_mb}",
            todo="free some room before the checkpoints need it",
        )
