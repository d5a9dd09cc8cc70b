"""Which of the submitting shell's variables travel into a job: those on a list, not all of them.

sbatch would take the whole environment, and slurmctld keeps it on disk, and with AccountingStoreFlags=job_env in the
database as well. What goes is what programs need to start and libraries are tuned by; what is called or looks like a
secret goes only if it is named in full.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from slurm_train.config.secrets import is_secret_name, is_secret_value
from slurm_train.slurm.environment import is_job_variable

_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR", "FORCE_COLOR"),
        *("TMPDIR", "TMP", "TEMP", "SCRATCH", "WORK", "PROJECT", "BASH_ENV", "ENV", "VIRTUAL_ENV", "SLURM_CONF"),
        *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH", "CC", "CXX", "LOADEDMODULES", "_LMFILES_"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "KRB5CCNAME", "MUNGE_SOCKET"),
    }
)
_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "CONDA_", "_CE_", "MAMBA_", "PYENV_", "MODULE", "LMOD_", "__LMOD_", "_ModuleTable"),
    # Functions of the shell, `module` among them.
    *("BASH_FUNC_", "EB", "SPACK_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "FI_", "IBV_"),
    *("PMIX_MCA_", "OMPI_MCA_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH", "PYTORCH_"),
    *("TRITON_", "ROCR_", "HIP_", "HSA_", "RCCL_", "MIOPEN_", "HF_", "TRANSFORMERS_", "DATASETS_", "TOKENIZERS_"),
    *("WANDB_", "MLFLOW_", "TRACKIO_", "SINGULARITY", "APPTAINER", "ENROOT_", "PYXIS_", "HYDRA_"),
)


def exported(env: Mapping[str, str], patterns: Iterable[str] = ()) -> set[str]:
    """Returns the names of the variables that a new job gets.

    Args:
        env: environment of the submitting shell.
        patterns: further names, or patterns as in a shell ("MY_*"); a secret is matched by its full name only.
    """
    asked = set(patterns)
    globs = [pattern for pattern in asked if any(sign in pattern for sign in "*?[")]

    def goes(name: str) -> bool:
        if is_job_variable(name):
            return False
        if name in asked:
            return True
        if is_secret_name(name) or is_secret_value(env[name]):
            return False
        return name in _NAMES or name.startswith(_PREFIXES) or any(fnmatch.fnmatchcase(name, glob) for glob in globs)

    return {name for name in env if goes(name)}
