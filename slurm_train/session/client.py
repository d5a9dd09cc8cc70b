"""How a program enters its run: `join` gives this process's part in it, `enter` opens one for a user's function."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from slurm_train.config.frozen import load_config
from slurm_train.distributed.master import is_under_torchrun
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_FAILURE, ConfigError, SlurmTrainError
from slurm_train.rundir.heartbeat import AwakeClock, Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.ending import close_and_exit
from slurm_train.session.interface import ChildSession, Session
from slurm_train.session.joined import JoinedSession
from slurm_train.session.rank_run import RankRun, display_of
from slurm_train.session.signals import NodeLeader, StopFlag, handled, install, note_continues
from slurm_train.session.wandb_calls import guard_calls
from slurm_train.slurm.job_variables import step_id

RUN_DIR = "SLURM_TRAIN_RUN_DIR"
"""Variable with the directory of the run, for scripts: a place for their files, the same at each attempt."""
RANK_STEP = "SLURM_TRAIN_STEP"
"""Variable with Slurm's step of the rank, for scripts: a job that a rank submits inherits all its variables."""
_ATTEMPT = "SLURM_TRAIN_ATTEMPT"

_joined: list[Session] = []
_claims: list[NodeLeader] = []
"""What makes this process the rank, for as long as it lives."""


def join() -> Session:
    """Returns this process's part in its run; the same object each time.

    Call it early: until then a stop signal ends the process, and another process that inherits its variables may become
    the rank. A process that a rank has started, such as a worker of a data loader or a program, and a job that it has
    submitted are outside of the run; where they would save or stop, they are refused.

    Raises:
        SlurmTrainError: the run directory cannot be read.
        ConfigError: the first call in a rank is not in its main thread.
    """
    if not _joined:
        env = dict(os.environ)
        place = RankPlace.from_env(env)
        is_in_run = bool(env.get(RUN_DIR)) and _ATTEMPT in env
        if not is_in_run:
            _joined.append(Session(place, env))
        else:
            run = RunDirectory(Path(env[RUN_DIR]))
            why = _why_no_rank(run, place, env)
            _joined.append(ChildSession(place, env, why) if why else _join(run, place, env))
    return _joined[0]


def has_joined() -> bool:
    """Returns whether this process has called `join`."""
    return bool(_joined)


def _why_no_rank(run: RunDirectory, place: RankPlace, env: Mapping[str, str]) -> str:
    """Returns why this process is no rank although it has the variables of one, "" for the rank; names it in the log.

    The first process of an attempt that asks for it is the rank until it ends. Another one of the same program may
    follow then, as in a shell script that starts it again.
    """
    if multiprocessing.parent_process() is not None:
        return "a rank has started it by multiprocessing"
    why = ""
    step = step_id(env)
    if env.get(RANK_STEP, step) != step:
        why = f"it is not in the rank's step {env[RANK_STEP] or '(none)'} but in {step or 'none'}"
    else:
        claim = NodeLeader(f"rank {run.path} {env[_ATTEMPT]} {place.rank}")
        if claim.keeps():
            _claims.append(claim)
        else:
            why = f"another process is rank {place.rank}"
    if why:
        print(
            f"slurm_train: process {os.getpid()} ({' '.join(sys.argv)}) is no rank of {run.name}/{run.run_id}: {why}",
            file=sys.stderr,
        )
    return why


def enter(rank: RankRun) -> JoinedSession:
    """Opens the session that `join` returns from now on; the worker calls it for a user's own function."""
    session = JoinedSession(rank)
    _joined[:] = [session]
    return session


def _join(run: RunDirectory, place: RankPlace, env: Mapping[str, str]) -> JoinedSession:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"`join()` was called in the thread {threading.current_thread().name}: Python installs handlers of signals "
            "in the main thread only, so no stop would reach the program",
            hint="call `session.join()` in the main thread, early; each thread gets the same session afterwards",
        )
    stop = StopFlag()
    before = handled()
    install(stop)
    guard_calls(stop)
    config = load_config(run.config)
    rank = RankRun(
        config=config,
        run=run,
        place=place,
        attempt=int(env[_ATTEMPT]),
        stop=stop,
        env=env,
        heartbeat=Heartbeat(clock=AwakeClock(was_continued=note_continues())),
        display=display_of(config, place, env),
    )
    if before:
        rank.say(
            f"`join()` takes the place of the program's handler of {' and '.join(before)}, which is not called any "
            "more; `should_stop` says when to save"
        )
    session = JoinedSession(rank, is_under_agent=is_under_torchrun(env))
    # It comes before the exit function of `multiprocessing`, which is imported already, ends its children by TERM.
    atexit.register(_close_at_exit, session)
    return session


def _close_at_exit(session: JoinedSession) -> None:
    """Closes the session at the end of the program, which has failed if its last checkpoint has."""
    try:
        session.close()
    except SlurmTrainError as err:
        print(f"slurm_train: {err}", file=sys.stderr, flush=True)
        # The exit code is settled already.
        close_and_exit(EXIT_FAILURE, places=[str(RunDirectory(session.run_directory).code), str(Path.cwd())])
