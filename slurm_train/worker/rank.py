"""One rank from its environment to its exit code: which attempt it is of, where it writes, what it runs, how it ends.

Nothing here imports torch before the preflight is over. Under `cluster.launcher=torchrun` a supervisor has opened the
attempt of the first restart and closes that of the last; under a plain torchrun there is none, and rank 0 does both.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
import traceback
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurm_train.checkpoint.verify import newest_committed_step
from slurm_train.config.batch import BatchPlan, recut_batch, solve_batch
from slurm_train.config.frozen import load_config
from slurm_train.config.parallel import solve_layout
from slurm_train.config.schema import BatchSection, RunConfig
from slurm_train.config.secrets import redact
from slurm_train.distributed.master import candidate_ports, is_under_torchrun, master_of, meeting_ports
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import agree_on_attempt
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_ORPHANED, EXIT_REQUEUE, RunError, SlurmTrainError
from slurm_train.launch.hub import OFFLINE, hub_snapshots, require_snapshots
from slurm_train.launch.imports import import_from_snapshot
from slurm_train.launch.snapshot import require_sealed
from slurm_train.rundir.attempts import (
    AttemptStart,
    attempt_secret,
    begin_round,
    check_fence,
    close_attempt,
    end_publishing,
    note_saved,
    read_round,
    rendezvous_secret,
)
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.files import is_there, open_file, read_json
from slurm_train.rundir.heartbeat import AwakeClock, Heartbeat, limits_of
from slurm_train.rundir.lineage import first_step_of
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.timing import step_of_attempt
from slurm_train.session.signals import NodeLeader, StopFlag, release_continue, start_orphan_watchdog, was_continued
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import node_name, step_id
from slurm_train.status.activity import live_holder
from slurm_train.supervise.hang import recording_environment
from slurm_train.worker.output import outlive_terminal

if TYPE_CHECKING:
    from slurm_train.train.context import Rank

_ATTEMPT = "SLURM_TRAIN_ATTEMPT"
# Devices, networks and files fail for a time; tried again, the same program may go on.
_IN_WORKER = "Original Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_PASSES = re.compile(
    r"CUDA error|AcceleratorError|CUBLAS|cuDNN|NCCL|gloo|Dist\w*Error|Connection|time.?out|OSError", re.I
)
_COMMIT_S = 5.0
"""Longest that a process stays for a checkpoint that is getting its name; a zombie must be gone within 10 s."""
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
"""What a rank of the trainer imports sooner or later."""


def wait_for_turn(run: RunDirectory) -> None:
    """Imports what a rank needs, and returns when the supervisor starts the attempt that this process was made for.

    The process ends where the supervisor does not need it any more. No GPU is touched before.
    """
    _prepare_torch()
    _import_early()
    if not sys.stdin.readline():
        os._exit(EXIT_DONE)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _write_to_own_log(run, int(os.environ[_ATTEMPT]), RankPlace.from_env(os.environ).rank)


def run_rank(run: RunDirectory, env: dict[str, str], stop: StopFlag, *, parent: int) -> NoReturn:
    """Runs one rank and ends the process; a failure leaves a mark that names its cause, for the supervisor.

    Args:
        run: the run directory, as this node names it.
        env: the process's environment.
        stop: set by the signal handlers, which are installed already.
        parent: id of the process that has started this one.
    """
    closes = False
    # A plain torchrun starts ranks without an attempt's number, which they agree on then.
    is_watched = _ATTEMPT in env
    try:
        _prepare_torch()
        if is_under_torchrun(env):
            _require_visible(run, node_name(env))
            closes = _ATTEMPT not in env and RankPlace.from_env(env).is_first
            env = _join_restart(run, env)
        elif "SLURM_HET_SIZE" in env and _ATTEMPT in env:
            # srun has given the log another number than the rank's (see `script.task_log`).
            _require_visible(run, node_name(env))
            _write_to_own_log(run, int(env[_ATTEMPT]), RankPlace.from_env(env).rank)
        if _ATTEMPT in env:
            _watch_orphan(run, env, parent)
        try:
            code = _work(run, env, stop, is_watched=is_watched)
        except SystemExit as err:
            code = err.code if isinstance(err.code, int) else EXIT_DONE if err.code is None else EXIT_FAILURE
        leave(_leave_restart(run, int(env[_ATTEMPT]), code, closes=closes) if is_under_torchrun(env) else code)
    except SlurmTrainError as err:
        print(f"error: {err}", file=sys.stderr, flush=True)
        _fail(run, env, err.exit_code, err.message.partition("\n")[0])
    except BaseException as err:
        print(redact(traceback.format_exc()), file=sys.stderr, end="", flush=True)
        _fail(run, env, EXIT_FAILURE, message_of(err), place=place_of(err))


def leave(code: int) -> NoReturn:
    """Ends the process; waits only for a checkpoint that is getting its name at this moment."""
    # Tearing a process group down waits for peers that may never come, and its threads outlive a good end at times;
    # that has held allocations for hours. Everything that matters is on disk by now, or about to be.
    end_publishing(within_s=_COMMIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def message_of(err: BaseException) -> str:
    """Returns an exception in one line; one of a DataLoader's worker, whose traceback torch makes a message, too."""
    lines = f"{type(err).__name__}: {err}".splitlines()
    return lines[-1] if _IN_WORKER in lines else lines[0]


def place_of(err: BaseException) -> str:
    """Returns where an exception was raised, e.g. "model.py:41 in forward"; "" for one that may pass by itself."""
    if isinstance(err, OSError) or _PASSES.search(f"{type(err).__name__}: {err}"):
        return ""
    if _IN_WORKER in str(err) and (frames := _FRAME.findall(str(err))):
        file, line, name = frames[-1]
        return f"{Path(file).name}:{line} in {name}"
    last = traceback.extract_tb(err.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def _fail(run: RunDirectory, env: Mapping[str, str], code: int, message: str, *, place: str = "") -> NoReturn:
    if is_under_torchrun(env) and _ATTEMPT not in env:
        # No attempt knows this rank yet.
        leave(code)
    rank = int(env.get("RANK") or env.get("SLURM_PROCID") or 0)
    mark = FailureMark(rank=rank, host=node_name(env), exit_code=code, message=message, place=place)
    # Where nothing can be written, the log has said what is wrong.
    with contextlib.suppress(OSError):
        leave_mark(run, int(env.get(_ATTEMPT, "0")), mark)
    leave(code)


def _watch_orphan(run: RunDirectory, env: Mapping[str, str], parent: int) -> None:
    """Makes this rank end by itself when the process that started it has ended, or a newer attempt has begun."""
    attempt = int(env[_ATTEMPT])

    def is_overtaken() -> bool:
        try:
            check_fence(run, attempt)
        except RunError:
            return True
        except OSError:
            pass  # A file system that does not answer says nothing about attempts.
        return False

    def on_overtaken() -> None:
        print(f"error: attempt {attempt} was overtaken by a newer one", file=sys.stderr, flush=True)
        leave(EXIT_FAILURE)

    def on_orphaned() -> None:
        starter = "slurmstepd" if "SLURM_STEP_ID" in env else "the launcher"
        _fail(run, env, EXIT_ORPHANED, f"the process that started it is gone ({starter} was killed?)")

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
    plan = read_json(run.plan) or {}
    attempt = int(env.get(_ATTEMPT, "0"))
    outlive_terminal(run.rank_log(attempt, place.rank))
    heartbeat = _start_heartbeat(run, attempt, config, place, env)
    code_dir = Path.cwd()
    env = _import_from_copy(run, place, env)
    if any(hub_snapshots(config)):
        require_snapshots(config, host=place.host)
        # Everything was fetched at the submission; a node without internet would wait for time-outs.
        os.environ.setdefault(OFFLINE, "1")
        env = {OFFLINE: os.environ[OFFLINE], **env}
    _set_defaults(gloo_environment(place.world_size))
    _enter(str(plan.get("directory", "")))
    point = MeetingPoint(
        master_addr=master_of(env),
        ports=meeting_ports(run.run_id, attempt=attempt, env=env),
        # torchrun's machines may have the run directory at different places.
        run_id=f"{run.name}/{run.run_id}" if is_under_torchrun(env) else str(run.path),
        attempt=attempt,
        timeout_s=config.train.start_timeout_s,
        secret=attempt_secret(run, attempt, wait_s=60.0 if _ATTEMPT in env else 0.0),
    )
    # On this machine alone there is no network between the ranks, and no other user's node to warn of.
    if config.cluster is not None and config.preflight.enabled and "SLURM_STEP_ID" in env:
        from slurm_train.tools.doctor.preflight import run_preflight

        variables = run_preflight(run, config, place, point, env=env)
        # gloo and NCCL read them from the process.
        os.environ.update(variables)
        env = {**env, **variables}
    heartbeat.mark("start")
    if config.preflight.only:
        return EXIT_DONE
    if config.trains:
        _import_early()
    if config.script is not None and config.train.follow is not None:
        from slurm_train.worker.scoring import follow_with_script

        return follow_with_script(config, place=place, env=env, code_dir=code_dir, run=run, attempt=attempt, stop=stop)
    if is_watched and not config.trains and config.health.hang_timeout_s is not None:
        env = {**env, **_watch(run, attempt, place, env, limit_s=config.health.hang_timeout_s)}
    if config.script is not None:
        from slurm_train.worker.script import run_script

        run_script(config.script, place=place, env=env, code_dir=code_dir, run=run)
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
    )
    if config.task is not None:
        from slurm_train.worker.watched import answer_watcher

        answer_watcher(dict(env))
        return run_task(rank)
    return _train_or_evaluate(rank)


def _enter(directory: str) -> None:
    """Makes relative paths in a user's code mean the directory that the run was submitted from, if the node has it."""
    if directory and Path(directory).is_dir():
        os.chdir(directory)


def _watch(
    run: RunDirectory, attempt: int, place: RankPlace, env: Mapping[str, str], *, limit_s: float
) -> dict[str, str]:
    """Starts the watcher of a rank that makes no marks, and returns the variables with which it can be asked."""
    from slurm_train.worker.watched import start_watcher

    answers = start_watcher(run, attempt=attempt, place=place, env=env, limit_s=limit_s)
    with contextlib.suppress(PackageNotFoundError):
        answers |= {name: os.environ[name] for name in recording_environment(version("torch")) if name in os.environ}
    return answers


def _train_or_evaluate(rank: Rank) -> int:
    """Returns the exit code of the built-in trainer, or of what measures checkpoints in its place."""
    if rank.config.train.follow is not None:
        from slurm_train.train.follow import follow_checkpoints

        return follow_checkpoints(rank)
    if rank.config.train.evaluate_from is not None:
        from slurm_train.train.evaluate_checkpoint import evaluate_checkpoint

        return evaluate_checkpoint(rank)
    from slurm_train.train.build import train

    return train(rank)


def _import_early() -> None:
    """Imports what a rank of the trainer needs, without the garbage collector: a tenth of the processor time."""
    gc.disable()
    try:
        for name in _IMPORTED_EARLY:
            # What this version of torch does not have is not needed either.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        gc.enable()


def _prepare_torch() -> None:
    # Before torch is imported: what collectives a rank has begun is asked in an autopsy.
    with contextlib.suppress(PackageNotFoundError):
        torch_version = version("torch")
        _set_defaults(recording_environment(torch_version) | allocator_environment(torch_version, os.environ))


def _set_defaults(variables: Mapping[str, str]) -> None:
    """Sets variables of this process that are not set, for libraries that read them there."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def allocator_environment(torch_version: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that lets segments of a GPU's memory grow, so that sizes which vary do not fragment it.

    Args:
        torch_version: e.g. "2.8.0+cu128". From 2.9 on the variable has another name, and the former one still counts.
        env: {} is returned where either is set.
    """
    former = "PYTORCH_CUDA_ALLOC_CONF"
    present = "PYTORCH_ALLOC_CONF"
    if former in env or present in env:
        return {}
    major, minor = map(int, torch_version.split(".")[:2])
    return {former if (major, minor) < (2, 9) else present: "expandable_segments:True"}


def gloo_environment(world_size: int) -> dict[str, str]:
    """Returns the variable that makes gloo connect two ranks only when they exchange something (torch 2.8 and newer).

    By itself each group connects every rank to every other: three descriptors per peer, and keys of the store that
    grow with the square. Small worlds keep that: a lazy broadcast waits beyond its time-out for a rank that has never
    been connected (seen with 2.13), so there the hang watchdog alone ends the ranks.

    Args:
        world_size: number of ranks.
    """
    return {"TORCH_GLOO_LAZY_INIT": "1"} if world_size >= _LAZY_FROM else {}


def _start_heartbeat(
    run: RunDirectory, attempt: int, config: RunConfig, place: RankPlace, env: Mapping[str, str]
) -> Heartbeat:
    heartbeat = Heartbeat(clock=AwakeClock(was_continued=was_continued))
    if not config.trains:
        release_continue()
        return heartbeat
    # All that the trainer writes is private; a user's own code keeps the umask of its user.
    os.umask(0o077)
    limits = limits_of(config)
    where = {"rank": place.rank, "local_rank": place.local_rank}
    heartbeat.start(run, attempt, host=place.host, limits=limits, step_id=step_id(env), **where)
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
    # Only root can write into the copy, and would leave bytecode there that others may read.
    sys.dont_write_bytecode = True
    changes = {"PYTHONPATH": child_path, "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.update(changes)
    return {**env, **changes}


def _batch_plan(config: RunConfig, plan: Mapping[str, Any], place: RankPlace) -> BatchPlan:
    """Returns the cut of the global batch for the ranks that there are, which may be fewer than were planned for."""
    batch = plan["batch"]
    if place.world_size == plan["world"]["size"]:
        return BatchPlan(
            global_size=batch["global_size"],
            local_size=batch["local_size"],
            ranks=batch["ranks"],
            accumulation=batch["accumulation"],
        )
    if not config.trains:
        return solve_batch(BatchSection(), ranks=place.world_size)
    layout = solve_layout(config.parallel, world_size=place.world_size)
    ranks = layout.data_parallel_size
    local_size = int(batch["local_size"])
    return recut_batch(int(batch["global_size"]), ranks=ranks, local_size=local_size, stages=layout.pp)


def _join_restart(run: RunDirectory, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with the attempt that torchrun's ranks agree on. Collective; output goes to its log then.

    Ends the process where the run is finished already.

    Raises:
        RendezvousError: ranks are missing.
        RunError: the run is being run already, or a newer attempt has taken it over.
    """
    place = RankPlace.from_env(env)
    first = int(env[_ATTEMPT]) if _ATTEMPT in env else None
    name = f"{run.name}/{run.run_id} lobby {env['TORCHELASTIC_RUN_ID']}"
    timeout_s = load_config(run.config).train.start_timeout_s
    point = MeetingPoint(
        master_addr=master_of(env),
        ports=candidate_ports(name),
        run_id=name,
        attempt=0,
        timeout_s=timeout_s,
        secret=rendezvous_secret(run, is_first=place.is_first, wait_s=timeout_s),
    )
    attempt = agree_on_attempt(
        place, point, open_attempt=lambda nodes: _begin(run, place, env, first=first, nodes=nodes)
    )
    if attempt == _NOTHING_TO_DO:
        if place.is_first:
            print(f"slurm_train: {run.path} is finished already; see {run.result}", file=sys.stderr, flush=True)
        leave(EXIT_DONE)
    os.environ[_ATTEMPT] = str(attempt)
    if first is not None or not place.is_first:
        _write_to_own_log(run, attempt, place.rank)
    return {**env, _ATTEMPT: str(attempt)}


def _begin(
    run: RunDirectory, place: RankPlace, env: Mapping[str, str], *, first: int | None, nodes: tuple[str, ...]
) -> int:
    if first is None:
        if (holder := live_holder(run, SlurmCommands(env))) is not None:
            raise RunError(f"{run.path} is being run by {holder}", hint="wait for it, or `cancel` it first")
        require_private(run)
        require_sealed(run)
        if is_there(run.result):
            return _NOTHING_TO_DO
        if is_there(run.stop_file):
            # Ranks that were started again while the others stopped have nothing to do either.
            raise RunError(f"{run.stop_file} is there, so nothing is started", hint=f"remove it: rm {run.stop_file}")
    start = AttemptStart(
        job_id=None,
        restart_count=0,
        nodes=nodes,
        world_size=place.world_size,
        first_committed=newest_committed_step(run.checkpoints),
    )
    return begin_round(run, start, first=first)


def _leave_restart(run: RunDirectory, attempt: int, code: int, *, closes: bool) -> int:
    """Returns the code that torchrun is to see: ranks that have saved and stopped are not to be started again.

    Args:
        run: the run.
        attempt: of this restart.
        code: of this rank.
        closes: this rank writes the end of the attempt, as no supervisor does.
    """
    if closes and code in (EXIT_DONE, EXIT_REQUEUE):
        begun = read_round(run, attempt)
        is_done = code == EXIT_DONE
        step_before = 0 if begun is None else begun.first_step
        facts = {
            "exit_code": code,
            "reason": "done" if is_done else "stopped",
            "action": "finish" if is_done else "stop",
            "note": "the run is finished" if is_done else "saved and stopped; the same command continues the run",
            "first_step": first_step_of(run, attempt, default=step_before),
            "last_step": step_of_attempt(run, attempt, default=step_before),
            "step_before": step_before,
        }
        close_attempt(run, attempt, facts)
    if code == EXIT_REQUEUE:
        note_saved(run, attempt)
        return EXIT_DONE
    return code


def _write_to_own_log(run: RunDirectory, attempt: int, rank: int) -> None:
    """Has stdout and stderr of this process go to its rank's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = open_file(run.rank_log(attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
