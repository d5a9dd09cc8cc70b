"""A healthy job of a few nodes as facts, from which each test takes one thing away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slurm_train.tools.doctor.evidence import Asked, Evidence, PortFacts
from slurm_train.tools.doctor.facts import (
    DiskFacts,
    FilesFacts,
    GpuFacts,
    NetworkFacts,
    NodeFacts,
    ProbeFacts,
    RankFacts,
)

VERSIONS = {"slurm_train": "1.0", "python": "3.11.2", "torch": "2.13.0", "driver": "570.1"}


def address(index: int) -> str:
    return f"10.0.0.{index + 1}"


def network(index: int) -> NetworkFacts:
    own = address(index)
    return NetworkFacts(
        addresses={"eth0": own},
        interface="eth0",
        address=own,
        own_name=f"node{index + 1}",
        own_addresses=[own],
        master_addresses=[address(0)],
        link_mbit_per_s=10_000,
        probe_port=40_000 + index,
    )


def node(index: int, *, gpus: int) -> NodeFacts:
    return NodeFacts(
        node=f"node{index + 1}",
        node_rank=index,
        num_cpus=64,
        load=1.0,
        network=network(index),
        files=FilesFacts(code_index="c0de", config="c0f1", data="da7a"),
        disks=[
            DiskFacts(role="run directory", path="/shared/run", free_mb=900_000, total_mb=1_000_000, free_inodes=9),
            DiskFacts(role="temporary files", path="/tmp", free_mb=9_000, total_mb=10_000, free_inodes=9),
            DiskFacts(role="shared memory", path="/dev/shm", free_mb=9_000, total_mb=10_000, free_inodes=9),
        ],
        gpus=[GpuFacts(name=str(gpu), total_mb=81_920) for gpu in range(gpus)],
        num_gpus=gpus,
        versions=dict(VERSIONS),
    )


def rank(number: int, *, per_node: int, world: int) -> RankFacts:
    local = number % per_node
    return RankFacts(
        rank=number,
        local_rank=local,
        node_rank=number // per_node,
        world_size=world,
        local_world_size=per_node,
        node=f"node{number // per_node + 1}",
        pid=1000 + number,
        slurm_rank=number,
        visible_gpus=per_node,
        cpus=list(range(8 * local, 8 * local + 8)),
        max_open_files=65_536,
    )


def probe(index: int, num_nodes: int) -> ProbeFacts:
    peers = [f"node{other + 1}" for other in range(num_nodes) if other != index]
    offset_s = None if index == 0 else 0.003
    return ProbeFacts(
        node=f"node{index + 1}",
        reached=peers,
        seen_after_s=dict.fromkeys(peers, 0.01),
        clock_offset_s=offset_s,
        clock_error_s=0.001,
    )


def healthy(num_nodes: int = 3, per_node: int = 2) -> Evidence:
    world = num_nodes * per_node
    return Evidence(
        ranks=[rank(number, per_node=per_node, world=world) for number in range(world)],
        nodes=[node(index, gpus=per_node) for index in range(num_nodes)],
        probes=[probe(index, num_nodes) for index in range(num_nodes)],
        port=PortFacts(asked=20_001, bound=20_001),
    )


def asked(num_nodes: int = 3, per_node: int = 2, **other: Any) -> Asked:
    return Asked(
        nodes=tuple(f"node{index + 1}" for index in range(num_nodes)),
        world_size=num_nodes * per_node,
        gpus_per_node=per_node,
        local_ranks=per_node,
        **other,
    )


def with_node(evidence: Evidence, name: str, **changes: Any) -> Evidence:
    """Returns the evidence with fields of one node changed; a function is given what was there."""
    return replace(evidence, nodes=[_changed(one, changes) if one.node == name else one for one in evidence.nodes])


def with_network(evidence: Evidence, name: str, **changes: Any) -> Evidence:
    return with_node(evidence, name, network=lambda old: _changed(old, changes))


def with_files(evidence: Evidence, name: str, **changes: Any) -> Evidence:
    return with_node(evidence, name, files=lambda old: _changed(old, changes))


def with_disk(evidence: Evidence, name: str, role: str, **changes: Any) -> Evidence:
    def change(disks: list[DiskFacts]) -> list[DiskFacts]:
        return [_changed(disk, changes) if disk.role == role else disk for disk in disks]

    return with_node(evidence, name, disks=change)


def with_gpu(evidence: Evidence, name: str, **changes: Any) -> Evidence:
    return with_node(evidence, name, gpus=lambda old: [_changed(old[0], changes), *old[1:]])


def with_ranks(evidence: Evidence, name: str, **changes: Any) -> Evidence:
    return replace(evidence, ranks=[_changed(one, changes) if one.node == name else one for one in evidence.ranks])


def with_probe(evidence: Evidence, name: str, **changes: Any) -> Evidence:
    return replace(evidence, probes=[_changed(one, changes) if one.node == name else one for one in evidence.probes])


def without_node(evidence: Evidence, name: str) -> Evidence:
    """Returns the evidence as rank 0 has it when none of a node's ranks has come."""
    return replace(
        evidence,
        ranks=[one for one in evidence.ranks if one.node != name],
        probes=[],
    )


def _changed(value: Any, changes: dict[str, Any]) -> Any:
    new = {
        key: change(getattr(value, key)) if isinstance(change, Callable) else change  # type: ignore[arg-type]
        for key, change in changes.items()
    }
    return replace(value, **new)
