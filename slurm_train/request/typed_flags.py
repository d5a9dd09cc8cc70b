"""Flags that a person types for sbatch and srun, beside those that the launch asks for itself. Pure.

Each flag has one owner. What the launch decides is refused in `cluster.sbatch` and `cluster.srun`, with the key to use.
What a key asks for is refused where the typed value is another. GPUs beside other generic resources are joined, since
Slurm has one flag for both: the later `--gres` would replace the earlier one, and the job would have no GPU (22.05).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slurm_train.config.schema import ClusterSection
from slurm_train.config.synonyms import EXPORT_WORDS
from slurm_train.errors import ConfigError
from slurm_train.slurm.flags import OPTIONS, Flags, resource_flags

Section = Literal["cluster.sbatch", "cluster.srun"]

# Flags that the launch sets itself, and the key to use instead.
_SIZES = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.gpus_per_node",
    "ntasks-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_gpu",
    # It limits each rank to one device with number 0 and cuts peer access between GPUs.
    "gpus-per-task": "cluster.gpus_per_node",
    "tres-per-task": "cluster.gpus_per_node and cluster.cpus_per_gpu",
}
_PROTECTED: Mapping[Section, Mapping[str, str]] = {
    "cluster.sbatch": {
        **_SIZES,
        "gpus-per-node": "cluster.gpus_per_node",
        "time": "cluster.time",
        "requeue": "requeue.enabled",
        "no-requeue": "requeue.enabled",
        "signal": "requeue.warn_before_limit_s",
        "job-name": "run.name, and cluster.job_name_prefix for what a site prescribes,",
        "output": "run.root",
        "error": "run.root",
        "open-mode": "",
        "array": "",
        "hetjob": "cluster.gpus_per_node",
        "wrap": "script",
        "parsable": "",
        "test-only": "",
        # With it, the submission would return only after the end of the job.
        "wait": "",
    },
    "cluster.srun": {
        **_SIZES,
        "output": "",
        "error": "",
        "open-mode": "",
        "kill-on-bad-exit": "",
        "het-group": "cluster.gpus_per_node",
        "job-name": "",
        "multi-prog": "script",
    },
}
# Slurm takes one of them; the key's is the first.
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
# Flags that say how many GPUs a node has; sbatch itself refuses another number in --gpus and --gpus-per-socket.
_GPUS_PER_NODE = ("gres", "gpus-per-node")
# Requeues, `status` and `cancel` use the cluster of this machine, where the same number is another job's.
_OTHER_CLUSTERS = ("cluster", "clusters", "cluster-constraint")
# Complete names of flags, although a protected name begins with them.
_NOT_SHORT = ("gpus",)
_UNITS_GIB = {"K": 2**-20, "M": 2**-10, "": 2**-10, "G": 1.0, "T": 2.0**10}


def typed_flags(section: Section, values: Mapping[str, Any]) -> Flags:
    """Returns the flags of a section by their long names without dashes; those that are null or false are left out.

    Raises:
        ConfigError: a flag that the launch decides, one that sends the job elsewhere, or a value that is no text.
    """
    flags: Flags = {}
    for name, value in values.items():
        flag = name.replace("_", "-")
        typed = f"{section}.{name}"
        if flag in _OTHER_CLUSTERS:
            raise ConfigError(
                f"{typed}={value} sends the job to another cluster, but status, cancel and requeue ask the "
                "cluster of this machine, where that job id belongs to another job",
                hint=f"log in to a login node of that cluster and submit there, without {typed}",
            )
        if flag == "export":
            raise _export_error(typed, value)
        # Slurm accepts an abbreviated name as well ("arr" for "array").
        protected = _PROTECTED[section]
        full_name = flag
        if flag not in protected:
            full_name = next((protected_name for protected_name in protected if protected_name.startswith(flag)), "")
        if full_name and flag not in _NOT_SHORT:
            hint = f"use {protected[full_name]} instead" if protected[full_name] else f"drop {typed}"
            raise ConfigError(f"{typed} would break the launch, which sets it itself", hint=hint)
        for placeholder in ("{attempt}", "{nodes}", "{tasks}", "{nodelist}"):
            if placeholder in str(value):
                raise ConfigError(f"{typed}={value}: {placeholder} is filled in by the launch", hint="write other text")
        if value is not None and value is not False:
            flags[flag] = value if value is True else as_text(typed, value)
    return flags


def as_text(key: str, value: Any) -> str:
    """Returns a single value as it is written for Slurm or a shell.

    Raises:
        ConfigError: it is a list or a mapping.
    """
    if isinstance(value, (dict, list)):
        raise ConfigError(f"{key}={value!r} is not a single value", hint=f"write {key}=TEXT")
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_typed(flags: Flags, typed: Flags, *, cluster: ClusterSection, per_node: int) -> Flags:
    """Returns the flags of a job's component with those of `cluster.sbatch`.

    Args:
        flags: what the launch asks for.
        typed: flags of `cluster.sbatch`, see `typed_flags`.
        cluster: the settings.
        per_node: GPUs of each node.

    Raises:
        ConfigError: both ask for the same, with different values.
    """
    for flag, value in typed.items():
        for key, (name, _) in OPTIONS.items():
            # Slurm accepts an abbreviated name as well ("part" for "partition").
            if name.startswith(flag) and flags.get(name, value) != value:
                raise ConfigError(
                    f"cluster.{key} asks for --{name}={flags[name]}, and cluster.sbatch.{flag} for {value}",
                    hint=f"set cluster.{key}={value} and leave cluster.sbatch.{flag} out",
                )
        if flag in _MEMORY and "mem" in flags and (flag != "mem" or flags["mem"] != value):
            raise _memory_error(flags, flag, str(value), cluster)
    _refuse_other_gpus("cluster.sbatch", typed, cluster=cluster, per_node=per_node)
    return flags | typed | _joined_gres(typed, cluster=cluster, per_node=per_node)


def step_flags(flags: Flags, typed: Flags, *, cluster: ClusterSection, gpus_per_node: Sequence[int]) -> Flags:
    """Returns the flags of the ranks' step with those of `cluster.srun`.

    A step has what its job has, unless it asks for some of it: with `--gres=nvme:5` it has no GPU of a job that asked
    for them by `--gres` (22.05).

    Args:
        flags: what the launch asks for.
        typed: flags of `cluster.srun`, see `typed_flags`.
        cluster: the settings.
        gpus_per_node: GPUs of each node, of each component of the job.

    Raises:
        ConfigError: other nodes or another order of ranks than the launch decides, fewer or more GPUs than the ranks
            need, or components that cannot be joined with one value.
    """
    if "nodelist" in flags and "nodelist" in typed:
        raise ConfigError(
            "cluster.srun.nodelist is one list for all attempts, and with spare nodes or a range each uses others",
            hint="name the nodes of the job: cluster.nodelist, cluster.exclude",
        )
    order = re.split("[:,]", str(typed.get("distribution", "block")))[0]
    if order not in ("block", "*"):
        # Rank r sits on node r // tasks for all that is about nodes: files, copies, layouts.
        raise ConfigError(
            f"cluster.srun.distribution={typed['distribution']} spreads neighbouring ranks over the nodes, and the "
            "launch has those of a node in a row",
            hint="block:cyclic spreads the ranks of a node over its sockets; else leave cluster.srun.distribution out",
        )
    joined = []
    for per_node in gpus_per_node:
        _refuse_other_gpus("cluster.srun", typed, cluster=cluster, per_node=per_node)
        joined.append(_joined_gres(typed, cluster=cluster, per_node=per_node))
    if any(gres != joined[0] for gres in joined):
        raise ConfigError(
            f"cluster.srun.gres={typed['gres']} is one value for all nodes, and cluster.gpu_flag=gres asks for "
            f"{list(gpus_per_node)} GPUs by it",
            hint="set cluster.gpu_flag=gpus-per-node, or leave cluster.srun.gres out",
        )
    return flags | typed | joined[0]


def _joined_gres(typed: Flags, *, cluster: ClusterSection, per_node: int) -> Flags:
    """Returns --gres with the GPUs of `cluster.gpu_flag=gres` and what was typed; {} where nothing is to be joined."""
    gpus = resource_flags(cluster, per_node=per_node).get("gres")
    gres = typed.get("gres")
    if gpus is None or gres is None or gpu_items(str(gres)):
        return {}
    return {"gres": f"{gpus},{gres}"}


def gpu_items(gres: str) -> list[str]:
    """Returns the GPUs of a value of --gres without their name, e.g. ["a100:2"] of "gpu:a100:2,nvme:10"."""
    items = (item.strip().removeprefix("gres/").removeprefix("gres:") for item in gres.split(","))
    return [item.partition(":")[2] for item in items if item.partition(":")[0] == "gpu"]


def _refuse_other_gpus(section: Section, typed: Flags, *, cluster: ClusterSection, per_node: int) -> None:
    """Refuses GPUs that are typed beside those of the keys: Slurm would take one of the two numbers, without a word."""
    if cluster.gpu_flag == "none":
        return
    for flag in _GPUS_PER_NODE:
        value = str(typed.get(flag, ""))
        items = gpu_items(value) if flag == "gres" else [item for item in value.split(",") if item]
        kinds = {item.rstrip("0123456789").rstrip(":") for item in items}
        number = sum(int(item.rpartition(":")[2]) if item[-1:].isdigit() else 1 for item in items)
        if not items or (number == per_node and (cluster.gpu_type is None or kinds == {cluster.gpu_type})):
            continue
        asked = f"{cluster.gpu_type}:{per_node}" if cluster.gpu_type else str(per_node)
        keys = [f"cluster.gpus_per_node={number}"]
        if len(kinds) == 1 and kinds != {""}:
            keys.append(f"cluster.gpu_type={kinds.pop()}")
        rest = ",".join(item for item in value.split(",") if flag == "gres" and not gpu_items(item))
        raise ConfigError(
            f"{section}.{flag} asks for {','.join(items)} GPUs per node, and the keys of cluster for {asked}",
            hint=f"{' '.join(keys)} asks for those; {f'set {section}.{flag}={rest}' if rest else 'leave it out'}",
        )


def _memory_error(flags: Flags, flag: str, value: str, cluster: ClusterSection) -> ConfigError:
    key = "memory_gb_per_gpu" if cluster.memory_gb_per_node is None else "memory_gb_per_node"
    typed_key = {"mem": "memory_gb_per_node", "mem-per-gpu": "memory_gb_per_gpu"}.get(flag, "")
    amount = re.fullmatch(r"(\d+)([KMGT]?)[bB]?", value.strip().upper())
    gib = int(amount[1]) * _UNITS_GIB[amount[2]] if amount else 0.0
    hint = f"leave one out: cluster.{key}=null, or cluster.sbatch.{flag}"
    if typed_key and gib and gib.is_integer():
        other = f" cluster.{key}=null" if key != typed_key else ""
        hint = f"set cluster.{typed_key}={int(gib)}{other} and leave cluster.sbatch.{flag} out"
    return ConfigError(f"cluster.{key} asks for --mem={flags['mem']}, and cluster.sbatch.{flag} for {value}", hint=hint)


def _export_error(typed: str, value: Any) -> ConfigError:
    """Returns the error for --export, which could only export what sbatch and srun are given: what travels."""
    words = [word for word in str(value).split(",") if word]
    names = [word for word in words if "=" not in word and word not in EXPORT_WORDS]
    settings = [f"cluster.env.{word}" for word in words if "=" in word]
    hints = [f"cluster.export=[{','.join(names)}]"] if names else []
    hints += [EXPORT_WORDS[word] for word in words if word in EXPORT_WORDS]
    hint = "; ".join([*hints, *settings])
    return ConfigError(
        f"{typed}={value} does not say what a job gets: sbatch and srun are given only the variables that travel",
        hint=hint,
    )
