"""One attempt from its opening to its end: in the job of this process, or on this machine.

Gives the supervisor what it needs: who started the job, how the ranks are started, trackers, messages to the person.
The supervisor decides what follows.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import load_config
from slurm_train.config.program import program_of
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.distributed.master import probe_port
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.request.rank_command import RankCommand
from slurm_train.rundir.ledger import Action, Start
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.pins import release_pins
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.slurm.pack_slot import PACK, PackSlot
from slurm_train.slurm.records import StepEnd
from slurm_train.status.activity import clear_dead_pins
from slurm_train.supervise.best_effort import BestEffort, say
from slurm_train.supervise.continuation import continued_job
from slurm_train.supervise.job import Job, SlurmJob
from slurm_train.supervise.judges import watch_ranks
from slurm_train.supervise.notify import Notifier
from slurm_train.supervise.output import outlive_terminal
from slurm_train.supervise.pack import BACK, PackedJob, return_of
from slurm_train.supervise.ranks import LocalRanks, note_environment, refused_code, start_local
from slurm_train.supervise.requeue import carry_out, requeue_after_error
from slurm_train.supervise.srun import SrunStep, pool_of
from slurm_train.supervise.step import Step
from slurm_train.supervise.supervisor import Supervisor, ignore_stop_signals, on_stop, progress_of

# --- in a job ---


BuildTrackers = Callable[..., Any]
"""Makes the context manager that runs a run's trackers, see `tools.trackers.build_trackers`."""


def supervise_in_job(
    run: RunDirectory, command: Sequence[str], env: Mapping[str, str], build_trackers: BuildTrackers
) -> int:
    """Runs one attempt inside an allocation and returns the exit code of the batch script.

    Args:
        run: the run.
        command: srun and its words, see `SrunStep`.
        env: the job's, see `job_environment`.
        build_trackers: makes what sends its metrics elsewhere meanwhile.

    Raises:
        SlurmTrainError: this is no job, or the run cannot be used, or another job has it.
        OSError: the file system does not let it start, and the job may not come back.
    """
    ignore_stop_signals()
    if env.get(PACK) == BACK:
        return _bring_pack_back(run, env)
    code = EXIT_FAILURE
    try:
        code = _supervise_in_job(run, command, env, build_trackers)
    except OSError as err:
        # A full disk or a stale handle at the start: the job comes back later.
        config = BestEffort()("the configuration", lambda: load_config(run.config), None)
        if config is not None and not _may_return(config):
            raise
        code = requeue_after_error(run, _job_of(run, env), err)
    finally:
        if code != EXIT_DONE:
            code = _job_of(run, env).end_for_good(code)
    return code


def _supervise_in_job(
    run: RunDirectory, command: Sequence[str], env: Mapping[str, str], build_trackers: BuildTrackers
) -> int:
    require_private(run)
    config = load_config(run.config)
    allocation = Allocation.from_env(env)
    trackers = build_trackers(run, config.track, env=env, say=say)
    job = _job_of(
        run,
        env,
        retry_s=config.requeue.controller_timeout_s,
        continues=continued_job(run, allocation.requeue_id, env),
        # The trackers get a moment before Slurm ends this job.
        before_requeue=lambda: BestEffort(within_s=2.0)("the trackers", trackers.finish_soon, None),
    )
    if job.is_predecessor_cancelled():
        say(f"job {job.continues}, which this one was to continue, was cancelled; `resume` continues the run")
        return EXIT_FAILURE
    step = SrunStep(run, config, job, pool=pool_of(allocation, run, config), command=command, env=env)
    # A job of an evaluation that was killed while it waited has left a pin.
    BestEffort()("the pins", lambda: clear_dead_pins(run, SlurmCommands(env)), None, asks_slurm=True)
    try:
        with trackers:
            exit_code = _build_supervisor(run, config, job, step, env).supervise()
        if exit_code != EXIT_REQUEUE:
            BestEffort()("the pins", lambda: release_pins(run), None)
        return exit_code
    finally:
        step.close()


def _bring_pack_back(run: RunDirectory, env: Mapping[str, str]) -> int:
    """Requeues the job of a pack in which all runs have ended, if this one is to continue; returns the exit code."""
    alone = {name: value for name, value in env.items() if name != PACK}
    job = _job_of(run, alone, retry_s=load_config(run.config).requeue.controller_timeout_s)
    decision = return_of(run, job)
    if decision.action is Action.STOP:
        return EXIT_FAILURE
    say(f"all runs of job {job.job_id} have ended, and it is requeued for those that continue: {decision.note}")
    return carry_out(run, job, decision)


def _job_of(
    run: RunDirectory,
    env: Mapping[str, str],
    *,
    retry_s: float = RequeueSection().controller_timeout_s,
    continues: str | None = None,
    before_requeue: Callable[[], None] = lambda: None,
) -> SlurmJob:
    kind = SlurmJob if PackSlot.from_env(env) is None else PackedJob
    allocation = Allocation.from_env(env)
    return kind(run, allocation, env, retry_s=retry_s, continues=continues, before_requeue=before_requeue)


# --- on this machine ---


def supervise_here(
    run: RunDirectory, config: RunConfig, *, world_size: int, env: Mapping[str, str], build_trackers: BuildTrackers
) -> int:
    """Runs one attempt of a run that is on disk, on this machine, and returns its exit code.

    Raises:
        RunError: the run is active already.
    """
    step = _LocalStep(run, config, world_size=world_size, env=env)
    supervisor = _build_supervisor(run, config, Job(env), step, env)
    outlive_terminal(run.logs / "batch.log")
    with build_trackers(run, config.track, env=env, say=say):
        return supervisor.supervise()


class _LocalStep(Step):
    """Ranks that are processes of this machine."""

    def __init__(self, run: RunDirectory, config: RunConfig, *, world_size: int, env: Mapping[str, str]) -> None:
        super().__init__(Start(job_id=None, restart_count=0, nodes=(socket.gethostname(),), world_size=world_size))
        self._run = run
        self._config = config
        self._env = env
        self._ranks = LocalRanks()

    def run(self, attempt: int) -> int:
        run = self._run
        config = self._config
        env = self._env
        world_size = self.start.world_size
        note_environment(run, attempt, slurm=lambda: None)
        code = refused_code(run, attempt, env)
        if code is not None:
            return code
        rank_env = scrubbed(env) | {"SLURM_TRAIN_ATTEMPT": str(attempt), "MASTER_ADDR": "127.0.0.1"}
        # The ranks run the snapshot; what it does not hold (ignored by git, say) is found where the run was typed.
        rank_env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(Path.cwd())]))
        rank_env["MASTER_PORT"] = str(probe_port(str(run.path), attempt=attempt, env=rank_env))
        command = RankCommand(config, run, PlanRecord.read(run.plan).directory or str(Path.cwd()))
        command.make_mount_points()
        words = command.words(python=sys.executable)
        ranks = start_local(words, run=run, attempt=attempt, num_ranks=world_size, env=rank_env)
        self._ranks = ranks
        watch = watch_ranks(run, attempt, config, world_size=world_size, end_ranks=lambda _beats: ranks.kill())
        with watch.running(), on_stop(ranks.interrupt):
            return ranks.wait(beside=watch.check)

    def ended(self, _attempt: int) -> StepEnd:
        return self._ranks.ended


# --- both ---


def _build_supervisor(run: RunDirectory, config: RunConfig, job: Job, step: Step, env: Mapping[str, str]) -> Supervisor:
    # Ranks of this machine have no preflight: one that is asked for alone has not been done when they end.
    checks_only = config.preflight.only and config.uses_cluster
    return Supervisor(
        run,
        job,
        step,
        replace(config.requeue, enabled=_may_return(config)),
        committed_step=progress_of(run, config),
        is_own_code=not program_of(config).reports or checks_only,
        notify=Notifier(run, config.notify, env=env, say=say) if config.notify else None,
    )


def _may_return(config: RunConfig) -> bool:
    # Whoever waits in an allocation wants to see a failure, and no job that goes on without them.
    return config.requeue.enabled and config.launch != "interactive"
