"""What the submitting shell sets of all jobs of a person: SBATCH_ACCOUNT and the like, and limits (`ulimit`).

For sbatch and salloc their priority is below the command line. Here it is below words, files and site. A variable that
is not used is reported, since a silently lost setting might charge another account. Inside a job these variables are
not read, since they may belong to that job. A limit that Slurm passes on, and that a training may come to, is named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.config.words import minutes
from slurm_train.errors import ClusterError, ConfigError
from slurm_train.rundir.node_disk import has_room_for_sockets
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.flags import OPTIONS
from slurm_train.slurm.limits import Limits, in_words, passed_on, read_limits, tight, way_out

# By the part of the name after SBATCH_ or SALLOC_, as the man pages of Slurm 20.11 to 25.05 list them.
_KEYS = {option.shell: key for key, option in OPTIONS.items() if option.shell}
_FLAGS = {
    "RESERVATION": "reservation",
    "WCKEY": "wckey",
    "EXCLUSIVE": "exclusive",
    "CORE_SPEC": "core-spec",
    "THREAD_SPEC": "thread-spec",
    "NETWORK": "network",
    "GRES_FLAGS": "gres-flags",
    "REQ_SWITCH": "switches",
    "DELAY_BOOT": "delay-boot",
    "PROFILE": "profile",
    "ACCTG_FREQ": "acctg-freq",
    "POWER": "power",
}
# Another cluster is refused by `acceptance`; the others set nothing about a job.
_NO_CHOICES = ("CLUSTERS", "DEBUG", "CONF", "EXIT_ERROR", "EXIT_IMMEDIATE", "BELL", "NO_BELL", "GET_USER_ENV")
# Variables that people set for srun beside the same for sbatch.
_OF_SRUN = (*_KEYS, "RESERVATION", "WCKEY", "HINT")


def take_shell_choices(
    config: RunConfig, open_keys: Collection[str] | None, env: Mapping[str, str], *, limits: Limits | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns a configuration with the shell's choices where nothing else is set, and remarks about each choice.

    Args:
        config: as composed.
        open_keys: the keys of `cluster` that neither words nor files set; None for an existing run, which keeps its
            settings.
        env: the environment of the submitting shell.
        limits: of its processes; None: those of this process.
    """
    cluster = config.slurm
    if not config.uses_cluster or "SLURM_JOB_ID" in env:
        return config, ()
    prefix = "SALLOC_" if config.launch == "interactive" else "SBATCH_"
    taken: dict[str, Any] = {}
    flags = dict[str, Any]()
    set_flags = {name.replace("_", "-") for name in cluster.sbatch}
    remarks = list[str]()
    for name, value in _choices(env, prefix):
        choice = name.removeprefix(prefix)
        key = _KEYS.get(choice)
        flag = _FLAGS.get(choice)
        if key is not None:
            setting = _parse(key, value)
            if setting is not None and getattr(cluster, key) == setting:
                continue
            if setting is None:
                remarks.append(f"{name}={value} is not used: it is no time limit")
            elif open_keys is not None and key in open_keys and key not in set_flags:
                taken[key] = setting
                remarks.append(f"{name}={value} is taken as cluster.{key}")
            else:
                present = f"{key}={_set_to(cluster, key)}"
                if key in cluster.sbatch:
                    present = f"sbatch.{key}={cluster.sbatch[key]}"
                remarks.append(f"{name}={value} is not used: cluster.{present} is set")
        elif flag is not None and flag not in set_flags and open_keys is not None:
            flags[flag] = value or True
            remarks.append(f"{name}={value} is taken as cluster.sbatch.{flag}")
        elif flag is None or str(cluster.sbatch.get(flag, cluster.sbatch.get(flag.replace("-", "_")))) != value:
            remarks.append(
                f"{name}={value} is not used" + (f": cluster.sbatch.{flag} is set" if flag in set_flags else "")
            )
    remarks += _of_srun(env, prefix)
    remarks += _of_temporary_files(cluster, env)
    remarks += _of_limits(cluster, read_limits() if limits is None else limits, SlurmCommands(env))
    if taken or flags:
        config = replace(config, cluster=replace(cluster, **taken, sbatch={**cluster.sbatch, **flags}))
    return config, tuple(remarks)


def _choices(env: Mapping[str, str], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in sorted(env.items()):
        choice = name.removeprefix(prefix)
        # sbatch ignores an empty variable, except for a flag without a value.
        if name != choice and choice not in _NO_CHOICES and (value or choice == "EXCLUSIVE"):
            yield name, value


def _parse(key: str, value: str) -> str | int | None:
    if key != "time_limit_min":
        return value
    try:
        return minutes(value)
    except ConfigError:
        return None


def _set_to(cluster: ClusterSection, key: str) -> str:
    value = getattr(cluster, key)
    return "null" if value is None else str(value)


def _of_temporary_files(cluster: ClusterSection, env: Mapping[str, str]) -> Iterator[str]:
    """Yields a remark on a TMPDIR that travels into the job and is too long for sockets below it."""
    folder = env.get("TMPDIR", "")
    is_set_there = "TMPDIR" in cluster.env or any("TMPDIR" in line for line in cluster.setup)
    if folder and not is_set_there and not has_room_for_sockets(folder):
        yield (
            f"TMPDIR has {len(folder)} characters, too many for sockets, by which workers of a loader hand over "
            "tensors: cluster.env.TMPDIR=/tmp"
        )


def _of_limits(cluster: ClusterSection, limits: Limits, commands: SlurmCommands) -> Iterator[str]:
    """Yields a remark on limits of this shell that the ranks would have; Slurm is asked only where there are any."""
    cpus = cluster.cpus_per_gpu if isinstance(cluster.cpus_per_gpu, int) else None
    minutes_at_most = cluster.time_limit_min
    names = tight(limits, run_s=None if minutes_at_most is None else 60.0 * minutes_at_most, cpus=cpus)
    if not names:
        return
    # Where Slurm does not say what it passes on, the preflight finds the limits on the nodes.
    with contextlib.suppress(ClusterError):
        site = commands.settings
        propagate = cluster.sbatch.get("propagate", "")
        names = passed_on(
            names,
            setting=site.get("PropagateResourceLimits", ""),
            but=site.get("PropagateResourceLimitsExcept", ""),
            propagate="ALL" if propagate is True else str(propagate or ""),
            setup=cluster.setup,
        )
        if names:
            found = ", ".join(in_words(limits, name) for name in names)
            yield f"the ranks get the limits of this shell, {found} for each process: {way_out(names)}"


def _of_srun(env: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Yields remarks on variables of srun, which neither this program nor sbatch applies to the job."""
    for choice in _OF_SRUN:
        value = env.get(f"SLURM_{choice}")
        if value and env.get(f"{prefix}{choice}") != value:
            key = f"cluster.{_KEYS[choice]}" if choice in _KEYS else f"cluster.sbatch.{choice.lower()}"
            yield f"SLURM_{choice}={value} is not used: it is for srun alone; {key} is for the job"
