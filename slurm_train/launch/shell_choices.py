"""The choices that a person has made in the shell for all their jobs: SBATCH_ACCOUNT and its like.

sbatch and salloc take them as defaults below their command line. Here they are defaults below words, files and site;
what is not taken is named, since a setting that is lost silently charges another account. Inside a job nothing is read:
there these variables may be those of the job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.config.words import minutes
from slurm_train.errors import ConfigError

# By what follows SBATCH_ or SALLOC_ in the name, as the man pages of Slurm 20.11 to 25.05 list them.
_KEYS = {
    "ACCOUNT": "account",
    "PARTITION": "partition",
    "QOS": "qos",
    "CONSTRAINT": "constraint",
    "TIMELIMIT": "time_limit_min",
}
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
# Other clusters are refused elsewhere; these choose nothing about a job.
_NO_CHOICES = ("CLUSTERS", "DEBUG", "CONF", "EXIT_ERROR", "EXIT_IMMEDIATE", "BELL", "NO_BELL", "GET_USER_ENV")
# What people set for srun beside the same for sbatch.
_OF_SRUN = (*_KEYS, "RESERVATION", "WCKEY", "HINT")


def take_shell_choices(
    config: RunConfig, open_keys: Collection[str] | None, env: Mapping[str, str]
) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns a configuration with the shell's choices where nothing else decides, and what was taken and dropped.

    Args:
        config: as composed.
        open_keys: the keys of `cluster` that neither words nor files set; None: of a run that exists, which keeps what
            it has, so that nothing is taken.
        env: the environment of the submitting shell.
    """
    cluster = config.cluster
    if cluster is None or "SLURM_JOB_ID" in env:
        return config, ()
    prefix = "SALLOC_" if config.launch == "interactive" else "SBATCH_"
    taken: dict[str, Any] = {}
    flags = dict[str, Any]()
    given = {name.replace("_", "-") for name in cluster.sbatch}
    remarks = list[str]()
    for name, value in _choices(env, prefix):
        choice = name.removeprefix(prefix)
        key = _KEYS.get(choice)
        flag = _FLAGS.get(choice)
        if key is not None:
            wanted = _wanted(key, value)
            if wanted is not None and getattr(cluster, key) == wanted:
                continue
            if wanted is None:
                remarks.append(f"{name}={value} is not used: it is no time limit")
            elif open_keys is not None and key in open_keys and key not in given:
                taken[key] = wanted
                remarks.append(f"{name}={value} is taken as cluster.{key}")
            else:
                decides = (
                    f"sbatch.{key}={cluster.sbatch[key]}" if key in cluster.sbatch else f"{key}={_set_to(cluster, key)}"
                )
                remarks.append(f"{name}={value} is not used: cluster.{decides} is set")
        elif flag is not None and flag not in given and open_keys is not None:
            flags[flag] = value or True
            remarks.append(f"{name}={value} is taken as cluster.sbatch.{flag}")
        elif flag is None or str(cluster.sbatch.get(flag, cluster.sbatch.get(flag.replace("-", "_")))) != value:
            remarks.append(f"{name}={value} is not used" + (f": cluster.sbatch.{flag} is set" if flag in given else ""))
    remarks += _of_srun(env, prefix)
    if taken or flags:
        config = replace(config, cluster=replace(cluster, **taken, sbatch={**cluster.sbatch, **flags}))
    return config, tuple(remarks)


def _choices(env: Mapping[str, str], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in sorted(env.items()):
        choice = name.removeprefix(prefix)
        # An empty variable is no choice to sbatch, but for a flag without a value.
        if name != choice and choice not in _NO_CHOICES and (value or choice == "EXCLUSIVE"):
            yield name, value


def _wanted(key: str, value: str) -> str | int | None:
    if key != "time_limit_min":
        return value
    try:
        return minutes(value)
    except ConfigError:
        return None


def _set_to(cluster: ClusterSection, key: str) -> str:
    value = getattr(cluster, key)
    return "null" if value is None else str(value)


def _of_srun(env: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Yields which choices for srun do not reach the job; sbatch does not read them either."""
    for choice in _OF_SRUN:
        value = env.get(f"SLURM_{choice}")
        if value and env.get(f"{prefix}{choice}") != value:
            key = f"cluster.{_KEYS[choice]}" if choice in _KEYS else f"cluster.sbatch.{choice.lower()}"
            yield f"SLURM_{choice}={value} is not used: it is for srun alone; {key} is for the job"
