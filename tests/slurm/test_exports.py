"""What travels from a login shell into a job."""

from __future__ import annotations

import pytest

from slurm_train.slurm.exports import exported

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
}
PLAIN = {"PATH", "HOME", "CUDA_HOME", "BASH_FUNC_module%%", "HF_HOME", "WANDB_MODE", "https_proxy"}


@pytest.mark.parametrize(
    ("patterns", "more"),
    [
        ([], set()),
        (["MY_*"], {"MY_DATA"}),
        (["WANDB_API_KEY"], {"WANDB_API_KEY"}),
        (["*"], {"MY_DATA", "LD_PRELOAD"}),
        (["MLFLOW_TRACKING_URI", "HTTPS_PROXY"], {"MLFLOW_TRACKING_URI", "HTTPS_PROXY"}),
        (["RANK", "SLURM_JOB_ID", "SBATCH_*"], set()),
    ],
)
def test_what_is_listed_goes_and_a_secret_only_by_its_full_name(patterns: list[str], more: set[str]) -> None:
    assert exported(SHELL, patterns) == PLAIN | more
