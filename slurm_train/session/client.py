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
from slurm_train.config.schema import RunConfig
from slurm_train.distributed.master import is_under_torchrun
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_FAILURE, ConfigError, SlurmTrainError
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.ending import close_and_exit
from slurm_train.session.interface import ChildSession, Session
from slurm_train.session.joined import JoinedSession
from slurm_train.session.signals import StopFlag, handled, install
from slurm_train.session.wandb_calls import guard_calls

RUN_DIR = "SLURM_TRAIN_RUN_DIR"
"""Variable with the directory of the run, for scripts: a place for their files, the same at each attempt."""
_ATTEMPT = "SLURM_TRAIN_ATTEMPT"

_joined: list[Session] = []


def join() -> Session:
    """Returns this process's part in its run; the same object each time.

    Call it early: until then a stop signal ends the process. A process that a rank has started, such as a worker of a
    data loader, is outside of the run; where it would save or stop, it is refused.

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
        elif multiprocessing.parent_process() is not None:
            _joined.append(ChildSession(place, env))
        else:
            _joined.append(_join(RunDirectory(Path(env[RUN_DIR])), place, env))
    return _joined[0]


def enter(
    run: RunDirectory,
    config: RunConfig,
    place: RankPlace,
    env: Mapping[str, str],
    *,
    attempt: int,
    stop: StopFlag,
    heartbeat: Heartbeat,
) -> JoinedSession:
    """Opens the session that `join` returns from now on; the worker calls it for a user's own function."""
    session = JoinedSession(run, config, place, env, attempt=attempt, stop=stop, heartbeat=heartbeat)
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
    if before and place.is_first:
        print(
            f"slurm_train: `join()` takes the place of the program's handler of {' and '.join(before)}, which is not "
            "called any more; `should_stop` says when to save",
            file=sys.stderr,
        )
    guard_calls(stop)
    # `get_start_method` alone would settle it.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork" and place.is_first:
        print(
            f"slurm_train: processes begin by {method} here, and Slurm's stop signals end those at once: let loaders "
            'with workers have multiprocessing_context="fork", else the program fails before it saves',
            file=sys.stderr,
        )
    session = JoinedSession(
        run,
        load_config(run.config),
        place,
        env,
        attempt=int(env[_ATTEMPT]),
        stop=stop,
        heartbeat=Heartbeat(),
        is_under_agent=is_under_torchrun(env),
    )
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
