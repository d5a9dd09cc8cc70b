"""What `report` and `should_stop` of a session cost per step, on one rank.

    python -m tests.benchmarks.bench_session [--rounds 7] [--steps 20000]

Processor time of the calling thread, the least of the rounds, beside an empty call of the same form. The heartbeat's
thread writes meanwhile, as in a run; a step waits for none of it. Ends with 1 where one of them takes more than
20 microseconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.joined import JoinedSession
from slurm_train.session.rank_run import RankRun
from slurm_train.session.signals import StopFlag

MOST_US = 20.0
ALONE = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")


def join(folder: Path) -> JoinedSession:
    """Returns the session of a run of one rank."""
    run = RunDirectory(folder / "runs" / "bench" / "0123456789ab")
    run.path.mkdir(parents=True)
    attempt = open_attempt(run, Start(job_id=None, restart_count=0, nodes=("here",), world_size=1))
    return JoinedSession(RankRun(config=RunConfig(), run=run, place=ALONE, attempt=attempt, stop=StopFlag(), env={}))


def least_us(call: Callable[[int], object], *, steps: int, rounds: int) -> float:
    """Returns the microseconds of one call."""
    least_s = float("inf")
    first = 1
    for _ in range(rounds):
        # Of this thread alone: what else the machine does is not the call's.
        start = time.thread_time()
        for step in range(first, first + steps):
            call(step)
        least_s = min(least_s, time.thread_time() - start)
        first += steps
    return 1e6 * least_s / steps


def main() -> None:
    """Prints the table; ends with 1 where a call is too slow."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        session = join(Path(folder))
        calls: dict[str, Callable[[int], object]] = {
            "empty": lambda step: step,
            "report(step)": session.report,
            "report(step, loss=, lr=)": lambda step: session.report(step, loss=1.5, lr=1e-3),
            "should_stop()": lambda _: session.should_stop(),
        }
        found = {}
        begin = 0
        for name, call in calls.items():
            first = begin
            found[name] = least_us(lambda step, call=call, first=first: call(first + step), **vars(options))  # type: ignore[misc]
            begin += options.steps * options.rounds
        session.close()
    for name, microseconds in found.items():
        print(f"{name:28} {microseconds:8.2f} us")
    slow = [name for name, microseconds in found.items() if microseconds > MOST_US]
    if slow:
        sys.exit(f"more than {MOST_US:g} us: {', '.join(slow)}")


if __name__ == "__main__":
    main()
