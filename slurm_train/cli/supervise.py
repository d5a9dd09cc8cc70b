"""`supervise RUN_DIR -- srun ...`: what the batch script calls; owns one attempt from its opening to its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from slurm_train.checkpoint.directory import newest_committed_step
from slurm_train.cli.liveness import holder_lives, newest_job
from slurm_train.cli.node_notes import note_nodes, note_unfit
from slurm_train.cli.seal import refused_code
from slurm_train.cli.surroundings import note_surroundings
from slurm_train.cli.trackers import tracking_run
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.errors import EXIT_FAILURE, EXIT_ORPHANED, ClusterError, ConfigError, NodesError
from slurm_train.launch.avoidance import can_avoid, keep_off, listed_among
from slurm_train.launch.continuation import continued_job, is_cancelled, submit_continuation
from slurm_train.launch.meeting import probe_port
from slurm_train.launch.resources import STEP_NAME
from slurm_train.launch.step import LINGER_S, ORPHAN_LINGER_S, end_step, run_step
from slurm_train.launch.visibility import require_seen_by_all
from slurm_train.metrics.trackers.beside import Trackers
from slurm_train.rundir.attempts import AttemptStart, first_round, newest_round
from slurm_train.rundir.events import fatal_line, first_mark, read_preflight
from slurm_train.rundir.files import create_private, read_json
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.jobs import this_process
from slurm_train.rundir.layout import RunDirectory, require_private
from slurm_train.rundir.timing import Notice
from slurm_train.slurm.allocation import Allocation, het_job_ids
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.environment import job_environment
from slurm_train.slurm.policy import read_preemption
from slurm_train.slurm.records import end_and_limit, queue_seconds, violent_end
from slurm_train.supervise.decision import Decision
from slurm_train.supervise.monitor import (
    BestEffort,
    Monitor,
    ReadNotice,
    Task,
    findings_relay,
    hang_of,
    hang_watchdog,
    limits_of,
    notice_keeper,
    say,
    straggler_watch,
)
from slurm_train.supervise.scheduler import bring_back, with_patience
from slurm_train.supervise.supervisor import Site, come_back_later, ignore_stop_signals, supervise


def main(words: Sequence[str]) -> int:
    """Runs an attempt inside an allocation and returns the exit code of the batch script."""
    run, command = _read(words)
    env = job_environment(os.environ)
    ignore_stop_signals()
    try:
        return _supervise(run, command, env)
    except OSError as err:
        # A full disk or a stale handle at the start: the job comes back later.
        config = BestEffort(say)("the configuration", lambda: load_config(run.config), None)
        if config is not None and not (config.requeue.enabled and config.launch != "interactive"):
            raise
        allocation = Allocation.from_env(env)
        patience_s = RequeueSection().controller_patience_s
        site = _site(run, allocation, env, world_size=allocation.num_tasks, patience_s=patience_s)
        return come_back_later(run, site, err)


def _supervise(run: RunDirectory, command: Sequence[str], env: Mapping[str, str]) -> int:
    require_private(run)
    config = load_config(run.config)
    allocation = _share_of(Allocation.from_env(env), run, config)
    continues = continued_job(run, allocation.requeue_id, env)
    if continues is not None and _is_cancelled(continues, env):
        say(f"job {continues}, which this one was to continue, was cancelled; `resume` continues the run")
        return EXIT_FAILURE

    commands, limits = SlurmCommands(env), limits_of(config)
    size, logs = _num_ranks(run, config, allocation), _task_logs(command, allocation, env)
    read = _notice_reader(allocation.requeue_id, commands)

    def launch(attempt: int) -> int:
        note_surroundings(run, attempt, slurm=commands.version)
        end, monitor = partial(_kill_steps, commands, _job_ids(allocation, env)), Monitor()
        monitor.add(hang_watchdog(run, attempt, limits=limits, world_size=size, end_ranks=end, clock=monitor.clock))
        monitor.add(notice_keeper(run, attempt, read=read))
        monitor.add(findings_relay(run, attempt, say=say))
        monitor.add(straggler_watch(run, attempt, config=config, world_size=size))
        code = _run_step(run, command, attempt=attempt, nodes=allocation.nodes, logs=logs, env=env, monitor=monitor)
        BestEffort(say)("the list of bad nodes", lambda: note_nodes(run, attempt, config), None)
        return code

    site = _site(run, allocation, env, world_size=size, patience_s=config.requeue.controller_patience_s)
    # Whoever waits in an allocation wants to see a failure, and no job that goes on without them.
    requeue = replace(config.requeue, enabled=config.requeue.enabled and config.launch != "interactive")
    with tracking_run(run, config.track, env) as trackers:
        site = replace(site, requeue=partial(_requeue_last, trackers, site.requeue), continues=continues)
        if config.trains:
            site = replace(site, committed_step=partial(newest_committed_step, run.checkpoints))
        return supervise(run, requeue, site, launch, is_own_code=not config.trains or config.preflight.only)


def _num_ranks(run: RunDirectory, config: RunConfig, allocation: Allocation) -> int:
    if not _is_torchrun(config):
        return allocation.num_tasks
    # One task has all ranks of its node.
    per_node = (read_json(run.plan) or {})["world"]["ranks_per_node"]
    return sum(per_node[: allocation.num_nodes])


def _task_logs(command: Sequence[str], allocation: Allocation, env: Mapping[str, str]) -> list[str]:
    """Returns the names of the logs that srun may write, from its --output."""
    output = next((word for word in command if word.startswith("--output=")), "rank_%t.log")
    num_components = max(1, len(het_job_ids(env)))
    # srun counts "%t" on by one with each component of a heterogeneous step (22.05).
    tasks = range(allocation.num_tasks + num_components - 1)
    return [Path(output).name.replace("%t", str(task)) for task in tasks]


def _is_torchrun(config: RunConfig) -> bool:
    return config.cluster is not None and config.cluster.launcher == "torchrun"


def _requeue_last(trackers: Trackers, requeue: Callable[[Decision], bool], decision: Decision) -> bool:
    # Slurm ends this job by it; the trackers get the moment until then.
    BestEffort(say, within_s=2.0)("the trackers", trackers.finish_soon, None)
    return requeue(decision)


def _share_of(allocation: Allocation, run: RunDirectory, config: RunConfig) -> Allocation:
    """Returns the part of an allocation that the run takes: an salloc may have more nodes, or other task counts."""
    per_node = (read_json(run.plan) or {}).get("world", {}).get("ranks_per_node") or allocation.tasks_per_node
    nodes = allocation.nodes[: len(per_node)]
    if _is_torchrun(config):
        # Slurm may have granted fewer nodes than were planned for.
        return replace(allocation, nodes=nodes, tasks_per_node=(1,) * len(nodes))
    if len(per_node) > allocation.num_nodes:
        return allocation
    return replace(allocation, nodes=nodes, tasks_per_node=tuple(per_node))


def _read(words: Sequence[str]) -> tuple[RunDirectory, list[str]]:
    if len(words) < 3 or words[1] != "--":
        raise ConfigError(f"supervise cannot read {list(words)}", hint="supervise RUN_DIR -- srun ...")
    return RunDirectory(Path(words[0])), list(words[2:])


def _site(
    run: RunDirectory, allocation: Allocation, env: Mapping[str, str], *, world_size: int, patience_s: float
) -> Site:
    job_id, commands, job_ids = allocation.requeue_id, SlurmCommands(env), _job_ids(allocation, env)
    return Site(
        start=AttemptStart(
            job_id=job_id,
            restart_count=allocation.restart_count,
            nodes=allocation.nodes,
            world_size=world_size,
        ),
        holder=this_process(job_id=job_id),
        is_alive=lambda holder: holder_lives(holder, commands),
        show_job=lambda: _show_job(job_id, commands, patience_s),
        requeue=lambda decision: _requeue(
            allocation, commands, decision, patience_s, job_ids=_job_ids(allocation, env)
        ),
        resubmit=lambda decision: _resubmit(run, job_id, decision, env),
        explain=lambda attempt: _read_step_errors(run, attempt),
        clear=lambda attempt: all(_clear(run, attempt, job_id=one, commands=commands) for one in job_ids),
        past_ends=lambda old_job: _past_ends(old_job, commands),
        can_avoid=lambda names: can_avoid(names, job_id, commands, num_nodes=allocation.num_nodes),
        queue_s=_queue_s(job_id, env),
        newest_job=lambda: newest_job(commands),
        can_relaunch=True,
    )


def _notice_reader(job_id: str, commands: SlurmCommands) -> ReadNotice:
    """Returns what asks Slurm when the job ends; how the site ends jobs does not change and is asked once."""
    site: dict[str, float | None] = {}

    def read() -> Notice:
        job = commands.show_job(job_id)
        if not site:
            settings = commands.show_config()
            partition = commands.show_partition(job.get("Partition", ""))
            preemption = read_preemption(settings, qos=commands.show_qos(job.get("QOS", "")), partition=partition)
            site.update(kill_wait_s=preemption.kill_wait_s, grace_s=preemption.grace_s)
        end_unix_s, limit_s = end_and_limit(job)
        return Notice(end_unix_s=end_unix_s, limit_s=limit_s, **site)

    return read


def _kill_steps(commands: SlurmCommands, job_ids: Sequence[str], beats: Mapping[int, Beat]) -> None:
    for step_id in {beat.source.step_id for beat in beats.values()} - {""}:
        job, _, step = step_id.partition(".")
        # The step has the same number in each component.
        for one in (job, *(other for other in job_ids if job in job_ids and other != job)):
            commands.cancel_step(f"{one}.{step}", kill=True)


def _job_ids(allocation: Allocation, env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the ids by which this job's steps and nodes are known: those of all components of a heterogeneous one."""
    return het_job_ids(env) or (allocation.requeue_id,)


def _read_step_errors(run: RunDirectory, attempt: int) -> str:
    # Ranks that were ended as hung were killed, and srun would name whoever died first.
    if sentence := hang_of(run, attempt):
        return sentence
    if line := fatal_line(read_preflight(run, attempt)):
        return line
    log = run.attempt_logs(first_round(run, attempt)) / "batch.log"
    return violent_end(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else ""


def _queue_s(job_id: str, env: Mapping[str, str]) -> float | None:
    # Only a figure for the ledger: a controller that is busy now does not hold the start up.
    try:
        return queue_seconds(SlurmCommands(env, timeout_s=10.0).show_job(job_id))
    except ClusterError:
        return None


def _clear(run: RunDirectory, attempt: int, *, job_id: str, commands: SlurmCommands) -> bool:
    mark = first_mark(run, attempt)
    # Slurm has nobody left who could end the step of a killed slurmstepd (22.05: it stays until the job ends).
    within_s = 10.0 if mark is not None and mark.exit_code == EXIT_ORPHANED else 60.0
    return end_step(job_id, STEP_NAME.format(attempt=first_round(run, attempt)), commands, within_s=within_s)


def _past_ends(job_id: str, commands: SlurmCommands) -> list[str]:
    try:
        return commands.ended_states(job_id)
    except ClusterError:
        return []


def _show_job(job_id: str, commands: SlurmCommands, patience_s: float) -> dict[str, str] | None:
    try:
        return with_patience(lambda: commands.show_job(job_id), limit_s=patience_s, sleep=time.sleep)
    except ClusterError as err:
        say(f"Slurm does not say how job {job_id} stands: {err.message}")
        return None


def _requeue(
    allocation: Allocation,
    commands: SlurmCommands,
    decision: Decision,
    patience_s: float,
    *,
    job_ids: Sequence[str],
) -> bool:
    job_id, count = allocation.requeue_id, allocation.restart_count
    try:
        done = bring_back(job_id, commands, restart_count=count, is_over=decision.is_over, limit_s=patience_s)
        if done and decision.delay_s:
            for one in job_ids:
                _put_off(decision.delay_s, one, commands)
        if done and decision.exclude:
            for one in job_ids:
                _keep_off(decision.exclude, one, commands)
    except ClusterError as err:
        say(f"job {job_id} could not be requeued: {err.message}")
        return False
    return done


def _resubmit(run: RunDirectory, job_id: str, decision: Decision, env: Mapping[str, str]) -> str:
    try:
        return submit_continuation(run, job_id, exclude=decision.exclude, env=env)
    except ClusterError as err:
        say(f"no other job could be submitted: {err.message}")
        return ""


def _is_cancelled(job_id: str, env: Mapping[str, str]) -> bool:
    commands = SlurmCommands(env)
    try:
        return with_patience(lambda: is_cancelled(job_id, commands), sleep=time.sleep)
    except ClusterError:
        return False


def _keep_off(names: str, job_id: str, commands: SlurmCommands) -> None:
    # Slurm may end this process any moment: an attempt, not a promise.
    try:
        keep_off(names, job_id, commands)
    except ClusterError as err:
        say(f"job {job_id} may get {names} again: {err.message}")


def _put_off(seconds: int, job_id: str, commands: SlurmCommands) -> None:
    # Like `_keep_off`: without it the job comes back after Slurm's own pause.
    try:
        commands.put_off(job_id, seconds)
    except ClusterError as err:
        say(f"job {job_id} may start again at once: {err.message}")


def _run_step(
    run: RunDirectory,
    command: Sequence[str],
    *,
    attempt: int,
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
    say(f"attempt {attempt} of {run.name}/{run.run_id} on {', '.join(nodes)}; rank logs in {run.attempt_logs(attempt)}")
    for bad in listed_among(nodes, run):
        say(f"was found bad, is looked at again: {bad}")
    argv = [word.replace("{attempt}", str(attempt)).replace("{nodes}", str(len(nodes))) for word in command]
    # Slurm would make them by the umask of the login shell.
    for name in (*logs, "batch.log"):
        create_private(run.attempt_logs(attempt) / name)
    with (run.attempt_logs(attempt) / "batch.log").open("ab") as log:
        try:
            require_seen_by_all(run, nodes, env, attempt=attempt)
        except NodesError as err:
            text = f"error: {err}"
            print(text, file=sys.stderr, flush=True)
            log.write(f"{text}\n".encode())
            return note_unfit(run, attempt, err, nodes=nodes)
        if (code := refused_code(run, attempt, env)) is not None:
            return code
        overdue = threading.Event()
        look = partial(_look_for_end, run, attempt, overdue)
        monitor.add(Task(name="the look for the end of the ranks", every_s=1.0, look=look))
        # This process works elsewhere: its own imports must not come from code that nobody has looked at.
        place = run.code if run.code.is_dir() else None
        with monitor.running():
            return run_step(argv, env=step_env, log=log, is_overdue=overdue.is_set, beside=monitor.check, cwd=place)


def _look_for_end(run: RunDirectory, attempt: int, overdue: threading.Event) -> None:
    """Sets the event when the ranks have ended so long ago that srun must have missed it."""
    if (mark := first_mark(run, newest_round(run, attempt))) is None:
        return
    linger_s = ORPHAN_LINGER_S if mark.exit_code == EXIT_ORPHANED else LINGER_S
    if time.time() - mark.time_unix_s > linger_s:
        overdue.set()
