"""Who preempts whom at a site, and a node's share for each GPU."""

from __future__ import annotations

import pytest

from slurm_train.slurm.policy import parse_sinfo
from slurm_train.slurm.site import NodeShape, cpus_per_gpu, gpu_types, memory_gb_per_gpu, preemption_in, shape_of
from tests.tools.site.sites import facts_of


@pytest.mark.parametrize(
    ("site", "qos", "partition", "outcome", "grace_s"),
    [
        ("devcluster", "normal", "main", "requeued", 15),
        ("devcluster", "urgent", "main", "never", 0),
        ("devcluster", "", "main", "requeued", 0),
        ("typed", "normal", "a100", "never", 0),
        ("typed", "normal", "scavenge", "requeued", 120),
        ("gres_only", "", "short", "never", 0),
        ("gres_only", "", "long", "suspended", 0),
        ("mixed_nodes", "free", "gpu", "cancelled", 300),
        ("mixed_nodes", "normal", "gpu", "never", 0),
        ("no_accounting", "", "batch", "never", 0),
    ],
)
def test_who_gives_way_and_how(site: str, qos: str, partition: str, outcome: str, grace_s: float) -> None:
    found = preemption_in(facts_of(site), qos, partition)
    assert (found.outcome, found.grace_s) == (outcome, grace_s)


NODE = NodeShape(num_nodes=4, gpus=4, cpus=50, memory_mb=256000)


def lines(*nodes: str) -> str:
    return "".join(f"p|p|up|{one.split('/')[0]}|1-infinite|infinite|n/a|{one.split('/')[1]}|idle\n" for one in nodes)


@pytest.mark.parametrize(
    ("nodes", "types", "shape"),
    [
        (("4/gpu:8|64|512000",), [""], NodeShape(num_nodes=4, gpus=8, cpus=64, memory_mb=512000)),
        (("4/(null)|64|512000",), [], NodeShape(num_nodes=4, gpus=0, cpus=64, memory_mb=512000)),
        # The smallest share of those that are alike.
        (
            ("2/gpu:a:4|64|512000", "1/gpu:a:4|48|256000", "9/(null)|8|1000"),
            ["a"],
            NodeShape(num_nodes=3, gpus=4, cpus=48, memory_mb=256000),
        ),
        # The number that most GPUs come in.
        (("8/gpu:a:4|64|1000", "2/gpu:a:8|32|500"), ["a"], NodeShape(num_nodes=8, gpus=4, cpus=64, memory_mb=1000)),
        (
            ("1/gpu:a:4|64|1000", "3/gpu:b:8|32|500"),
            ["b", "a"],
            NodeShape(num_nodes=3, gpus=8, cpus=32, memory_mb=500),
        ),
    ],
)
def test_the_shape_of_a_node(nodes: tuple[str, ...], types: list[str], shape: NodeShape) -> None:
    (partition,) = parse_sinfo(lines(*nodes))
    assert gpu_types(partition) == types
    assert shape_of(partition, gpu_type=types[0] if types else "") == shape


@pytest.mark.parametrize(
    ("record", "cpus"),
    [
        ({}, 12),
        ({"MaxCPUsPerNode": "UNLIMITED", "JobDefaults": "(null)"}, 12),
        ({"MaxCPUsPerNode": "40"}, 10),
        ({"JobDefaults": "DefCpuPerGPU=6,DefMemPerGPU=16000"}, 6),
        ({"TotalCPUs": "200", "TRES": "cpu=184,mem=1000M,node=4,billing=184"}, 11),
        ({"TotalCPUs": "200", "TRES": "cpu=200,mem=1000M,node=4,billing=200"}, 12),
    ],
)
def test_cpus_of_a_gpus_share(record: dict[str, str], cpus: int) -> None:
    assert cpus_per_gpu(NODE, record) == cpus


def test_a_node_with_fewer_cpus_than_gpus_gives_one() -> None:
    assert cpus_per_gpu(NodeShape(num_nodes=1, gpus=8, cpus=4, memory_mb=1), {}) == 1


@pytest.mark.parametrize(
    ("record", "settings", "gb"),
    [
        ({}, {"SelectTypeParameters": "CR_CORE_MEMORY"}, 62),
        ({}, {"SelectTypeParameters": "CR_CORE"}, None),
        ({}, {}, None),
        ({"JobDefaults": "DefMemPerGPU=60000"}, {"SelectTypeParameters": "CR_CPU_Memory"}, None),
        ({"MaxMemPerNode": "128000"}, {"SelectTypeParameters": "CR_CORE_MEMORY"}, 31),
        ({"MaxMemPerCPU": "2000"}, {"SelectTypeParameters": "CR_CORE_MEMORY"}, 23),
    ],
)
def test_memory_of_a_gpus_share(record: dict[str, str], settings: dict[str, str], gb: int | None) -> None:
    assert memory_gb_per_gpu(NODE, record, settings, cpus=12) == gb
