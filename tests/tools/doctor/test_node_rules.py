"""Facts in, findings out: each row is a healthy job of three nodes with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from slurm_train.tools.doctor.facts import (
    DiskFacts,
    GpuFacts,
    JobFacts,
    NodeFacts,
    ProbeFacts,
    RankFacts,
    SpeedFacts,
    Trouble,
    error,
    merge,
    warning,
)
from slurm_train.tools.doctor.node_rules import HINTS, OTHER_CODES, find_faults, interface_choices
from tests.campaigns.preflight_faults import FAULTS

Fault = Callable[[JobFacts], JobFacts]
VERSIONS = {"slurm_train": "1.0", "python": "3.11.2", "torch": "2.13.0", "driver": "570.1"}
ROOM: dict[str, Any] = {"free_mb": 900_000, "total_mb": 1_000_000, "free_inodes": 9}
HASHES = {"code": "c0de", "config": "c0f1", "data": "da7a"}
NODES = ("node1", "node2", "node3")


def healthy(num_nodes: int = 3, per_node: int = 2, **asked: Any) -> JobFacts:
    names = tuple(f"node{index + 1}" for index in range(num_nodes))
    world = num_nodes * per_node
    return JobFacts(
        names=names,
        world_size=world,
        gpus_per_node=per_node,
        port=20_001,
        bound_port=20_001,
        ranks=[
            RankFacts(
                rank=rank,
                local_rank=rank % per_node,
                world_size=world,
                local_world_size=per_node,
                node=names[rank // per_node],
                slurm_rank=rank,
                visible_gpus=per_node,
                cpus=list(range(8 * (rank % per_node), 8 * (rank % per_node) + 8)),
                max_open_files=65_536,
            )
            for rank in range(world)
        ],
        nodes=[
            NodeFacts(
                node=name,
                node_rank=index,
                num_cpus=64,
                load=1.0,
                versions=VERSIONS,
                addresses={"eth0": f"10.0.0.{index + 1}"},
                interface="eth0",
                address=f"10.0.0.{index + 1}",
                own_name=name,
                own_addresses=[f"10.0.0.{index + 1}"],
                link_mbit_per_s=10_000,
                probe_port=40_000 + index,
                hashes=HASHES,
                disks=[
                    DiskFacts(role="run directory", path="/shared/run", **ROOM),
                    DiskFacts(role="temporary files", path="/tmp", **ROOM),
                ],
                gpus=[GpuFacts(name=str(gpu), total_mb=81_920) for gpu in range(per_node)],
                num_gpus=per_node,
            )
            for index, name in enumerate(names)
        ],
        probes=[
            ProbeFacts(
                node=name,
                seen_after_s={other: 0.01 for other in names if other != name},
                clock_offset_s=0.003 if index else None,
            )
            for index, name in enumerate(names)
        ],
        **asked,
    )


def job(**changes: Any) -> Fault:
    return lambda job: replace(job, **changes)


def node(*names: str, **changes: Any) -> Fault:
    return lambda job: replace(job, nodes=[replace(one, **changes) if one.node in names else one for one in job.nodes])


def ranks(of: str | int, **changes: Any) -> Fault:
    """Changes the ranks of a node, or the one of that number."""
    return lambda job: replace(
        job, ranks=[replace(one, **changes) if of in (one.node, one.rank) else one for one in job.ranks]
    )


def probe(**changes_by_node: Mapping[str, Any]) -> Fault:
    return lambda job: replace(job, probes=[replace(one, **changes_by_node.get(one.node, {})) for one in job.probes])


def disk(place: int, **changes: Any) -> Fault:
    """Changes one of the disks of node2."""
    return lambda job: node(
        "node2", disks=[replace(one, **changes) if at == place else one for at, one in enumerate(job.nodes[1].disks)]
    )(job)


def gpu(**changes: Any) -> Fault:
    """Changes the first GPU of node2."""
    return node("node2", gpus=[GpuFacts(name="0", total_mb=81_920, **changes), GpuFacts(name="1", total_mb=81_920)])


def without(*names: str) -> Fault:
    """None of the nodes' ranks has connected."""
    return lambda job: replace(job, ranks=[one for one in job.ranks if one.node not in names], probes=[])


def trouble(*names: str, **facts: Any) -> Fault:
    """No rank of the nodes reaches rank 0."""
    given = {"tries": 9, "address": "10.0.0.1", "port": 20_001, "error": "timed out", **facts}
    return both(without(*names), job(troubles=[Trouble(node=name, **given) for name in names]))


def speeds(*rows: tuple[float, float, float]) -> Fault:
    """(ms of work, MB/s, microseconds to the nearest peer), node after node."""
    return job(
        speeds=[
            SpeedFacts(node=f"node{index}", work_ms=work_ms, mb_per_s=rate, latency_us=latency)
            for index, (work_ms, rate, latency) in enumerate(rows, 1)
        ]
    )


def both(first: Fault, second: Fault) -> Fault:
    return lambda job: second(first(job))


def blocked(*callers: str, to: str) -> dict[str, Any]:
    return {caller: {"unreached": {to: "timed out"}} for caller in callers}


ERROR, BLAMES, WARNING = ("error", False), ("error", True), ("warning", False)
GLOO = {"node1": {"unreached_gloo": {"node2": "timed out"}}}
# Code, level and whether the node is to blame, node, what is wrong, and the line without its hint.
ROWS: list[tuple[str, tuple[str, bool], str, Fault, str]] = [
    ("NAME_RESOLUTION", BLAMES, "node3", trouble("node3", address="", port=0, error="temporary failure"),
     "cannot resolve node1, where rank 0 is: temporary failure"),
    ("LOOPBACK", BLAMES, "node3", trouble("node3", address="127.0.1.1"),
     "resolves node1, where rank 0 is, to itself (127.0.1.1)"),
    ("WRONG_MASTER", BLAMES, "node3", trouble("node3", address="10.0.0.99"),
     "looks for rank 0 at 10.0.0.99, but node1 has 10.0.0.1"),
    ("PORT_BLOCKED", BLAMES, "node3", trouble("node3", unreached=["node2"]),
     "does not reach rank 0 at 10.0.0.1:20001 (node1): timed out; it does not reach node2"),
    ("NAME_RESOLUTION", BLAMES, "node3", both(job(master="node1i"), trouble("node3", address="", port=0, error="no")),
     "cannot resolve node1i, where rank 0 is: no"),
    ("PORT_BLOCKED", ERROR, "node3", trouble("node3", unreached=["node2"], answers={"ib0": "10.9.0.1"}),
     "does not reach rank 0 at 10.0.0.1:20001 (node1): timed out; it does not reach node2; its ib0 (10.9.0.1) answers"),
    ("PORT_BLOCKED", ERROR, "node1", trouble("node2", "node3", reached=["another"], answers={"ib0": "10.9.0.1"}),
     "no other node reaches rank 0 at 10.0.0.1:20001: timed out; they reach each other; its ib0 (10.9.0.1) answers"),
    ("WRONG_INTERFACE", ERROR, "node1", both(
        node("node1", addresses={"eth0": "10.0.0.1", "ib0": "10.9.0.1"}, gloo_interface="ib0"),
        trouble("node2", "node3", address="10.9.0.1", answers={"eth0": "10.0.0.1"})),
     "no other node reaches rank 0 at 10.9.0.1:20001: timed out; gloo would announce ib0, too; its eth0 (10.0.0.1) "
     "answers"),
    ("PORT_BLOCKED", BLAMES, "node1", trouble("node2", "node3", reached=["another"]),
     "no other node reaches rank 0 at 10.0.0.1:20001: timed out; they reach each other"),
    ("PORT_BLOCKED", BLAMES, "node3",
     probe(**blocked("node1", "node2", to="node3"), node3={"unreached": dict.fromkeys(NODES[:2], "timed out")}),
     "node1 does not reach node3 at 10.0.0.3:40002 (timed out), node2 does not reach node3 at 10.0.0.3:40002 (timed "
     "out), node3 does not reach node1 at 10.0.0.1:40000 (timed out), and 1 more"),
    ("PORT_IN_USE", ERROR, "node1", job(bound_port=0),
     "port 20001 was free and is taken now, and so are all others on the list"),
    ("WRONG_INTERFACE", ERROR, "node2", node("node2", gloo_interface="ib0"),
     "GLOO_SOCKET_IFNAME=ib0: there is no such interface with an address, but eth0"),
    ("WRONG_INTERFACE", WARNING, "node2", probe(**GLOO),
     "gloo would announce 10.0.0.2, which node1 cannot reach; eth0 (10.0.0.2) answers"),
    ("RANK_MISMATCH", ERROR, "node1", ranks(0, slurm_rank=1),
     "the task that Slurm calls rank 1 has RANK=0 in its environment"),
    ("RANK_MISMATCH", ERROR, "node2", ranks(2, world_size=4), "rank 2 counts 4 ranks, the attempt was opened for 6"),
    ("RANK_MISMATCH", ERROR, "node2", ranks("node2", local_rank=0),
     "ranks 2-3 all have local rank 0, so they would share a GPU"),
    ("NODE_MISSING", BLAMES, "node3", both(without("node3"), job(silent=["node3"], waited_s=600.0)),
     "some of its ranks have not come within 600 s, and it gave no reason"),
    ("GPU_COUNT", BLAMES, "node2", ranks("node2", visible_gpus=1),
     "1 GPUs are visible to the ranks, 2 were asked for"),
    ("GPU_COUNT", ERROR, "node2", ranks("node2", visible_gpus=None, unnamed_gpus=0),
     "Slurm names no GPU to the ranks, 2 were asked for: they would use CPUs"),
    ("GPU_COUNT", WARNING, "node2", ranks("node2", visible_gpus=None, unnamed_gpus=8),
     "Slurm names no GPU to the ranks, 2 were asked for: they may use all 8 of the node, other jobs' too"),
    ("GPU_BUSY", BLAMES, "node2", gpu(used_mb=60_000, holders=["pid 4711 (60000 MiB)"]),
     "60000 of 81920 MiB of GPU 0 are taken by pid 4711 (60000 MiB)"),
    ("GPU_BUSY", WARNING, "node2", gpu(used_mb=3000), "3000 of 81920 MiB of GPU 0 are taken"),
    ("GPU_SICK", BLAMES, "node2", node("node2", gpu_errors=["Xid 79 on 0000:3b:00"]),
     "the driver has logged Xid 79 on 0000:3b:00"),
    ("NO_COMPILER", BLAMES, "node2", node("node2", compile_obstacles=["no Python.h in /usr/include"]),
     "torch cannot compile kernels: no Python.h in /usr/include; the first step would fail"),
    ("CODE_DRIFT", BLAMES, "node2", node("node2", code_changes=["train.py"]),
     "sees other code than was submitted: train.py"),
    ("CONFIG_DRIFT", BLAMES, "node2", node("node2", hashes={**HASHES, "config": "01d"}),
     "reads another config.yaml or plan.json than the other nodes"),
    ("DATA_MISSING", BLAMES, "node2", node("node2", data_missing=["/data/train.bin is not there"]),
     "the data: /data/train.bin is not there"),
    ("VERSION_DRIFT", BLAMES, "node2", node("node2", versions={**VERSIONS, "torch": "2.12.0"}),
     "has torch 2.12.0, the other nodes have 2.13.0"),
    ("VERSION_DRIFT", WARNING, "node2", node("node2", versions={**VERSIONS, "driver": "550.2"}),
     "has driver 550.2, the other nodes have 570.1"),
    ("NO_SCONTROL", WARNING, "", node(*NODES, lacks_scontrol=True),
     "has no scontrol: a run that is preempted goes on as another job"),
    ("FS_STALE", BLAMES, "node3", probe(node2={"unseen": ["node3"]}, node3={"unseen": ["node1", "node2"]}),
     "node2 does not see what node3 wrote into the run directory, node3 does not see what node1 wrote into the run "
     "directory, node3 does not see what node2 wrote into the run directory"),
    ("FS_STALE", WARNING, "node2", probe(node2={"seen_after_s": {"node3": 3.2}}),
     "saw what node3 wrote into the run directory 3.2 s late"),
    ("FS_READONLY", BLAMES, "node2", disk(0, error="Read-only file system", is_readonly=True),
     "cannot write to /shared/run (run directory): Read-only file system"),
    ("DISK_FULL", ERROR, "node2", disk(0, free_mb=3),
     "no room in /shared/run (run directory): 3 MiB and 9 inodes left"),
    ("DISK_FULL", WARNING, "node2", disk(0, free_mb=900),
     "little room in /shared/run (run directory): 900 MiB and 9 inodes left"),
    ("CLOCK_SKEW", WARNING, "node2", probe(node2={"clock_offset_s": -41.5}), "its clock is 41.5 s behind rank 0's"),
    ("CPU_AFFINITY", WARNING, "node2", ranks("node2", cpus=[3]),
     "2 ranks may use CPUs 3 of 64, one of them 1; cluster.cpus_per_gpu=null"),
    ("LIMITS", ERROR, "node2", ranks("node2", max_open_files=128), "a rank may open 128 files, it should have 1024"),
    ("LIMITS", WARNING, "node2", disk(1, path="/" + "a" * 99),
     f"the path of temporary files has 100 characters, too many for sockets: /{'a' * 99}"),
    ("LIMITS", WARNING, "node2", ranks("node2", limits={"CPU": 3, "AS": 700_000 << 10, "NPROC": 99}),
     "each process of a rank may have 3 s of processor time (ulimit -t), 684 MiB of address space (ulimit -v)"),
    ("SLOW_NODE", WARNING, "node2", speeds((30, 900, 50), (300, 20, 4000), (30, 900, 50)),
     "computes 10.0 times as long as the others (300 ms for 30 ms of work, load 1.0)"),
    ("SLOW_LINK", WARNING, "node2", speeds((30, 900, 50), (30, 12, 50), (30, 900, 50)),
     "12 MB/s at best, the other nodes 900"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "kind", "where", "fault", "seen"), ROWS, ids=[f"{row[0]}-{row[4][:9]}" for row in ROWS]
)
def test_a_fault_is_named_once(code: str, kind: tuple[str, bool], where: str, fault: Fault, seen: str) -> None:
    (found,) = find_faults(fault(healthy()))
    assert (found.code, found.level, found.blames_node, found.node, found.seen) == (code, *kind, where, seen)
    assert found.todo and "\n" not in found.line


def test_every_code_has_a_row() -> None:
    assert {row[0] for row in ROWS} == {*HINTS} - {"SLOW_GPU"}, "test_gpu_speed has that one"
    assert not {*HINTS} & {*OTHER_CODES}


def test_every_code_has_a_fault_of_the_campaign() -> None:
    codes = {*HINTS, *OTHER_CODES}
    faults = {fault.code for fault in FAULTS}
    assert (codes - faults, faults - codes) == (set(), set()), "codes without a fault, faults without a code"


TWO_CPUS = both(ranks(2, cpus=[5, 6]), ranks(3, cpus=[25, 26]))
# A job, and the level and blame of each finding.
JOBS: dict[str, tuple[JobFacts, list[tuple[str, bool]]]] = {
    "many nodes": (healthy(40), []),
    "of two versions either is wrong": (node("node2", versions={**VERSIONS, "torch": "2.12.0"})(healthy(2)), [ERROR]),
    "of two nodes either is blocked": (probe(**blocked("node1", to="node2"))(healthy(2)), [ERROR]),
    "a link far from its nominal speed": (speeds((30, 12, 50), (30, 12, 50))(healthy(2)), [WARNING]),
    "a folder that is empty everywhere": (node(*NODES, data_empty=["/data"])(healthy()), []),
    "fewer CPUs than asked": (TWO_CPUS(healthy(cpus_per_gpu=8)), [WARNING]),
    "as many CPUs as asked": (TWO_CPUS(healthy(cpus_per_gpu=2)), []),
    "more ranks than CPUs": (both(ranks("node1", cpus=[0, 1]), node("node1", num_cpus=2))(healthy(1, 8)), []),
    "a script needs its port": (job(bound_port=20_002)(healthy(needs_port=True)), [ERROR]),
    "no more GPUs than ranks are needed": (ranks("node2", visible_gpus=1, local_world_size=1)(healthy()), []),
    "on CPUs no GPU is named": (both(ranks("node1", unnamed_gpus=0), job(gpus_per_node=0))(healthy(1)), []),
    "no node can compile": (node(*NODES, compile_obstacles=["no C compiler"])(healthy()), [ERROR]),
    "compiling was typed": (node("node2", compile_obstacles=["no C"])(healthy(must_compile=True)), [WARNING]),
    "the beginning of an interface": (node("node2", nccl_interface="eth")(healthy()), []),
    "interfaces left out": (node("node2", nccl_interface="^docker,lo")(healthy()), []),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_a_fault_depends_on_the_job(name: str) -> None:
    found, expected = JOBS[name]
    assert [(one.level, one.blames_node) for one in find_faults(found)] == expected


LOOPBACK = {"own_addresses": ["127.0.1.1"]}
SEVERAL = {"addresses": {"docker0": "172.17.0.1", "eth0": "10.0.0.2"}}


@pytest.mark.parametrize(
    ("fault", "chosen"),
    [
        (node("node2", **LOOPBACK), {"node2": {"GLOO_SOCKET_IFNAME": "eth0"}}),
        (probe(**GLOO), {"node2": {"GLOO_SOCKET_IFNAME": "eth0"}}),
        (node("node2", **SEVERAL), {"node2": {"NCCL_SOCKET_IFNAME": "=eth0"}}),
        (node("node2", **SEVERAL, has_infiniband=True), {}),
        (node("node2", **LOOPBACK, **SEVERAL, gloo_interface="eth0", nccl_interface="eth0"), {}),
    ],
)
def test_collectives_are_led_along_the_route_unless_the_user_named_an_interface(
    fault: Fault, chosen: dict[str, dict[str, str]]
) -> None:
    assert interface_choices(fault(healthy())) == chosen


FIVE = ("node1", "node2", "node3", "node4", "node5")


@pytest.mark.parametrize(
    ("names", "where", "blames"),
    [(FIVE[3:], "node4, node5", True), (FIVE[2:], "node3, node4, node5", False), (FIVE, "", False)],
)
def test_what_several_nodes_have_is_one_finding_and_errors_come_first(
    names: tuple[str, ...], where: str, blames: bool
) -> None:
    found = [warning("CLOCK_SKEW", "node1", "late")]
    found += [error("DISK_FULL", name, "is full", blames=True) for name in names]
    merged, late = merge(found, hints=HINTS, nodes=FIVE)
    assert (merged.node, merged.blames_node, late.level) == (where, blames, "warning")
