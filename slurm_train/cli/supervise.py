"""`supervise RUN_DIR -- srun ...`: what the batch script calls; owns one attempt from its opening to its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE, ConfigError
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.pins import release_pins
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import job_environment
from slurm_train.slurm.share import PACK, Share
from slurm_train.status.activity import clear_dead_pins
from slurm_train.supervise.continuation import continued_job
from slurm_train.supervise.monitor import BestEffort, say
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.notify import Notifier
from slurm_train.supervise.pack import BACK, PackedJob, return_of
from slurm_train.supervise.scheduler import SlurmJob
from slurm_train.supervise.srun import SrunLaunch, pool_of
from slurm_train.supervise.supervisor import Supervisor, ignore_stop_signals, progress_of
from slurm_train.tools.trackers import build_trackers


def main(words: Sequence[str]) -> int:
    """Runs an attempt inside an allocation and returns the exit code of the batch script."""
    if len(words) < 3 or words[1] != "--":
        raise ConfigError(f"supervise cannot read {list(words)}", hint="supervise RUN_DIR -- srun ...")
    run = RunDirectory(Path(words[0]))
    env = job_environment(os.environ)
    ignore_stop_signals()
    if env.get(PACK) == BACK:
        return _bring_pack_back(run, env)
    code = EXIT_FAILURE
    try:
        code = _run(run, words, env)
    finally:
        if code != EXIT_DONE:
            _job(run, env, RequeueSection()).end_for_good()
    return code


def _run(run: RunDirectory, words: Sequence[str], env: Mapping[str, str]) -> int:
    try:
        return _supervise(run, list(words[2:]), env)
    except OSError as err:
        # A full disk or a stale handle at the start: the job comes back later.
        config = BestEffort()("the configuration", lambda: load_config(run.config), None)
        if config is not None and not _may_return(config):
            raise
        settings = RequeueSection()
        return Supervisor(run, _job(run, env, settings), settings).come_back_later(err)


def _job(run: RunDirectory, env: Mapping[str, str], settings: RequeueSection) -> SlurmJob:
    """Returns the job that this process runs in, for what is done about the job alone."""
    allocation = Allocation.from_env(env)
    kind = SlurmJob if Share.from_env(env) is None else PackedJob
    return kind(run, allocation, env, pool=NodePool.whole(allocation), retry_s=settings.controller_timeout_s)


def _bring_pack_back(run: RunDirectory, env: Mapping[str, str]) -> int:
    """Requeues the job of a pack in which all runs have ended, and this one is to continue."""
    alone = {name: value for name, value in env.items() if name != PACK}
    settings = load_config(run.config).requeue
    job = _job(run, alone, settings)
    decision = return_of(run, job)
    say(f"all runs of job {job.job_id} have ended, and it is requeued for those that continue: {decision.note}")
    return Supervisor(run, job, settings).come_back(decision)


def _may_return(config: RunConfig) -> bool:
    # Whoever waits in an allocation wants to see a failure, and no job that goes on without them.
    return config.requeue.enabled and config.launch != "interactive"


def _supervise(run: RunDirectory, command: Sequence[str], env: Mapping[str, str]) -> int:
    require_private(run)
    config = load_config(run.config)
    allocation = Allocation.from_env(env)
    trackers = build_trackers(run, config.track, env=env, say=say)
    kind = SlurmJob if Share.from_env(env) is None else PackedJob
    job = kind(
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
    supervisor = Supervisor(
        run,
        job,
        replace(config.requeue, enabled=_may_return(config)),
        committed_step=progress_of(run, config),
        is_own_code=not config.trains or config.preflight.only,
        notify=Notifier(run, config.notify, env=env, say=say) if config.notify else None,
    )
    # A job of an evaluation that was killed while it waited has left a pin.
    BestEffort()("the pins", lambda: clear_dead_pins(run, SlurmCommands(env)), None, asks_slurm=True)
    try:
        with trackers:
            exit_code = supervisor.supervise(launch)
        if exit_code != EXIT_REQUEUE:
            BestEffort()("the pins", lambda: release_pins(run), None)
        return exit_code
    finally:
        launch.close()
