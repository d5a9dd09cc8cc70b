"""`cluster.cpus_per_gpu=auto`: a rank's part of its node, from what Slurm says; what a person or the site says wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ClusterError
from slurm_train.plan.cpu_part import LEFT_TO_SLURM, CpuPart, NodeCpus
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.request.acceptance import acceptable_plans, require_acceptable, without_chosen_cpus
from slurm_train.request.batch_script import job_request, sbatch_components
from slurm_train.slurm.policy import Partition, parse_sinfo
from slurm_train.slurm.refusals import TestVerdict
from tests.fakes.slurm_commands import FakeSlurmCommands
from tests.support.plans import composed, render_script


def partitions(*lines: str) -> list[Partition]:
    """Returns partitions; each line is "name nodes gres CPUs" or with threads per core, the first one the default."""
    rows = []
    for number, line in enumerate(lines):
        name, nodes, gres, cpus, *threads = line.split()
        starred = "" if number else "*"
        parts = f"{gres}|{cpus}|{threads[0] if threads else 1}|512000"
        rows.append(f"{name}|{name}{starred}|up|{nodes}|1-infinite|infinite|n/a|{parts}|idle")
    return parse_sinfo("\n".join(rows))


def slurm(*lines: str, settings: dict[str, str] | None = None, **record: str) -> FakeSlurmCommands:
    """Returns a Slurm with such partitions, all of which have this record."""
    commands = FakeSlurmCommands()
    commands.listed_partitions = partitions(*lines)
    commands.records = {partition.name: record for partition in commands.listed_partitions}
    commands.config |= settings or {}
    return commands


def plan_of(commands: Any, *, in_allocation: bool = False, launch: str = "slurm", **cluster: Any) -> RunPlan:
    sections = {"cluster": {"nodes": 2, "gpus_per_node": 8, **cluster}, "batch": {"global_size": 48}, "launch": launch}
    node_cpus = NodeCpus(commands, in_allocation=in_allocation)
    return plan_run(composed(**sections), cwd=Path("/home/user/project"), env={}, node_cpus=node_cpus)


def cpus_per_task(plan: RunPlan) -> list[Any]:
    return [flags.get("cpus-per-task") for flags in sbatch_components(plan)]


NODE = "gpu 4 gpu:8 112"
PARTS: dict[str, tuple[FakeSlurmCommands, dict[str, Any], int]] = {
    "a whole node": (slurm(NODE), {}, 14),
    "a part of a node that others use": (slurm(NODE), {"gpus_per_node": 2}, 14),
    "the smallest of mixed nodes": (slurm(NODE, "gpu 1 gpu:8 64", "gpu 9 gpu:4 192"), {}, 8),
    "nodes with too few GPUs do not count": (slurm(NODE, "gpu 9 gpu:4 16", "gpu 9 (null) 8"), {}, 14),
    "they count for those that they suit": (slurm(NODE, "gpu 9 gpu:4 16"), {"gpus_per_node": 4}, 4),
    "the type that is asked for": (slurm("gpu 4 gpu:a:8 64", "gpu 4 gpu:b:8 96"), {"gpu_type": "b"}, 12),
    "several partitions": (slurm(NODE, "long 4 gpu:8 64"), {"partition": "gpu,long"}, 8),
    "the partition by its flag": (slurm(NODE, "long 4 gpu:8 64"), {"sbatch": {"partition": "long"}}, 8),
    "uneven nodes": (slurm(NODE, "gpu 9 gpu:4 16"), {"gpus_per_node": [8, 4]}, 4),
    "whole cores": (slurm("gpu 4 gpu:8 120 2"), {}, 14),
    "whole cores of each kind of node": (slurm("gpu 4 gpu:8 120 2", "gpu 4 gpu:8 104"), {}, 13),
    "fewer threads than a core has": (slurm("gpu 4 gpu:8 8 2"), {}, 1),
    "CPUs that are kept for the system": (slurm(NODE, TotalCPUs="448", TRES="cpu=416,mem=1M,node=4"), {}, 13),
    "a partition that gives less": (slurm(NODE, MaxCPUsPerNode="96"), {}, 12),
    "nodes that no other job gets": (slurm(NODE), {"gpus_per_node": 2, "sbatch": {"exclusive": True}}, 56),
    "partitions of whole nodes": (slurm(NODE, OverSubscribe="EXCLUSIVE"), {"gpus_per_node": 2}, 56),
    "sites of whole nodes": (slurm(NODE, settings={"SelectType": "select/linear"}), {"gpus_per_node": 2}, 56),
    "nodes shared with one's own jobs": (slurm(NODE), {"gpus_per_node": 2, "sbatch": {"exclusive": "user"}}, 14),
}


@pytest.mark.parametrize(("commands", "cluster", "cpus"), PARTS.values(), ids=PARTS)
def test_a_rank_asks_for_its_gpus_part_of_the_node(
    commands: FakeSlurmCommands, cluster: dict[str, Any], cpus: int
) -> None:
    plan = plan_of(commands, **cluster)
    assert plan.cpus_per_rank == cpus and f"{cpus} per rank" in plan.cpus.reason
    assert set(cpus_per_task(plan)) == {str(cpus)}
    assert plan.config.cluster is not None and plan.config.cluster.cpus_per_gpu == "auto", "it is chosen anew each time"


def test_runs_that_share_whole_nodes_ask_for_their_part_of_one() -> None:
    commands = slurm(NODE, OverSubscribe="EXCLUSIVE")
    sections: dict[str, Any] = {"cluster": {"nodes": 1, "gpus_per_node": 1}, "sweep": {"pack": 4}}
    plan = plan_run(composed(**sections), cwd=Path("/home/user"), env={}, node_cpus=NodeCpus(commands))
    assert plan.cpus_per_rank == 112 // 4


def test_runs_that_share_a_gpu_ask_for_their_part_of_its_cpus() -> None:
    sections: dict[str, Any] = {
        "cluster": {"nodes": 1, "gpus_per_node": 1},
        "sweep": {"pack": 16, "runs_per_gpu": 2},
    }
    node_cpus = NodeCpus(slurm(NODE))
    plan = plan_run(composed(**sections), cwd=Path("/home/user"), env={}, node_cpus=node_cpus)
    assert plan.cpus_per_rank == 112 // 16
    sections["sweep"]["pack"] = 17
    plan = plan_run(composed(**sections), cwd=Path("/home/user"), env={}, node_cpus=node_cpus)
    assert plan.cpus_per_rank is None and plan.cpus.reason == "as Slurm gives them: no node has 9 GPUs"


def test_runs_that_share_a_gpu_ask_for_their_part_of_what_a_site_file_gives_it() -> None:
    given = {"nodes": 1, "gpus_per_node": 1, "cpus_per_gpu": 8, "memory_gb_per_gpu": 60}
    for runs_per_gpu, cpus, memory in ((1, "8", "60G"), (2, "4", "30G"), (100, "1", "1G")):
        sweep = {"pack": 100, "runs_per_gpu": runs_per_gpu}
        settings = composed(cluster=given, sweep=sweep)
        plan = plan_run(settings, cwd=Path("/home/user"), env={}, node_cpus=NodeCpus(slurm(NODE)))
        (flags,) = job_request(plan).components
        assert (flags["cpus-per-task"], flags["mem"]) == (cpus, memory)


def away() -> FakeSlurmCommands:
    commands = slurm(NODE)
    commands.error = ClusterError("no answer")
    return commands


def silent_about_itself() -> FakeSlurmCommands:
    commands = slurm(NODE)

    def show_partitions() -> list[dict[str, str]]:
        raise ClusterError("no scontrol here")

    commands.show_partitions = show_partitions  # type: ignore[method-assign]
    return commands


NOT_KNOWN = "as Slurm gives them: it does not say what its nodes have"
LEFT: dict[str, tuple[Callable[[], FakeSlurmCommands], dict[str, Any], str]] = {
    "the site gives CPUs": (
        lambda: slurm(NODE, JobDefaults="DefCpuPerGPU=6,DefMemPerGPU=16000"),
        {},
        "6 per GPU by the site's DefCpuPerGPU, partition gpu",
    ),
    "the whole site does": (
        lambda: slurm(NODE, settings={"JobDefaults": "DefCpuPerGPU=6"}),
        {},
        "6 per GPU by the site's DefCpuPerGPU, partition gpu",
    ),
    "cores are typed": (lambda: slurm(NODE), {"sbatch": {"cpus_per_gpu": 4}}, "as cluster.sbatch.cpus_per_gpu says"),
    "threads are typed": (lambda: slurm(NODE), {"sbatch": {"hint": "nomultithread"}}, "as cluster.sbatch.hint says"),
    "memory is typed by CPU": (lambda: slurm(NODE), {"sbatch": {"mem-per-cpu": "4G"}}, "as cluster.sbatch.mem-per-cpu"),
    "srun is given them": (lambda: slurm(NODE), {"srun": {"hint": "nomultithread"}}, "as cluster.srun.hint says"),
    "null is typed": (lambda: slurm(NODE), {"cpus_per_gpu": None}, ""),
    "no GPUs are asked for": (lambda: slurm(NODE), {"gpu_flag": "none"}, ""),
    "no such partition": (lambda: slurm(NODE), {"partition": "nope"}, NOT_KNOWN),
    "no answer": (away, {}, NOT_KNOWN),
    "no scontrol": (silent_about_itself, {}, NOT_KNOWN),
    "no such nodes": (lambda: slurm("gpu 4 gpu:4 64"), {}, "as Slurm gives them: no node has 8 GPUs"),
    "no Slurm": (lambda: FakeSlurmCommands(is_available=False), {}, ""),
}


@pytest.mark.parametrize(("make", "cluster", "why"), LEFT.values(), ids=LEFT)
def test_what_the_site_or_a_person_says_stays(
    make: Callable[[], FakeSlurmCommands], cluster: dict[str, Any], why: str
) -> None:
    plan = plan_of(make(), **cluster)
    assert plan.cpus_per_rank is None and plan.cpus.reason.startswith(why)
    assert cpus_per_task(plan) == [None] and "--cpus-per-task" not in render_script(plan)


def test_a_number_that_was_typed_wins_and_nothing_is_asked() -> None:
    plan = plan_of(away(), cpus_per_gpu=5)
    assert plan.cpus_per_rank == 5 and plan.cpus is LEFT_TO_SLURM and cpus_per_task(plan) == ["5"]


def test_an_allocation_that_is_there_keeps_its_cpus() -> None:
    assert plan_of(slurm(NODE), launch="interactive").cpus_per_rank == 14
    assert plan_of(slurm(NODE), launch="interactive", in_allocation=True).cpus_per_rank is None
    assert plan_of(slurm(NODE), in_allocation=True).cpus_per_rank == 14, "a job of its own, typed in an allocation"


def test_a_node_of_torchrun_has_the_cpus_of_its_ranks() -> None:
    assert cpus_per_task(plan_of(slurm(NODE), launcher="torchrun")) == ["112"]
    given = slurm(NODE, JobDefaults="DefCpuPerGPU=6")
    assert cpus_per_task(plan_of(given, launcher="torchrun")) == ["48"], "one task would not get them by itself"


def test_the_ranks_are_given_what_the_job_asks_for() -> None:
    script = render_script(plan_of(slurm(NODE)))
    assert "#SBATCH --cpus-per-task=14\n" in script
    assert " --cpus-per-task=14 " in script[script.index("srun") :]


def test_slurm_is_asked_once_for_all_runs_of_a_sweep() -> None:
    commands = slurm(NODE)
    answers = commands.partitions()
    asked = []

    def count() -> list[Partition]:
        asked.append(1)
        return answers

    commands.partitions = count  # type: ignore[method-assign]
    node_cpus = NodeCpus(commands)  # type: ignore[arg-type]
    cluster, world = plan_of(away(), cpus_per_gpu=1).config.cluster, plan_of(away(), cpus_per_gpu=1).world
    assert cluster is not None
    parts = {node_cpus.part_of(cluster, world, is_interactive=False) for _ in range(5)}
    assert [part.number for part in parts] == [14] and len(asked) == 1


def ask(commands: FakeSlurmCommands, plans: Sequence[RunPlan]) -> str:
    request = job_request(plans[0])
    require_acceptable(request, commands)  # type: ignore[arg-type]
    return request.text()


def test_cpus_that_slurm_refuses_are_left_out() -> None:
    commands = slurm(NODE)
    scripts: list[str] = []
    refused = TestVerdict(is_accepted=False, message="Requested node configuration is not available")

    def verdict_on(script: Any) -> TestVerdict:
        scripts.append(script.read_text())
        return refused if "--cpus-per-task" in scripts[-1] else TestVerdict(is_accepted=True)

    commands.test_only = verdict_on  # type: ignore[method-assign]
    (plan,), script = acceptable_plans([plan_of(commands)], partial(ask, commands))
    assert "--cpus-per-task" not in script and script == scripts[-1]
    assert plan.cpus == CpuPart(None, "as Slurm gives them: it refuses 14 per rank")
    with pytest.raises(ClusterError, match="Requested node configuration"):
        acceptable_plans([plan_of(commands, cpus_per_gpu=14)], partial(ask, commands))


def test_a_limit_that_is_too_long_is_refused_with_automatic_cpus_too() -> None:
    commands = slurm(NODE)
    commands.test_only = lambda _: TestVerdict(is_accepted=True)  # type: ignore[method-assign, misc]
    plan = plan_of(commands, time_limit_min=9999)
    assert without_chosen_cpus(plan) is not None
    with pytest.raises(ClusterError, match="time_limit_min=9999 is more than partition"):
        acceptable_plans([plan], partial(ask, commands))
