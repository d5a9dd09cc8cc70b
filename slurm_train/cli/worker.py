"""`worker RUN_DIR`: one rank. srun, a local launch or a hand-typed command starts it; it reads the run directory.

The stop handlers are installed before torch is imported: importing takes seconds, and a preemption does not wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurm_train.cli.terminal import outlive_terminal
from slurm_train.distributed.ports import is_under_torchrun
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_ORPHANED, RunError, SlurmTrainError
from slurm_train.rundir.attempts import end_publishing
from slurm_train.slurm.environment import node_name
from slurm_train.train.preflight import preflight
from slurm_train.train.signals import (
    StopFlag,
    hold_continue,
    install,
    release_continue,
    start_orphan_watchdog,
    was_continued,
)

_COMMIT_S = 5.0
"""Longest that a process stays for a checkpoint that is getting its name; a zombie must be gone within 10 s."""

if TYPE_CHECKING:
    from slurm_train.cli.joining import Joined
    from slurm_train.config.batch import BatchPlan
    from slurm_train.config.schema import RunConfig
    from slurm_train.distributed.meeting import MeetingPoint
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.heartbeat import Heartbeat
    from slurm_train.rundir.paths import RunDirectory
    from slurm_train.train.context import Rank


def main(words: Sequence[str]) -> NoReturn:
    """Runs one rank and ends the process with its exit code; an unexpected error leaves its traceback."""
    parent = os.getppid()
    stop = StopFlag()
    install(stop)
    hold_continue()
    if len(words) != 1:
        raise RunError(f"worker takes one run directory, found {list(words)}", hint="worker RUN_DIR")
    path, env = Path(words[0]), dict(os.environ)
    joined: Joined | None = None
    try:
        _let_torch_record()
        if is_under_torchrun(env):
            joined = _join(path, env)
            env = joined.env
        elif "SLURM_HET_SIZE" in env and "SLURM_TRAIN_ATTEMPT" in env:
            _open_own_log(path, env)
        if "SLURM_TRAIN_ATTEMPT" in env:
            _watch_orphan(path, env, parent)
        _leave(_told(path, joined, _work(path, env, stop)))
    except SlurmTrainError as err:
        print(f"error: {err}", file=sys.stderr, flush=True)
        _fail(path, env, err.exit_code, err.message)
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 0 if err.code is None else EXIT_FAILURE
        _leave(_told(path, joined, code))
    except BaseException as err:
        import traceback

        from slurm_train.config.secrets import redact

        print(redact(traceback.format_exc()), file=sys.stderr, end="", flush=True)
        _fail(path, env, EXIT_FAILURE, f"{type(err).__name__}: {err}")


def _join(path: Path, env: Mapping[str, str]) -> Joined:
    """Returns the attempt of a rank that torchrun has started; ends it where the run is finished already."""
    from slurm_train.cli.joining import join_round
    from slurm_train.config.frozen import load_config
    from slurm_train.rundir.paths import RunDirectory

    run = RunDirectory(path)
    _require_visible(run, node_name(env))
    joined = join_round(run, env, timeout_s=load_config(run.config).train.start_timeout_s)
    if joined is None:
        _leave(EXIT_DONE)
    return joined


def _open_own_log(path: Path, env: Mapping[str, str]) -> None:
    """Has a rank write where it is looked for; srun has given its log another number (see `script.task_log`)."""
    from slurm_train.cli.joining import write_to_own_log
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.paths import RunDirectory

    place, run = RankPlace.from_env(env), RunDirectory(path)
    _require_visible(run, place.host)
    write_to_own_log(run, int(env["SLURM_TRAIN_ATTEMPT"]), place.rank)


def _told(path: Path, joined: Joined | None, code: int) -> int:
    """Returns the exit code for whoever started this rank."""
    if joined is None:
        return code
    from slurm_train.cli.joining import leave_round
    from slurm_train.rundir.paths import RunDirectory

    return leave_round(RunDirectory(path), joined, code)


def _fail(path: Path, env: Mapping[str, str], code: int, message: str) -> NoReturn:
    """Leaves a mark that names the cause, for the supervisor, and ends the process."""
    from slurm_train.rundir.events import FailureMark, leave_mark
    from slurm_train.rundir.paths import RunDirectory

    if is_under_torchrun(env) and "SLURM_TRAIN_ATTEMPT" not in env:
        # No attempt knows this rank yet.
        _leave(code)
    rank = int(env.get("RANK") or env.get("SLURM_PROCID") or 0)
    mark = FailureMark(rank=rank, host=node_name(env), exit_code=code, message=message.partition("\n")[0])
    # Where nothing can be written, the log has said what is wrong.
    with contextlib.suppress(OSError):
        leave_mark(RunDirectory(path), int(env.get("SLURM_TRAIN_ATTEMPT", "0")), mark)
    _leave(code)


def _watch_orphan(path: Path, env: Mapping[str, str], parent: int) -> None:
    """Makes this rank end by itself when nobody holds it any more; a rank started by hand belongs to the hand."""
    from slurm_train.rundir.attempts import check_fence
    from slurm_train.rundir.paths import RunDirectory

    run, attempt = RunDirectory(path), int(env["SLURM_TRAIN_ATTEMPT"])

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
        _leave(EXIT_FAILURE)

    def on_orphaned() -> None:
        _fail(path, env, EXIT_ORPHANED, f"the process that started it is gone ({_names_of_parents(env)} was killed?)")

    start_orphan_watchdog(parent=parent, is_overtaken=is_overtaken, on_orphaned=on_orphaned, on_overtaken=on_overtaken)


def _names_of_parents(env: Mapping[str, str]) -> str:
    return "slurmstepd" if "SLURM_STEP_ID" in env else "the launcher"


def _leave(code: int) -> NoReturn:
    # Tearing a process group down waits for peers that may never come, and its threads outlive a good end at times;
    # that has held allocations for hours. Everything that matters is on disk by now, or about to be.
    end_publishing(within_s=_COMMIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(path: Path, env: Mapping[str, str], stop: StopFlag) -> int:
    from slurm_train.config.frozen import load_config
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.files import read_json
    from slurm_train.rundir.paths import RunDirectory

    place = RankPlace.from_env(env)
    run = RunDirectory(path)
    _require_visible(run, place.host)
    config = load_config(run.config)
    plan = read_json(run.plan) or {}
    attempt = int(env.get("SLURM_TRAIN_ATTEMPT", "0"))
    outlive_terminal(run.rank_log(attempt, place.rank))
    heartbeat = _start_heartbeat(run, attempt, config, place, env)
    code_dir = Path.cwd()
    env = _import_from_copy(run, place, env)
    _enter(str(plan.get("directory", "")))
    point = _meeting_point(run, env, attempt, config.train.start_timeout_s)
    variables = preflight(run, config, place, point, plan=plan, env=env)
    # gloo and NCCL read them from the process.
    os.environ.update(variables)
    env = {**env, **variables}
    heartbeat.mark("start")
    if config.preflight.only:
        return EXIT_DONE
    if config.script is not None:
        _run_script(config.script, place=place, env=env, code_dir=code_dir, run=run)
    from slurm_train.train.context import Rank

    rank = Rank(
        config=config,
        plan=_batch_plan(config, plan, place),
        run=run,
        place=place,
        point=point,
        attempt=attempt,
        stop=stop,
        env=env,
        heartbeat=heartbeat,
    )
    return _train(rank)


def _run_script(
    script: Sequence[str], *, place: RankPlace, env: Mapping[str, str], code_dir: Path, run: RunDirectory
) -> NoReturn:
    from slurm_train.train.script import run_script

    run_script(script, place=place, env=env, code_dir=code_dir, run=run)


def _train(rank: Rank) -> int:
    if rank.config.task is not None:
        from slurm_train.train.context import run_task

        return run_task(rank)
    from slurm_train.train.trainer import train

    return train(rank)


def _let_torch_record() -> None:
    # Before torch is imported: what collectives a rank has begun is asked in an autopsy.
    from importlib.metadata import PackageNotFoundError, version

    from slurm_train.supervise.hang import recording_environment

    with contextlib.suppress(PackageNotFoundError):
        for name, value in recording_environment(version("torch")).items():
            os.environ.setdefault(name, value)


def _start_heartbeat(
    run: RunDirectory, attempt: int, config: RunConfig, place: RankPlace, env: Mapping[str, str]
) -> Heartbeat:
    from slurm_train.rundir.heartbeat import AwakeClock, BeatSource, Heartbeat, limits_of

    heartbeat = Heartbeat(clock=AwakeClock(was_continued=was_continued))
    if not config.trains:
        release_continue()
    else:
        # All that the trainer writes is private; a user's own code keeps the umask of its user.
        os.umask(0o077)
        job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
        step_id = f"{job}.{step}" if job and step else ""
        source = BeatSource(rank=place.rank, host=place.host, pid=os.getpid(), step_id=step_id)
        heartbeat.start(run, attempt, source, limits=limits_of(config))
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
    from slurm_train.launch.imports import import_from_snapshot

    child_path, lines = import_from_snapshot(str(run.path), python_path=env.get("PYTHONPATH", ""))
    for line in lines if place.is_first else ():
        print(line, file=sys.stderr, flush=True)
    if not child_path:
        return env
    os.environ["PYTHONPATH"] = child_path
    return {**env, "PYTHONPATH": child_path}


def _enter(directory: str) -> None:
    # Relative paths in a user's code mean the directory that the run was submitted from, where the node has it.
    if directory and Path(directory).is_dir():
        os.chdir(directory)


def _meeting_point(run: RunDirectory, env: Mapping[str, str], attempt: int, timeout_s: float) -> MeetingPoint:
    from slurm_train.distributed.meeting import MeetingPoint
    from slurm_train.distributed.ports import master_of, meeting_ports
    from slurm_train.rundir.attempts import attempt_secret

    return MeetingPoint(
        master_addr=master_of(env),
        ports=meeting_ports(run.run_id, attempt=attempt, env=env),
        # torchrun's machines may have the run directory at different places.
        run_id=f"{run.name}/{run.run_id}" if is_under_torchrun(env) else str(run.path),
        attempt=attempt,
        timeout_s=timeout_s,
        secret=attempt_secret(run, attempt, wait_s=60.0 if "SLURM_TRAIN_ATTEMPT" in env else 0.0),
    )


def _batch_plan(config: RunConfig, plan: Mapping[str, Any], place: RankPlace) -> BatchPlan:
    """Returns the cut of the global batch for the ranks that there are, which may be fewer than were planned for."""
    from slurm_train.config.batch import BatchPlan, recut_batch, solve_batch
    from slurm_train.config.layout import solve_layout
    from slurm_train.config.schema import BatchSection

    batch, world = plan["batch"], plan["world"]
    if place.world_size == world["size"]:
        ranks = batch.get("ranks", world["size"])
        return BatchPlan(local_size=batch["local_size"], ranks=ranks, accumulation=batch["accumulation"])
    if not config.trains:
        return solve_batch(BatchSection(), ranks=place.world_size)
    layout = solve_layout(config.parallel, world_size=place.world_size)
    ranks, local_size = layout.data_parallel_size, int(batch["local_size"])
    return recut_batch(int(batch["global_size"]), ranks=ranks, local_size=local_size, stages=layout.pp)
