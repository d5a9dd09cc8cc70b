from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ClusterError
from slurm_train.launch.acceptance import require_acceptable, slurm_verdict
from slurm_train.slurm.policy import Refusal, TestVerdict
from tests.fakes.slurm_commands import FakeSlurmCommands, four_by_eight
from tests.support.plans import make_plan

SCRIPT = "#!/bin/bash\n"


def refused(refusal: Refusal) -> TestVerdict:
    return TestVerdict(is_accepted=False, refusal=refusal, message="Slurm's own words")


def test_the_script_that_slurm_reads_is_gone_afterwards() -> None:
    texts: list[str] = []

    class Reading(FakeSlurmCommands):
        def test_only(self, script: Path) -> TestVerdict:
            texts.append(script.read_text())
            return super().test_only(script)

    commands: Any = Reading()
    assert slurm_verdict(SCRIPT, commands).is_accepted
    assert texts == [SCRIPT]
    assert not commands.tested[0].exists()


HINTS = [
    (
        Refusal.RESOURCES,
        {"nodes": 1, "gpus_per_node": 16},
        "16 GPUs per node were asked; the nodes of partition main have at most 8: "
        "lower cluster.gpus_per_node, or name another cluster.partition",
    ),
    (
        Refusal.RESOURCES,
        {"nodes": 5, "gpus_per_node": 8},
        "5 nodes with 8 GPUs were asked; partition main has 4 such nodes: "
        "lower cluster.nodes, or name another cluster.partition",
    ),
    (Refusal.RESOURCES, {"nodes": 4, "gpus_per_node": 8, "cpus_per_gpu": 99}, Refusal.RESOURCES.value),
    (Refusal.RESOURCES, {"gpus_per_node": 16, "gpu_flag": "none"}, Refusal.RESOURCES.value),
    (Refusal.PARTITION, {"partition": "nope"}, "partitions here: main; set cluster.partition"),
    (Refusal.QOS, {"qos": "nope"}, Refusal.QOS.value),
]


@pytest.mark.parametrize(("refusal", "cluster", "hint"), HINTS)
def test_a_refusal_is_explained_by_what_there_is(refusal: Refusal, cluster: dict[str, Any], hint: str) -> None:
    commands: Any = FakeSlurmCommands()
    commands.verdict = refused(refusal)
    plan = make_plan(cluster=cluster, batch={})
    with pytest.raises(ClusterError) as caught:
        require_acceptable(SCRIPT, commands, plan)
    assert caught.value.message == "Slurm would not take this job: Slurm's own words"
    assert caught.value.hint.startswith(hint)


def test_without_a_plan_the_general_advice_is_given() -> None:
    commands: Any = FakeSlurmCommands()
    commands.verdict = refused(Refusal.PARTITION)
    with pytest.raises(ClusterError) as caught:
        require_acceptable(SCRIPT, commands)
    assert caught.value.hint == Refusal.PARTITION.value


@pytest.mark.parametrize(("limit_min", "accepted"), [(None, True), (1440, True), (1441, False)])
def test_a_limit_that_slurm_would_take_and_never_start_is_refused(limit_min: int | None, accepted: bool) -> None:
    commands: Any = FakeSlurmCommands()
    plan = make_plan(cluster={"time_limit_min": limit_min})
    if accepted:
        require_acceptable(SCRIPT, commands, plan)
        return
    with pytest.raises(ClusterError, match=r"cluster\.time_limit_min=1441 is more than partition main allows"):
        require_acceptable(SCRIPT, commands, plan)


def test_the_limit_is_that_of_the_named_partition() -> None:
    commands: Any = FakeSlurmCommands()
    commands.listed_partitions = [four_by_eight(), four_by_eight("other")]
    require_acceptable(SCRIPT, commands, make_plan(cluster={"time_limit_min": 60, "partition": "other"}))
