"""The environment that a new job or a Slurm command may see.

Submitting from inside a job would hand that job's CPU binding, ranks and rendezvous to the new one, and options left
in SBATCH_* or SRUN_* would change what the script says. Both go; the rest of the user's environment stays.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from slurm_train.slurm.nodelist import parse_nodelist

# SLURM_CONF says which cluster this is; without it a non-default installation is not found.
_KEPT = frozenset({"SLURM_CONF"})
# Tuning of the PMIx library, which users set themselves.
_KEPT_PREFIX = "PMIX_MCA_"
_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SUBMITIT_",
    "TORCHELASTIC_",
    "PMI",
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
    "MPI_LOCAL",
)
_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMPI_UNIVERSE_SIZE",
    }
)
# A user's own defaults for the commands: they filter and reformat what the commands print.
_COMMAND_PREFIXES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")


def is_job_variable(name: str) -> bool:
    """Returns whether a variable belongs to one job or one rank and must not travel into another."""
    if name in _KEPT or name.startswith(_KEPT_PREFIX):
        return False
    return name in _NAMES or name.startswith(_PREFIXES)


# Of all that a shell in a step has of its job: what says which job it is, where it runs, and how Slurm is reached.
_OF_JOB = frozenset(
    {
        *("SLURM_JOBID", "SLURM_NODELIST", "SLURM_NODE_ALIASES", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"),
        *("SLURM_CONF", "SLURM_JWT", "SLURM_STEPMGR", "SLURM_WORKING_CLUSTER", "SLURMD_NODENAME"),
    }
)
_OF_JOB_PREFIXES = ("SLURM_JOB_", "SLURM_ARRAY_", "SLURM_HET_", "SLURM_SUBMIT_", "SLURM_TRAIN_")


def job_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a job for the processes that a supervisor in it starts, srun above all.

    Left-over ranks and options of srun go. In a batch script the rest stays: sbatch hands its own options on to srun by
    such variables (SLURM_HINT and the like). In a shell that srun has started (`srun --pty bash`) they are those of the
    shell's step (CPU binding, distribution, one task on one node), and srun would read them as options: there only
    what is about the whole job stays.
    """
    others = {name: value for name, value in env.items() if not is_job_variable(name)}
    ours = {name: value for name, value in env.items() if name.startswith("SLURM")}
    if not {"SLURM_STEP_ID", "SLURM_STEPID"} & set(ours):
        return others | {name: value for name, value in ours.items() if not name.startswith("SLURM_STEP_")}
    kept = {name: value for name, value in ours.items() if _is_about_the_job(name)}
    if "SLURM_HET_SIZE" not in env and (nodes := env.get("SLURM_JOB_NODELIST")):
        # SLURM_TASKS_PER_NODE is the shell's. How many tasks a run has is in its plan.
        kept["SLURM_TASKS_PER_NODE"] = f"1(x{len(parse_nodelist(nodes))})"
    # The shell's step holds the nodes itself, and the ranks would wait for its end.
    return others | kept | {"SLURM_OVERLAP": "1"}


def _is_about_the_job(name: str) -> bool:
    return name in _OF_JOB or name.startswith(_OF_JOB_PREFIXES) or "_HET_GROUP_" in name


def node_name(env: Mapping[str, str]) -> str:
    """Returns the name under which Slurm knows this node, which `--exclude` wants: its NodeName, not its host name.

    The two may differ (an alias, or a host name with a domain). Outside a job it is the host name.
    """
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of an enclosing job; SLURM_CONF stays."""
    return {name: value for name, value in env.items() if not is_job_variable(name)}


def command_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a Slurm command whose output is parsed.

    The user's SQUEUE_FORMAT and the like are left out, and array indices are never cut off with "...".
    """
    clean = {name: value for name, value in scrubbed(env).items() if not name.startswith(_COMMAND_PREFIXES)}
    return clean | {"SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
