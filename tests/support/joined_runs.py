"""A run that this process joins, as its only rank or as one of several; each time is another attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.metrics import SILENT, Display
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.files import last_lines
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session import client
from slurm_train.session.rank_run import RankRun
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
    place = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    with _entered(run, place, _open(run, world_size=1), stop) as session:
        yield session


@contextmanager
def joined_rank(run: RunDirectory, stop: StopFlag) -> Iterator[client.JoinedSession]:
    """Has `session.join` return this rank's session while the body runs. All ranks of the process group call it."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    box = [_open(run, world_size=ranks) if rank == 0 else -1]
    dist.broadcast_object_list(box)
    place = RankPlace(rank=rank, local_rank=rank, node_rank=0, world_size=ranks, local_world_size=ranks, host="here")
    with _entered(run, place, box[0], stop) as session:
        yield session


def _open(run: RunDirectory, *, world_size: int) -> int:
    return open_attempt(run, Start(job_id=None, restart_count=0, nodes=("here",), world_size=world_size))


@contextmanager
def _entered(
    run: RunDirectory, place: RankPlace, attempt: int, stop: StopFlag | None
) -> Iterator[client.JoinedSession]:
    rank = RankRun(
        config=RunConfig(),
        run=run,
        place=place,
        attempt=attempt,
        stop=stop or StopFlag(),
        env={},
        display=Display(opening="slurm_train: ") if place.is_first else SILENT,
    )
    before = list(client._joined)
    session = client.enter(rank)
    try:
        yield session
    finally:
        session.close()
        # Else it writes beside the tests that follow in this process, some of which count such calls.
        rank.heartbeat.stop()
        client._joined[:] = before


def evaluations(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns the lines of the evaluations that are on record, in order."""
    return [line for line in last_lines(run.metrics) if "eval_loss" in line]


def evaluated_steps(run: RunDirectory) -> list[int]:
    """Returns the steps whose evaluation is on record, in order."""
    return [line["step"] for line in evaluations(run)]
