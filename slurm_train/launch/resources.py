"""From a plan to the flags of sbatch and srun: which resources, and the rules that keep multi-node jobs alive.

Every flag has its reason in a fact about Slurm; see docs/slurm.md. Values are checked where they become text
(`script`), names that would break the launch are refused here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.world import NodeGroup, World
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import warning_lead_s
from slurm_train.slurm.flags import Flags, resource_flags
from slurm_train.slurm.nodelist import parse_nodelist

STEP_NAME = "attempt_{attempt}"

# What the launch decides itself, and the key to use instead.
_PROTECTED_SBATCH = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.gpus_per_node",
    "ntasks-per-node": "cluster.gpus_per_node",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_gpu",
    "time": "cluster.time_limit_min",
    "requeue": "requeue.enabled",
    "no-requeue": "requeue.enabled",
    "signal": "requeue.warn_before_limit_s",
    "job-name": "run.name",
    "output": "run.root",
    "error": "run.root",
    "open-mode": "",
    "array": "",
    "hetjob": "cluster.gpus_per_node",
    "wrap": "script",
    "parsable": "",
    "test-only": "",
    # The submission would not return before the job has ended.
    "wait": "",
    # It narrows each rank to one device numbered 0 and cuts peer access between GPUs.
    "gpus-per-task": "cluster.gpus_per_node",
}
_PROTECTED_SRUN = {
    "output": "",
    "error": "",
    "open-mode": "",
    "export": "cluster.env",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.gpus_per_node",
    "ntasks-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_gpu",
    "gpus-per-task": "cluster.gpus_per_node",
    "kill-on-bad-exit": "",
    "het-group": "cluster.gpus_per_node",
    "job-name": "",
    "multi-prog": "script",
}
# Requeues, `status` and `cancel` address the cluster of this machine: there the number is another job's.
_OTHER_CLUSTERS = ("cluster", "clusters", "cluster-constraint")
# Flags in their own right, although a protected one begins with them.
_NOT_SHORT = ("gpus",)


def sbatch_components(plan: RunPlan) -> list[Flags]:
    """Returns the sbatch flags of a run, long names without dashes; True is a flag without a value.

    Nodes with different numbers of GPUs cannot be asked for in one request: there are as many components of a
    heterogeneous job then. Its name and its log are those of the first; all else is said of each, since Slurm hands
    down some flags only.

    Raises:
        ConfigError: `cluster.sbatch` names a flag that the launch decides, or `cluster.nodelist` cannot be shared.
    """
    cluster = _cluster(plan.config)
    own = _own_flags(cluster.sbatch, "cluster.sbatch", _PROTECTED_SBATCH)
    hosts = _hosts_of_groups(cluster, plan.world)
    components = []
    for index, group in enumerate(plan.world.groups):
        named = {} if hosts is None else {"nodelist": ",".join(hosts[index])}
        flags = {
            **_size_flags(plan, group),
            **resource_flags(
                replace(cluster, cpus_per_gpu=_cpus_per_task(cluster, group)), per_node=group.ranks_per_node
            ),
            **named,
        }
        components.append(_first_flags(plan, flags) | own if index == 0 else flags | _rest_flags(plan) | own)
    return components


def _first_flags(plan: RunPlan, flags: Flags) -> Flags:
    return {
        "job-name": f"{plan.run.name}-{plan.run.run_id}",
        **flags,
        "output": str(plan.run.logs / "batch.log"),
        # Without it a requeue truncates the log of the attempts before.
        "open-mode": "append",
        **_rest_flags(plan),
    }


def _rest_flags(plan: RunPlan) -> Flags:
    return {
        # A site's JobRequeue may be either; say it always.
        ("requeue" if plan.config.requeue.enabled else "no-requeue"): True,
        # No "B:": the warning goes to the ranks. USR2, since NCCL may catch USR1.
        "signal": warning_signal(plan.config, plan.run),
    }


def _size_flags(plan: RunPlan, group: NodeGroup) -> Flags:
    if _cluster(plan.config).launcher == "torchrun":
        if plan.world.min_nodes is not None:
            # How many tasks follows from how many nodes Slurm grants.
            return {"nodes": f"{plan.world.min_nodes}-{group.num_nodes}", "ntasks-per-node": "1"}
        return {"nodes": str(group.num_nodes), "ntasks": str(group.num_nodes), "ntasks-per-node": "1"}
    return {
        "nodes": str(group.num_nodes),
        "ntasks": str(group.num_nodes * group.ranks_per_node),
        "ntasks-per-node": str(group.ranks_per_node),
    }


def _cpus_per_task(cluster: ClusterSection, group: NodeGroup) -> int | None:
    if cluster.launcher == "torchrun":
        # One task has all ranks of its node; Slurm's default would be one core for it.
        return (cluster.cpus_per_gpu or 1) * group.ranks_per_node
    return cluster.cpus_per_gpu


def _hosts_of_groups(cluster: ClusterSection, world: World) -> list[list[str]] | None:
    """Returns the hosts of `cluster.nodelist` for each component; None where there is one component, or no list."""
    if len(world.groups) == 1 or cluster.nodelist is None:
        return None
    hosts = parse_nodelist(cluster.nodelist)
    if len(hosts) != world.num_nodes:
        raise ConfigError(
            f"cluster.nodelist={cluster.nodelist} names {len(hosts)} nodes, cluster.gpus_per_node "
            f"{list(world.ranks_per_node)} asks for {world.num_nodes}",
            hint="with uneven nodes name all of them, in the order of cluster.gpus_per_node",
        )
    rest = iter(hosts)
    return [list(itertools.islice(rest, group.num_nodes)) for group in world.groups]


def renewed_warning(config: RunConfig, run: RunDirectory) -> list[str]:
    """Returns words for sbatch that renew a script's --signal, where its lead is ours to say; they win over it."""
    is_ours = config.cluster is not None and config.requeue.warn_before_limit_s == "auto"
    return [f"--signal={warning_signal(config, run)}"] if is_ours else []


def warning_signal(config: RunConfig, run: RunDirectory) -> str:
    """Returns the value of sbatch's --signal, e.g. "USR2@120": a lead from what the run has measured, if it has."""
    minutes = _cluster(config).time_limit_min
    limit_s = None if minutes is None else 60.0 * minutes
    return f"USR2@{warning_lead_s(config.requeue.warn_before_limit_s, run, limit_s=limit_s)}"


def srun_flags(plan: RunPlan) -> Flags:
    """Returns the srun flags of a run.

    "{attempt}" in a value is replaced when an attempt starts, "{nodes}" by the number of nodes that Slurm has granted.

    Raises:
        ConfigError: `cluster.srun` names a flag that the launch decides.
    """
    cluster = _cluster(plan.config)
    flags: Flags = {
        **_step_size_flags(plan),
        "distribution": "block",
        # The supervisor ends what is left of a step by this name; other steps of an allocation are not ours.
        "job-name": STEP_NAME,
        # By default a dead rank leaves the others waiting for ever; --wait alone would kill them without SIGTERM.
        "kill-on-bad-exit": "1",
        "wait": "60",
        "open-mode": "append",
        # Under `sbatch --export=NAME` srun would pass NAME alone on, without the attempt and the meeting point.
        "export": "ALL",
        "output": str(plan.run.logs / "attempt_{attempt}" / task_log(plan.config, plan.world)),
    }
    if cluster.launcher == "torchrun" and len(plan.world.groups) > 1:
        # The components' tasks have different numbers of cores, of which srun could be told one.
        flags["cpu-bind"] = "none"
    elif (cpus := _cpus_per_task(cluster, plan.world.groups[0])) is not None:
        # srun inherits it in some releases only (not from 22.05 to 23.02), so it is said again.
        flags["cpus-per-task"] = str(cpus)
    return flags | _own_flags(cluster.srun, "cluster.srun", _PROTECTED_SRUN)


def task_log(config: RunConfig, world: World) -> str:
    """Returns the name of the log that srun writes for each task: the rank's own, where srun knows its number.

    In a step over several components srun counts "%t" on by one with each component (22.05), so there, and where a task
    is torchrun, the ranks open their logs themselves.
    """
    if _cluster(config).launcher == "torchrun":
        return "node_%t.log"
    return "rank_%t.log" if world.is_even else "task_%t.log"


def _step_size_flags(plan: RunPlan) -> Flags:
    groups, is_torchrun = plan.world.groups, _cluster(plan.config).launcher == "torchrun"
    if len(groups) > 1:
        # Numbers of nodes and tasks would be meant for each component; without them each gives what it has.
        return {"het-group": ",".join(map(str, range(len(groups))))}
    if is_torchrun and plan.world.min_nodes is not None:
        return {"nodes": "{nodes}", "ntasks": "{nodes}", "ntasks-per-node": "1"}
    return _size_flags(plan, groups[0])


def job_environment(config: RunConfig) -> dict[str, str]:
    """Returns the variables that the job exports before the ranks start."""
    cluster = _cluster(config)
    variables = {"PYTHONUNBUFFERED": "1"}
    if cluster.network_interface:
        variables |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), cluster.network_interface)
    own = {name: value for name, value in cluster.env.items() if value is not None}
    return variables | {name: _text(f"cluster.env.{name}", value) for name, value in own.items()}


def _cluster(config: RunConfig) -> ClusterSection:
    assert config.cluster is not None, "only runs on a cluster have Slurm resources"
    return config.cluster


def _own_flags(values: dict[str, Any], key: str, protected: dict[str, str]) -> Flags:
    flags: Flags = {}
    for name, value in values.items():
        flag = name.replace("_", "-")
        if flag in _OTHER_CLUSTERS:
            raise ConfigError(
                f"{key}.{name}={value} sends the job to another cluster, but status, cancel and requeue ask the "
                "cluster of this machine, where that job id belongs to another job",
                hint=f"log in to a login node of that cluster and submit there, without {key}.{name}",
            )
        if (meant := _protected_flag(flag, protected)) is not None:
            instead = protected[meant]
            hint = f"use {instead} instead" if instead else f"drop {key}.{name}"
            raise ConfigError(f"{key}.{name} would break the launch, which sets it itself", hint=hint)
        if found := next((word for word in ("{attempt}", "{nodes}") if word in str(value)), None):
            raise ConfigError(f"{key}.{name}={value}: {found} is a word of the launch", hint="write another text")
        if value is not None and value is not False:
            flags[flag] = value if value is True else _text(f"{key}.{name}", value)
    return flags


def _protected_flag(flag: str, protected: Mapping[str, str]) -> str | None:
    """Returns the protected flag that Slurm would read; it takes a long name cut short as well ("arr" for "array")."""
    if flag in protected or flag in _NOT_SHORT:
        return flag if flag in protected else None
    return next((name for name in protected if name.startswith(flag)), None)


def _text(key: str, value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ConfigError(f"{key}={value!r} is not a single value", hint=f"write {key}=TEXT")
    return str(value).lower() if isinstance(value, bool) else str(value)
