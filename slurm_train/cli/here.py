"""Trains a run on this machine: opens an attempt, starts the ranks, passes Ctrl-C on as a polite stop."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from slurm_train.checkpoint.directory import newest_committed_step
from slurm_train.cli.changes import weigh
from slurm_train.cli.lost_terminal import outlive_terminal
from slurm_train.cli.outputs import RunOutput, make_outputs
from slurm_train.cli.terminal import note
from slurm_train.cli.trackers import tracking_run
from slurm_train.config.schema import RunConfig
from slurm_train.launch.container import Ranks
from slurm_train.launch.local import LocalRanks, start_local
from slurm_train.launch.meeting import probe_port
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.preparation import write_run_directory
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.source import Source
from slurm_train.rundir.attempts import AttemptStart
from slurm_train.rundir.files import read_json
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.environment import scrubbed
from slurm_train.status.activity import refuse_active, writing
from slurm_train.status.failure import find_failure
from slurm_train.supervise.monitor import Monitor, note_environment, watch_ranks
from slurm_train.supervise.scheduler import Scheduler
from slurm_train.supervise.supervisor import Supervisor, refused_code


def train_here(
    plan: RunPlan,
    source: Source | None,
    *,
    words: Sequence[str],
    env: Mapping[str, str],
    accept: Collection[str] = (),
    outputs: Sequence[RunOutput] = (),
) -> int:
    """Runs the plan's ranks on this machine and returns the exit code.

    Args:
        plan: the run.
        source: its code; None: the snapshot that it has.
        words: the command line.
        env: the environment.
        accept: changes of a run in progress that the person accepts.
        outputs: what the run shall have besides its own directory.

    Raises:
        RunError: the run is active already, or it would not be the same training.
    """
    # A container that cannot be started is found before anything is written.
    Ranks(plan.config, plan.run, plan.directory).command(python=sys.executable)
    # Nothing of a run that somebody else is training, or that is queued, may be overwritten.
    refuse_active(plan.run, SlurmCommands(env))
    with writing(plan.run, SlurmCommands(env)):
        change = weigh(plan, source, accept=accept)
        write_run_directory(plan, source, script=None, change=change)
    make_outputs(outputs)
    if source is not None:
        write_provenance(plan.run.provenance, source, words=words, slurm=None)
    return supervise_here(plan.run, plan.config, world_size=plan.world.size, env=env)


def supervise_here(run: RunDirectory, config: RunConfig, *, world_size: int, env: Mapping[str, str]) -> int:
    """Runs one attempt of a run that is on disk, on this machine, and returns its exit code.

    Raises:
        RunError: the run is active already.
    """
    start = AttemptStart(job_id=None, restart_count=0, nodes=(socket.gethostname(),), world_size=world_size)
    supervisor = Supervisor(
        run,
        Scheduler(start, env),
        config.requeue,
        committed_step=partial(newest_committed_step, run.checkpoints) if config.trains else None,
        is_own_code=not config.trains,
    )
    outlive_terminal(run.logs / "batch.log")

    def launch(attempt: int) -> int:
        return _launch(run, config, world_size, attempt, env=env)

    with tracking_run(run, config.track, env):
        code = supervisor.supervise(launch)
    _print_unseen_failure(run)
    return code


def _print_unseen_failure(run: RunDirectory) -> None:
    """Prints the traceback of the rank that failed first, where the terminal shows rank 0 alone."""
    failure = find_failure(run, max(existing_attempts(run), default=0))
    if failure is not None and failure.rank and failure.excerpt:
        for line in [*failure.lines(rank_shown=0)[1:], *failure.excerpt.splitlines()]:
            note(line)


def _rank_command(run: RunDirectory, config: RunConfig) -> list[str]:
    directory = str((read_json(run.plan) or {}).get("directory", Path.cwd()))
    ranks = Ranks(config, run, directory)
    ranks.make_mount_points()
    return ranks.command(python=sys.executable)


def _launch(run: RunDirectory, config: RunConfig, world_size: int, attempt: int, *, env: Mapping[str, str]) -> int:
    note_environment(run, attempt, slurm=lambda: None)
    if (code := refused_code(run, attempt, env)) is not None:
        return code
    rank_env = scrubbed(env) | {"SLURM_TRAIN_ATTEMPT": str(attempt), "MASTER_ADDR": "127.0.0.1"}
    # The ranks run the snapshot; what it does not hold (ignored by git, say) is found where the run was typed.
    rank_env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(Path.cwd())]))
    rank_env["MASTER_PORT"] = str(probe_port(str(run.path), attempt=attempt, env=rank_env))
    command = _rank_command(run, config)
    ranks = start_local(command, run=run, attempt=attempt, num_ranks=world_size, env=rank_env)

    def end_ranks(_: Mapping[int, Beat]) -> None:
        ranks.kill()

    monitor = watch_ranks(run, attempt, config, world_size=world_size, end_ranks=end_ranks)
    with monitor.running():
        return _wait(ranks, monitor)


def _wait(ranks: LocalRanks, monitor: Monitor) -> int:
    def ask(_number: int, _frame: FrameType | None) -> None:
        ranks.interrupt()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return ranks.wait(beside=monitor.check)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
