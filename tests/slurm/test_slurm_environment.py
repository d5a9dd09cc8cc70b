from __future__ import annotations

import pytest

from slurm_train.slurm.environment import command_environment, is_job_variable, scrubbed


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID",
        "SLURM_CPU_BIND",
        "SLURM_NTASKS",
        "SLURM_TIME_FORMAT",
        "SLURMD_NODENAME",
        "SBATCH_REQUEUE",
        "SBATCH_PARTITION",
        "SRUN_CPUS_PER_TASK",
        "SALLOC_QOS",
        "SUBMITIT_EXECUTOR",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "ROLE_RANK",
        "PMI_RANK",
        "PMI2_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
    ],
)
def test_variables_of_an_enclosing_job_go(name: str) -> None:
    assert is_job_variable(name)
    assert scrubbed({name: "1", "HOME": "/home/user"}) == {"HOME": "/home/user"}


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_CONF",
        "PATH",
        "HOME",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "MY_RANK",
        "RANKS",
        "OMPI_MCA_btl",
        "PMIX_MCA_gds",
        "SQUEUE_FORMAT",
        "slurm_job_id",
        "PYTHONPATH",
    ],
)
def test_the_users_own_variables_stay(name: str) -> None:
    assert scrubbed({name: "1"}) == {name: "1"}


def test_the_input_is_not_changed() -> None:
    env = {"RANK": "3", "A": "1"}
    assert scrubbed(env) == {"A": "1"}
    assert env == {"RANK": "3", "A": "1"}


def test_a_command_sees_neither_the_users_formats_nor_cut_off_arrays() -> None:
    env = {"PATH": "/bin", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x", "SINFO_PARTITION": "p", "SCANCEL_STATE": "R"}
    assert command_environment(env | {"SLURM_BITSTR_LEN": "64", "SLURM_CONF": "/c"}) == {
        "PATH": "/bin",
        "SLURM_CONF": "/c",
        "SLURM_BITSTR_LEN": "0",
        "LC_ALL": "C",
    }
