from __future__ import annotations

import re
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.launch.resources import job_environment, sbatch_components, srun_flags
from tests.support.plans import make_plan


def flags_of(**cluster: Any) -> tuple[dict[str, str | bool], dict[str, str | bool]]:
    plan = make_plan(cluster=cluster)
    return sbatch_components(plan)[0], srun_flags(plan)


def test_flags_of_a_plain_cluster_are_these_and_no_others() -> None:
    plan = make_plan(cluster={"nodes": 4, "gpus_per_node": 8})
    logs = plan.run.logs
    assert sbatch_components(plan)[0] == {
        "job-name": f"gpt-stdlib-{plan.run.run_id}",
        "nodes": "4",
        "ntasks": "32",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "output": f"{logs}/batch.log",
        "open-mode": "append",
        "requeue": True,
        "signal": "USR2@120",
    }
    assert srun_flags(plan) == {
        "nodes": "4",
        "ntasks": "32",
        "ntasks-per-node": "8",
        "distribution": "block",
        "job-name": "attempt_{attempt}",
        "kill-on-bad-exit": "1",
        "wait": "60",
        "open-mode": "append",
        "export": "ALL",
        "output": f"{logs}/attempt_{{attempt}}/rank_%t.log",
    }


KEYS = [
    ({"partition": "gpu"}, "partition", "gpu"),
    ({"account": "lab"}, "account", "lab"),
    ({"qos": "high"}, "qos", "high"),
    ({"time_limit_min": 90}, "time", "90"),
    ({"nodelist": "node[1-2]"}, "nodelist", "node[1-2]"),
    ({"exclude": "node3"}, "exclude", "node3"),
    ({"constraint": "h100&ib"}, "constraint", "h100&ib"),
    ({"memory_gb_per_node": 500}, "mem", "500G"),
    ({"memory_gb_per_node": 0}, "mem", "0"),
    ({"cpus_per_gpu": 12}, "cpus-per-task", "12"),
    ({"memory_gb_per_gpu": 60, "gpus_per_node": 4}, "mem", "240G"),
    ({"memory_gb_per_gpu": 60, "memory_gb_per_node": 0}, "mem", "0"),
    ({"gpu_flag": "gres", "gpus_per_node": 4}, "gres", "gpu:4"),
    ({"gpu_flag": "gres", "gpu_type": "a100", "gpus_per_node": 4}, "gres", "gpu:a100:4"),
    ({"gpu_type": "a100_3g.20gb", "gpus_per_node": 4}, "gpus-per-node", "a100_3g.20gb:4"),
    ({"sbatch": {"reservation": "maint"}}, "reservation", "maint"),
    ({"sbatch": {"mail_type": "END"}}, "mail-type", "END"),
    ({"sbatch": {"exclusive": True}}, "exclusive", True),
    ({"sbatch": {"nice": 100}}, "nice", "100"),
]


@pytest.mark.parametrize(("cluster", "flag", "value"), KEYS, ids=[str(cluster) for cluster, _, _ in KEYS])
def test_a_key_becomes_its_sbatch_flag(cluster: dict[str, Any], flag: str, value: str | bool) -> None:
    assert flags_of(**cluster)[0][flag] == value


@pytest.mark.parametrize("absent", [None, False])
def test_a_flag_that_is_switched_off_is_absent(absent: object) -> None:
    sbatch, srun = flags_of(sbatch={"exclusive": absent}, srun={"mpi": absent})
    assert "exclusive" not in sbatch and "mpi" not in srun


@pytest.mark.parametrize(
    ("gpu_flag", "present"), [("gpus-per-node", "gpus-per-node"), ("gres", "gres"), ("none", None)]
)
def test_gpus_are_asked_for_in_one_way_only(gpu_flag: str, present: str | None) -> None:
    sbatch, srun = flags_of(gpu_flag=gpu_flag, gpus_per_node=2)
    assert {"gpus-per-node", "gres", "gpus", "gpus-per-task"} & set(sbatch) == ({present} if present else set())
    assert not {"gpus-per-task", "gpu-bind"} & set(srun), "narrowing ranks to one device cuts peer access"


def test_cpus_are_said_again_to_srun() -> None:
    assert flags_of(cpus_per_gpu=12)[1]["cpus-per-task"] == "12"
    assert "cpus-per-task" not in flags_of()[1]


@pytest.mark.parametrize(("enabled", "flag"), [(True, "requeue"), (False, "no-requeue")])
def test_requeue_is_always_said_one_way_or_the_other(enabled: bool, flag: str) -> None:
    flags = sbatch_components(make_plan(cluster={}, requeue={"enabled": enabled, "warn_before_limit_s": 300}))[0]
    assert {"requeue", "no-requeue"} & set(flags) == {flag}
    assert flags["signal"] == "USR2@300", "to the ranks (no B:), and not the USR1 that NCCL may catch"


def test_a_dead_rank_ends_the_step_and_logs_are_appended() -> None:
    srun = flags_of()[1]
    assert (srun["kill-on-bad-exit"], srun["wait"], srun["open-mode"]) == ("1", "60", "append")


@pytest.mark.parametrize("export", ["NONE", "PATH,HOME"])
def test_srun_passes_everything_on_whatever_sbatch_was_told(export: str) -> None:
    sbatch, srun = flags_of(sbatch={"export": export})
    assert (sbatch["export"], srun["export"]) == (export, "ALL")


PROTECTED = [
    ("sbatch", "nodes", "use cluster.nodes instead"),
    ("sbatch", "ntasks", "use cluster.gpus_per_node instead"),
    ("sbatch", "ntasks-per-node", "use cluster.gpus_per_node instead"),
    ("sbatch", "ntasks_per_node", "use cluster.gpus_per_node instead"),
    ("sbatch", "gpus-per-task", "use cluster.gpus_per_node instead"),
    ("sbatch", "gpus_per_task", "use cluster.gpus_per_node instead"),
    ("sbatch", "cpus-per-task", "use cluster.cpus_per_gpu instead"),
    ("sbatch", "time", "use cluster.time_limit_min instead"),
    ("sbatch", "signal", "use requeue.warn_before_limit_s instead"),
    ("sbatch", "requeue", "use requeue.enabled instead"),
    ("sbatch", "no-requeue", "use requeue.enabled instead"),
    ("sbatch", "job-name", "use run.name instead"),
    ("sbatch", "output", "use run.root instead"),
    ("sbatch", "array", "drop cluster.sbatch.array"),
    ("sbatch", "wait", "drop cluster.sbatch.wait"),
    ("sbatch", "parsable", "drop cluster.sbatch.parsable"),
    ("srun", "output", "drop cluster.srun.output"),
    ("srun", "export", "use cluster.env instead"),
    ("srun", "kill-on-bad-exit", "drop cluster.srun.kill-on-bad-exit"),
    ("srun", "gpus-per-task", "use cluster.gpus_per_node instead"),
    ("srun", "cpus-per-task", "use cluster.cpus_per_gpu instead"),
    ("srun", "ntasks", "use cluster.gpus_per_node instead"),
    # Slurm takes a long name cut short as well.
    ("sbatch", "arr", "drop cluster.sbatch.arr"),
    ("sbatch", "gpus-per-t", "use cluster.gpus_per_node instead"),
    ("srun", "outp", "drop cluster.srun.outp"),
]


@pytest.mark.parametrize(("section", "flag", "hint"), PROTECTED)
def test_flags_that_the_launch_decides_are_refused_with_the_key_to_use(section: str, flag: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags_of(**{section: {flag: "1"}})
    assert caught.value.message == f"cluster.{section}.{flag} would break the launch, which sets it itself"
    assert caught.value.hint == hint


def test_a_flag_that_only_begins_a_protected_one_is_its_own() -> None:
    assert flags_of(sbatch={"gpus": "8"})[0]["gpus"] == "8"


@pytest.mark.parametrize("section", ["sbatch", "srun"])
@pytest.mark.parametrize("flag", ["clusters", "cluster", "cluster-constraint"])
def test_another_cluster_is_refused(section: str, flag: str) -> None:
    text = f"cluster.{section}.{flag}=gpu2 sends the job to another cluster"
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        flags_of(**{section: {flag: "gpu2"}})
    assert "log in to a login node of that cluster" in caught.value.hint


@pytest.mark.parametrize("value", [["a"], {"a": 1}])
def test_a_flag_has_one_value(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a single value"):
        flags_of(sbatch={"reservation": value})


ENVIRONMENTS = [
    ({}, {}),
    ({"network_interface": "ib0"}, {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}),
    ({"env": {"NCCL_DEBUG": "INFO", "N": 3, "ON": True}}, {"NCCL_DEBUG": "INFO", "N": "3", "ON": "true"}),
    ({"env": {"A": None, "B": ""}}, {"B": ""}),
    (
        {"network_interface": "ib0", "env": {"NCCL_SOCKET_IFNAME": "ib1"}},
        {"NCCL_SOCKET_IFNAME": "ib1", "GLOO_SOCKET_IFNAME": "ib0"},
    ),
]


@pytest.mark.parametrize(("cluster", "variables"), ENVIRONMENTS)
def test_the_jobs_environment(cluster: dict[str, Any], variables: dict[str, str]) -> None:
    assert job_environment(make_plan(cluster=cluster).config) == {"PYTHONUNBUFFERED": "1", **variables}
