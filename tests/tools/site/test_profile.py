from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slurm_train.config.site_profile import read_site
from slurm_train.config.site_schema import SiteFile
from slurm_train.errors import ClusterError, ConfigError
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import Partition, Qos, parse_sinfo
from slurm_train.slurm.site import Site, SiteFacts
from slurm_train.tools.site import (
    build_profile,
    cpus_per_gpu,
    gpu_types,
    memory_gb_per_gpu,
    open_questions,
    render_site,
    shape_of,
)
from tests.tools.site.sites import RECORDED, SITES, RecordedRunner, facts_of

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("site", SITES)
def test_the_file_of_a_site_is_the_golden_one(site: str) -> None:
    # After a wanted change: print the new text, read the difference, and put it there.
    facts = facts_of(site)
    text = render_site(build_profile(facts, {}), name=site, problems=list(facts.problems))
    assert text == (GOLDEN / f"{site}.yaml").read_text(encoding="utf-8")


def test_odd_values_survive_the_file() -> None:
    site = SiteFile(cluster={"account": "0123", "setup": ['echo "a: b" # c', "it's"], "env": {"A": "1", "B": "ü"}})
    assert (
        read_site(yaml.safe_load(render_site(site, name="odd", problems=["a: b # c", "two\nlines"])), name="odd")
        == site
    )


def test_answers_go_into_the_file() -> None:
    answers = {"partition": "h100", "account": "teaching", "time_limit_min": "300", "network_interface": "ib0"}
    site = build_profile(facts_of("typed"), answers | {"setup": "module load cuda/12.4"})
    facts = {"partition": "h100", "account": "teaching", "qos": "normal", "gpu_flag": "gpus-per-node"}
    assert site.cluster == facts | {"network_interface": "ib0", "setup": ["module load cuda/12.4"]}
    assert {one.cluster["time_limit_min"] for one in site.partitions.values()} == {300}
    site = build_profile(facts_of("mixed_nodes"), {"gpu_type": "nvidia_h100_80gb_hbm3"})
    assert site.partitions["gpu"].cluster["cpus_per_gpu"] == 112 // 4, "the chosen GPUs decide a node's share"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"partition": "cpu"}, "partition='cpu' is not among them"),
        ({"time_limit_min": "two days"}, "time_limit_min='two days' is no number of minutes"),
        ({"time_limit_min": "0"}, "time_limit_min='0' is no number of minutes"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(answers: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_profile(facts_of("typed"), answers)


QUESTIONS = {
    "devcluster": ["account", "qos"],
    "gres_only": ["partition", "account"],
    "mixed_nodes": ["gpu_type", "qos"],
    "no_accounting": ["account"],
    "typed": ["partition", "account", "qos"],
}


@pytest.mark.parametrize("site", SITES)
def test_only_what_slurm_cannot_say_is_asked(site: str) -> None:
    asked = [question.key for question in open_questions(facts_of(site), {})]
    assert asked == [*QUESTIONS[site], "time_limit_min", "network_interface", "setup"]


def test_limits_of_a_partitions_qos_go_into_the_file_and_so_do_the_names_that_it_takes() -> None:
    facts = facts_of("devcluster")
    (main,), (record,), (normal, urgent) = facts.partitions, facts.records, facts.qos
    names = {"partqos": {"QoS": "part_gpu"}, "picky": {"AllowQos": "urgent"}, "shut": {"AllowAccounts": "physics"}}
    facts = replace(
        facts,
        partitions=[main, *(replace(main, name=name, is_default=False) for name in names)],
        records=[record, *({**record, "PartitionName": name, **fields} for name, fields in names.items())],
        qos=[normal, urgent, Qos(name="part_gpu", max_time_min=60)],
    )
    site = build_profile(facts, {})
    assert {name: one.cluster["time_limit_min"] for name, one in site.partitions.items()} == {
        "main": 1440,
        "partqos": 60,
        "picky": 1440,
    }
    assert {name: one.cluster.get("qos") for name, one in site.partitions.items()} == {
        "main": None,
        "partqos": None,
        "picky": "urgent",
    }
    also = replace(facts, associations=[*facts.associations, replace(facts.associations[0], account="physics")])
    assert build_profile(also, {}).partitions["shut"].cluster["account"] == "physics"


def test_a_site_without_gpus_runs_on_cpus() -> None:
    partition = nodes_of("2/(null)|64|256000")
    other = replace(partition, name="q", is_default=True)
    records = [{"PartitionName": "q", "MaxTime": "01:00:00"}]
    site = build_profile(SiteFacts(partitions=[replace(partition, is_default=False), other], records=records), {})
    assert site.cluster == {"partition": "q", "gpu_flag": "none"}
    assert site.partitions["q"].cluster == {"time_limit_min": 60}
    closed = SiteFacts(partitions=[replace(other, state="down"), replace(other, groups=())])
    with pytest.raises(ConfigError, match="no partition that is up"):
        build_profile(closed, {})


def test_commands_that_refuse_are_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    commands = SlurmCommands({}, runner=RecordedRunner(tmp_path))
    with pytest.raises(ClusterError, match="no sinfo"):
        Site(commands, user="me").facts()
    (tmp_path / "sinfo.txt").write_text((RECORDED / "devcluster" / "sinfo.txt").read_text())
    facts = Site(commands, user="me").facts()
    assert [problem.partition(":")[0] for problem in facts.problems] == ["settings", "partitions", "accounts", "QOS"]
    site = build_profile(facts, {})
    assert site.cluster == {"partition": "main", "gpu_flag": "gpus-per-node"}
    assert site.requeue == "requeue, same job id; what happens on preemption is not known"


def nodes_of(*nodes: str) -> Partition:
    """Returns a partition of nodes, each "number/gres|CPUs|MB", one thread per core."""
    lines = []
    for group in nodes:
        num_nodes, parts = group.split("/")
        gres, cpus, memory_mb = parts.split("|")
        lines.append(f"p|p|up|{num_nodes}|1-infinite|infinite|n/a|{gres}|{cpus}|1|{memory_mb}|idle\n")
    (found,) = parse_sinfo("".join(lines))
    return found


NODE = nodes_of("4/gpu:4|50|256000").groups[0]


@pytest.mark.parametrize(
    ("nodes", "types", "shape"),
    [
        (["4/(null)|64|512000"], [], (4, 0, 64, 512000)),
        # The smallest share of those that are alike.
        (["2/gpu:a:4|64|512000", "1/gpu:a:4|48|256000", "9/(null)|8|1000"], ["a"], (3, 4, 48, 256000)),
        # The number that most GPUs come in.
        (["8/gpu:a:4|64|1000", "2/gpu:a:8|32|500"], ["a"], (8, 4, 64, 1000)),
        (["1/gpu:a:4|64|1000", "3/gpu:b:8|32|500"], ["b", "a"], (3, 8, 32, 500)),
    ],
)
def test_the_shape_of_a_node(nodes: list[str], types: list[str], shape: tuple[int, ...]) -> None:
    partition = nodes_of(*nodes)
    assert gpu_types(partition) == types
    found = shape_of(partition, gpu_type=types[0] if types else "")
    assert (found.num_nodes, found.gpus_per_node, found.cpus_per_node, found.memory_per_node_mb) == shape


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
    assert cpus_per_gpu(nodes_of("1/gpu:8|4|1").groups[0], {}) == 1


@pytest.mark.parametrize(
    ("record", "settings", "gb"),
    [
        ({}, {"SelectTypeParameters": "CR_CORE_MEMORY"}, 62),
        ({}, {"SelectTypeParameters": "CR_CORE"}, None),
        ({"JobDefaults": "DefMemPerGPU=60000"}, {"SelectTypeParameters": "CR_CPU_Memory"}, None),
        ({"MaxMemPerNode": "128000"}, {"SelectTypeParameters": "CR_CORE_MEMORY"}, 31),
        ({"MaxMemPerCPU": "2000"}, {"SelectTypeParameters": "CR_CORE_MEMORY"}, 23),
    ],
)
def test_memory_of_a_gpus_share(record: dict[str, str], settings: dict[str, str], gb: int | None) -> None:
    assert memory_gb_per_gpu(NODE, record, settings, cpus=12) == gb
