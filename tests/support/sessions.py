"""A program's session in the process of a test, as the only rank of the next attempt of a run."""

from __future__ import annotations

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.metrics import Display
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.joined import JoinedSession
from slurm_train.session.rank_run import RankRun
from slurm_train.session.signals import StopFlag

ALONE = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")


def join_alone(
    run: RunDirectory, *, heartbeat: Heartbeat, config: RunConfig | None = None, stop: StopFlag | None = None
) -> JoinedSession:
    """Opens the next attempt and returns its session.

    Args:
        run: the run.
        heartbeat: its thread; the caller stops it.
        config: of the run; None: the defaults.
        stop: set by whoever asks for a stop.
    """
    attempt = open_attempt(run, Start(job_id=None, restart_count=0, nodes=("here",), world_size=1))
    return JoinedSession(
        RankRun(
            config=config or RunConfig(),
            run=run,
            place=ALONE,
            attempt=attempt,
            stop=stop or StopFlag(),
            env={},
            heartbeat=heartbeat,
            display=Display(opening="slurm_train: "),
        )
    )
