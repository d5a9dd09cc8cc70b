from __future__ import annotations

import pytest

from slurm_train.slurm.job_variables import (
    command_environment,
    exported,
    job_environment,
    scrubbed,
    with_gpus_for,
)

OF_A_JOB = (
    "SLURM_JOB_ID SLURM_CPU_BIND SLURM_NTASKS SLURM_TIME_FORMAT SLURMD_NODENAME SBATCH_REQUEUE SBATCH_PARTITION "
    "SRUN_CPUS_PER_TASK SALLOC_QOS SUBMITIT_EXECUTOR RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RUN_ID ROLE_RANK PMIX_RANK OMPI_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID"
)
OF_THE_USER = (
    "SLURM_CONF SLURM_JWT PATH HOME NCCL_DEBUG OMP_NUM_THREADS CUDA_VISIBLE_DEVICES MY_RANK RANKS OMPI_MCA_btl "
    "PMIX_MCA_gds SQUEUE_FORMAT slurm_job_id PYTHONPATH"
)


def test_variables_of_an_enclosing_job_go_and_the_users_own_stay() -> None:
    names = f"{OF_A_JOB} {OF_THE_USER}".split()
    assert list(scrubbed(dict.fromkeys(names, "1"))) == OF_THE_USER.split()


IN_A_STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_SUBMIT_DIR": "/home/ada",
    "SLURM_CONF": "/c",
    "SLURMD_NODENAME": "node1",
    "SLURM_TRAIN_ATTEMPT": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_NTASKS": "1",
    "SLURM_NNODES": "1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_MEM_BIND": "local",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_TRES_PER_TASK": "gres/gpu:1",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_HINT": "nomultithread",
    "SLURM_OPTION_OF_A_NEWER_SLURM": "x",
    "SRUN_CPUS_PER_TASK": "1",
    "RANK": "0",
    "PATH": "/bin",
}


def test_in_a_shell_that_srun_started_the_options_of_its_step_are_left_behind() -> None:
    assert job_environment(IN_A_STEP) == {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": "/home/ada",
        "SLURM_CONF": "/c",
        "SLURMD_NODENAME": "node1",
        "SLURM_TRAIN_ATTEMPT": "3",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_OVERLAP": "1",
        "PATH": "/bin",
    }


def test_in_a_batch_script_what_sbatch_hands_on_to_srun_stays() -> None:
    of_batch = {"SLURM_JOB_ID": "77", "SLURM_HINT": "nomultithread", "SLURM_TASKS_PER_NODE": "4(x2)", "PATH": "/bin"}
    assert job_environment({**of_batch, "SRUN_CPUS_PER_TASK": "1", "RANK": "0"}) == of_batch


@pytest.mark.parametrize(
    ("total", "num_ranks", "expected"),
    [
        ("8", 4, "4"),
        ("8", 8, "8"),
        ("4", 8, "4"),
        ("a100:8", 4, "a100:4"),
        ("a100:2,v100:2", 1, "a100:2,v100:2"),
        (None, 4, None),
    ],
)
def test_ranks_ask_for_a_gpu_each_where_an_allocation_was_given_a_total(
    total: str | None, num_ranks: int, expected: str | None
) -> None:
    env = {} if total is None else {"SLURM_GPUS": total}
    assert with_gpus_for(env, num_ranks).get("SLURM_GPUS") == expected


def test_an_allocations_cpus_per_task_are_no_option_of_the_ranks() -> None:
    """What salloc --cpus-per-task=4 of 24.11 sets: with it, two ranks would ask for eight of a node's four CPUs."""
    of_salloc = {"SLURM_JOB_ID": "44", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "PATH": "/bin"}
    cpus = {"SLURM_CPUS_PER_TASK": "4", "SLURM_TRES_PER_TASK": "cpu=4"}
    assert job_environment(of_salloc | cpus) == of_salloc


def test_a_command_sees_neither_the_users_formats_nor_cut_off_arrays() -> None:
    env = {"PATH": "/bin", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x", "SINFO_PARTITION": "p", "SCANCEL_STATE": "R"}
    assert command_environment(env | {"SLURM_BITSTR_LEN": "64", "SLURM_CONF": "/c", "SLURM_JWT": "eyJ"}) == {
        "PATH": "/bin",
        "SLURM_CONF": "/c",
        "SLURM_JWT": "eyJ",
        "SLURM_BITSTR_LEN": "0",
        "LC_ALL": "C",
    }


SHELL = {
    "PATH": "/bin",
    "HOME": "/home/ada",
    "CUDA_HOME": "/cuda",
    "BASH_FUNC_module%%": "() { :; }",
    "HF_HOME": "/hf",
    "HF_TOKEN": "t",
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": "k",
    "MLFLOW_TRACKING_URI": "https://ada:pw@host/",
    "https_proxy": "http://proxy:80",
    "HTTPS_PROXY": "http://ada:pw@proxy:80",
    "LD_PRELOAD": "/evil.so",
    "MY_DATA": "/data",
    "MY_PASSWORD": "p",
    "SLURM_JOB_ID": "7",
    "SBATCH_REQUEUE": "1",
    "RANK": "0",
    "SLURM_JWT": "eyJ",
    "CUDA_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "3",
}
PLAIN = {"PATH", "HOME", "CUDA_HOME", "BASH_FUNC_module%%", "HF_HOME", "WANDB_MODE", "https_proxy"}


@pytest.mark.parametrize(
    ("patterns", "more"),
    [
        ([], set()),
        (["MY_*"], {"MY_DATA"}),
        (["WANDB_API_KEY"], {"WANDB_API_KEY"}),
        (["*"], {"MY_DATA", "LD_PRELOAD"}),
        (["CUDA_VISIBLE_DEVICES", "ROCR_*"], {"CUDA_VISIBLE_DEVICES"}),
        (["MLFLOW_TRACKING_URI", "HTTPS_PROXY"], {"MLFLOW_TRACKING_URI", "HTTPS_PROXY"}),
        (["RANK", "SLURM_JOB_ID", "SBATCH_*", "SLURM_JWT"], set()),
    ],
)
def test_what_is_listed_goes_and_a_secret_only_by_its_full_name(patterns: list[str], more: set[str]) -> None:
    assert exported(SHELL, patterns) == PLAIN | more
