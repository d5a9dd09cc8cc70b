"""`supervise RUN_DIR -- srun ...`: what the batch script calls; owns one attempt from its opening to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slurm_train.errors import ConfigError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.job_variables import job_environment
from slurm_train.supervise.main import supervise_in_job
from slurm_train.tools.trackers import build_trackers


def main(words: Sequence[str]) -> int:
    """Runs an attempt inside an allocation and returns the exit code of the batch script."""
    if len(words) < 3 or words[1] != "--":
        raise ConfigError(f"supervise cannot read {list(words)}", hint="supervise RUN_DIR -- srun ...")
    return supervise_in_job(RunDirectory(Path(words[0])), words[2:], job_environment(os.environ), build_trackers)
