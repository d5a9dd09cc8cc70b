"""Facts in, findings out: one table per kind, each row a healthy job with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_train.tools.doctor.diagnose import diagnose
from slurm_train.tools.doctor.evidence import Asked, Evidence, PortFacts
from slurm_train.tools.doctor.facts import SpeedFacts, Trouble
from slurm_train.tools.doctor.finding import RUN_CODES
from slurm_train.tools.doctor.rules_hardware import best_speeds
from slurm_train.tools.doctor.rules_interfaces import interface_choices
from tests.tools.doctor.scenes import (
    VERSIONS,
    asked,
    healthy,
    network,
    with_disk,
    with_files,
    with_gpu,
    with_network,
    with_node,
    with_probe,
    with_ranks,
    without_node,
)

Fault = Callable[[Evidence], Evidence]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 40])
def test_a_healthy_job_has_no_finding(num_nodes: int) -> None:
    assert diagnose(healthy(num_nodes), asked(num_nodes)) == ()


def trouble(**facts: object) -> Fault:
    """Nobody of node3 gets to rank 0."""
    defaults = {"node": "node3", "tries": 9, "address": "10.0.0.1", "port": 20_001, "error": "timed out"}
    return lambda job: replace(without_node(job, "node3"), troubles=[Trouble(**{**defaults, **facts})])  # type: ignore[arg-type]


def blocked(*pairs: tuple[str, str]) -> Fault:
    def block(job: Evidence) -> Evidence:
        for caller, peer in pairs:
            job = with_probe(job, caller, unreached=lambda old, peer=peer: {**old, peer: "timed out"})
        return job

    return block


def speeds(*rows: tuple[float, float, float]) -> Fault:
    """(ms of work, MB/s to every peer, microseconds to every peer), node after node."""

    def measured(job: Evidence) -> Evidence:
        names = [node.node for node in job.nodes]
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


LINK = "docs/troubleshooting.md#"
# Code, level, node, whether the node is to blame, what is wrong, and the line without its advice.
ROWS: list[tuple[str, str, str, bool, Fault, str]] = [
    (
        "NAME_RESOLUTION", "error", "node3", True,
        trouble(address="", port=0, error="temporary failure in name resolution"),
        "cannot resolve node1, where rank 0 is: temporary failure in name resolution",
    ),
    (
        "LOOPBACK", "error", "node3", True, trouble(address="127.0.1.1"),
        "resolves node1, where rank 0 is, to itself (127.0.1.1)",
    ),
    (
        "WRONG_MASTER", "error", "node3", True, trouble(address="10.0.0.99"),
        "looks for rank 0 at 10.0.0.99, but node1 has 10.0.0.1",
    ),
    (
        "PORT_BLOCKED", "error", "node3", True, trouble(unreached=["node2"]),
        "does not reach rank 0 at 10.0.0.1:20001 (node1): timed out; it does not reach node2",
    ),
    (
        "PORT_BLOCKED", "error", "node3", False, trouble(error="connection refused", reached=["node2"]),
        "does not reach rank 0 at 10.0.0.1:20001 (node1): connection refused; it reaches node2",
    ),
    (
        "PORT_BLOCKED", "error", "node3", True,
        blocked(("node1", "node3"), ("node2", "node3"), ("node3", "node1"), ("node3", "node2")),
        "node1 does not reach node3 at 10.0.0.3:40002 (timed out), "
        "node2 does not reach node3 at 10.0.0.3:40002 (timed out), "
        "node3 does not reach node1 at 10.0.0.1:40000 (timed out) and 1 more",
    ),
    (
        "PORT_BLOCKED", "error", "node2, node3", False, blocked(("node2", "node3"), ("node3", "node2")),
        "node2 does not reach node3 at 10.0.0.3:40002 (timed out), node3 does not reach node2 at 10.0.0.2:40001 "
        "(timed out)",
    ),
    (
        "PORT_BLOCKED", "error", "node1", True,
        lambda job: replace(
            without_node(without_node(job, "node3"), "node2"),
            troubles=[
                Trouble(node=name, tries=9, address="10.0.0.1", port=20_001, error="timed out", reached=[other])
                for name, other in (("node2", "node3"), ("node3", "node2"))
            ],
        ),
        "no other node reaches rank 0 at 10.0.0.1:20001: timed out; they reach each other",
    ),
    (
        "PORT_BLOCKED", "error", "node2, node3", False, blocked(("node2", "node3")),
        "node2 does not reach node3 at 10.0.0.3:40002 (timed out)",
    ),
    (
        "PORT_BLOCKED", "error", "node3", True, lambda job: replace(without_node(job, "node3"), mute=["node3"]),
        "connects to rank 0, and nothing larger arrives from it: a report of a few kB was lost",
    ),
    (
        "PORT_IN_USE", "warning", "node1", False,
        lambda job: replace(job, port=PortFacts(asked=20_001, bound=20_002, holder="pid 7 (nginx)")),
        "port 20001 was free and is held by pid 7 (nginx) now, the ranks meet at 20002",
    ),
    (
        "PORT_IN_USE", "error", "node1", False, lambda job: replace(job, port=PortFacts(asked=20_001, bound=0)),
        "port 20001 was free and is held now, and so are all others on the list",
    ),
    (
        "WRONG_INTERFACE", "error", "node2", False, lambda job: with_network(job, "node2", gloo_interface="ib0"),
        "GLOO_SOCKET_IFNAME=ib0: there is no such interface with an address, but eth0",
    ),
    (
        "WRONG_INTERFACE", "error", "node2", False, lambda job: with_network(job, "node2", nccl_interface="=eth"),
        "NCCL_SOCKET_IFNAME==eth: there is no such interface with an address, but eth0",
    ),
    (
        "WRONG_INTERFACE", "error", "node2", False,
        lambda job: with_probe(
            with_network(
                job, "node2", gloo_interface="eth1", addresses={"eth0": "10.0.0.2", "eth1": "192.168.7.2"}
            ),
            "node1",
            unreached_gloo={"node2": "timed out"},
        ),
        "gloo would announce eth1 (192.168.7.2), which node1 cannot reach; eth0 (10.0.0.2) answers",
    ),
    (
        "LOOPBACK", "warning", "node2", False,
        lambda job: with_probe(
            with_network(job, "node2", own_addresses=["127.0.1.1"]), "node1", unreached_gloo={"node2": "timed out"}
        ),
        "resolves its own name node2 to itself (127.0.1.1), which gloo would announce",
    ),
    (
        "NAME_RESOLUTION", "warning", "node2", False, lambda job: with_network(job, "node2", own_addresses=[]),
        "cannot resolve its own name node2, which gloo announces",
    ),
    (
        "NAME_RESOLUTION", "warning", "node2", False,
        lambda job: with_network(job, "node2", own_addresses=["10.9.9.9"]),
        "resolves its own name node2 to 10.9.9.9, which is no address of it (eth0 (10.0.0.2))",
    ),
    (
        "RANK_MISMATCH", "error", "node1", False,
        lambda job: replace(job, ranks=[replace(job.ranks[0], slurm_rank=1), *job.ranks[1:]]),
        "the task that Slurm calls rank 1 has RANK=0 in its environment",
    ),
    (
        "RANK_MISMATCH", "error", "node2", False,
        lambda job: replace(job, ranks=[*job.ranks[:2], replace(job.ranks[2], world_size=4), *job.ranks[3:]]),
        "rank 2 counts 4 ranks, the run was planned for 6",
    ),
    (
        "RANK_MISMATCH", "error", "node2", False, lambda job: with_ranks(job, "node2", local_rank=0),
        "ranks 2-3 all have local rank 0, so they would share a GPU",
    ),
    (
        "NODE_MISSING", "error", "node3", True,
        lambda job: replace(without_node(job, "node3"), silent=["node3"], waited_s=600.0),
        "ranks of it have not come within 600 s and left no word",
    ),
    (
        "NODE_MISSING", "warning", "node3", False, lambda job: replace(job, late=["node3"], waited_s=10.0),
        "did not answer what it was asked within 10 s, so less is known of it",
    ),
    (
        "GPU_COUNT", "error", "node2", True, lambda job: with_ranks(job, "node2", visible_gpus=1),
        "1 GPUs are visible to the ranks, 2 were asked for",
    ),
    (
        "GPU_COUNT", "error", "node2", True, lambda job: with_node(job, "node2", num_gpus=1),
        "the driver counts 1 GPUs, Slurm has given 2",
    ),
    (
        "GPU_BUSY", "error", "node2", True,
        lambda job: with_gpu(job, "node2", used_mb=60_000, holders=["pid 4711 (60000 MiB)"]),
        "60000 of 81920 MiB of GPU 0 are taken by pid 4711 (60000 MiB)",
    ),
    (
        "GPU_BUSY", "warning", "node2", False, lambda job: with_gpu(job, "node2", used_mb=3000),
        "3000 of 81920 MiB of GPU 0 are taken",
    ),
    (
        "GPU_SICK", "error", "node2", True,
        lambda job: with_gpu(job, "node2", errors=["3 uncorrected memory errors since it was started"]),
        "GPU 0: 3 uncorrected memory errors since it was started",
    ),
    (
        "GPU_SICK", "error", "node2", True, lambda job: with_node(job, "node2", gpu_errors=["Xid 79 on 0000:3b:00"]),
        "the driver has logged Xid 79 on 0000:3b:00",
    ),
    (
        "GPU_SICK", "warning", "node2", False, lambda job: with_gpu(job, "node2", warnings=["slowed down by heat"]),
        "GPU 0: slowed down by heat",
    ),
    (
        "GPU_SICK", "warning", "node2", False,
        lambda job: with_node(job, "node2", gpus=lambda old: [replace(gpu, warnings=["slow"]) for gpu in old]),
        "GPU 0, 1: slow",
    ),
    (
        "GPU_BUSY", "error", "node2", True,
        lambda job: with_node(job, "node2", gpus=lambda old: [replace(gpu, used_mb=70_000) for gpu in old]),
        "70000 of 81920 MiB of GPU 0, 1 are taken",
    ),
    (
        "CODE_DRIFT", "error", "node2", True, lambda job: with_files(job, "node2", code_changes=["train.py"]),
        "sees other code than was submitted: train.py",
    ),
    (
        "CODE_DRIFT", "error", "node2", True, lambda job: with_files(job, "node2", code_index="01d"),
        "reads another list of the code's files (code.json) than the other nodes",
    ),
    (
        "CONFIG_DRIFT", "error", "node2", True, lambda job: with_files(job, "node2", config="01d"),
        "reads another config.yaml or plan.json than the other nodes",
    ),
    (
        "DATA_MISSING", "error", "node2", True,
        lambda job: with_files(job, "node2", data="", data_missing=["/data/train.bin"]),
        "does not see /data/train.bin",
    ),
    (
        "DATA_MISSING", "error", "node2", True, lambda job: with_files(job, "node2", data_empty=["/data"]),
        "sees nothing in /data, where other nodes see something",
    ),
    (
        "DATA_MISSING", "error", "node2", True, lambda job: with_files(job, "node2", data="0dd0dd0dd0dd"),
        "sees other data than the other nodes (fingerprint 0dd0dd0d, there da7a)",
    ),
    (
        "VERSION_DRIFT", "error", "node2", True,
        lambda job: with_node(job, "node2", versions={**VERSIONS, "torch": "2.12.0"}),
        "has torch 2.12.0, the other nodes have 2.13.0",
    ),
    (
        "VERSION_DRIFT", "warning", "node2", False,
        lambda job: with_node(job, "node2", versions={**VERSIONS, "driver": "550.2"}),
        "has driver 550.2, the other nodes have 570.1",
    ),
    (
        "FS_STALE", "error", "node2", False,
        lambda job: with_probe(job, "node2", seen_after_s={"node1": 0.0}, unseen=["node3"]),
        "node2 does not see what node3 wrote into the run directory",
    ),
    (
        "FS_STALE", "error", "node3", True,
        lambda job: with_probe(with_probe(job, "node2", unseen=["node3"]), "node3", unseen=["node1", "node2"]),
        "node2 does not see what node3 wrote, node3 does not see what node1 wrote and 1 more into the run directory",
    ),
    (
        "FS_STALE", "warning", "node2", False,
        lambda job: with_probe(job, "node2", seen_after_s={"node1": 0.0, "node3": 3.2}),
        "saw what node3 wrote into the run directory 3.2 s late",
    ),
    (
        "FS_READONLY", "error", "node2", True,
        lambda job: with_disk(job, "node2", "run directory", error="Read-only file system", is_readonly=True),
        "cannot write to /shared/run (run directory): Read-only file system",
    ),
    (
        "DISK_FULL", "error", "node2", False, lambda job: with_disk(job, "node2", "run directory", free_mb=3),
        "/shared/run (run directory) is full: 3 MiB are left",
    ),
    (
        "DISK_FULL", "warning", "node2", False,
        lambda job: with_disk(job, "node2", "temporary files", error="No space left on device", is_full=True),
        "/tmp (temporary files) is full: No space left on device",
    ),
    (
        "DISK_FULL", "warning", "node2", False, lambda job: with_disk(job, "node2", "run directory", free_mb=900),
        "/shared/run (run directory) has 900 MiB left of 1000000",
    ),
    (
        "CLOCK_SKEW", "warning", "node2", False, lambda job: with_probe(job, "node2", clock_offset_s=-41.5),
        "its clock is 41.5 s behind rank 0's",
    ),
    (
        "CPU_AFFINITY", "warning", "node2", False, lambda job: with_ranks(job, "node2", cpus=[3]),
        "2 ranks may use nothing but CPU 3 of 64",
    ),
    (
        "LIMITS", "error", "node2", False, lambda job: with_ranks(job, "node2", max_open_files=128),
        "a rank may open 128 files, it needs 1024",
    ),
    (
        "LIMITS", "warning", "node2", False, lambda job: with_ranks(job, "node2", max_open_files=512),
        "a rank may open 512 files, usual are 1024",
    ),
    (
        "LIMITS", "warning", "node2", False,
        lambda job: with_network(with_ranks(job, "node2", max_locked_mb=8), "node2", has_infiniband=True),
        "a rank may lock 8 MiB of memory, and InfiniBand has to lock its buffers",
    ),
    (
        "SLOW_NODE", "warning", "node2", False, speeds((30, 900, 50), (66, 900, 50), (30, 900, 50)),
        "computes 2.2 times as long as the others (66 ms for 30 ms of work, load 1.0)",
    ),
    (
        "SLOW_NODE", "warning", "node2", False, speeds((30, 900, 50), (300, 20, 4000), (30, 900, 50)),
        "computes 10.0 times as long as the others (300 ms for 30 ms of work, load 1.0)",
    ),
    (
        "SLOW_LINK", "warning", "node2", False, speeds((30, 900, 50), (30, 12, 50), (30, 900, 50)),
        "12 MB/s at best, the other nodes 900",
    ),
    (
        "SLOW_LINK", "warning", "node2", False, speeds((30, 900, 50), (30, 900, 4000), (30, 900, 50)),
        "4000 us to the nearest node, the other nodes 50",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "level", "where", "blames", "fault", "seen"),
    ROWS,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(ROWS)],
)
def test_a_fault_is_named_once(code: str, level: str, where: str, blames: bool, fault: Fault, seen: str) -> None:
    (found,) = diagnose(fault(healthy()), asked())
    assert (found.code, found.level, found.node, found.blames_node) == (code, level, where, blames)
    assert found.seen == seen
    assert found.line.startswith(f"{code} {where}: {seen}; ") and found.line.endswith(f"({LINK}{code.lower()})")
    assert "\n" not in found.line and found.todo


def test_every_code_but_those_of_other_moments_has_a_row() -> None:
    # FS_MISSING is said before there are ranks, COLLECTIVE when the process group is open.
    assert {row[0] for row in ROWS} == set(RUN_CODES) - {"FS_MISSING", "COLLECTIVE"}


def test_what_all_nodes_have_is_said_once_and_blames_nobody() -> None:
    job = healthy()
    for name in ("node1", "node2", "node3"):
        job = with_files(job, name, data_missing=["/data"])
    (found,) = diagnose(job, asked())
    assert (found.node, found.blames_node, found.seen) == ("", False, "does not see /data")


def test_what_few_of_many_nodes_have_blames_them_together() -> None:
    job = healthy(6)
    for name in ("node2", "node5"):
        job = with_files(job, name, data_missing=["/data"])
    (found,) = diagnose(job, asked(6))
    assert (found.node, found.blames_node) == ("node2, node5", True)


def test_of_two_nodes_that_differ_nobody_is_to_blame() -> None:
    job = with_node(healthy(2), "node2", versions={**VERSIONS, "torch": "2.12.0"})
    (found,) = diagnose(job, asked(2))
    assert (found.node, found.level, found.blames_node) == ("node2", "error", False)
    (found,) = diagnose(blocked(("node1", "node2"))(healthy(2)), asked(2))
    assert (found.code, found.blames_node) == ("PORT_BLOCKED", False)


def test_a_folder_that_is_empty_everywhere_is_no_fault() -> None:
    job = healthy()
    for name in ("node1", "node2", "node3"):
        job = with_files(job, name, data_empty=["/data"])
    assert diagnose(job, asked()) == ()


def test_errors_come_before_warnings() -> None:
    job = with_probe(with_files(healthy(), "node3", config="01d"), "node2", clock_offset_s=9.0)
    assert [found.code for found in diagnose(job, asked())] == ["CONFIG_DRIFT", "CLOCK_SKEW"]


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
    job = healthy()
    shifted = [
        replace(one, cpus=[cpu + 20 * one.local_rank for cpu in cpus]) for one in job.ranks if one.node == "node2"
    ]
    others = [one for one in job.ranks if one.node != "node2"]
    found = diagnose(replace(job, ranks=[*others, *shifted]), asked(cpus_per_gpu=wanted))
    assert [one.seen for one in found] == ([] if expected is None else [expected])


def test_more_ranks_than_cpus_are_no_fault_of_affinity() -> None:
    job = healthy(1, 8)
    job = with_node(with_ranks(job, "node1", cpus=[0, 1]), "node1", num_cpus=2)
    assert diagnose(job, asked(1, 8)) == ()


def test_a_script_needs_its_port() -> None:
    job = replace(healthy(), port=PortFacts(asked=20_001, bound=20_002))
    assert [one.level for one in diagnose(job, asked(needs_port=True))] == ["error"]


def test_a_node_of_fewer_ranks_than_another_needs_no_more_gpus_than_ranks() -> None:
    job = with_ranks(healthy(), "node2", visible_gpus=1, local_world_size=1)
    assert not [found for found in diagnose(job, asked()) if found.code == "GPU_COUNT"]
    job = with_ranks(healthy(), "node2", visible_gpus=0, local_world_size=1)
    (found,) = [found for found in diagnose(job, asked()) if found.code == "GPU_COUNT"]
    assert found.short == "GPU_COUNT node2: 0 GPUs are visible to the ranks, 1 were asked for"


def test_no_gpus_asked_for_is_no_fault() -> None:
    job = healthy()
    for name in ("node1", "node2", "node3"):
        job = with_ranks(job, name, visible_gpus=None)
    assert diagnose(job, Asked(nodes=("node1", "node2", "node3"), world_size=6)) == ()


def test_gloo_is_led_along_the_route_where_its_own_choice_leads_nowhere() -> None:
    assert interface_choices(healthy()) == {}
    job = with_network(healthy(), "node2", own_addresses=["127.0.1.1"])
    assert interface_choices(job) == {"node2": {"GLOO_SOCKET_IFNAME": "eth0"}}
    job = with_probe(healthy(), "node1", unreached_gloo={"node3": "timed out"})
    assert interface_choices(job) == {"node3": {"GLOO_SOCKET_IFNAME": "eth0"}}


def test_nccl_is_told_the_interface_where_there_are_several_and_no_infiniband() -> None:
    two = {"docker0": "172.17.0.1", "eth0": "10.0.0.2"}
    job = with_network(healthy(), "node2", addresses=two)
    assert interface_choices(job) == {"node2": {"NCCL_SOCKET_IFNAME": "=eth0"}}
    assert interface_choices(with_network(job, "node2", has_infiniband=True)) == {}


def test_what_somebody_has_named_stays() -> None:
    job = with_network(healthy(), "node2", own_addresses=["127.0.1.1"], gloo_interface="eth0", nccl_interface="eth0")
    assert interface_choices(job) == {}
    assert diagnose(job, asked()) == ()


@pytest.mark.parametrize(
    ("setting", "is_wrong"), [("eth", False), ("=eth0", False), ("^docker,lo", False), ("ib", True)]
)
def test_settings_of_nccl_are_read_as_nccl_does(setting: str, is_wrong: bool) -> None:
    job = with_network(healthy(), "node2", nccl_interface=setting)
    assert [one.code for one in diagnose(job, asked())] == ["WRONG_INTERFACE"] * is_wrong


def test_a_node_that_is_far_from_its_nominal_speed_is_named_though_it_has_but_one_partner() -> None:
    job = speeds((30, 12, 50), (30, 12, 50))(healthy(2))
    assert [(one.code, one.node, one.seen) for one in diagnose(job, asked(2))] == [
        ("SLOW_LINK", "", "12 MB/s at best, its interface claims 1250")
    ]


def test_of_several_measurements_the_best_counts() -> None:
    first = SpeedFacts(node="node1", work_ms=90.0, mb_per_s={"node2": 10.0}, latency_us={"node2": 50.0})
    second = SpeedFacts(node="node1", work_ms=30.0, mb_per_s={"node2": 900.0}, latency_us={"node2": 70.0})
    assert best_speeds([first, second]) == [
        SpeedFacts(node="node1", work_ms=30.0, mb_per_s={"node2": 900.0}, latency_us={"node2": 50.0})
    ]


def test_facts_travel_as_json() -> None:
    import json
    from dataclasses import asdict

    from slurm_train.tools.doctor.facts import read_node, read_probe, read_rank, read_speed, read_trouble

    job = speeds((30, 900, 50), (30, 900, 50), (30, 900, 50))(trouble()(healthy()))
    for read, values in (
        (read_rank, job.ranks),
        (read_node, job.nodes),
        (read_probe, healthy().probes),
        (read_speed, job.speeds),
        (read_trouble, job.troubles),
    ):
        assert [read(json.loads(json.dumps(asdict(value)))) for value in values] == list(values)  # type: ignore[operator]


def test_the_address_of_gloo_is_that_of_the_named_interface() -> None:
    facts = replace(network(0), gloo_interface="eth1", addresses={"eth0": "10.0.0.1", "eth1": "10.1.0.1"})
    assert facts.gloo_address == "10.1.0.1"
    assert network(0).gloo_address == "10.0.0.1"
