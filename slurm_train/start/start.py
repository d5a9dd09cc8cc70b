"""The order in which every run is started: refuse an active run, compare with the files on disk, ask Slurm, write,
remove the locks of processes that no longer exist, submit, record.

`Start.write` ends after the files are written, for runs on this machine or in an allocation. Nothing is written unless
Slurm would accept the job. From the check that the run is not active until the job id is recorded, one submitter holds
the run (`submission.json`); files for the ranks are written while the run's own lock is held. `start_sweep` does the
same for many runs at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from slurm_train.code.job_python import require_lasting_python
from slurm_train.code.snapshot import MOST_CHANGES_SHOWN, Source, without_written_files
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ClusterError, ConfigError, RunError
from slurm_train.formatting import shorten
from slurm_train.plan.plan import RunPlan, node_shares
from slurm_train.plan.shell_choices import take_shell_choices
from slurm_train.plan.shell_variables import variable_notes
from slurm_train.request.acceptance import (
    acceptable_plan,
    exclude_flags,
    expedite_flags,
    refused_by,
    require_acceptable,
    require_room,
    require_slurm,
    step_verdict,
)
from slurm_train.request.batch_script import job_request, renewed_warning
from slurm_train.request.rank_command import RankCommand
from slurm_train.rundir.jobs import clear_dead, jobs_elsewhere, named, read_job, record_job
from slurm_train.rundir.lookup import find_run, find_sweep, remember_root, root_of
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.rundir.sweep import read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_request import JobRequest
from slurm_train.start.drift import check_drift
from slurm_train.start.write import write_run
from slurm_train.status.activity import find_active, holder_lives, submitting, writing


class Start:
    """Starts runs for one command line.

    Args:
        words: the command line, which the provenance of the runs records.
        env: the environment.
        say: prints a line for the person.
        accept: changes of a run in progress that the person accepts.
        after: runs and sweeps that must succeed before Slurm starts the job.
    """

    def __init__(
        self,
        *,
        words: Sequence[str],
        env: Mapping[str, str],
        say: Callable[[str], None],
        accept: Collection[str] = (),
        after: Sequence[str] = (),
        commands: SlurmCommands | None = None,
    ) -> None:
        self.words = words
        self.env = env
        self.say = say
        self.accept = accept
        self.after = after
        self.commands = commands or SlurmCommands(env)
        self.shares = node_shares(env, self.commands)
        """Slurm's answers about nodes, for the plan of the run."""

    def dependency(self, config: RunConfig, root: Path) -> str:
        """Returns sbatch's dependency on the runs in `after`, e.g. "afterok:12:13"; "" if all of them are finished.

        Args:
            config: of the run that waits.
            root: of the runs.

        Raises:
            ConfigError: the run is not submitted to Slurm, or has its own dependency in `cluster.sbatch`.
            RunError: there is no such run, or it ended without a result.
        """
        if not self.after:
            return ""
        setting = f"after={','.join(self.after)}"
        if config.cluster is None or config.launch != "slurm":
            hint = "add +cluster=NxG, or drop after="
            raise ConfigError(
                f"{setting} makes a job wait in Slurm's queue, but this run would start at once", hint=hint
            )
        if "dependency" in config.cluster.sbatch:
            raise ConfigError(f"{setting} and cluster.sbatch.dependency exclude each other", hint="drop one of the two")
        require_slurm(self.commands, self.env)
        runs = self._runs_before(root)
        active = find_active(runs, self.commands)
        jobs: list[str] = []
        for run in runs:
            # The result is checked after the jobs: a run that ends in between is no longer active but has a result.
            if run.result.exists():
                continue
            if run in active and active[run].elsewhere:
                raise RunError(
                    f"{setting}: {named(active[run].elsewhere)} may train {run.name}/{run.run_id}, and a job of this "
                    "cluster cannot wait for it",
                    hint=f"`status {run.run_id}` there says how it is; type this when it is finished",
                )
            if run not in active or not active[run].jobs:
                raise RunError(
                    f"{setting}: {run.name}/{run.run_id} is not finished, and no job of it is queued or running",
                    hint=f"`status {run.run_id}` says why, `resume {run.run_id}` continues it",
                )
            # The newest of several jobs ends last: it waits for the others, or continues them.
            newest = active[run].jobs[-1]
            if newest not in jobs:
                jobs.append(newest)
        self.say(f"  after         {'job ' + ', '.join(jobs) if jobs else 'already finished; no dependency'}")
        return f"afterok:{':'.join(jobs)}" if jobs else ""

    def _runs_before(self, root: Path) -> list[RunDirectory]:
        runs: list[RunDirectory] = []
        for name in self.after:
            place = root_of(name, root, self.env)
            sweep = find_sweep(place, name)
            if sweep is None:
                runs.append(find_run(place, name))
            else:
                runs += [element.run for element in read_table(sweep)]
        return runs

    def submit(self, plan: RunPlan, source: Source | RunDirectory | None) -> str:
        """Writes a run, submits it and returns the job id; `write_provenance` is still to be called.

        Args:
            plan: the run.
            source: its code, or the run whose snapshot it shares; None: its existing snapshot.

        Raises:
            ClusterError: no Slurm here, or it refuses the request.
            RunError: the run is active already, or it would not be the same training.
        """
        config = plan.config
        run = plan.run
        dependency = self.dependency(config, run.place)
        require_slurm(self.commands, self.env)
        with submitting(run, self.commands):
            request = self._write(plan, source)
            assert request is not None
            flags = [f"--dependency={dependency}"] if dependency else []
            return self.submit_written(run, config, request, flags=flags)

    def write(
        self, plan: RunPlan, source: Source | RunDirectory | None, *, inside: str | None = None
    ) -> JobRequest | None:
        """Writes all files for a run's ranks, and returns what its job asks for; None without a cluster.

        Args:
            plan: the run.
            source: as for `submit`.
            inside: id of the job whose allocation the run will use; a run that was started there before is not refused.

        Raises:
            ClusterError: Slurm refuses the request, or the allocation is too small.
            RunError: the run is active already, or it would not be the same training.
        """
        with submitting(plan.run, self.commands, inside=inside):
            request = self._write(plan, source, inside=inside)
        self.write_provenance(plan.run.provenance, source, plan.config)
        return request

    def _write(
        self, plan: RunPlan, source: Source | RunDirectory | None, *, inside: str | None = None
    ) -> JobRequest | None:
        """Compares, asks Slurm and writes; the caller holds the run as its submitter."""
        run = plan.run
        is_submitted = plan.config.cluster is not None
        require_lasting_python(plan.config)
        self.say_variables(plan.config, Path(plan.directory) if isinstance(source, Source) else (source or run).code)
        ranks = RankCommand(plan.config, run, plan.directory)
        request = job_request(plan) if is_submitted else None
        # This refuses an impossible container before anything is written.
        ranks.words(python="python")
        if isinstance(source, Source) and "code" not in self.accept and list_checkpoints(run.checkpoints):
            source, written = without_written_files(run, source)
            if written:
                names = shorten(written, MOST_CHANGES_SHOWN)
                self.say(f"not copied into the run: {names} (new since it began; it may have written them itself)")
        code = source if isinstance(source, Source) else None
        change = check_drift(plan, code, accept=self.accept, say=self.say)
        if inside is not None:
            require_room(plan, self.commands.show_job(inside))
        elif is_submitted:
            fitting, request, remarks = acceptable_plan(plan, self.commands)
            if fitting is not plan:
                self.say(f"  CPUs          {fitting.cpus.reason}")
            self.say_remarks(remarks)
            plan = fitting
            self._say_refused_here(plan)
        ranks.make_mount_points()
        with writing(run, self.commands, inside=inside):
            renamed = write_run(plan, source, request=request, change=change)
        self.say_renamed(run, renamed)
        remember_root(run.place, self.env)
        return request

    def _say_refused_here(self, plan: RunPlan) -> None:
        """Prints what the srun of this machine says of flags for plug-ins that the nodes may have."""
        _, words = step_verdict(plan, self.commands)
        if words:
            self.say(f"  srun          {refused_by(words)}")

    def say_remarks(self, remarks: Sequence[str]) -> None:
        """Prints what is to be known of the start and the end of a job."""
        for remark in remarks:
            self.say(f"  Slurm         {remark}")

    def say_renamed(self, run: RunDirectory, names: Sequence[str]) -> None:
        """Prints which files in a run's copy of the code were renamed to make room for new code, if any were."""
        if names:
            self.say(f"renamed in {run.code}, since new code takes their place: {shorten(names, MOST_CHANGES_SHOWN)}")

    def say_variables(self, config: RunConfig, code: Path) -> None:
        """Prints which variables do not arrive as the words or the program expect.

        Args:
            config: of the run.
            code: the folder of its code.
        """
        for line in variable_notes(config, cwd=code, env=self.env):
            self.say(line)

    def resubmit(self, run: RunDirectory) -> str:
        """Submits a run's script again as it is on disk, and returns the job id.

        Raises:
            RunError: the run is active.
            ClusterError: no Slurm here, no script, or Slurm refuses.
        """
        require_slurm(self.commands, self.env)
        with submitting(run, self.commands):
            if not run.submit_script.is_file():
                raise ClusterError(f"{run.submit_script} is missing", hint="type the run's first command again")
            request = JobRequest.read(run.submit_script)
            config = load_config(run.config)
            self.say_variables(config, run.code)
            self.say_remarks(require_acceptable(request, self.commands))
            _, remarks = take_shell_choices(config, None, self.env)
            for remark in remarks:
                self.say(f"  {remark}")
            run.stop_file.unlink(missing_ok=True)
            return self.submit_written(run, config, request, flags=renewed_warning(config, run))

    def submit_written(
        self,
        run: RunDirectory,
        config: RunConfig,
        request: JobRequest,
        *,
        flags: Sequence[str] = (),
        excludes_bad_nodes: bool = True,
    ) -> str:
        """Submits a run's job, records it and returns its id.

        Args:
            run: the run, which is on disk; the caller holds it as its submitter.
            config: says which variables the job gets.
            request: the job.
            flags: further flags of sbatch.
            excludes_bad_nodes: leave out nodes that were found bad recently.

        Raises:
            ClusterError: sbatch refused it.
        """
        # Imported late: a run that is trained on this machine needs no submitit.
        from slurm_train.request.submission import submit_request

        if excludes_bad_nodes:
            flags = [*flags, *self.exclude_flags(request, run)]
        flags = [*flags, *expedite_flags(request, config, self.commands)]
        self.clear_dead_lock(run)
        previous = read_job(run)
        # Before the job is in the queue: what it says is recorded with the job.
        cluster = self.commands.cluster
        export = config.cluster.export if config.cluster is not None else ()
        job_id = submit_request(request, folder=run.submitted, env=self.env, flags=flags, export=export)
        record_job(run, job_id, cluster=cluster)
        if previous is not None and previous.job_id not in jobs_elsewhere(previous, None, cluster=cluster):
            with contextlib.suppress(ClusterError):
                self.commands.hand_dependents(previous.job_id, job_id)
        return job_id

    def clear_dead_lock(self, run: RunDirectory) -> None:
        """Removes the lock of a run if its holder is dead; a node could not check a process of this machine."""
        clear_dead(run.lock, is_alive=lambda holder: holder_lives(holder, self.commands))

    def exclude_flags(self, request: JobRequest, run: RunDirectory) -> list[str]:
        """Returns flags of sbatch or salloc that leave out nodes which were found bad recently; prints these nodes."""
        flags, text = exclude_flags(request, run, self.env)
        if text:
            self.say(f"  {text}")
        return flags

    def write_provenance(self, path: Path, source: Source | RunDirectory | None, config: RunConfig) -> None:
        """Writes `provenance.json` of code that was copied; to list the packages takes a moment."""
        from slurm_train.code.provenance import write_provenance

        if isinstance(source, Source):
            slurm_version = None if config.cluster is None else self.commands.version()
            write_provenance(path, source, words=self.words, slurm=slurm_version, config=config)
