"""Submits a complete script to Slurm by submitit; the only module that imports submitit.

submitit's own script, pickles and signal handlers are not used: nothing is pickled, the script is the text
of a `JobRequest`, and a job is identified by its run directory. Only submitit's submission path and Job handle are
used.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from slurm_train.code.job_python import with_absolute_python_path
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ClusterError
from slurm_train.request.acceptance import expedite_flags
from slurm_train.rundir.files import make_folder, write_durable
from slurm_train.rundir.jobs import jobs_elsewhere, number_of, read_job, record_job
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import cluster_of
from slurm_train.slurm.answers import Submitted, in_words, numbers_in, said, submitted_jobs
from slurm_train.slurm.commands import Finished, SlurmCommands, is_away, run_program
from slurm_train.slurm.job_request import JobRequest
from slurm_train.slurm.job_variables import TOKEN, exported
from slurm_train.slurm.refusals import read_verdict

# sbatch itself retries for up to two minutes while the controller is too busy to accept jobs.
_TIMEOUT_S = 300.0
# A new job is in the queue at once, but a busy controller may list it only after a moment.
_LOOKS = 3
_PAUSE_S = 1.0


class UnreadAnswer(ClusterError):
    """It is not known whether Slurm has accepted a job; its files must be kept."""


class ScriptExecutor(submitit.SlurmExecutor):
    """A submitit executor that submits a script as it is.

    Args:
        folder: where submitit keeps its copy of what was submitted.
        request: the job.
        env: environment of the future job; sbatch gets only the exported variables, since it passes on all it has.
        commands: Slurm, which is asked if the answer of sbatch cannot be read.
        flags: further flags of sbatch, which override the script's own.
        export: further exported variables, see `slurm.job_variables`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        request: JobRequest,
        env: Mapping[str, str],
        commands: SlurmCommands,
        flags: Sequence[str] = (),
        export: Sequence[str] = (),
    ) -> None:
        super().__init__(folder)
        self.cluster = ""
        """The other cluster that has accepted the job, if sbatch names one, else ""."""
        self._request = request
        self._commands = commands
        self._flags = list(flags)
        names = exported(env, export)
        self._env = with_absolute_python_path({name: env[name] for name in names}, Path.cwd())
        self._token = env.get(TOKEN)

    def submit_script(self) -> submitit.Job[Any]:
        """Submits the script and returns submitit's handle of the job.

        Raises:
            ClusterError: sbatch refused it.
            UnreadAnswer: it is not known whether sbatch accepted it.
        """
        file = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        write_durable(file, self._request.text())
        submitted = self._submitted(self._call_sbatch(file), file)
        self.cluster = submitted.cluster
        job = self.job_class(folder=self.folder, job_id=submitted.job_id, tasks=[0])
        job.paths.move_temporary_file(file, "submission_file", keep_as_symlink=True)
        return job

    def _call_sbatch(self, file: Path) -> Finished:
        # submitit's own _submit_command is not used: it gives sbatch the environment of this process.
        try:
            if self._token is None:
                return self._run_sbatch(self._flags, file, self._env)
            # Whatever --export says, a job gets the SLURM_* of sbatch, but under --export-file only what is in there.
            with os.fdopen(os.memfd_create("environment of a job"), "wb") as variables:
                variables.writelines(os.fsencode(f"{name}={value}\0") for name, value in self._env.items())
                variables.flush()
                flags = [*self._flags, f"--export-file=/proc/{os.getpid()}/fd/{variables.fileno()}"]
                return self._run_sbatch(flags, file, {**self._env, TOKEN: self._token})
        except subprocess.TimeoutExpired:
            return Finished(-1, "", f"sbatch did not end within {_TIMEOUT_S:g} s: socket timed out")
        except OSError as err:
            file.unlink()
            raise ClusterError(f"sbatch cannot be started: {err}", hint="see `which sbatch` and `ulimit -a`") from err

    @staticmethod
    def _run_sbatch(flags: Sequence[str], file: Path, env: Mapping[str, str]) -> Finished:
        return run_program(["sbatch", "--parsable", *flags, str(file)], env=env, timeout_s=_TIMEOUT_S)

    def _submitted(self, finished: Finished, file: Path) -> Submitted:
        """Returns the job that sbatch has submitted.

        A wrapper may hide the id, or end with another exit code than sbatch. If the network lost the answer, the job
        may still have been submitted. In these cases the queue decides: a job with exactly this script is the job.
        """
        printed = submitted_jobs(finished.stdout)
        has_ended_well = finished.return_code == 0
        if has_ended_well and len(printed) == 1 and not printed[0].cluster:
            return printed[0]
        may_be_late = not printed and (has_ended_well or _is_lost(finished))
        queued, is_sure = self._look_up(file, finished.stdout, looks=_LOOKS if may_be_late else 1)
        if queued is not None:
            return queued
        if has_ended_well and printed:
            # It is not in the queue of this cluster: it has ended, or another cluster has it.
            return printed[-1]
        if not has_ended_well and not _is_lost(finished) and (is_sure or not printed):
            file.unlink()
            verdict = read_verdict(finished.return_code, finished.stderr, finished.stdout)
            raise ClusterError(f"sbatch refused the job: {verdict.message}", hint=verdict.advice)
        output = in_words(said(finished.stdout, finished.stderr)) or "nothing"
        raise UnreadAnswer(
            f"whether Slurm has the job is not known: sbatch ended with exit code {finished.return_code} and said: "
            f"{output}",
            hint="`status` looks for it again; if the site gave it another name, `squeue --me -o '%i %j %o'` shows it: "
            f"cancel it before you submit it again; its script is {file}",
        )

    def _look_up(self, file: Path, stdout: str, *, looks: int) -> tuple[Submitted | None, bool]:
        """Returns the queued job with this script, None if there is none, and whether Slurm has answered.

        A wrapper may submit a copy of the script with further lines. Then the job is the one with the script's job name
        whose number is printed anywhere in the output of sbatch.
        """
        is_sure = False
        for remaining in reversed(range(looks)):
            with contextlib.suppress(ClusterError):
                scripts = self._commands.own_scripts()
                is_sure = True
                numbers = [number_of(job_id) for job_id, script in scripts.items() if script == str(file)]
                printed = numbers_in(stdout)
                if not numbers and printed:
                    numbers = [number for number in self._with_this_name() if str(number) in printed]
                if numbers:
                    return Submitted(str(max(numbers))), is_sure
            if remaining:
                time.sleep(_PAUSE_S)
        return None, is_sure

    def _with_this_name(self) -> list[int]:
        """Returns the numbers of this user's jobs with the name of this one."""
        names = self._commands.own_names() if self._request.name else {}
        return [number_of(job_id) for job_id, name in names.items() if name == self._request.name]


def _is_lost(finished: Finished) -> bool:
    """Returns whether the controller may have accepted a job although sbatch got no answer."""
    words = finished.stderr.lower()
    was_connected = "connect failure" not in words and "connection refused" not in words
    return finished.return_code < 0 or (is_away(words) and was_connected)


def submit_request(
    request: JobRequest, *, folder: Path, env: Mapping[str, str], flags: Sequence[str] = (), export: Sequence[str] = ()
) -> str:
    """Submits a job and returns its id; see `ScriptExecutor` for the arguments.

    Raises:
        ClusterError: sbatch refused it, or gave it to another cluster, where it was cancelled.
        UnreadAnswer: it is not known whether Slurm has accepted it.
    """
    make_folder(folder, within=folder.parent.parent)
    commands = SlurmCommands(env)
    try:
        executor = ScriptExecutor(folder, request=request, env=env, commands=commands, flags=flags, export=export)
    except RuntimeError as err:
        raise ClusterError(f"the job cannot be submitted: {err}", hint="type this on a login node") from err
    job = executor.submit_script()
    if executor.cluster:
        _refuse_other_cluster(str(job.job_id), executor.cluster, commands)
    return str(job.job_id)


def submit_run(
    run: RunDirectory,
    request: JobRequest,
    config: RunConfig,
    *,
    env: Mapping[str, str],
    commands: SlurmCommands,
    flags: Sequence[str] = (),
    continues: str | None = None,
) -> str:
    """Submits a job of a run, records it, and returns its id; jobs that wait for the one before it wait for this one.

    Args:
        run: the run, which is on disk.
        request: the job.
        config: the run's.
        env: the environment.
        commands: Slurm.
        flags: further flags of sbatch.
        continues: the job that submits it, of which it takes over all variables; None: the person's command.

    Raises:
        ClusterError: as `submit_request`.
    """
    previous = read_job(run)
    # Before the job is in the queue: what it says is recorded with the job.
    cluster = commands.cluster if continues is None else cluster_of(env)
    export: Sequence[str] = tuple(env)
    waited_for = continues
    if continues is None:
        export = config.slurm.export
        if previous is not None and previous.job_id not in jobs_elsewhere(previous, None, cluster=cluster):
            waited_for = previous.job_id
    flags = [*flags, *expedite_flags(request, config, commands)]
    job_id = submit_request(request, folder=run.submitted, env=env, flags=flags, export=export)
    record_job(run, job_id, cluster=cluster, continues=continues)
    # Slurm counts a job that another takes over from as failed: jobs that wait for its success would wait for ever.
    if waited_for is not None:
        with contextlib.suppress(ClusterError):
            commands.hand_dependents(waited_for, job_id)
    return job_id


def _refuse_other_cluster(job_id: str, cluster: str, commands: SlurmCommands) -> None:
    this_cluster = commands.show_config().get("ClusterName", "")
    if cluster == this_cluster:
        return
    try:
        commands.cancel([job_id], cluster=cluster)
    except ClusterError as err:
        raise UnreadAnswer(
            f"sbatch gave the job to cluster {cluster} as job {job_id}, and it cannot be cancelled: {err.message}",
            hint=f"scancel --clusters={cluster} {job_id}; then submit from a login node of {cluster}",
        ) from err
    raise ClusterError(
        f"sbatch gave the job to cluster {cluster} as job {job_id}, which is cancelled: status, cancel and requeue ask "
        f"the cluster of this machine ({this_cluster or 'it does not tell its name'})",
        hint=f"submit from a login node of {cluster}; look for --clusters or -M in submit.sh and in sbatch wrappers",
    )
