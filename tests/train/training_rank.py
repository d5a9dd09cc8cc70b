"""One rank of a small training, as a process: what the trainer's tests start. Reads its orders as JSON from argv.

python training_rank.py '{"run": "...", "config": {...}, "port": 12345, "attempt": 0}'
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).resolve().parent)]

from slurm_train.supervise.signals import StopFlag, install  # noqa: E402  # the handlers come before torch


def main() -> int:
    stop = StopFlag()
    install(stop)
    orders = json.loads(sys.argv[1])

    from slurm_train.config.batch import solve_batch
    from slurm_train.config.layout import solve_layout
    from slurm_train.config.schema import RunConfig, build_config
    from slurm_train.distributed.greeting import MeetingPoint
    from slurm_train.distributed.place import RankPlace
    from slurm_train.rundir.layout import RunDirectory
    from slurm_train.train.context import Rank
    from slurm_train.train.trainer import train

    config = build_config(RunConfig, orders["config"])
    place = RankPlace.from_env(os.environ)
    layout = solve_layout(config.parallel, world_size=place.world_size)
    point = MeetingPoint(
        master_addr="127.0.0.1", ports=[orders["port"]], run_id="test", attempt=orders["attempt"], timeout_s=60
    )
    start = Rank(
        config=config,
        plan=solve_batch(config.batch, ranks=layout.data_parallel_size, stages=layout.pp),
        run=RunDirectory(Path(orders["run"])),
        place=place,
        point=point,
        attempt=orders["attempt"],
        stop=stop,
        env=dict(os.environ),
    )
    if orders.get("beats"):
        from slurm_train.rundir.heartbeat import BeatSource

        source = BeatSource(rank=place.rank, host=os.uname().nodename, pid=os.getpid(), step_id="")
        start.heartbeat.start(start.run, orders["attempt"], source, limits=None)
    if orders.get("fault"):
        import rank_faults

        rank_faults.install(orders["fault"], run=start.run, rank=place.rank)
    return train(start)


if __name__ == "__main__":
    # As the worker ends: gloo's threads do not survive an orderly interpreter exit.
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)
