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

from slurm_train.session.signals import StopFlag, install  # noqa: E402  # the handlers come before torch


def main() -> int:
    stop = StopFlag()
    install(stop)
    orders = json.loads(sys.argv[1])

    from slurm_train.config.schema import RunConfig, build_config
    from slurm_train.distributed.place import RankPlace
    from slurm_train.session.rank_run import display_of
    from slurm_train.train.build import train
    from tests.support.ranks import make_rank

    config = build_config(RunConfig, orders["config"])
    place = RankPlace.from_env(os.environ)
    rank = make_rank(
        Path(orders["run"]),
        config,
        rank=place.rank,
        ranks=place.world_size,
        port=orders["port"],
        attempt=orders["attempt"],
        stop=stop,
        env=dict(os.environ),
        display=display_of(config, place, os.environ),
    )
    if orders.get("beats"):
        rank.heartbeat.start(rank.run, rank.attempt, rank=rank.place.rank, host=os.uname().nodename, limits=None)
    if orders.get("fault"):
        import rank_faults

        rank_faults.install(orders["fault"], run=rank.run, rank=rank.place.rank)
    return train(rank)


if __name__ == "__main__":
    # As the worker ends: gloo's threads do not survive an orderly interpreter exit.
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)
