"""Hands a finished script to Slurm through submitit; the one module that imports it.

submitit's own script, pickles and signal handlers are not used: nothing is pickled, the script is ours, and a job is
known by its run directory. What is used is its submission path and its Job handle.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import CommandFunction, FailedJobError, FailedSubmissionError

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import make_folder, write_durable
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import exported


class ScriptExecutor(submitit.SlurmExecutor):
    """A submitit executor that submits a script as it is.

    Args:
        folder: where submitit keeps its copy of what was submitted.
        script: the script's text.
        env: environment of the job to be; what does not travel is withheld from sbatch, which would pass on all it has.
        flags: further words for sbatch, which win over the script's own.
        export: further variables that travel, see `slurm.job_variables`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        script: str,
        env: Mapping[str, str],
        flags: Sequence[str] = (),
        export: Sequence[str] = (),
    ) -> None:
        super().__init__(folder)
        self.cluster = ""
        """The cluster that has taken the job, where sbatch names one."""
        self._script = script
        self._flags = list(flags)
        self._env = {name: env[name] for name in exported(env, export)}

    def submit_script(self) -> submitit.Job[Any]:
        """Submits the script and returns submitit's handle of the job."""
        file = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        write_durable(file, self._script)
        # As submitit's own _submit_command does, but that would give sbatch the environment of this process.
        command = ["sbatch", "--parsable", *self._flags, str(file)]
        said = CommandFunction(command, verbose=False, env=self._env)()
        job = self.job_class(folder=self.folder, job_id=self._get_job_id_from_submission_command(said), tasks=[0])
        job.paths.move_temporary_file(file, "submission_file", keep_as_symlink=True)
        return job

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]  # static there
        text = string.decode() if isinstance(string, bytes) else string
        # --parsable prints "id" or "id;cluster"; a site's wrapper may print more before it.
        match = re.search(r"^(\d+)(?:;([\w.-]+))?$", text, re.MULTILINE)
        if match is None:
            raise FailedSubmissionError(f"sbatch printed no job id: {text!r}")
        self.cluster = match[2] or ""
        return match[1]


def submit_script(
    script: str, *, folder: Path, env: Mapping[str, str], flags: Sequence[str] = (), export: Sequence[str] = ()
) -> str:
    """Submits a script and returns the job id; see `ScriptExecutor` for the arguments.

    Raises:
        ClusterError: sbatch refused it, or gave it to another cluster, where it is cancelled.
    """
    make_folder(folder)
    try:
        executor = ScriptExecutor(folder, script=script, env=env, flags=flags, export=export)
        job = executor.submit_script()
    except (FailedJobError, FailedSubmissionError, RuntimeError) as err:
        lines = [line for line in str(err).splitlines() if "sbatch:" in line] or str(err).splitlines()[-1:]
        reason = lines[-1].strip() if lines else type(err).__name__
        raise ClusterError(
            f"sbatch refused the job: {reason}", hint="`plan` with the same words shows the script"
        ) from err
    if executor.cluster:
        _refuse_other_cluster(str(job.job_id), executor.cluster, SlurmCommands(env))
    return str(job.job_id)


def _refuse_other_cluster(job_id: str, cluster: str, commands: SlurmCommands) -> None:
    here = commands.show_config().get("ClusterName", "")
    if cluster == here:
        return
    commands.cancel([job_id], cluster=cluster)
    raise ClusterError(
        f"sbatch gave the job to cluster {cluster} as job {job_id}, which is cancelled: status, cancel and requeue ask "
        f"the cluster of this machine ({here or 'it does not tell its name'})",
        hint=f"submit from a login node of {cluster}; look for --clusters or -M in submit.sh and in sbatch wrappers",
    )
