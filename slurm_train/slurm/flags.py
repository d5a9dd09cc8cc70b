"""The flags and variables that a batch script sets, checked and quoted.

Two readers parse a script: sbatch its `#SBATCH` lines, bash the rest. A value is either refused or reaches its reader
byte for byte. What was learned from sbatch 22.05: blanks end a value, "#" starts a comment, both kinds of quotes group
as in a shell, nothing is expanded, and a backslash vanishes even inside single quotes. A directive may be of any length
(60,000 bytes were tried); what is limited is what slurmctld keeps, and not lists of nodes and dependencies.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from slurm_train.errors import ConfigError
from slurm_train.slurm.job_variables import is_job_variable

if TYPE_CHECKING:
    from slurm_train.config.schema import ClusterSection

Flags = dict[str, str | bool]


class SbatchFlag(NamedTuple):
    """A flag of sbatch that has a key of `cluster`, whose text it takes as it is."""

    flag: str
    """Its long name, e.g. "time"."""
    shell: str = ""
    """Its part of the variable of a shell, e.g. "TIMELIMIT" of SBATCH_TIMELIMIT; "" where there is none."""


OPTIONS: Mapping[str, SbatchFlag] = {
    "partition": SbatchFlag("partition", "PARTITION"),
    "account": SbatchFlag("account", "ACCOUNT"),
    "qos": SbatchFlag("qos", "QOS"),
    "time_limit_min": SbatchFlag("time", "TIMELIMIT"),
    "nodelist": SbatchFlag("nodelist"),
    "exclude": SbatchFlag("exclude"),
    "constraint": SbatchFlag("constraint", "CONSTRAINT"),
}
"""By their keys, in the order of the script. A row and a field of `ClusterSection` are all that a new one needs."""

# slurmctld answers "Pathname of a file, directory or other parameter too long" for more of each of these (tried on
# 22.05: 1,100 bytes are refused). It takes 60,000 bytes of --nodelist and --exclude.
_MAX_FLAG_BYTES = 1024
_LIMITED = frozenset(
    {
        *("account", "comment", "constraint", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"),
        *("job-name", "licenses", "mail-user", "mcs-label", "network", "partition", "prefer", "qos", "reservation"),
        "wckey",
    }
)
_FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# bash refuses to assign these; under `set -e` the job would end before its first line of work.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
_CHARACTERS = {"\n": "a line break", "\r": "a carriage return", "\0": "a NUL", "\t": "a tab"}


def node_memory_gb(cluster: ClusterSection, *, per_node: int, runs_per_gpu: int) -> int | None:
    """Returns the memory in GiB that a job asks of a node; 0: all of it; None: what the partition gives.

    Args:
        cluster: the settings.
        per_node: ranks, and so GPUs, of the node.
        runs_per_gpu: runs that share a GPU, and so its memory of the node.
    """
    if cluster.memory_gb_per_node is not None or cluster.memory_gb_per_gpu is None:
        return cluster.memory_gb_per_node
    share_gb = cluster.memory_gb_per_gpu * per_node // runs_per_gpu
    # A small share is not 0, which means all memory of the node.
    return max(share_gb, min(1, cluster.memory_gb_per_gpu))


def resource_flags(
    cluster: ClusterSection, *, per_node: int, cpus_per_task: int | None = None, runs_per_gpu: int = 1
) -> Flags:
    """Returns the sbatch flags for GPUs, CPUs, memory and a place in the queue, by their long names without dashes.

    Args:
        cluster: the settings, e.g. of partition "gpu": {"gpus-per-node": "8", "partition": "gpu"}.
        per_node: ranks, and so GPUs, of each node.
        cpus_per_task: CPUs of each task; None: what Slurm gives.
        runs_per_gpu: runs that share a GPU, and so its memory of the node.
    """
    # Under torchrun one task has all ranks of its node.
    per_task = per_node if cluster.launcher == "torchrun" else 1
    gpus, task_gpus = (
        f"{cluster.gpu_type}:{number}" if cluster.gpu_type else str(number) for number in (per_node, per_task)
    )
    memory_gb = node_memory_gb(cluster, per_node=per_node, runs_per_gpu=runs_per_gpu)
    values = {
        "gres": f"gpu:{gpus}" if cluster.gpu_flag == "gres" else None,
        "gpus-per-node": gpus if cluster.gpu_flag == "gpus-per-node" else None,
        "gpus-per-task": task_gpus if cluster.gpu_flag == "gpus-per-task" else None,
        "cpus-per-task": cpus_per_task,
        # --mem=0 means all memory of the node; a unit would be wrong there.
        "mem": None if memory_gb is None else f"{memory_gb}G" if memory_gb else "0",
        **{option.flag: getattr(cluster, key) for key, option in OPTIONS.items()},
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def check_flag_name(name: str) -> str:
    """Returns the long name of an sbatch or srun option unchanged, e.g. "mem-per-cpu".

    Raises:
        ConfigError: not lower-case words joined by "-".
    """
    if _FLAG_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} is not the name of a Slurm option",
            hint='write the long name without dashes in front, e.g. "mem-per-cpu"',
        )
    return name


def check_flag_value(value: str) -> str:
    """Returns the text for the right side of `--name=` in a directive, quoted where sbatch needs it.

    Pass the value itself, not this text, to a program that quotes by shlex on its own.

    Limits are sbatch's own: a directive is one line, and a backslash in it is dropped.

    Raises:
        ConfigError: a line break, a control or invisible character, or a backslash.
    """
    _check_printable(value, "a Slurm option")
    if "\\" in value:
        raise ConfigError(
            f"the backslash in {value!r} cannot be a Slurm option's value",
            hint="leave it out: sbatch drops backslashes even between quotes",
        )
    return shlex.quote(value)


def flag_word(name: str, value: str | bool) -> str:
    """Returns a flag as it stands in a directive or a command: `--name=value`, or `--name` for True.

    Raises:
        ConfigError: as `check_flag_name` and `check_flag_value`; more than slurmctld takes for this flag.
    """
    flag = f"--{check_flag_name(name)}"
    if value is True:
        return flag
    text = str(value)
    if name in _LIMITED and len(text.encode()) > _MAX_FLAG_BYTES:
        raise ConfigError(
            f"the value of {len(text.encode())} bytes is too long: {text[:40]!r}...",
            hint=f"Slurm takes at most {_MAX_FLAG_BYTES} bytes of --{name}",
        )
    return f"{flag}={check_flag_value(text)}"


def check_env_name(name: str) -> str:
    """Returns the name of an environment variable unchanged.

    Raises:
        ConfigError: not an identifier, read-only in bash, or owned by Slurm or the launcher.
    """
    if _ENV_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} is not the name of an environment variable",
            hint="use letters, digits and _, not a digit first, e.g. NCCL_DEBUG",
        )
    if name in _READ_ONLY:
        raise ConfigError(f"{name} is read-only in bash", hint=f"leave {name} out")
    if is_job_variable(name):
        raise ConfigError(
            f"{name} is set by Slurm or the launcher for each job",
            hint="set the option itself: cluster.sbatch.<flag> or cluster.srun.<flag>",
        )
    return name


def check_env_value(value: str) -> str:
    """Returns the text for the right side of `export NAME=`, quoted for bash.

    Raises:
        ConfigError: a line break, a control or invisible character.
    """
    _check_printable(value, "an environment variable")
    return shlex.quote(value)


def _check_printable(value: str, kind: str) -> None:
    for position, character in enumerate(value, start=1):
        if not character.isprintable():
            name = _CHARACTERS.get(character, f"U+{ord(character):04X}")
            raise ConfigError(
                f"{name} at character {position} of {value[:80]!r} cannot be in {kind}'s value",
                hint="remove it: only printable characters reach the batch script",
            )
