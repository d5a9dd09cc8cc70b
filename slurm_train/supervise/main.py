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
from functools import partial
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.distributed.master import probe_port
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.request.rank_command import RankCommand
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.ledger import Action, Start
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.pins import release_pins
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.slurm.share import PACK, Share
from slurm_train.status.activity import clear_dead_pins
from slurm_train.supervise.best_effort import BestEffort, say
from slurm_train.supervise.continuation import continued_job
from slurm_train.supervise.judges import watch_ranks
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.notify import Notifier
from slurm_train.supervise.output import outlive_terminal
from slurm_train.supervise.pack import BACK, PackedJob, return_of
from slurm_train.supervise.ranks import note_environment, start_local
from slurm_train.supervise.scheduler import Scheduler, SlurmJob
from slurm_train.supervise.srun import SrunLaunch, pool_of
from slurm_train.supervise.supervisor import Supervisor, ignore_stop_signals, on_stop, progress_of, refused_code

# --- in a job ---


BuildTrackers = Callable[..., Any]
"""Makes the context manager that runs a run's trackers, see `tools.trackers.build_trackers`."""


def supervise_in_job(
    run: RunDirectory, command: Sequence[str], env: Mapping[str, str], build_trackers: BuildTrackers
) -> int:
    """Runs one attempt inside an allocation and returns the exit code of the batch script.

    Args:
        run: the run.
        command: srun and its words, see `SrunLaunch`.
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
        settings = RequeueSection()
        code = Supervisor(run, _job_alone(run, env, settings), settings).come_back_later(err)
    finally:
        if code != EXIT_DONE:
            code = _job_alone(run, env, RequeueSection()).end_for_good(code)
    return code


def _supervise_in_job(
    run: RunDirectory, command: Sequence[str], env: Mapping[str, str], build_trackers: BuildTrackers
) -> int:
    require_private(run)
    config = load_config(run.config)
    allocation = Allocation.from_env(env)
    trackers = build_trackers(run, config.track, env=env, say=say)
    job = _job_class(env)(
        run,
        allocation,
        env,
        pool=pool_of(allocation, run, config),
        retry_s=config.requeue.controller_timeout_s,
        continues=continued_job(run, allocation.requeue_id, env),
        # The trackers get a moment before Slurm ends this job.
        before_requeue=lambda: BestEffort(within_s=2.0)("the trackers", trackers.finish_soon, None),
    )
    if job.is_predecessor_cancelled():
        say(f"job {job.continues}, which this one was to continue, was cancelled; `resume` continues the run")
        return EXIT_FAILURE
    launch = SrunLaunch(run=run, config=config, job=job, command=command, env=env)
    # A job of an evaluation that was killed while it waited has left a pin.
    BestEffort()("the pins", lambda: clear_dead_pins(run, SlurmCommands(env)), None, asks_slurm=True)
    try:
        with trackers:
            exit_code = _build_supervisor(run, config, job, env).supervise(launch)
        if exit_code != EXIT_REQUEUE:
            BestEffort()("the pins", lambda: release_pins(run), None)
        return exit_code
    finally:
        launch.close()


def _bring_pack_back(run: RunDirectory, env: Mapping[str, str]) -> int:
    """Requeues the job of a pack in which all runs have ended, if this one is to continue; returns the exit code."""
    alone = {name: value for name, value in env.items() if name != PACK}
    settings = load_config(run.config).requeue
    job = _job_alone(run, alone, settings)
    decision = return_of(run, job)
    if decision.action is Action.STOP:
        return EXIT_FAILURE
    say(f"all runs of job {job.job_id} have ended, and it is requeued for those that continue: {decision.note}")
    return Supervisor(run, job, settings).come_back(decision)


def _job_alone(run: RunDirectory, env: Mapping[str, str], settings: RequeueSection) -> SlurmJob:
    """Returns the job of this process, for what is done about the job and not about ranks."""
    allocation = Allocation.from_env(env)
    pool = NodePool.whole(allocation)
    return _job_class(env)(run, allocation, env, pool=pool, retry_s=settings.controller_timeout_s)


def _job_class(env: Mapping[str, str]) -> type[SlurmJob]:
    return SlurmJob if Share.from_env(env) is None else PackedJob


# --- on this machine ---


def supervise_here(
    run: RunDirectory, config: RunConfig, *, world_size: int, env: Mapping[str, str], build_trackers: BuildTrackers
) -> int:
    """Runs one attempt of a run that is on disk, on this machine, and returns its exit code.

    Raises:
        RunError: the run is active already.
    """
    start = Start(job_id=None, restart_count=0, nodes=(socket.gethostname(),), world_size=world_size)
    scheduler = Scheduler(start, env)
    supervisor = _build_supervisor(run, config, scheduler, env)
    outlive_terminal(run.logs / "batch.log")
    with build_trackers(run, config.track, env=env, say=say):
        return supervisor.supervise(partial(_run_ranks_here, run, config, scheduler, env))


def _run_ranks_here(
    run: RunDirectory, config: RunConfig, scheduler: Scheduler, env: Mapping[str, str], attempt: int
) -> int:
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
    world_size = scheduler.start.world_size
    ranks = start_local(words, run=run, attempt=attempt, num_ranks=world_size, env=rank_env)

    def end_ranks(_: Mapping[int, Beat]) -> None:
        ranks.kill()

    watch = watch_ranks(run, attempt, config, world_size=world_size, end_ranks=end_ranks)
    with watch.running(), on_stop(ranks.interrupt):
        exit_code = ranks.wait(beside=watch.check)
    scheduler.violent_end = ranks.violent_end
    scheduler.task_ends = ranks.ends
    return exit_code


# --- both ---


def _build_supervisor(run: RunDirectory, config: RunConfig, scheduler: Scheduler, env: Mapping[str, str]) -> Supervisor:
    # Ranks of this machine have no preflight: one that is asked for alone has not been done when they end.
    checks_only = config.preflight.only and config.cluster is not None
    return Supervisor(
        run,
        scheduler,
        replace(config.requeue, enabled=_may_return(config)),
        committed_step=progress_of(run, config),
        is_own_code=not config.trains or checks_only,
        notify=Notifier(run, config.notify, env=env, say=say) if config.notify else None,
    )


def _may_return(config: RunConfig) -> bool:
    # Whoever waits in an allocation wants to see a failure, and no job that goes on without them.
    return config.requeue.enabled and config.launch != "interactive"
