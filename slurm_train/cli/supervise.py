"""`supervise RUN_DIR -- srun ...`: what the batch script calls; owns one attempt from its opening to its end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from slurm_train.checkpoint.directory import newest_committed_step
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.distributed.ports import probe_port
from slurm_train.errors import EXIT_FAILURE, EXIT_ORPHANED, ConfigError, NodesError, SilentNodesError
from slurm_train.rundir.attempts import newest_round
from slurm_train.rundir.events import (
    BAD_NODES_PARTS,
    Finding,
    add_bad_nodes,
    bad_nodes_of,
    fatal_line,
    first_mark,
    forgive_nodes,
    list_file,
    read_bad_nodes,
    read_preflight,
    write_preflight,
)
from slurm_train.rundir.files import create_private, read_json
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.slurm.allocation import Allocation, het_job_ids
from slurm_train.slurm.environment import job_environment
from slurm_train.supervise.continuation import continued_job
from slurm_train.supervise.monitor import (
    BestEffort,
    FindingsRelay,
    Monitor,
    NoticeKeeper,
    Task,
    note_environment,
    say,
    watch_ranks,
)
from slurm_train.supervise.ranks import LINGER_S, ORPHAN_LINGER_S, require_seen_by_all, run_step
from slurm_train.supervise.scheduler import SlurmJob
from slurm_train.supervise.supervisor import Supervisor, ignore_stop_signals, refused_code
from slurm_train.tools.trackers import Tracking


def main(words: Sequence[str]) -> int:
    """Runs an attempt inside an allocation and returns the exit code of the batch script."""
    if len(words) < 3 or words[1] != "--":
        raise ConfigError(f"supervise cannot read {list(words)}", hint="supervise RUN_DIR -- srun ...")
    run, env = RunDirectory(Path(words[0])), job_environment(os.environ)
    ignore_stop_signals()
    try:
        return _supervise(run, list(words[2:]), env)
    except OSError as err:
        # A full disk or a stale handle at the start: the job comes back later.
        config = BestEffort()("the configuration", lambda: load_config(run.config), None)
        if config is not None and not _may_return(config):
            raise
        allocation, settings = Allocation.from_env(env), RequeueSection()
        patience_s = settings.controller_patience_s
        job = SlurmJob(run, allocation, env, world_size=allocation.num_tasks, patience_s=patience_s)
        return Supervisor(run, job, settings).come_back_later(err)


def _may_return(config: RunConfig) -> bool:
    # Whoever waits in an allocation wants to see a failure, and no job that goes on without them.
    return config.requeue.enabled and config.launch != "interactive"


def _supervise(run: RunDirectory, command: Sequence[str], env: Mapping[str, str]) -> int:
    require_private(run)
    config = load_config(run.config)
    allocation, world_size = _share_of(Allocation.from_env(env), run, config)
    trackers = Tracking(run, config.track, env=env, say=say)
    job = SlurmJob(
        run,
        allocation,
        env,
        world_size=world_size,
        patience_s=config.requeue.controller_patience_s,
        continues=continued_job(run, allocation.requeue_id, env),
        # The trackers get a moment before Slurm ends this job.
        before_requeue=lambda: BestEffort(within_s=2.0)("the trackers", trackers.finish_soon, None),
    )
    if job.is_predecessor_cancelled():
        say(f"job {job.continues}, which this one was to continue, was cancelled; `resume` continues the run")
        return EXIT_FAILURE
    logs = _task_logs(command, allocation, env)

    def launch(attempt: int) -> int:
        note_environment(run, attempt, slurm=job.commands.version)
        monitor = watch_ranks(run, attempt, config, world_size=world_size, end_ranks=job.end_ranks)
        monitor.add(NoticeKeeper(run, attempt, ask=job.notice))
        monitor.add(FindingsRelay(run, attempt))
        code = _run_step(run, command, attempt, nodes=allocation.nodes, logs=logs, env=env, monitor=monitor)
        BestEffort()("the list of bad nodes", lambda: _note_nodes(run, attempt, config), None)
        return code

    supervisor = Supervisor(
        run,
        job,
        replace(config.requeue, enabled=_may_return(config)),
        committed_step=partial(newest_committed_step, run.checkpoints) if config.trains else None,
        is_own_code=not config.trains or config.preflight.only,
    )
    with trackers:
        return supervisor.supervise(launch)


def _share_of(allocation: Allocation, run: RunDirectory, config: RunConfig) -> tuple[Allocation, int]:
    """Returns the part of an allocation that the run takes, and its number of ranks.

    An salloc may have more nodes, or other task counts.
    """
    per_node = (read_json(run.plan) or {}).get("world", {}).get("ranks_per_node") or allocation.tasks_per_node
    nodes = allocation.nodes[: len(per_node)]
    if config.cluster is not None and config.cluster.launcher == "torchrun":
        # Slurm may have granted fewer nodes than were planned for. One task has all ranks of its node.
        share = replace(allocation, nodes=nodes, tasks_per_node=(1,) * len(nodes))
        return share, sum(per_node[: len(nodes)])
    if len(per_node) <= allocation.num_nodes:
        allocation = replace(allocation, nodes=nodes, tasks_per_node=tuple(per_node))
    return allocation, allocation.num_tasks


def _task_logs(command: Sequence[str], allocation: Allocation, env: Mapping[str, str]) -> list[str]:
    """Returns the names of the logs that srun may write, from its --output."""
    output = next((word for word in command if word.startswith("--output=")), "rank_%t.log")
    num_components = max(1, len(het_job_ids(env)))
    # srun counts "%t" on by one with each component of a heterogeneous step (22.05).
    tasks = range(allocation.num_tasks + num_components - 1)
    return [Path(output).name.replace("%t", str(task)) for task in tasks]


class _EndOfRanks(Task):
    """Finds out that the ranks have ended so long ago that srun must have missed it."""

    name = "the look for the end of the ranks"

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self.is_overdue = False

    def look(self) -> None:
        """Looks at the first mark of a rank."""
        if (mark := first_mark(self._run, newest_round(self._run, self._attempt))) is not None:
            linger_s = ORPHAN_LINGER_S if mark.exit_code == EXIT_ORPHANED else LINGER_S
            self.is_overdue |= time.time() - mark.time_unix_s > linger_s


def _run_step(
    run: RunDirectory,
    command: Sequence[str],
    attempt: int,
    *,
    nodes: Sequence[str],
    logs: Sequence[str],
    env: Mapping[str, str],
    monitor: Monitor,
) -> int:
    step_env = {
        **env,
        "SLURM_TRAIN_ATTEMPT": str(attempt),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": str(probe_port(str(run.path), attempt=attempt, env=env)),
    }
    folder = run.attempt_logs(attempt)
    say(f"attempt {attempt} of {run.name}/{run.run_id} on {', '.join(nodes)}; rank logs in {folder}")
    for bad in read_bad_nodes(run, now_unix_s=time.time()):
        if bad.node in nodes:
            say(f"was found bad before and is checked again: {bad}")
    argv = [word.replace("{attempt}", str(attempt)).replace("{nodes}", str(len(nodes))) for word in command]
    # Slurm would make them by the umask of the login shell.
    for name in (*logs, "batch.log"):
        create_private(folder / name)
    with (folder / "batch.log").open("ab") as log:
        try:
            require_seen_by_all(run, nodes, env, attempt=attempt)
        except NodesError as err:
            finding = _note_unfit(run, attempt, err, nodes=nodes)
            # The relay of findings runs beside the ranks, of which there are none.
            say(finding.line)
            log.write(f"{finding.line}\n".encode())
            return EXIT_FAILURE if finding.blames_node else err.exit_code
        if (code := refused_code(run, attempt, env)) is not None:
            return code
        ranks = _EndOfRanks(run, attempt)
        monitor.add(ranks)
        # This process works elsewhere: its own imports must not come from code that nobody has looked at.
        place = run.code if run.code.is_dir() else None
        with monitor.running():
            return run_step(
                argv, env=step_env, log=log, is_overdue=lambda: ranks.is_overdue, beside=monitor.check, cwd=place
            )


def _note_unfit(run: RunDirectory, attempt: int, error: NodesError, *, nodes: Sequence[str]) -> Finding:
    """Writes down as a finding what kept the ranks from being started, and returns it."""
    # Where few of many nodes are blind it is their fault; of two, or where most are, the path is not shared.
    blames = 2 * len(error.nodes) < len(nodes) and not isinstance(error, SilentNodesError)
    finding = Finding(
        code=error.code,
        level="error",
        node=", ".join(error.nodes),
        seen=error.message,
        todo=error.hint,
        blames_node=blames,
    )
    write_preflight(run, attempt, {"findings": [finding.as_json()], "table": [], "nodes": list(nodes)})
    return finding


def _note_nodes(run: RunDirectory, attempt: int, config: RunConfig) -> None:
    """Writes down what an attempt has found out about its nodes; the run goes on if the list cannot be written."""
    record = read_preflight(run, attempt)
    found, hours = bad_nodes_of(record), config.preflight.exclude_bad_nodes_h
    with contextlib.suppress(OSError):
        add_bad_nodes(run, found, hours=hours, now_unix_s=time.time())
        if found and hours > 0:
            lists = list_file(run).with_name(BAD_NODES_PARTS)
            say(f"later submissions leave out {', '.join(found)} for {hours:g} h; see {lists}")
        if record and not fatal_line(record):
            for node in forgive_nodes(run, record.get("nodes", ()), now_unix_s=time.time()):
                say(f"{node} was found well and is off the list of bad nodes")
