"""The order in which every run is started: refuse an active run, compare with the files on disk, ask Slurm, write,
remove the locks of processes that no longer exist, submit, record.

A `Batch` is what is held and written after the first half, planned anew (`Starter.fresh`) or as it is on disk
(`Starter.as_written`); `start_sweep` makes one of the runs of a sweep. Where it goes from there is the caller's: into
the queue (`Batch.submit`), into an allocation, or onto this machine. Nothing is written unless Slurm would accept the
job. From the check that the run is not active until the job id is recorded, one submitter holds the run
(`submission.json`); files for the ranks are written while the run's own lock is held.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from slurm_train.code.job_python import require_lasting_python
from slurm_train.code.snapshot import MOST_CHANGES_SHOWN, Source, without_written_files
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError, RunError
from slurm_train.formatting import shorten
from slurm_train.plan.plan import RunPlan, ask_node_cpus
from slurm_train.plan.shell_choices import take_shell_choices
from slurm_train.plan.shell_variables import variable_notes
from slurm_train.request.acceptance import (
    acceptable_plans,
    exclude_flags,
    refused_by,
    require_acceptable,
    require_room,
    require_slurm,
    step_verdict,
)
from slurm_train.request.arrays import ArrayPlan, submit_arrays
from slurm_train.request.batch_script import job_request, renewed_warning
from slurm_train.request.rank_command import RankCommand
from slurm_train.rundir.events import AcceptedChange
from slurm_train.rundir.jobs import clear_dead, named, read_script_of
from slurm_train.rundir.lookup import find_run, find_sweep, remember_root, root_of
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_request import JobRequest
from slurm_train.start.drift import check_drift
from slurm_train.start.write import write_run
from slurm_train.status.activity import find_active, holder_lives, refuse_active, submitting, writing

T = TypeVar("T")


class Starter:
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
        self.node_cpus = ask_node_cpus(env, self.commands)
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
        if not config.is_submitted:
            hint = "add +cluster=NxG, or drop after="
            raise ConfigError(
                f"{setting} makes a job wait in Slurm's queue, but this run would start at once", hint=hint
            )
        if "dependency" in config.slurm.sbatch:
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

    # --- one run ---

    @contextlib.contextmanager
    def fresh(
        self,
        plan: RunPlan,
        source: Source | RunDirectory | None,
        *,
        leaves_out_bad_nodes: bool = True,
    ) -> Iterator[Batch]:
        """Holds a run, and yields it written as planned.

        Args:
            plan: the run.
            source: its code, or the run whose snapshot it shares; None: its existing snapshot.
            leaves_out_bad_nodes: its job leaves out nodes that were found bad recently.

        Raises:
            ClusterError: no Slurm here, it refuses the request, or the allocation is too small.
            RunError: the run is active already, or it would not be the same training.
        """
        run = plan.run
        uses_slurm = plan.config.uses_cluster
        dependency = self.dependency(plan.config, run.place)
        if uses_slurm:
            require_slurm(self.commands, self.env)
        # The job whose allocation the run will use; a run that was started there before is not refused.
        waits_here = uses_slurm and not plan.config.is_submitted
        inside = self.env.get("SLURM_JOB_ID") if waits_here else None
        with submitting(run, self.commands, inside=inside):
            require_lasting_python(plan.config)
            code = source if isinstance(source, Source) else None
            self.say_variables(
                plan.config, Path(plan.directory) if isinstance(source, Source) else (source or run).code
            )
            ranks = RankCommand(plan.config, run, plan.directory)
            # This refuses an impossible container before anything is written.
            ranks.words(python="python")
            if code is not None and "code" not in self.accept and list_checkpoints(run.checkpoints):
                code, written = without_written_files(run, code)
                if written:
                    names = shorten(written, MOST_CHANGES_SHOWN)
                    self.say(f"not copied into the run: {names} (new since it began; it may have written them itself)")
            change = check_drift(plan, code, accept=self.accept, say=self.say)
            request = None
            if inside is not None:
                request = job_request(plan)
                require_room(plan, self.commands.show_job(inside))
            elif uses_slurm:
                (plan,), (request, remarks) = self.acceptable([plan], self._ask_for_run)
                self.say_remarks(remarks)
                self._say_refused_here(plan)
            ranks.make_mount_points()
            self.write(plan, code or source, request, change=change, inside=inside)
            remember_root(run.place, self.env)
            yield Batch(
                start=self,
                path=run.path,
                config=plan.config,
                elements=(Element(run=run),),
                requests=() if request is None else ((run, request),),
                flags=(f"--dependency={dependency}",) if dependency else (),
                leaves_out_bad_nodes=leaves_out_bad_nodes,
                source=source if isinstance(source, Source) else None,
                provenance=run.provenance,
            )

    @contextlib.contextmanager
    def as_written(self, run: RunDirectory) -> Iterator[Batch]:
        """Holds a run, and yields it as it is on disk.

        Raises:
            RunError: the run is active.
            ClusterError: no Slurm here, no script, or Slurm refuses.
        """
        config = load_config(run.config)
        batch = Batch(start=self, path=run.path, config=config, elements=(Element(run=run),), is_as_written=True)
        if not config.uses_cluster:
            refuse_active(run, self.commands)
            run.stop_file.unlink(missing_ok=True)
            yield batch
            return
        require_slurm(self.commands, self.env)
        with submitting(run, self.commands):
            request = read_script_of(run)
            self.say_variables(config, run.code)
            self.say_remarks(require_acceptable(request, self.commands))
            _, remarks = take_shell_choices(config, None, self.env)
            for remark in remarks:
                self.say(f"  {remark}")
            run.stop_file.unlink(missing_ok=True)
            yield replace(batch, requests=((run, request),), flags=tuple(renewed_warning(config, run)))

    def acceptable(self, plans: Sequence[RunPlan], ask: Callable[[Sequence[RunPlan]], T]) -> tuple[list[RunPlan], T]:
        """Returns plans that Slurm accepts and its answer, see `acceptable_plans`; prints what had to be left out."""
        accepted, answer = acceptable_plans(plans, ask)
        if any(map(operator.is_not, accepted, plans)):
            self.say(f"  CPUs          {accepted[0].cpus.reason}")
        return accepted, answer

    def _ask_for_run(self, plans: Sequence[RunPlan]) -> tuple[JobRequest, tuple[str, ...]]:
        request = job_request(plans[0])
        return request, require_acceptable(request, self.commands, plans[0])

    def write(
        self,
        plan: RunPlan,
        code: Source | RunDirectory | Path | None,
        request: JobRequest | None,
        *,
        change: AcceptedChange | None = None,
        inside: str | None = None,
    ) -> None:
        """Writes the files of a run that the caller holds; see `write_run`."""
        # A run without a directory cannot be active, so no lock is needed; there may be thousands of runs.
        is_new = not plan.run.config.exists()
        with contextlib.nullcontext() if is_new else writing(plan.run, self.commands, inside=inside):
            renamed = write_run(plan, code, request=request, change=change)
        self.say_renamed(plan.run, renamed)

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

    def clear_dead_lock(self, run: RunDirectory) -> None:
        """Removes the lock of a run if its holder is dead; a node could not check a process of this machine."""
        clear_dead(run.lock, is_alive=lambda holder: holder_lives(holder, self.commands))

    def exclude_flags(self, request: JobRequest, run: RunDirectory) -> list[str]:
        """Returns flags of sbatch or salloc that leave out nodes which were found bad recently; prints these nodes."""
        flags, text = exclude_flags(request, run, self.env)
        if text:
            self.say(f"  {text}")
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Runs that are held and on disk, ready to be started: one by itself, or those of a sweep."""

    start: Starter
    path: Path
    """Directory of the run, or of the sweep."""
    config: RunConfig
    """The configuration of one of them."""
    elements: Sequence[Element]
    requests: Sequence[tuple[RunDirectory, JobRequest]] = ()
    """Each run with what its job asks for; empty without a cluster."""
    flags: Sequence[str] = ()
    """Further flags of sbatch for a run by itself."""
    leaves_out_bad_nodes: bool = True
    is_as_written: bool = False
    """Whether nothing but the obstacles to a start was changed."""
    source: Source | None = None
    """The code that was copied, None where none was."""
    provenance: Path | None = None
    """Where its provenance is to be written."""
    sweep: SweepDirectory | None = None
    arrays: Sequence[ArrayPlan] = ()
    dependency: str = ""
    """The dependency of the arrays, e.g. "afterok:12"."""

    def submit(self) -> Iterator[str]:
        """Submits what there is, and yields the id of each job after it is on record.

        Raises:
            ClusterError: Slurm refuses a job; those before it are submitted and recorded.
        """
        start = self.start
        for element in self.elements:
            start.clear_dead_lock(element.run)
        if not self.requests:
            return
        run, request = self.requests[0]
        # Printed once; the submission of each array leaves out the bad nodes itself.
        excluded = start.exclude_flags(request, run) if self.leaves_out_bad_nodes else []
        if self.sweep is not None:
            if any(array.is_alone for array in self.arrays):
                unit = "run" if self.config.sweep.pack == 1 else "pack of runs"
                start.say(f"this site takes no job arrays: each {unit} is a job of its own")
            yield from submit_arrays(self.sweep, self.arrays, env=start.env, depends=self.dependency)
            return
        # Imported late: a run that is trained on this machine needs no submitit.
        from slurm_train.request.submission import submit_run

        flags = [*self.flags, *excluded]
        yield submit_run(run, request, self.config, env=start.env, commands=start.commands, flags=flags)

    def write_provenance(self) -> None:
        """Writes the provenance of code that was copied; to list the packages takes a moment."""
        from slurm_train.code.provenance import write_provenance

        if self.source is not None and self.provenance is not None:
            slurm_version = self.start.commands.version() if self.requests else None
            words = self.start.words
            write_provenance(self.provenance, self.source, words=words, slurm=slurm_version, config=self.config)
