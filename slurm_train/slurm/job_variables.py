"""Which environment variables belong to one job, and which travel into another job or a Slurm command.

Submitting from inside a job would hand that job's CPU binding, ranks and rendezvous to the new one, and options left
in SBATCH_* or SRUN_* would change what the script asks for. Both are removed. sbatch would export all the rest, and
slurmctld keeps it on disk, and with AccountingStoreFlags=job_env in the database as well: what travels is on a list.
"""

from __future__ import annotations

import fnmatch
import socket
from collections.abc import Iterable, Mapping

from slurm_train.config.secrets import is_secret_name, is_secret_value
from slurm_train.slurm.allocation import parse_nodelist
from slurm_train.slurm.devices import VISIBLE

TOKEN = "SLURM_JWT"
"""The variable by which a user proves to Slurm who asks, without munge."""
_JOB_PREFIXES = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SUBMITIT_", "TORCHELASTIC_"),
    *("PMI", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL"),
)
_JOB_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_NAME", "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_UNIVERSE_SIZE"),
    }
)
# How Slurm's commands find their cluster, and how they prove who asks where there is no munge. The token is a secret:
# it is for the commands alone, and no job gets it.
_OF_COMMANDS = frozenset({"SLURM_CONF", TOKEN})
# A user's own defaults for the commands: they filter and reformat what the commands print.
_COMMAND_PREFIXES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
# Of all that a shell in a step has of its job: which job it is, where it runs, and how Slurm is reached.
_WHOLE_JOB_NAMES = frozenset(
    {
        *("SLURM_JOBID", "SLURM_NODELIST", "SLURM_NODE_ALIASES", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"),
        *("SLURM_CONF", "SLURM_JWT", "SLURM_STEPMGR", "SLURM_WORKING_CLUSTER", "SLURMD_NODENAME"),
    }
)
_WHOLE_JOB_PREFIXES = ("SLURM_JOB_", "SLURM_ARRAY_", "SLURM_HET_", "SLURM_SUBMIT_", "SLURM_TRAIN_")
# What the run wants is in the words of srun. An allocation may have more CPUs per task, which srun of 20.11 and of
# 23.11 on takes over, and tasks per GPU, which contradict those per node (a fatal error of srun).
_SAID_IN_WORDS = frozenset(
    {"SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"}
)
# What programs need to start and libraries are tuned by.
_EXPORTED_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR", "FORCE_COLOR"),
        *("TMPDIR", "TMP", "TEMP", "SCRATCH", "WORK", "PROJECT", "BASH_ENV", "ENV", "VIRTUAL_ENV", "SLURM_CONF"),
        *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH", "CC", "CXX", "LOADEDMODULES", "_LMFILES_"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "KRB5CCNAME", "MUNGE_SOCKET"),
    }
)
_EXPORTED_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "CONDA_", "_CE_", "MAMBA_", "PYENV_", "UV_", "PIXI_", "GUIX_", "NIX_"),
    *("MODULE", "__MODULES_", "LMOD_", "__LMOD_", "_ModuleTable"),
    # Functions of the shell, `module` among them.
    *(
        "BASH_FUNC_",
        "EBROOT",
        "EBVERSION",
        "EBDEVEL",
        "SPACK_",
        "CUDA_",
        "CUDNN_",
        "CUBLAS_",
        "NVIDIA_",
        "NCCL_",
        "GLOO_",
        "UCX_",
        "FI_",
        "IBV_",
    ),
    *(
        "PSM2_",
        "PSM3_",
        "I_MPI_",
        "CCL_",
        "MALLOC_",
        "TCMALLOC_",
        "GLIBC_TUNABLES",
        "PMIX_MCA_",
        "OMPI_MCA_",
        "OMP_",
        "KMP_",
        "GOMP_",
        "MKL_",
        "OPENBLAS_",
        "NUMEXPR_",
        "TORCH",
        "PYTORCH_",
    ),
    *(
        "TRITON_",
        "ROCM_",
        "ROCR_",
        "HIP_",
        "HSA_",
        "RCCL_",
        "MIOPEN_",
        "HF_",
        "TRANSFORMERS_",
        "DATASETS_",
        "TOKENIZERS_",
        "JAX_",
        "XLA_",
        "KERAS_",
    ),
    *("WANDB_", "MLFLOW_", "TRACKIO_", "SINGULARITY", "APPTAINER", "ENROOT_", "PYXIS_", "HYDRA_"),
)


def is_job_variable(name: str) -> bool:
    """Returns whether a variable belongs to one job or one rank and must not travel into another."""
    # SLURM_CONF names the cluster; without it a non-default installation is not found. Users tune the PMIx library.
    if name == "SLURM_CONF" or name.startswith("PMIX_MCA_"):
        return False
    return name in _JOB_NAMES or name.startswith(_JOB_PREFIXES)


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of an enclosing job; what Slurm's commands need stays."""
    return {name: value for name, value in env.items() if name in _OF_COMMANDS or not is_job_variable(name)}


def command_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a Slurm command whose output is parsed.

    The user's SQUEUE_FORMAT and the like are left out, and array indices are never cut off with "...".
    """
    clean = {name: value for name, value in scrubbed(env).items() if not name.startswith(_COMMAND_PREFIXES)}
    return clean | {"SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}


def job_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a job for the processes that a supervisor in it starts, srun above all.

    Left-over ranks, options of srun, CPUs per task and tasks per GPU are removed. In a batch script the rest stays:
    sbatch hands its own options on to srun by such variables (SLURM_HINT and the like). In a shell that srun has
    started (`srun --pty bash`) they are those of the shell's step (CPU binding, distribution, one task on one node),
    and srun would read them as options: there only what is about the whole job stays.
    """
    slurm = {name: value for name, value in env.items() if name.startswith("SLURM") and name not in _SAID_IN_WORDS}
    if not {"SLURM_STEP_ID", "SLURM_STEPID"} & set(slurm):
        kept = {name: value for name, value in slurm.items() if not name.startswith("SLURM_STEP_")}
        return scrubbed(env) | kept
    kept = {name: value for name, value in slurm.items() if _is_of_whole_job(name) or "_HET_GROUP_" in name}
    nodes = env.get("SLURM_JOB_NODELIST", "")
    if nodes and "SLURM_HET_SIZE" not in env:
        # SLURM_TASKS_PER_NODE is the shell's. The number of tasks of a run is in its plan.
        kept["SLURM_TASKS_PER_NODE"] = f"1(x{len(parse_nodelist(nodes))})"
    # The shell's step holds the nodes itself, and the ranks would wait for its end.
    return scrubbed(env) | kept | {"SLURM_OVERLAP": "1"}


def helper_environment(env: Mapping[str, str], *, num_nodes: int) -> dict[str, str]:
    """Returns the environment for a step of the supervisor's own: a question to the nodes, a copy, a guard.

    srun reads the job's requests from variables, and such a step is not to ask for the job's GPUs, memory, tasks,
    binding, distribution or labels again: it runs once per node beside the ranks. What is about the job stays.

    Args:
        env: of the job.
        num_nodes: of the job; its tasks per node are the ranks'.
    """
    # SLURM_GPUS_PER_NODE_HET_GROUP_0 and its like are requests as well.
    kept = {name: value for name, value in env.items() if _is_of_whole_job(name)}
    if "SLURM_HET_SIZE" not in env:
        kept["SLURM_TASKS_PER_NODE"] = f"1(x{num_nodes})"
    return scrubbed(env) | kept


def _is_of_whole_job(name: str) -> bool:
    return name in _WHOLE_JOB_NAMES or name.startswith(_WHOLE_JOB_PREFIXES)


def with_gpus_for(env: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Returns an environment in which srun asks for a GPU per rank, not for all that an allocation was given in total.

    With `salloc --gpus=8` srun takes SLURM_GPUS for the step's own total, and finds fewer on some of the nodes (22.05:
    "Invalid generic resource (gres) specification").

    Args:
        env: of the ranks' step.
        num_ranks: of the run, each with one GPU.
    """
    kind, colon, total = env.get("SLURM_GPUS", "").rpartition(":")
    has_several_kinds = "," in kind
    if has_several_kinds or not total.isdigit() or int(total) <= num_ranks:
        return dict(env)
    return {**env, "SLURM_GPUS": f"{kind}{colon}{num_ranks}"}


def exported(env: Mapping[str, str], patterns: Iterable[str] = ()) -> set[str]:
    """Returns the names of the submitting shell's variables that a new job gets.

    Args:
        env: environment of the submitting shell.
        patterns: further names, or patterns as in a shell ("MY_*"); secrets, and names of GPUs, are matched by their
            full names only.
    """
    requested = set(patterns)

    def is_exported(name: str) -> bool:
        if is_job_variable(name):
            return False
        if name in requested:
            return True
        # Names of GPUs are those of this machine: `CUDA_VISIBLE_DEVICES=` of a login node would take a job's GPUs away.
        if name in VISIBLE or is_secret_name(name) or is_secret_value(env[name]):
            return False
        is_listed = name in _EXPORTED_NAMES or name.startswith(_EXPORTED_PREFIXES)
        return is_listed or any(fnmatch.fnmatchcase(name, pattern) for pattern in requested)

    return {name for name in env if is_exported(name)}


def node_name(env: Mapping[str, str]) -> str:
    """Returns the name under which Slurm knows this node, which `--exclude` wants: its NodeName, not its host name.

    The two may differ (an alias, or a host name with a domain). Outside a job it is the host name.
    """
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def step_id(env: Mapping[str, str]) -> str:
    """Returns Slurm's id of this process's step, e.g. "123.0"; "" outside of one."""
    job = env.get("SLURM_JOB_ID", "")
    step = env.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else ""
