from __future__ import annotations

from typing import Any

import pytest

from slurm_train.errors import ClusterError
from slurm_train.launch.interactive import require_room, salloc_words
from tests.support.plans import make_plan

CLUSTER: dict[str, Any] = {
    "nodes": 2,
    "gpus_per_node": 4,
    "cpus_per_gpu": 3,
    "time_limit_min": 60,
    "partition": "gpu",
    "sbatch": {"reservation": "maint window", "exclusive": True, "export": "NONE"},
}
# As Slurm 22.05 and 24.05 write it.
JOB = {"JobId": "55", "JobState": "RUNNING", "NumNodes": "2", "NumCPUs": "24", "TRES": "cpu=24,node=2,gres/gpu=8"}
NEWER = {**JOB, "TRES": "", "ReqTRES": "cpu=1,node=2", "AllocTRES": "cpu=24,mem=1G,node=2,gres/gpu=8,gres/gpu:a100=8"}


def test_an_allocation_is_asked_for_like_a_job() -> None:
    plan = make_plan(cluster=CLUSTER)
    assert salloc_words(plan) == [
        "salloc",
        f"--job-name=gpt-stdlib-{plan.run.run_id}",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=3",
        "--partition=gpu",
        "--time=60",
        "--signal=USR2@120",
        "--reservation=maint window",
        "--exclusive",
        "bash",
        str(plan.run.submit_script),
    ]


def test_further_flags_of_an_allocation_come_last_and_win() -> None:
    plan = make_plan(cluster={"nodes": 2, "gpus_per_node": 1, "exclude": "node9"})
    words = salloc_words(plan, ["--exclude=node9,node2"])
    assert words.index("--exclude=node9") < words.index("--exclude=node9,node2") == len(words) - 3


def test_for_torchrun_there_is_one_task_on_each_node_and_the_fewest_nodes_will_do() -> None:
    cluster = {"nodes": "2-4", "gpus_per_node": 4, "cpus_per_gpu": 3, "launcher": "torchrun"}
    plan = make_plan(cluster=cluster, batch={})
    assert salloc_words(plan)[2:6] == ["--nodes=2-4", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=12"]
    require_room(plan, JOB)


@pytest.mark.parametrize("job", [JOB, NEWER], ids=["22.05", "24.05"])
@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, ""),
        ({"nodes": 3}, "2 nodes, 3 asked; 8 GPUs, 12 asked; 24 CPUs, 36 asked"),
        ({"gpus_per_node": 5}, "8 GPUs, 10 asked; 24 CPUs, 30 asked"),
        ({"cpus_per_gpu": 4}, "24 CPUs, 32 asked"),
        ({"nodes": 1, "gpus_per_node": 2}, ""),
        ({"gpu_flag": "none", "gpus_per_node": 12, "cpus_per_gpu": 1}, ""),
    ],
)
def test_what_an_allocation_lacks_is_said(job: dict[str, str], change: dict[str, Any], missing: str) -> None:
    plan = make_plan(cluster={**CLUSTER, **change}, batch={})
    if not missing:
        require_room(plan, job)
        return
    with pytest.raises(ClusterError) as caught:
        require_room(plan, job)
    assert caught.value.message == f"the allocation of job 55 is too small for this run: {missing}"
    assert f"salloc --job-name=gpt-stdlib-{plan.run.run_id} --nodes={plan.world.num_nodes}" in caught.value.hint


def test_gpus_that_nobody_gave_are_missing() -> None:
    plan = make_plan(cluster={"nodes": 1, "gpus_per_node": 1})
    with pytest.raises(ClusterError, match="0 GPUs, 1 asked"):
        require_room(plan, {**JOB, "TRES": "cpu=24,node=2"})


def test_what_slurm_does_not_tell_is_not_refused() -> None:
    require_room(make_plan(cluster=CLUSTER), {"JobId": "55", "JobState": "RUNNING"})


@pytest.mark.parametrize(("state", "word"), [("COMPLETED", "COMPLETED"), ("", "gone")])
def test_a_shell_whose_job_is_over_is_no_allocation(state: str, word: str) -> None:
    job = {**JOB, "JobState": state} if state else {"JobId": "55"}
    with pytest.raises(ClusterError) as caught:
        require_room(make_plan(cluster=CLUSTER), job)
    assert caught.value.message == f"this shell belongs to job 55, which is {word}"
