"""From a plan to the flags of sbatch and srun: which resources, and the rules that keep multi-node jobs alive.

Every flag has its reason in a fact about Slurm; see docs/slurm.md. Values are checked where they become text
(`script`), names that would break the launch are refused here.
"""

from __future__ import annotations

from typing import Any

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.notice import warning_lead_s
from slurm_train.slurm.resource_flags import Flags, resource_flags

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
    "job-name": "",
    "multi-prog": "script",
}


def sbatch_flags(plan: RunPlan) -> Flags:
    """Returns the sbatch flags of a run, long names without dashes; True is a flag without a value.

    Raises:
        ConfigError: `cluster.sbatch` names a flag that the launch decides.
    """
    cluster = _cluster(plan.config)
    flags: Flags = {
        "job-name": f"{plan.run.name}-{plan.run.run_id}",
        "nodes": str(plan.world.num_nodes),
        "ntasks": str(plan.world.size),
        "ntasks-per-node": str(plan.world.ranks_per_node[0]),
        **resource_flags(cluster, per_node=plan.world.ranks_per_node[0]),
        "output": str(plan.run.logs / "batch.log"),
        # Without it a requeue truncates the log of the attempts before.
        "open-mode": "append",
        # A site's JobRequeue may be either; say it always.
        ("requeue" if plan.config.requeue.enabled else "no-requeue"): True,
        # No "B:": the warning goes to the ranks. USR2, since NCCL may catch USR1.
        "signal": warning_signal(plan.config, plan.run),
    }
    return flags | _own_flags(cluster.sbatch, "cluster.sbatch", _PROTECTED_SBATCH)


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
    """Returns the srun flags of a run; "{attempt}" in a value is replaced when an attempt starts.

    Raises:
        ConfigError: `cluster.srun` names a flag that the launch decides.
    """
    cluster = _cluster(plan.config)
    flags: Flags = {
        "nodes": str(plan.world.num_nodes),
        "ntasks": str(plan.world.size),
        "ntasks-per-node": str(plan.world.ranks_per_node[0]),
        "distribution": "block",
        # The supervisor ends what is left of a step by this name; other steps of an allocation are not ours.
        "job-name": STEP_NAME,
        # By default a dead rank leaves the others waiting for ever; --wait alone would kill them without SIGTERM.
        "kill-on-bad-exit": "1",
        "wait": "60",
        "open-mode": "append",
        # Under `sbatch --export=NAME` srun would pass NAME alone on, without the attempt and the meeting point.
        "export": "ALL",
        "output": str(plan.run.logs / "attempt_{attempt}" / "rank_%t.log"),
    }
    if cluster.cpus_per_gpu is not None:
        # srun inherits it in some releases only (not from 22.05 to 23.02), so it is said again.
        flags["cpus-per-task"] = str(cluster.cpus_per_gpu)
    return flags | _own_flags(cluster.srun, "cluster.srun", _PROTECTED_SRUN)


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
        if flag in protected:
            instead = protected[flag]
            hint = f"use {instead} instead" if instead else f"drop {key}.{name}"
            raise ConfigError(f"{key}.{name} would break the launch, which sets it itself", hint=hint)
        if "{attempt}" in str(value):
            raise ConfigError(f"{key}.{name}={value}: {{attempt}} is a word of the launch", hint="write another text")
        if value is not None and value is not False:
            flags[flag] = value if value is True else _text(f"{key}.{name}", value)
    return flags


def _text(key: str, value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ConfigError(f"{key}={value!r} is not a single value", hint=f"write {key}=TEXT")
    return str(value).lower() if isinstance(value, bool) else str(value)
