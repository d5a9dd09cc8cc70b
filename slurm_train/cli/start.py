"""The one order of every start: refuse what is active, compare with what is there, ask Slurm, write, remove the
locks of processes that no longer exist, submit, record.

A run may go to Slurm as a job, into an allocation that a person waits in, or onto this machine; `write` stops after the
files. A sweep does the same for many runs at once: what is finished or active is left alone, so the same command again
submits what is missing. Nothing is written before Slurm would take the jobs. From the check that nothing is active to
the recorded job id one submitter holds the run (`submission.json`) or the sweep; what ranks read is written with the
run's own lock held.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.drift import check_drift
from slurm_train.cli.preview import say_source, warn_unexported_keys
from slurm_train.cli.terminal import answer, note, working_folder
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ClusterError, ConfigError, RunError
from slurm_train.launch.acceptance import (
    acceptable_plan,
    exclude_flags,
    require_acceptable,
    require_room,
    require_slurm,
    salloc_words,
    slurm_verdict,
    without_chosen_cpus,
)
from slurm_train.launch.batch_script import render_script, renewed_warning
from slurm_train.launch.plan import RunPlan, SweepPlan, replan_run
from slurm_train.launch.rank_command import RankCommand
from slurm_train.launch.shell_choices import take_shell_choices
from slurm_train.launch.snapshot import Source, read_source
from slurm_train.launch.write import link_code, put_on_record, write_run, write_shared_code, write_table_of
from slurm_train.rundir.files import for_each, read_json
from slurm_train.rundir.jobs import clear_dead, read_job, record_job
from slurm_train.rundir.lookup import find_run, remember_root, root_of
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.rundir.sweep import Element, SweepDirectory, find_sweep, read_table
from slurm_train.rundir.sweep import submitting as submitting_sweep
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.status.activity import find_active, holder_lives, submitting, writing

if TYPE_CHECKING:
    from slurm_train.launch.arrays import ArrayPlan
    from slurm_train.status.run_status import RunState

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class Start:
    """What a command line says about how runs are started, whatever they are.

    Args:
        words: the command line.
        env: the environment; SLURM_JOB_ID says that this is typed inside an allocation.
        accept: changes of a run in progress that the person accepts.
        after: runs and sweeps whose success Slurm waits for first.
    """

    def __init__(
        self,
        *,
        words: Sequence[str],
        env: Mapping[str, str],
        accept: Collection[str] = (),
        after: Sequence[str] = (),
    ) -> None:
        self.words = words
        self.env = env
        self.accept = accept
        self.after = after
        self.commands = SlurmCommands(env)

    def dependency(self, config: RunConfig, root: Path) -> str:
        """Returns sbatch's dependency on the runs in `after`, e.g. "afterok:12:13"; "" if there is none to wait for.

        Args:
            config: what is to wait.
            root: of the runs.

        Raises:
            ConfigError: it is not submitted, or names a dependency of its own.
            RunError: there is no such run, or it ended without a result.
        """
        if not self.after:
            return ""
        asked = f"after={','.join(self.after)}"
        if config.cluster is None or config.launch != "slurm":
            hint = "add +cluster=NxG, or drop after="
            raise ConfigError(f"{asked} makes a job wait in Slurm's queue, but this run would start at once", hint=hint)
        if "dependency" in config.cluster.sbatch:
            raise ConfigError(f"{asked} and cluster.sbatch.dependency exclude each other", hint="drop one of the two")
        require_slurm(self.commands, self.env)
        runs: list[RunDirectory] = []
        for name in self.after:
            place = root_of(name, root, self.env)
            sweep = find_sweep(place, name)
            runs += [find_run(place, name)] if sweep is None else [element.run for element in read_table(sweep)]
        active, jobs = find_active(runs, self.commands), dict[str, None]()
        # The result is looked for last: a run that has ended meanwhile is not active any more.
        for run in (run for run in runs if not run.result.exists()):
            if run not in active or not active[run].jobs:
                raise RunError(
                    f"{asked}: {run.name}/{run.run_id} is not finished, and no job of it is queued or running",
                    hint=f"`status {run.run_id}` says why, `resume {run.run_id}` continues it",
                )
            # Of several the newest ends last: it waits for the others, or takes over from them.
            jobs[active[run].jobs[-1]] = None
        note(f"  after         {'job ' + ', '.join(jobs) if jobs else 'already finished; no dependency'}")
        return f"afterok:{':'.join(jobs)}" if jobs else ""

    # --- one run ---

    def run(self, plan: RunPlan, source: Source | RunDirectory | None) -> int:
        """Submits a run, or trains it here or in an allocation, as it asks; returns the exit code.

        Args:
            plan: the run.
            source: its code, or the run whose snapshot it shares; None: the snapshot that it has.

        Raises:
            ClusterError: no Slurm here, it refuses the request, or the allocation is too small.
            RunError: the run is active already, or it would not be the same training.
        """
        config, run = plan.config, plan.run
        depends = self.dependency(config, run.path.parent.parent)
        if config.cluster is None:
            from slurm_train.cli.here import supervise_here

            self.write(plan, source)
            return supervise_here(run, config, world_size=plan.world.size, env=self.env)
        require_slurm(self.commands, self.env)
        if config.launch == "interactive":
            from slurm_train.cli.here import attend

            script = self.write(plan, source, inside=self.env.get("SLURM_JOB_ID"))
            if "SLURM_JOB_ID" in self.env:
                return attend(run, ["bash", str(run.submit_script)], env=self.env)
            return attend(run, salloc_words(plan, self._left_out(script, run)), env=scrubbed(self.env))
        with submitting(run, self.commands):
            script = self._write(plan, source)
            job_id = self.submit(run, config, script, flags=[f"--dependency={depends}"] if depends else ())
        note(f"submitted; next:\n  python -m slurm_train status {run.run_id}")
        note(f"  python -m slurm_train logs -f {run.run_id}\n  python -m slurm_train cancel {run.run_id}")
        answer(f"{job_id} {run.path}")
        self._write_provenance(run.provenance, source, config)
        return EXIT_DONE

    def write(self, plan: RunPlan, source: Source | RunDirectory | None, *, inside: str | None = None) -> str:
        """Writes everything that a run's ranks read, and returns its script ("" without a cluster).

        Args:
            plan: the run.
            source: as for `run`.
            inside: the job whose allocation it will use; that the run was run there before is not a hindrance.
        """
        with submitting(plan.run, self.commands, inside=inside):
            script = self._write(plan, source, inside=inside)
        self._write_provenance(plan.run.provenance, source, plan.config)
        return script

    def _write(self, plan: RunPlan, source: Source | RunDirectory | None, *, inside: str | None = None) -> str:
        """Compares, asks Slurm and writes; called by the one submitter of the run."""
        run, is_submitted = plan.run, plan.config.cluster is not None
        ranks = RankCommand(plan.config, run, plan.directory)
        script = render_script(plan) if is_submitted else ""
        # A container that cannot be started is found before anything is written.
        ranks.words(python="python")
        change = check_drift(plan, source if isinstance(source, Source) else None, accept=self.accept)
        if inside is not None:
            require_room(plan, self.commands.show_job(inside))
        elif is_submitted:
            fitting, script = acceptable_plan(plan, self.commands)
            if fitting is not plan:
                note(f"  CPUs          {fitting.cpus.why}")
            plan = fitting
        ranks.make_mount_points()
        with writing(run, self.commands, inside=inside):
            write_run(plan, source, script=script or None, change=change)
        remember_root(run.path.parent.parent, self.env)
        return script

    def resubmit(self, run: RunDirectory) -> int:
        """Submits a run's own script again as it is on disk; returns the exit code.

        Raises:
            RunError: the run is active.
            ClusterError: no Slurm here, no script, or Slurm refuses.
        """
        require_slurm(self.commands, self.env)
        with submitting(run, self.commands):
            if not run.submit_script.is_file():
                raise ClusterError(f"{run.submit_script} is missing", hint="type the run's first command again")
            script, config = run.submit_script.read_text(encoding="utf-8"), load_config(run.config)
            require_acceptable(script, self.commands)
            for remark in take_shell_choices(config, None, self.env)[1]:
                note(f"  {remark}")
            run.stop_file.unlink(missing_ok=True)
            job_id = self.submit(run, config, script, flags=renewed_warning(config, run))
        note(f"submitted again; it continues from the newest verified checkpoint in {run.checkpoints}")
        answer(f"{job_id} {run.path}")
        return EXIT_DONE

    def submit(
        self, run: RunDirectory, config: RunConfig, script: str, *, flags: Sequence[str] = (), avoids: bool = True
    ) -> str:
        """Gives a run's script to Slurm, records the job and returns its id; called by the one submitter of the run.

        Args:
            run: the run.
            config: says which variables travel.
            script: the script.
            flags: further words for sbatch.
            avoids: leave out nodes that were found bad lately.

        Raises:
            ClusterError: sbatch refused it.
        """
        # A run that is trained here needs no submitit.
        from slurm_train.launch.submission import submit_script

        flags = [*flags, *(self._left_out(script, run) if avoids else ())]
        self._clear_dead(run)
        before = read_job(run)
        export = config.cluster.export if config.cluster is not None else ()
        job_id = submit_script(script, folder=run.submitted, env=self.env, flags=flags, export=export)
        record_job(run, job_id)
        if before is not None:
            with contextlib.suppress(ClusterError):
                self.commands.hand_dependents(before.job_id, job_id)
        return job_id

    def _clear_dead(self, run: RunDirectory) -> None:
        # A dead process on this machine can be recognised from here, not from the node that the job starts on.
        clear_dead(run.lock, is_alive=lambda holder: holder_lives(holder, self.commands))

    def _left_out(self, script: str, run: RunDirectory) -> list[str]:
        """Returns words for sbatch or salloc that leave out nodes which were found bad lately, and prints which."""
        flags, text = exclude_flags(script, run, self.env)
        if text:
            note(f"  {text}")
        return flags

    def _write_provenance(self, path: Path, source: Source | RunDirectory | None, config: RunConfig) -> None:
        from slurm_train.launch.provenance import write_provenance

        if isinstance(source, Source):
            slurm = None if config.cluster is None else self.commands.version()
            write_provenance(path, source, words=self.words, slurm=slurm, config=config)

    # --- the runs of a sweep ---

    def sweep(self, plan: SweepPlan, source: Source, *, wait: bool) -> int:
        """Submits or trains what is missing of a sweep; prints `<array job id> <sweep directory>` per array.

        Args:
            plan: the sweep.
            source: its code.
            wait: return when all its runs have ended.

        Raises:
            SlurmTrainError: something is wrong with the site or one of the runs; nothing was written then.
        """
        from slurm_train.launch.arrays import find_lost_arrays, plan_arrays

        sweep, commands, scripts = plan.sweep, self.commands, dict[RunDirectory, str]()
        depends = self.dependency(plan.plans[0].config, sweep.root)
        if plan.uses_cluster:
            require_slurm(commands, self.env)
            warn_unexported_keys(plan.plans[0].config, self.env)
            plan = self._with_possible_cpus(plan)
            scripts = {run_plan.run: render_script(run_plan) for run_plan in plan.plans}
        with contextlib.ExitStack() as held:
            # A sweep that Slurm refuses leaves no directory, so a new one is made and held afterwards.
            if is_known := sweep.table.exists():
                held.enter_context(submitting_sweep(sweep))
                if plan.uses_cluster:
                    find_lost_arrays(sweep, commands)
            runs = {run_plan.run for run_plan in plan.plans}
            finished = {run for run in runs if run.result.exists()}
            active = set(
                find_active([run_plan.run for run_plan in plan.plans if run_plan.run not in finished], commands)
            )
            missing = runs - finished - active
            if len(missing) < len(runs):
                note(f"{len(finished)} runs are finished, {len(active)} active; {len(missing)} to submit")
            todo = [(run, script) for run, script in scripts.items() if run in missing]
            arrays = plan_arrays(sweep, todo, commands, max_parallel=plan.max_parallel, example=plan.plans[0])
            if not is_known:
                held.enter_context(submitting_sweep(sweep))
                if sweep.table.exists():
                    raise RunError(
                        f"sweep {sweep.sweep_id} was submitted by another command just now",
                        hint=f"`status {sweep.sweep_id}` shows it; the same command again submits what is missing",
                    )
            planned = write_table_of(plan, words=self.words)
            code = write_shared_code(sweep, source) if missing else None

            def write(plan: RunPlan) -> None:
                # A run without a directory cannot be active, and there may be thousands of them.
                with writing(plan.run, commands) if plan.run.config.exists() else contextlib.nullcontext():
                    # A run that has been trained goes on with its own code; `resume --accept code` gives it another.
                    is_trained = plan.run.code.exists() and bool(list_checkpoints(plan.run.checkpoints))
                    write_run(plan, None if is_trained else code, script=scripts.get(plan.run))

            for_each(write, (run_plan for run_plan in plan.plans if run_plan.run in missing))
            elements = [element for element in planned if element.run in missing]
            first = plan.plans[0].config
            ended = self._carry_out(sweep, elements, todo, arrays, first, code=code, source=source, depends=depends)
        if not plan.uses_cluster:
            return ended
        verbs = ("status", "cancel", "collate", "report")
        note("next:\n" + "\n".join(f"  python -m slurm_train {verb} {sweep.sweep_id}" for verb in verbs))
        if not wait or wait_for_runs([element.run for element in plan.elements], commands, see=sweep.sweep_id):
            return EXIT_DONE
        return EXIT_FAILURE

    def resume_sweep(self, sweep: SweepDirectory, *, only: Collection[RunState] | None, where: Sequence[str]) -> int:
        """Continues runs of a sweep that ended early, as they are on disk, and returns the exit code.

        With "code" accepted they take the code of the current directory, for the runs of a corrected script.

        Args:
            sweep: the sweep.
            only: states of the runs that are meant; None: all that are neither finished nor active.
            where: conditions on their values.

        Raises:
            RunError: nothing is to be continued, or a run was never written.
            ClusterError: Slurm refuses.
        """
        from slurm_train.cli.selection import filter_where, summary
        from slurm_train.launch.arrays import find_lost_arrays, plan_arrays
        from slurm_train.status.run_status import read_statuses

        commands = self.commands
        with submitting_sweep(sweep):
            if commands.is_available():
                find_lost_arrays(sweep, commands)
            elements = read_table(sweep)
            named, rows = filter_where(elements, where), read_statuses(elements, commands)
            meant = [row for row in rows if row.subject in named and (only is None or row.state in only)]
            runs = [plan.run for plan in meant if not plan.is_finished and not plan.is_active]
            if not runs:
                raise RunError(
                    f"no run of sweep {sweep.sweep_id} is to be continued: {summary(rows)}", hint="see `status`"
                )
            todo = [element for element in elements if element.run in runs]
            if unwritten := [element.index for element in todo if not element.run.config.is_file()]:
                raise RunError(
                    f"{len(unwritten)} runs of sweep {sweep.sweep_id} were never written, the first is {unwritten[0]}",
                    hint="type the words of the sweep again: they submit what is missing",
                )
            config, source = load_config(todo[0].run.config), None
            if "code" in self.accept:
                cwd = working_folder(self.env)
                source = read_source(todo[0].run, config, cwd, env=self.env)
                say_source(source)
            scripts = []
            if config.cluster is not None:
                require_slurm(commands, self.env)
                scripts = [(run, run.submit_script.read_text(encoding="utf-8")) for run in runs]
            arrays = plan_arrays(sweep, scripts, commands, max_parallel=config.sweep.max_parallel)
            code = None if source is None else self._replace_code(sweep, runs, source)
            for run in runs:
                run.stop_file.unlink(missing_ok=True)
            ended = self._carry_out(sweep, todo, scripts, arrays, config, code=code, source=source)
        if config.cluster is not None:
            note(f"submitted {len(runs)} runs again; each continues from its newest verified checkpoint")
        return ended

    def _with_possible_cpus(self, plan: SweepPlan) -> SweepPlan:
        """Returns a sweep whose first run Slurm takes: without CPUs of our choice, if those are all that it refuses."""
        first = plan.plans[0]
        bare = [without_chosen_cpus(run_plan) or run_plan for run_plan in plan.plans]
        if bare[0] is first or slurm_verdict(render_script(first), self.commands).is_accepted:
            return plan
        if not slurm_verdict(render_script(bare[0]), self.commands).is_accepted:
            return plan
        note(f"  CPUs          {bare[0].cpus.why}")
        return replace(plan, plans=tuple(bare))

    def _replace_code(self, sweep: SweepDirectory, runs: Sequence[RunDirectory], source: Source) -> Path:
        """Gives runs of a sweep other code, which it returns the place of; all are compared before one is changed."""
        changes = {}
        for run in runs:
            plan = replan_run(load_config(run.config), read_json(run.plan) or {}, run=run, typed=(), env={})
            changes[run] = check_drift(plan, source, accept={"code"})
        code = write_shared_code(sweep, source)
        for run, change in changes.items():
            with writing(run, self.commands):
                if change is not None:
                    put_on_record(run, change)
                link_code(run, code)
        return code

    def _carry_out(
        self,
        sweep: SweepDirectory,
        elements: Sequence[Element],
        scripts: Sequence[tuple[RunDirectory, str]],
        arrays: Sequence[ArrayPlan],
        config: RunConfig,
        *,
        code: Path | None,
        source: Source | None,
        depends: str = "",
    ) -> int:
        """Submits arrays, or trains runs here, which are on disk; returns the exit code.

        Args:
            sweep: the sweep.
            elements: its runs that are meant.
            scripts: each with its script; empty without a cluster.
            arrays: the arrays of these.
            config: that of one of them.
            code: the snapshot that was made for them, if any.
            source: what it was made from.
            depends: what the arrays wait for.
        """
        from slurm_train.launch.arrays import submit_arrays

        sweep.stop_file.unlink(missing_ok=True)
        remember_root(sweep.root, self.env)
        for element in elements:
            self._clear_dead(element.run)
        if any(array.is_alone for array in arrays):
            note("this site takes no job arrays: each run is a job of its own")
        for run, script in scripts[:1]:
            # Printed once; each array leaves them out by itself.
            self._left_out(script, run)
        for job_id in submit_arrays(sweep, arrays, env=self.env, depends=depends):
            answer(f"{job_id} {sweep.path}")
        if code is not None:
            self._write_provenance(code.with_suffix(".json"), source, config)
        if config.cluster is not None:
            return EXIT_DONE
        from slurm_train.cli.here import train_each

        answer(f"- {sweep.path}")
        return train_each(sweep, elements, num_parallel=config.sweep.max_parallel or 1, env=self.env)


def wait_for_runs(
    runs: Sequence[RunDirectory],
    commands: SlurmCommands,
    *,
    see: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Returns when no run is active any more: whether all are finished. Ctrl-C ends the waiting, not the runs.

    Slurm is asked rarely, with one command for all runs: `result.json` says by itself that a run is finished.

    Args:
        runs: the runs.
        commands: Slurm.
        see: what `status` shows of them; "": the first run that has no result.
        sleep: waits so many seconds.
    """
    pause_s, num_seen = _FIRST_PAUSE_S, -1
    while left := [run for run in runs if not run.result.exists()]:
        try:
            if not find_active(left, commands):
                status = f"`status {see or left[0].run_id}` says why"
                note(f"{len(left)} of {len(runs)} runs ended without a result; {status}")
                return False
        except ClusterError as err:
            note(f"Slurm does not answer, asking again later: {err.message}")
        if len(left) != num_seen:
            note(f"{len(runs) - len(left)} of {len(runs)} runs are finished; Ctrl-C leaves the others alone")
            # Where something happens more may follow soon.
            pause_s, num_seen = _FIRST_PAUSE_S, len(left)
        sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    note(f"all {len(runs)} runs are finished")
    return True
