"""A run that this process joins, as a program of its only rank does; each time is another attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.attempts import AttemptStart, open_attempt
from slurm_train.rundir.files import last_lines
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session import client
from slurm_train.session.signals import StopFlag


def new_run(folder: Path) -> RunDirectory:
    """Returns the directory of a new run."""
    run = RunDirectory(folder / "runs" / "mine" / "0123456789ab")
    run.path.mkdir(parents=True)
    return run


@contextmanager
def joined(run: RunDirectory, stop: StopFlag | None = None) -> Iterator[client.JoinedSession]:
    """Has `session.join` return a session of the run while the body runs.

    Args:
        run: the run.
        stop: what asks its rank to stop.
    """
    attempt = open_attempt(run, AttemptStart(job_id=None, restart_count=0, nodes=("here",), world_size=1))
    place = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    heartbeat = Heartbeat()
    before = list(client._joined)
    session = client.enter(run, RunConfig(), place, {}, attempt=attempt, stop=stop or StopFlag(), heartbeat=heartbeat)
    try:
        yield session
    finally:
        session.close()
        # Else it writes beside the tests that follow in this process, some of which count such calls.
        heartbeat.stop()
        client._joined[:] = before


def evaluated_steps(run: RunDirectory) -> list[int]:
    """Returns the steps whose evaluation is on record, in order."""
    return [line["step"] for line in last_lines(run.metrics) if "eval_loss" in line]
