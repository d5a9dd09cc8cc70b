"""Facts in, findings out: each row is a healthy job of three nodes with one thing wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from slurm_train.config.schema import build_config
from slurm_train.rundir.events import Finding
from slurm_train.tools.doctor.facts import (
    Asked,
    DiskFacts,
    Evidence,
    FilesFacts,
    GpuFacts,
    NetworkFacts,
    NodeFacts,
    PortFacts,
    ProbeFacts,
    RankFacts,
    SpeedFacts,
    Trouble,
)
from slurm_train.tools.doctor.findings import error, merge, note, warning
from slurm_train.tools.doctor.node_rules import OTHER_CODES, best_speeds, interface_choices, rules

Fault = Callable[[Evidence], Evidence]
VERSIONS = {"slurm_train": "1.0", "python": "3.11.2", "torch": "2.13.0", "driver": "570.1"}
ROOM: dict[str, Any] = {"free_mb": 900_000, "total_mb": 1_000_000, "free_inodes": 9}
NODES = ("node1", "node2", "node3")


def healthy(num_nodes: int = 3, per_node: int = 2, **asked: Any) -> Evidence:
    names = tuple(f"node{index + 1}" for index in range(num_nodes))
    addresses = [f"10.0.0.{index + 1}" for index in range(num_nodes)]
    world = num_nodes * per_node
    return Evidence(
        asked=Asked(nodes=names, world_size=world, gpus_per_node=per_node, **asked),
        ranks=[
            RankFacts(
                rank=rank,
                local_rank=rank % per_node,
                node_rank=rank // per_node,
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
                network=NetworkFacts(
                    addresses={"eth0": address},
                    interface="eth0",
                    address=address,
                    own_name=name,
                    own_addresses=[address],
                    link_mbit_per_s=10_000,
                    probe_port=40_000 + index,
                ),
                files=FilesFacts(code_index="c0de", config="c0f1", data="da7a"),
                disks=[
                    DiskFacts(role="run directory", path="/shared/run", **ROOM),
                    DiskFacts(role="temporary files", path="/tmp", **ROOM),
                ],
                gpus=[GpuFacts(name=str(gpu), total_mb=81_920) for gpu in range(per_node)],
                num_gpus=per_node,
                versions=VERSIONS,
            )
            for index, (name, address) in enumerate(zip(names, addresses, strict=True))
        ],
        probes=[
            ProbeFacts(
                node=name,
                seen_after_s={other: 0.01 for other in names if other != name},
                clock_offset_s=0.003 if index else None,
            )
            for index, name in enumerate(names)
        ],
        port=PortFacts(asked=20_001, bound=20_001),
    )


def changed(value: Any, changes: Mapping[str, Any]) -> Any:
    """Returns facts with fields changed; a mapping changes fields of the facts in a field."""
    found = {name: changed(getattr(value, name), to) if isinstance(to, Mapping) else to for name, to in changes.items()}
    return {**value, **changes} if isinstance(value, dict) else replace(value, **found)


def node(*names: str, **changes: Any) -> Fault:
    def fault(job: Evidence) -> Evidence:
        return replace(job, nodes=[changed(one, changes) if one.node in names else one for one in job.nodes])

    return fault


def ranks(name: str, **changes: Any) -> Fault:
    return lambda job: replace(job, ranks=[replace(one, **changes) if one.node == name else one for one in job.ranks])


def rank(number: int, **changes: Any) -> Fault:
    return lambda job: replace(job, ranks=[replace(one, **changes) if one.rank == number else one for one in job.ranks])


def probe(**changes_by_node: Mapping[str, Any]) -> Fault:
    return lambda job: replace(job, probes=[changed(one, changes_by_node.get(one.node, {})) for one in job.probes])


def disk(place: int, **changes: Any) -> Fault:
    def fault(job: Evidence) -> Evidence:
        disks = [replace(one, **changes) if at == place else one for at, one in enumerate(job.nodes[1].disks)]
        return node("node2", disks=disks)(job)

    return fault


def gpus(*changes: Mapping[str, Any]) -> Fault:
    def fault(job: Evidence) -> Evidence:
        both = [replace(one, **change) for one, change in zip(job.nodes[1].gpus or [], changes, strict=True)]
        return node("node2", gpus=both)(job)

    return fault


def job(**changes: Any) -> Fault:
    return lambda job: replace(job, **changes)


def without(*names: str) -> Fault:
    """None of the nodes' ranks has connected."""
    return lambda job: replace(job, ranks=[one for one in job.ranks if one.node not in names], probes=[])


def trouble(*names: str, **facts: Any) -> Fault:
    """No rank of the nodes reaches rank 0."""
    given = {"tries": 9, "address": "10.0.0.1", "port": 20_001, "error": "timed out", **facts}
    return both(without(*names), job(troubles=[Trouble(node=name, **given) for name in names]))


def speeds(*rows: tuple[float, float, float]) -> Fault:
    """(ms of work, MB/s to every peer, microseconds to every peer), node after node."""

    def measured(job: Evidence) -> Evidence:
        names = [one.node for one in job.nodes]
        facts = [
            SpeedFacts(
                node=name,
                work_ms=work_ms,
                # A connection is as fast as the slower of its two ends.
                mb_per_s={other: min(rate, rows[names.index(other)][1]) for other in names if other != name},
                latency_us={other: latency for other in names if other != name},
            )
            for name, (work_ms, rate, latency) in zip(names, rows, strict=True)
        ]
        return replace(job, speeds=facts)

    return measured


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
    ("PORT_BLOCKED", ERROR, "node3", trouble("node3", error="connection refused", reached=["node2"]),
     "does not reach rank 0 at 10.0.0.1:20001 (node1): connection refused; it reaches node2"),
    ("PORT_BLOCKED", BLAMES, "node1", trouble("node2", "node3", reached=["another"]),
     "no other node reaches rank 0 at 10.0.0.1:20001: timed out; they reach each other"),
    ("PORT_BLOCKED", BLAMES, "node3",
     probe(**blocked("node1", "node2", to="node3"), node3={"unreached": dict.fromkeys(NODES[:2], "timed out")}),
     "node1 does not reach node3 at 10.0.0.3:40002 (timed out), node2 does not reach node3 at 10.0.0.3:40002 (timed "
     "out), node3 does not reach node1 at 10.0.0.1:40000 (timed out), and 1 more"),
    ("PORT_BLOCKED", ERROR, "node2, node3", probe(**blocked("node2", to="node3"), **blocked("node3", to="node2")),
     "node2 does not reach node3 at 10.0.0.3:40002 (timed out), node3 does not reach node2 at 10.0.0.2:40001 (timed "
     "out)"),
    ("PORT_BLOCKED", BLAMES, "node3", both(without("node3"), job(mute=["node3"])),
     "connects to rank 0, and nothing larger arrives from it: a report of a few kB was lost"),
    ("PORT_IN_USE", WARNING, "node1", job(port=PortFacts(asked=20_001, bound=20_002, holder="pid 7 (nginx)")),
     "port 20001 was free and is held by pid 7 (nginx) now, the ranks meet at 20002"),
    ("PORT_IN_USE", ERROR, "node1", job(port=PortFacts(asked=20_001, bound=0)),
     "port 20001 was free and is held now, and so are all others on the list"),
    ("WRONG_INTERFACE", ERROR, "node2", node("node2", network={"gloo_interface": "ib0"}),
     "GLOO_SOCKET_IFNAME=ib0: there is no such interface with an address, but eth0"),
    ("WRONG_INTERFACE", ERROR, "node2", node("node2", network={"nccl_interface": "=eth"}),
     "NCCL_SOCKET_IFNAME==eth: there is no such interface with an address, but eth0"),
    ("WRONG_INTERFACE", ERROR, "node2",
     both(node("node2", network={"gloo_interface": "eth1", "addresses": {"eth1": "192.168.7.2"}}), probe(**GLOO)),
     "gloo would announce eth1 (192.168.7.2), which node1 cannot reach; eth0 (10.0.0.2) answers"),
    ("WRONG_INTERFACE", WARNING, "node2", probe(**GLOO),
     "gloo would announce 10.0.0.2, which node1 cannot reach; eth0 (10.0.0.2) answers"),
    ("LOOPBACK", WARNING, "node2", both(node("node2", network={"own_addresses": ["127.0.1.1"]}), probe(**GLOO)),
     "resolves its own name node2 to itself (127.0.1.1), which gloo would announce"),
    ("NAME_RESOLUTION", WARNING, "node2", node("node2", network={"own_addresses": []}),
     "cannot resolve its own name node2, which gloo announces"),
    ("NAME_RESOLUTION", WARNING, "node2", node("node2", network={"own_addresses": ["10.9.9.9"]}),
     "resolves its own name node2 to 10.9.9.9, which is no address of it (eth0 (10.0.0.2))"),
    ("RANK_MISMATCH", ERROR, "node1", rank(0, slurm_rank=1),
     "the task that Slurm calls rank 1 has RANK=0 in its environment"),
    ("RANK_MISMATCH", ERROR, "node2", rank(2, world_size=4), "rank 2 counts 4 ranks, the run was planned for 6"),
    ("RANK_MISMATCH", ERROR, "node2", ranks("node2", local_rank=0),
     "ranks 2-3 all have local rank 0, so they would share a GPU"),
    ("NODE_MISSING", BLAMES, "node3", both(without("node3"), job(silent=["node3"], waited_s=600.0)),
     "some of its ranks have not come within 600 s, and it gave no reason"),
    ("NODE_MISSING", WARNING, "node3", job(late=["node3"], waited_s=10.0),
     "did not answer rank 0's questions within 10 s, so less is known of it"),
    ("GPU_COUNT", BLAMES, "node2", ranks("node2", visible_gpus=1),
     "1 GPUs are visible to the ranks, 2 were asked for"),
    ("GPU_COUNT", BLAMES, "node2", node("node2", num_gpus=1), "the driver counts 1 GPUs, Slurm has given 2"),
    ("GPU_BUSY", BLAMES, "node2", gpus({"used_mb": 60_000, "holders": ["pid 4711 (60000 MiB)"]}, {}),
     "60000 of 81920 MiB of GPU 0 are taken by pid 4711 (60000 MiB)"),
    ("GPU_BUSY", WARNING, "node2", gpus({"used_mb": 3000}, {"used_mb": 2500}),
     "3000 of 81920 MiB of GPU 0, 1 are taken"),
    ("GPU_SICK", BLAMES, "node2", gpus({"errors": ["3 uncorrected memory errors"]}, {}),
     "GPU 0: 3 uncorrected memory errors"),
    ("GPU_SICK", BLAMES, "node2", node("node2", gpu_errors=["Xid 79 on 0000:3b:00"]),
     "the driver has logged Xid 79 on 0000:3b:00"),
    ("GPU_SICK", WARNING, "node2", gpus({"warnings": ["slowed down by heat"]}, {"warnings": ["slowed down by heat"]}),
     "GPU 0, 1: slowed down by heat"),
    ("CODE_DRIFT", BLAMES, "node2", node("node2", files={"code_changes": ["train.py"]}),
     "sees other code than was submitted: train.py"),
    ("CODE_DRIFT", BLAMES, "node2", node("node2", files={"code_index": "01d"}),
     "reads another list of the code's files (code.json) than the other nodes"),
    ("CONFIG_DRIFT", BLAMES, "node2", node("node2", files={"config": "01d"}),
     "reads another config.yaml or plan.json than the other nodes"),
    ("DATA_MISSING", BLAMES, "node2", node("node2", files={"data": "", "data_missing": ["/data/train.bin"]}),
     "does not see /data/train.bin"),
    ("DATA_MISSING", BLAMES, "node2", node("node2", files={"data_empty": ["/data"]}),
     "sees nothing in /data, where other nodes see something"),
    ("DATA_MISSING", BLAMES, "node2", node("node2", files={"data": "0dd0dd0dd0dd"}),
     "sees other data than the other nodes (fingerprint 0dd0dd0d, there da7a)"),
    ("VERSION_DRIFT", BLAMES, "node2", node("node2", versions={"torch": "2.12.0"}),
     "has torch 2.12.0, the other nodes have 2.13.0"),
    ("VERSION_DRIFT", WARNING, "node2", node("node2", versions={"driver": "550.2"}),
     "has driver 550.2, the other nodes have 570.1"),
    ("FS_STALE", ERROR, "node2", probe(node2={"unseen": ["node3"]}),
     "node2 does not see what node3 wrote into the run directory"),
    ("FS_STALE", BLAMES, "node3", probe(node2={"unseen": ["node3"]}, node3={"unseen": ["node1", "node2"]}),
     "node2 does not see what node3 wrote, node3 does not see what node1 wrote, and 1 more into the run directory"),
    ("FS_STALE", WARNING, "node2", probe(node2={"seen_after_s": {"node3": 3.2}}),
     "saw what node3 wrote into the run directory 3.2 s late"),
    ("FS_READONLY", BLAMES, "node2", disk(0, error="Read-only file system", is_readonly=True),
     "cannot write to /shared/run (run directory): Read-only file system"),
    ("DISK_FULL", ERROR, "node2", disk(0, free_mb=3), "/shared/run (run directory) is full: 3 MiB are left"),
    ("DISK_FULL", WARNING, "node2", disk(1, error="No space left on device", is_full=True),
     "/tmp (temporary files) is full: No space left on device"),
    ("DISK_FULL", WARNING, "node2", disk(0, free_mb=900), "/shared/run (run directory) has 900 MiB left of 1000000"),
    ("CLOCK_SKEW", WARNING, "node2", probe(node2={"clock_offset_s": -41.5}), "its clock is 41.5 s behind rank 0's"),
    ("CPU_AFFINITY", WARNING, "node2", ranks("node2", cpus=[3]), "2 ranks may use nothing but CPU 3 of 64"),
    ("LIMITS", ERROR, "node2", ranks("node2", max_open_files=128), "a rank may open 128 files, it needs 1024"),
    ("LIMITS", WARNING, "node2", ranks("node2", max_open_files=512), "a rank may open 512 files, usual are 1024"),
    ("LIMITS", WARNING, "node2",
     both(ranks("node2", max_locked_mb=8), node("node2", network={"has_infiniband": True})),
     "a rank may lock 8 MiB of memory, and InfiniBand has to lock its buffers"),
    ("SLOW_NODE", WARNING, "node2", speeds((30, 900, 50), (300, 20, 4000), (30, 900, 50)),
     "computes 10.0 times as long as the others (300 ms for 30 ms of work, load 1.0)"),
    ("SLOW_LINK", WARNING, "node2", speeds((30, 900, 50), (30, 12, 50), (30, 900, 50)),
     "12 MB/s at best, the other nodes 900"),
    ("SLOW_LINK", WARNING, "node2", speeds((30, 900, 50), (30, 900, 4000), (30, 900, 50)),
     "4000 us to the nearest node, the other nodes 50"),
]  # fmt: skip


def find(evidence: Evidence) -> tuple[Finding, ...]:
    return rules.find(evidence, nodes=evidence.asked.nodes)


@pytest.mark.parametrize(
    ("code", "kind", "where", "fault", "seen"), ROWS, ids=[f"{row[0]}-{row[4][:9]}" for row in ROWS]
)
def test_a_fault_is_named_once(code: str, kind: tuple[str, bool], where: str, fault: Fault, seen: str) -> None:
    (found,) = find(fault(healthy()))
    assert (found.code, found.level, found.blames_node, found.node, found.seen) == (code, *kind, where, seen)
    assert found.line == f"{code} {where}: {seen}; {found.todo} (docs/troubleshooting.md#{code.lower()})"
    assert "\n" not in found.line and found.todo


def test_every_rule_has_a_row_and_no_code_is_found_twice() -> None:
    assert {row[0] for row in ROWS} == {*rules.codes}
    assert not {*rules.codes} & {*OTHER_CODES}


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 40])
def test_a_healthy_job_has_no_finding(num_nodes: int) -> None:
    assert find(healthy(num_nodes)) == ()


def test_of_two_nodes_that_differ_nobody_is_to_blame() -> None:
    for fault in (node("node2", versions={"torch": "2.12.0"}), probe(**blocked("node1", to="node2"))):
        (found,) = find(fault(healthy(2)))
        assert (found.level, found.blames_node) == ("error", False)


def test_a_folder_that_is_empty_everywhere_is_no_fault() -> None:
    assert find(node(*NODES, files={"data_empty": ["/data"]})(healthy())) == ()


@pytest.mark.parametrize(
    ("wanted", "cpus", "expected"),
    [
        (None, [5], "each rank has 1 of 64 CPUs, for its loader workers as well"),
        (8, [5, 6], "rank 2 may use 2 CPUs, cluster.cpus_per_gpu=8 asked"),
        (2, [5, 6], None),
        (None, [5, 6], None),
    ],
)
def test_cpus_are_compared_with_what_was_asked(wanted: int | None, cpus: list[int], expected: str | None) -> None:
    fault = both(rank(2, cpus=cpus), rank(3, cpus=[cpu + 20 for cpu in cpus]))
    assert [one.seen for one in find(fault(healthy(cpus_per_gpu=wanted)))] == ([expected] if expected else [])


def test_more_ranks_than_cpus_are_no_fault_of_affinity() -> None:
    assert find(both(ranks("node1", cpus=[0, 1]), node("node1", num_cpus=2))(healthy(1, 8))) == ()


def test_a_script_needs_its_port() -> None:
    taken = job(port=PortFacts(asked=20_001, bound=20_002))(healthy(needs_port=True))
    assert [one.level for one in find(taken)] == ["error"]


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({"visible_gpus": 1, "local_world_size": 1}, []),
        ({"visible_gpus": 0, "local_world_size": 1}, ["0 GPUs are visible to the ranks, 1 were asked for"]),
        ({"visible_gpus": None}, []),
    ],
)
def test_a_node_needs_no_more_gpus_than_ranks(facts: Mapping[str, Any], seen: list[str]) -> None:
    found = find(ranks("node2", **facts)(healthy()))
    assert [one.seen for one in found if one.code == "GPU_COUNT"] == seen


OWN_LOOPBACK = {"own_addresses": ["127.0.1.1"]}
SEVERAL = {"addresses": {"docker0": "172.17.0.1", "eth0": "10.0.0.2"}}


@pytest.mark.parametrize(
    ("fault", "variables"),
    [
        (job(), {}),
        (node("node2", network=OWN_LOOPBACK), {"GLOO_SOCKET_IFNAME": "eth0"}),
        (probe(**GLOO), {"GLOO_SOCKET_IFNAME": "eth0"}),
        (node("node2", network=SEVERAL), {"NCCL_SOCKET_IFNAME": "=eth0"}),
        (node("node2", network={**SEVERAL, "has_infiniband": True}), {}),
        (node("node2", network={**OWN_LOOPBACK, "gloo_interface": "eth0", "nccl_interface": "eth0"}), {}),
    ],
)
def test_collectives_are_led_along_the_route_unless_the_user_named_an_interface(
    fault: Fault, variables: dict[str, str]
) -> None:
    assert interface_choices(fault(healthy())) == ({"node2": variables} if variables else {})


@pytest.mark.parametrize(
    ("setting", "is_wrong"), [("eth", False), ("=eth0", False), ("^docker,lo", False), ("ib", True)]
)
def test_settings_of_nccl_are_read_as_nccl_does(setting: str, is_wrong: bool) -> None:
    found = find(node("node2", network={"nccl_interface": setting})(healthy()))
    assert [one.code for one in found] == ["WRONG_INTERFACE"] * is_wrong


def test_a_link_far_from_its_nominal_speed_is_named_though_the_node_has_but_one_partner() -> None:
    (found,) = find(speeds((30, 12, 50), (30, 12, 50))(healthy(2)))
    assert (found.code, found.node, found.seen) == ("SLOW_LINK", "", "12 MB/s at best, its interface claims 1250")


def test_of_several_measurements_the_best_counts() -> None:
    first = SpeedFacts(node="node1", work_ms=90.0, mb_per_s={"node2": 10.0}, latency_us={"node2": 50.0})
    second = SpeedFacts(node="node1", work_ms=30.0, mb_per_s={"node2": 900.0}, latency_us={"node2": 70.0})
    best = SpeedFacts(node="node1", work_ms=30.0, mb_per_s={"node2": 900.0}, latency_us={"node2": 50.0})
    assert best_speeds([first, second]) == [best]


def test_facts_travel_as_json() -> None:
    full = both(trouble("node3"), speeds((30, 900, 50), (30, 900, 50), (30, 900, 50)))(healthy())
    for values in (full.ranks, full.nodes, healthy().probes, full.speeds, full.troubles):
        assert [build_config(type(one), json.loads(json.dumps(asdict(one)))) for one in values] == list(values)


@pytest.mark.parametrize(
    ("names", "where", "blames"),
    [
        (["node3"], "node3", True),
        (["node3", "node4"], "node3, node4", True),
        (["node3", "node4", "node5"], "node3, node4, node5", False),
        (["node1", "node2", "node3", "node4", "node5"], "", False),
    ],
)
def test_what_several_nodes_have_is_one_finding(names: list[str], where: str, blames: bool) -> None:
    all_nodes = ["node1", "node2", "node3", "node4", "node5"]
    (merged,) = merge([error(name, "is full", blames=True) for name in names], nodes=all_nodes)
    assert (merged.node, merged.blames_node) == (where, blames)


def test_errors_come_first_and_other_texts_are_other_findings() -> None:
    found = merge([note("a"), warning("node1", "b"), error("node1", "c"), error("node2", "d")], nodes=NODES)
    assert [one.level for one in found] == ["error", "error", "warning", "note"]
