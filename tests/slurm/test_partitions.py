from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.partitions import NodeGroup, Partition, parse_gpus, parse_sinfo, parse_time_limit_min, tres_gpus


def group(num_nodes: int, gpus: int, gpu_type: str, cpus: int, memory_mb: int, state: str) -> NodeGroup:
    return NodeGroup(
        num_nodes=num_nodes,
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        cpus_per_node=cpus,
        memory_per_node_mb=memory_mb,
        state=state,
    )


def test_recorded_devcluster(recorded: Callable[[str], str]) -> None:
    assert parse_sinfo(recorded("sinfo_devcluster")) == [
        Partition(
            name="main",
            is_default=True,
            state="up",
            max_nodes=None,
            max_time_min=1440,
            default_time_min=60,
            groups=(group(2, 8, "", 64, 512000, "mix"), group(2, 8, "", 64, 512000, "idle")),
        )
    ]


def test_recorded_cluster_of_mixed_nodes(recorded: Callable[[str], str]) -> None:
    main, mixed, closed = parse_sinfo(recorded("sinfo_mixed"))
    assert (main.num_nodes, main.gpus_per_node, main.cpus_per_node, main.is_default) == (4, 8, 16, True)
    assert mixed == Partition(
        name="mixed",
        is_default=False,
        state="up",
        max_nodes=3,
        max_time_min=None,
        default_time_min=None,
        groups=(group(2, 4, "a100", 64, 64000, "down~"), group(4, 8, "", 16, 64000, "idle~")),
    )
    assert [mixed.num_nodes_with(gpus=gpus) for gpus in (0, 4, 5, 8, 9)] == [6, 6, 4, 4, 0]
    assert (closed.state, closed.max_time_min) == ("down", 60)


def test_a_partition_without_nodes() -> None:
    (empty,) = parse_sinfo("new|new|up|0|1-infinite|infinite|n/a||0|0|n/a\n")
    assert (empty.num_nodes, empty.gpus_per_node, empty.cpus_per_node, empty.groups) == (0, 0, 0, ())


def test_nodes_that_differ_within_a_line_count_as_the_smallest() -> None:
    (partition,) = parse_sinfo("p|p|up|9|1-infinite|infinite|n/a|gpu:2|32+|64000+|idle\n")
    assert partition.groups == (group(9, 2, "", 32, 64000, "idle"),)


def test_a_line_of_another_form_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"cannot read sinfo's line 'main\|up'"):
        parse_sinfo("main|up\n")


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", (8, "")),
        ("gpu", (1, "")),
        ("gpu:a100:4", (4, "a100")),
        ("gpu:a100:4(S:0-1),nic:2", (4, "a100")),
        ("nic:2,gpu:h100:8(S:0,1)", (8, "h100")),
        ("gpu:a100:2,gpu:v100:2", (4, "")),
        ("gpu:a100_3g.20gb:4", (4, "a100_3g.20gb")),
        ("gpu:2g:4", (4, "2g")),
        ("gpu:3090:4", (4, "3090")),
        ("gpu:3090:4(S:0-1),nic:2", (4, "3090")),
        ("gpu:a100_3g.20gb:2(S:0-1)", (2, "a100_3g.20gb")),
        ("gpu:tesla:2,gpu:kepler:1", (3, "")),
        ("gpu:tesla:no_consume:2", (2, "tesla")),
        ("gpu:a100:2(IDX:0,1),gpu:a100:1", (3, "a100")),
        ("gpu:a100", (1, "a100")),
        ("(null)", (0, "")),
        ("", (0, "")),
        ("craynetwork:4,gpumem:80", (0, "")),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: tuple[int, str]) -> None:
    assert parse_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("cpu=8,mem=64G,node=1,billing=8,gres/gpu=4", 4),
        ("cpu=8,gres/gpu=4,gres/gpu:3090=4", 4),
        ("gres/gpu:3090=4", 4),
        ("gres/gpu:tesla=2,gres/gpu:kepler=1", 3),
        ("cpu=8,gres/gpumem=80,gres/nic=2", None),
        ("", None),
    ],
)
def test_gpus_of_a_job(tres: str, gpus: int | None) -> None:
    assert tres_gpus(tres) == gpus


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("infinite", None),
        ("UNLIMITED", None),
        ("n/a", None),
        ("1-00:00:00", 1440),
        ("7-12:30:00", 10830),
        ("2-12", 3600),
        ("1:00:00", 60),
        ("30:00", 30),
        ("45", 45),
        ("0:30", 0),
    ],
)
def test_time_limits(text: str, minutes: int | None) -> None:
    assert parse_time_limit_min(text) == minutes


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-5", "1-", "1 h"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a time limit"):
        parse_time_limit_min(text)


def test_nodes_that_are_down_or_drained_are_not_usable() -> None:
    two = group(2, 0, "", 1, 1, "idle")
    states = ("idle", "mix", "alloc", "down*", "drain", "drng", "idle*", "alloc-")
    partition = Partition(
        name="main",
        is_default=True,
        state="up",
        max_nodes=None,
        max_time_min=None,
        default_time_min=None,
        groups=tuple(replace(two, state=state) for state in states),
    )
    assert partition.num_usable_nodes == 8
