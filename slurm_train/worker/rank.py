"""One rank from its environment to its exit code: its attempt, its log, the program that it runs, and its end.

Nothing here imports torch before the preflight has ended. Under `cluster.launcher=torchrun` a supervisor has opened the
attempt of the first restart and closes that of the last. Under a plain torchrun there is no supervisor, and rank 0 does
both.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slurm_train.checkpoint.verify import newest_committed_step
from slurm_train.code.hub import OFFLINE, hub_snapshots, require_snapshots
from slurm_train.code.imports import import_from_snapshot
from slurm_train.code.snapshot import require_sealed
from slurm_train.config.batch import BatchPlan, recut_batch, solve_batch
from slurm_train.config.frozen import load_config
from slurm_train.config.parallel import solve_layout
from slurm_train.config.program import program_of
from slurm_train.config.schema import BatchSection, RunConfig
from slurm_train.config.secrets import redact
from slurm_train.distributed.master import PORTS, candidate_ports, is_under_torchrun, master_of, meeting_ports
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import agree_on_attempt
from slurm_train.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_ORPHANED,
    EXIT_REQUEUE,
    RunError,
    SlurmTrainError,
    exit_status,
)
from slurm_train.explained import with_address
from slurm_train.rundir.attempts import (
    attempt_secret,
    begin_round,
    check_fence,
    end_publishing,
    hold_run,
    note_saved,
    read_round,
    rendezvous_secret,
    was_saved,
)
from slurm_train.rundir.events import FailureMark, leave_mark, message_of, place_of, would_last
from slurm_train.rundir.files import is_there, open_file
from slurm_train.rundir.heartbeat import AwakeClock, Heartbeat, limits_of
from slurm_train.rundir.ledger import Action, End, Reason, Start, record_end
from slurm_train.rundir.lineage import first_step_of
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.timing import step_of_attempt
from slurm_train.session.ending import end_process
from slurm_train.session.loader_workers import tell_of_loader_workers
from slurm_train.session.rank_run import display_of
from slurm_train.session.signals import (
    NodeLeader,
    StopFlag,
    ignore_ends_of_children,
    note_continues,
    release_continue,
    start_orphan_watchdog,
    was_continued,
)
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import node_name, step_id
from slurm_train.status.activity import live_holder
from slurm_train.supervise.hang import recording_environment
from slurm_train.supervise.output import outlive_terminal

if TYPE_CHECKING:
    from slurm_train.train.context import Rank

_ATTEMPT = "SLURM_TRAIN_ATTEMPT"
_COMMIT_S = 5.0
"""Longest wait for a checkpoint that is just being renamed to its final name; a zombie must end within 10 s."""
_NOTHING_TO_DO = -1
_LAZY_FROM = 512
_IMPORTED_EARLY = (
    "torch",
    "encodings.idna",
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "slurm_train.tools.doctor.preflight",
    "slurm_train.train.build",
    "slurm_train.checkpoint.load",
    "slurm_train.checkpoint.tensors",
)
"""Modules that every rank of the trainer imports at some time."""


def wait_for_turn(run: RunDirectory) -> None:
    """Imports what a rank needs, and returns when the supervisor starts the attempt of this process.

    Ends the process if the supervisor no longer needs it. No GPU is used before that.
    """
    _prepare_torch()
    _import_early()
    if not sys.stdin.readline():
        os._exit(EXIT_DONE)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _write_to_own_log(run, int(os.environ[_ATTEMPT]), RankPlace.from_env(os.environ).rank)


def run_rank(run: RunDirectory, env: dict[str, str], stop: StopFlag, *, parent: int) -> NoReturn:
    """Runs one rank and ends the process; after a failure it leaves a mark with the cause for the supervisor.

    Args:
        run: the run directory by its path on this node.
        env: the process's environment.
        stop: set by the signal handlers, which are installed already.
        parent: id of the process that started this one.
    """
    closes = False
    # A segmentation fault would otherwise leave nothing in the log.
    faulthandler.enable()
    tell_of_loader_workers()
    # A plain torchrun starts ranks without an attempt's number; they agree on it later.
    is_watched = _ATTEMPT in env
    try:
        _prepare_torch()
        if is_under_torchrun(env):
            _require_visible(run, node_name(env))
            closes = _ATTEMPT not in env and RankPlace.from_env(env).is_first
            env = _join_restart(run, env)
        elif "SLURM_HET_SIZE" in env and _ATTEMPT in env:
            # The number in the log's name is not the rank's (see `batch_script.task_log`).
            _require_visible(run, node_name(env))
            _write_to_own_log(run, int(env[_ATTEMPT]), RankPlace.from_env(env).rank)
        if _ATTEMPT in env:
            _watch_orphan(run, env, parent)
        try:
            code = _work(run, env, stop, is_watched=is_watched)
        except SystemExit as end:
            code = _exit_code(run, env, end)
        if is_under_torchrun(env):
            code = _leave_restart(run, int(env[_ATTEMPT]), code, closes=closes)
        leave(run, code)
    except SlurmTrainError as err:
        ignore_ends_of_children()
        print(f"error: {with_address(str(err), err.message)}", file=sys.stderr, flush=True)
        _fail(run, env, err.exit_code, err.message.partition("\n")[0])
    except BaseException as err:
        ignore_ends_of_children()
        print(redact(traceback.format_exc()), file=sys.stderr, end="", flush=True)
        _fail(run, env, EXIT_FAILURE, message_of(err), place=place_of(err), lasting=would_last(err))


def leave(run: RunDirectory, code: int) -> NoReturn:
    """Ends the process after its program, whose threads, exit functions and open files come to their end first."""
    # After the threads, which may be saving.
    atexit.register(end_publishing, within_s=_COMMIT_S)
    end_process(exit_status(code), places=[str(run.code), str(Path.cwd())])


def cut_off(code: int) -> NoReturn:
    """Ends the process at once, from any thread; waits only for a checkpoint that is being renamed at this moment."""
    end_publishing(within_s=_COMMIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(
    run: RunDirectory, env: Mapping[str, str], code: int, message: str, *, place: str = "", lasting: bool = True
) -> NoReturn:
    # A rank of torchrun may belong to no attempt yet.
    if not is_under_torchrun(env) or _ATTEMPT in env:
        _leave_failure_mark(run, env, code, message, place=place, lasting=lasting)
    leave(run, code)


def _leave_failure_mark(
    run: RunDirectory, env: Mapping[str, str], code: int, message: str, *, place: str = "", lasting: bool = True
) -> None:
    rank = int(env.get("RANK") or env.get("SLURM_PROCID") or 0)
    mark = FailureMark(rank=rank, host=node_name(env), exit_code=code, message=message, place=place, lasting=lasting)
    # If the mark cannot be written, the error is still in the log.
    with contextlib.suppress(OSError):
        leave_mark(run, int(env.get(_ATTEMPT, "0")), mark)


def _exit_code(run: RunDirectory, env: Mapping[str, str], end: SystemExit) -> int:
    """Returns the exit code of a user's function that has called `sys.exit`; after a failure it ends the process."""
    if end.code is not None and not isinstance(end.code, int):
        print(end.code, file=sys.stderr, flush=True)
        _fail(run, env, EXIT_FAILURE, str(end.code).partition("\n")[0])
    code = exit_status(end.code or EXIT_DONE)
    if code not in (EXIT_DONE, EXIT_REQUEUE):
        _fail(run, env, code, f"the function ended with code {code}")
    return code


def _watch_orphan(run: RunDirectory, env: Mapping[str, str], parent: int) -> None:
    """Ends this rank when its starter has ended, a newer attempt has begun, or the run directory has gone."""
    hold_run(run)
    attempt = int(env[_ATTEMPT])
    reasons = [f"attempt {attempt} was overtaken by a newer one"]

    def is_overtaken() -> bool:
        try:
            check_fence(run, attempt)
        except RunError as err:
            reasons.append(err.message)
            return True
        except OSError:
            pass  # A file system that does not answer says nothing about attempts.
        return False

    def on_overtaken() -> None:
        print(f"error: {reasons[-1]}", file=sys.stderr, flush=True)
        cut_off(EXIT_FAILURE)

    def on_orphaned() -> None:
        starter = "slurmstepd" if "SLURM_STEP_ID" in env else "the launcher"
        message = f"the process that started it is gone ({starter} was killed?)"
        _leave_failure_mark(run, env, EXIT_ORPHANED, message)
        cut_off(EXIT_ORPHANED)

    start_orphan_watchdog(
        parent=parent,
        is_overtaken=is_overtaken,
        on_orphaned=on_orphaned,
        on_overtaken=on_overtaken,
        leader=NodeLeader(f"fence {run.path} {attempt} {node_name(env)}"),
    )


def _work(run: RunDirectory, env: Mapping[str, str], stop: StopFlag, *, is_watched: bool) -> int:
    """Returns the exit code of what the configuration names: the trainer, a task, or a script."""
    place = RankPlace.from_env(env)
    _require_visible(run, place.host)
    config = load_config(run.config)
    plan = PlanRecord.read(run.plan)
    attempt = int(env.get(_ATTEMPT, "0"))
    outlive_terminal(run.rank_log(attempt, place.rank))
    heartbeat = _start_heartbeat(run, attempt, config, place, env)
    code_dir = Path.cwd()
    env = _import_from_copy(run, place, env)
    if any(hub_snapshots(config)):
        require_snapshots(config, host=place.host)
        # Everything was fetched at submission; on a node without internet the library would wait for time-outs.
        os.environ.setdefault(OFFLINE, "1")
        env = {OFFLINE: os.environ[OFFLINE], **env}
    _set_defaults(gloo_environment(place.world_size))
    _enter(plan.directory)
    point = MeetingPoint(
        master_addr=master_of(env),
        ports=meeting_ports(run.run_id, attempt=attempt, env=env),
        # Under torchrun, machines may have the run directory at different paths.
        run_id=f"{run.name}/{run.run_id}" if is_under_torchrun(env) else str(run.path),
        attempt=attempt,
        timeout_s=config.train.start_timeout_s,
        secret=attempt_secret(run, attempt, wait_s=60.0 if _ATTEMPT in env else 0.0),
    )
    # Without Slurm there is no network between the ranks, and no shared node to check.
    if config.uses_cluster and config.preflight.enabled and "SLURM_STEP_ID" in env:
        from slurm_train.tools.doctor.preflight import run_preflight

        variables = run_preflight(run, config, place, point, env=env)
        # gloo and NCCL read them from the process.
        os.environ.update(variables)
        env = {**env, **variables}
    heartbeat.mark("start")
    if config.preflight.only:
        return EXIT_DONE
    if config.script is not None and config.train.follow is not None:
        from slurm_train.worker.scoring import follow_with_script

        return follow_with_script(config, place=place, env=env, code_dir=code_dir, run=run, attempt=attempt, stop=stop)
    if is_watched and not program_of(config).reports and config.health.hang_timeout_s is not None:
        env = {**env, **_watch(run, attempt, place, env, limit_s=config.health.hang_timeout_s)}
    if config.script is not None:
        from slurm_train.worker.script import run_script

        run_script(config, place=place, env=env, code_dir=code_dir, run=run, attempt=attempt, stop=stop)
    if config.task is not None:
        from slurm_train.worker.watched import answer_watcher

        answer_watcher(dict(env))
    else:
        _import_early()
    from slurm_train.train.context import Rank, run_task

    rank = Rank(
        config=config,
        plan=_batch_plan(config, plan, place),
        run=run,
        place=place,
        point=point,
        attempt=attempt,
        stop=stop,
        env=env,
        is_watched=is_watched,
        heartbeat=heartbeat,
        display=display_of(config, place, env),
    )
    return _train_or_evaluate(rank) if config.task is None else run_task(rank)


def _enter(directory: str) -> None:
    """Changes to the directory that the run was submitted from, if the node has it, for relative paths in user code."""
    if directory and Path(directory).is_dir():
        os.chdir(directory)


def _watch(
    run: RunDirectory, attempt: int, place: RankPlace, env: Mapping[str, str], *, limit_s: float
) -> dict[str, str]:
    """Starts the watcher of a rank that makes no marks, and returns the variables by which the rank can answer it."""
    from slurm_train.worker.watched import start_watcher

    variables = start_watcher(run, attempt=attempt, place=place, env=env, limit_s=limit_s)
    with contextlib.suppress(PackageNotFoundError):
        for name in recording_environment(version("torch")):
            if name in os.environ:
                variables[name] = os.environ[name]
    return variables


def _train_or_evaluate(rank: Rank) -> int:
    """Returns the exit code of the built-in trainer, or of an evaluation of checkpoints.

    Raises:
        RuntimeError: a model, a data set or a callback has called `sys.exit`. The rank would end as if nothing were
            left to do, and its peers would lose it.
    """
    try:
        if rank.config.train.follow is not None:
            from slurm_train.evaluation.follow import follow_checkpoints

            return follow_checkpoints(rank)
        if rank.config.train.evaluate_from is not None:
            from slurm_train.evaluation.evaluate_checkpoint import evaluate_checkpoint

            return evaluate_checkpoint(rank)
        from slurm_train.train.build import train

        return train(rank)
    except SystemExit as end:
        raise RuntimeError(f"sys.exit({end.code!r}) was called in the training, at {place_of(end)}") from end


def _import_early() -> None:
    """Imports what a rank of the trainer needs, without the garbage collector, which saves a tenth of the time."""
    gc.disable()
    try:
        for name in _IMPORTED_EARLY:
            # A module that this version of torch lacks is not needed.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        gc.enable()


def _prepare_torch() -> None:
    # Set before torch is imported; after a hang the flight records show which collectives each rank has begun.
    with contextlib.suppress(PackageNotFoundError):
        torch_version = version("torch")
        _set_defaults(recording_environment(torch_version) | allocator_environment(torch_version, os.environ))


def _set_defaults(variables: Mapping[str, str]) -> None:
    """Sets variables of this process that are not set yet, for libraries that read them from the environment."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def allocator_environment(torch_version: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that lets segments of GPU memory grow, so that varying sizes do not fragment it.

    Args:
        torch_version: e.g. "2.8.0+cu128". From 2.9 on the variable has another name, but the former name still works.
        env: {} is returned where either is set.
    """
    former = "PYTORCH_CUDA_ALLOC_CONF"
    present = "PYTORCH_ALLOC_CONF"
    if former in env or present in env:
        return {}
    major, minor = map(int, torch_version.split(".")[:2])
    return {former if (major, minor) < (2, 9) else present: "expandable_segments:True"}


def gloo_environment(world_size: int) -> dict[str, str]:
    """Returns the variable that makes gloo connect two ranks only when they exchange data (torch 2.8 and newer).

    By default each group connects every rank to every other: three descriptors per peer, and a number of store keys
    that grows with the square of the ranks. Small worlds keep the default: with the variable, a broadcast waits longer
    than its time-out for a rank that was never connected (seen with 2.13), and only the hang watchdog ends the ranks.

    Args:
        world_size: number of ranks.
    """
    return {"TORCH_GLOO_LAZY_INIT": "1"} if world_size >= _LAZY_FROM else {}


def _start_heartbeat(
    run: RunDirectory, attempt: int, config: RunConfig, place: RankPlace, env: Mapping[str, str]
) -> Heartbeat:
    if not program_of(config).reports:
        release_continue()
        return Heartbeat(clock=AwakeClock(was_continued=note_continues()))
    heartbeat = Heartbeat(clock=AwakeClock(was_continued=was_continued))
    # All files of the trainer are private; a user's own code keeps the umask of its user.
    os.umask(0o077)
    heartbeat.start(
        run,
        attempt,
        rank=place.rank,
        local_rank=place.local_rank,
        host=place.host,
        limits=limits_of(config),
        step_id=step_id(env),
    )
    return heartbeat


def _require_visible(run: RunDirectory, host: str) -> None:
    if not run.config.is_file():
        raise RunError(
            f"node {host} does not see {run.config}",
            hint="put the run on a path that every node shares: run.root=/shared/path",
        )
    if not os.access(run.path, os.W_OK):
        raise RunError(f"node {host} cannot write to {run.path}", hint="name another place with run.root=DIR")


def _import_from_copy(run: RunDirectory, place: RankPlace, env: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the environment with which this process and its children import from the run's copy of the code."""
    child_path, lines = import_from_snapshot(str(run.path), python_path=env.get("PYTHONPATH", ""))
    for line in lines if place.is_first else ():
        print(line, file=sys.stderr, flush=True)
    if not child_path:
        return env
    # Only root can write into the copy; bytecode that root leaves there might be read by others.
    sys.dont_write_bytecode = True
    changes = {"PYTHONPATH": child_path, "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.update(changes)
    return {**env, **changes}


def _batch_plan(config: RunConfig, plan: PlanRecord, place: RankPlace) -> BatchPlan:
    """Returns the batch plan for the actual number of ranks, which may be smaller than planned."""
    batch = plan.batch
    if batch is None:
        raise RunError("plan.json of the run cannot be read", hint="type the run's first command again")
    if place.world_size == plan.world.size:
        return BatchPlan(
            global_size=batch.global_size,
            local_size=batch.local_size,
            ranks=batch.ranks,
            accumulation=batch.accumulation,
        )
    if not program_of(config).is_planned:
        return solve_batch(BatchSection(), ranks=place.world_size)
    layout = solve_layout(config.parallel, world_size=place.world_size)
    ranks = layout.data_parallel_size
    return recut_batch(batch.global_size, ranks=ranks, local_size=batch.local_size, stages=layout.pp)


def _join_restart(run: RunDirectory, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with the attempt on which torchrun's ranks agree; opens its log for output. Collective.

    Ends the process if the run is finished already.

    Raises:
        RendezvousError: ranks are missing.
        RunError: the run is active already, or a newer attempt has taken over.
    """
    place = RankPlace.from_env(env)
    first_attempt = int(env[_ATTEMPT]) if _ATTEMPT in env else None
    name = f"{run.name}/{run.run_id} lobby {env['TORCHELASTIC_RUN_ID']}"
    timeout_s = load_config(run.config).train.start_timeout_s
    point = MeetingPoint(
        master_addr=master_of(env),
        ports=candidate_ports(name, within=env.get(PORTS, "")),
        run_id=name,
        attempt=0,
        timeout_s=timeout_s,
        secret=rendezvous_secret(run, is_first=place.is_first, wait_s=timeout_s),
    )
    attempt = agree_on_attempt(
        place, point, open_attempt=lambda nodes: _begin(run, place, env, first_attempt=first_attempt, nodes=nodes)
    )
    if attempt == _NOTHING_TO_DO:
        if place.is_first:
            print(f"slurm_train: {run.path} is finished already; see {run.result}", file=sys.stderr, flush=True)
        leave(run, EXIT_DONE)
    os.environ[_ATTEMPT] = str(attempt)
    if first_attempt is not None or not place.is_first:
        _write_to_own_log(run, attempt, place.rank)
    return {**env, _ATTEMPT: str(attempt)}


def _begin(
    run: RunDirectory, place: RankPlace, env: Mapping[str, str], *, first_attempt: int | None, nodes: tuple[str, ...]
) -> int:
    if first_attempt is None:
        holder = live_holder(run, SlurmCommands(env))
        if holder is not None:
            raise RunError(f"{run.path} is being run by {holder}", hint="wait for it, or `cancel` it first")
        require_private(run)
        require_sealed(run)
        if is_there(run.result):
            return _NOTHING_TO_DO
        if is_there(run.stop_file):
            # Ranks that were restarted while the others stopped must not begin either.
            raise RunError(f"{run.stop_file} is there, so nothing is started", hint=f"remove it: rm {run.stop_file}")
    start = Start(
        job_id=None,
        restart_count=0,
        nodes=nodes,
        world_size=place.world_size,
        first_committed=newest_committed_step(run.checkpoints),
    )
    return begin_round(run, start, first=first_attempt)


def _leave_restart(run: RunDirectory, attempt: int, code: int, *, closes: bool) -> int:
    """Returns the exit code for torchrun, which must not restart ranks that have saved and stopped.

    Args:
        run: the run.
        attempt: of this restart.
        code: of this rank.
        closes: this rank writes the end line of the attempt, since there is no supervisor.
    """
    if closes and code in (EXIT_DONE, EXIT_REQUEUE):
        opening = read_round(run, attempt)
        is_done = code == EXIT_DONE and not was_saved(run, attempt)
        step_before = 0 if opening is None else opening.first_step
        end = End(
            time_unix_s=time.time(),
            exit_code=code,
            reason=Reason.DONE if is_done else Reason.STOPPED,
            action=Action.FINISH if is_done else Action.STOP,
            note="the run is finished" if is_done else "saved and stopped; the same command continues the run",
            first_step=first_step_of(run, attempt, default=step_before),
            last_step=step_of_attempt(run, attempt, default=step_before),
            step_before=step_before,
        )
        record_end(run, attempt, end)
    if code == EXIT_REQUEUE:
        note_saved(run, attempt)
        return EXIT_DONE
    return code


def _write_to_own_log(run: RunDirectory, attempt: int, rank: int) -> None:
    """Redirects stdout and stderr of this process to its rank's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = open_file(run.rank_log(attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
