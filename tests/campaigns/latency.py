"""From a warning to a durable checkpoint, and from a job's start to its first new step, beside a bare torch script.

Inside one allocation a run is started by its own batch script, trains a few steps, and is warned as Slurm warns before
a time limit; it saves, ends, and is started again. In turns with it a bare script imports the same, opens the same
group, loads a checkpoint of the same model and optimizer, and takes a step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from slurm_train.rundir.paths import RunDirectory
from tests.benchmarks.bench_start_time import bare
from tests.campaigns.record import Tally, only_true
from tests.campaigns.victims import lines_of, newest_attempt
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work, command
from tests.support.small_checkpoints import checkpoint_of
from tests.support.waiting import wait_for

STEP_S = 0.3
RATIO = 1.2
_SLACK_S = 0.15
"""For scancel, slurmctld and slurmd to bring the signal to the ranks."""
_RANKS = 2
_WORDS = (
    f"+cluster=1x{_RANKS}",
    *TINY,
    "model._target_=paced.Paced",
    f"model.step_s={STEP_S}",
    "train.max_steps=1000000",
    "train.threads=1",
    "checkpoint.every_steps=1000000",
    "requeue.enabled=false",
    "run.name=latency",
)
# A third of a step is forward, two thirds are backward, as in a real network.
_PACED = """
import time
from tiny import Tiny

class Paced(Tiny):
    def __init__(self, step_s):
        super().__init__(0.0)
        self.pace_s = step_s
    def forward(self, x):
        y = super().forward(x)
        time.sleep(self.pace_s / 3)
        if y.requires_grad:
            y.register_hook(self.wait)
        return y
    def wait(self, gradient):
        time.sleep(2 * self.pace_s / 3)
"""
BARE = f"""
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from tiny import Numbers
from paced import Paced
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
model = nn.parallel.DistributedDataParallel(Paced({STEP_S}), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
if os.path.exists("bare.pt"):
    state = torch.load("bare.pt", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
inputs, targets = Numbers()[slice(rank * 8, rank * 8 + 8)]
nn.functional.mse_loss(model(inputs), targets).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
if rank == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
    torch.save(dict(model=model.module.state_dict(), optimizer=optimizer.state_dict()), "bare.pt")
dist.barrier()
os._exit(0)
"""


class Stop(NamedTuple):
    """One warning, in seconds since it was given."""

    stopped_s: float
    """The end of the last step."""
    durable_s: float
    """COMPLETE."""
    was_at: int
    """Steps done when the warning was given."""
    stopped_at: int

    def problems(self) -> list[str]:
        """Returns what is wrong: the step under way and one more are what a stop may take."""
        far = f"warned in step {self.was_at + 1}, stopped after step {self.stopped_at}"
        late = f"stopped {self.stopped_s:.2f} s after the warning; two steps are {2 * STEP_S:.2f} s"
        return only_true({far: self.stopped_at > self.was_at + 2, late: self.stopped_s > 2 * STEP_S + _SLACK_S})


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Starts and warns a run `trials` times."""
    with at_work(folder) as person:
        (person.folder / "paced.py").write_text(_PACED)
        (person.folder / "bare.py").write_text(BARE)
        allocation = ["salloc", "--quiet", "--nodes=1", f"--ntasks={_RANKS}", f"--ntasks-per-node={_RANKS}"]
        allocation += [f"--gpus-per-node={_RANKS}", "--nodelist=node1", "--job-name=latency"]
        inside = [sys.executable, "-m", __name__, str(person.folder), str(seed), str(trials)]
        subprocess.run([*allocation, *inside], check=True, timeout=60.0 + 40.0 * trials)
        kept = json.loads((person.folder / "measured.json").read_text())
    stops = [Stop(*stop) for stop in kept["stops"]]
    ratios = [mine / other for mine, other in zip(kept["ours_s"], kept["bare_s"], strict=True)]
    late = [] if median(ratios) <= RATIO else [f"start {median(ratios):.2f} x the bare script's"]
    for stop in stops:
        tally.add(
            f"stopped after {stop.stopped_s:.2f} s, durable after {stop.durable_s:.2f} s", stop.problems() or late
        )
    return figures(stops, ratios, kept)


def figures(stops: Sequence[Stop], ratios: Sequence[float], kept: Mapping[str, list[float]]) -> dict[str, str]:
    """Returns medians and worst values."""
    durable = [stop.durable_s for stop in stops]
    saves = [stop.durable_s - stop.stopped_s for stop in stops]
    steps = [stop.stopped_s / STEP_S for stop in stops]
    return {
        "signal to durable checkpoint": f"{median(durable):.2f} s, at most {max(durable):.2f} s",
        "of which the save": f"{median(saves):.3f} s",
        f"of which steps of {STEP_S} s": f"{median(steps):.2f}, at most {max(steps):.2f}",
        "start to first new step": f"{median(kept['ours_s']):.2f} s, bare script "
        f"{median(kept['bare_s']):.2f} s, ratio {median(ratios):.2f}",
    }


def measure(folder: Path, *, seed: int, trials: int) -> None:
    """Inside the allocation: alternates between both, and writes what was measured."""
    person, dice = Person(folder), random.Random(seed)
    one = person.prepares(*_WORDS)
    bare(person, 0)
    start_and_stop(person, one, dice)
    ours, others, stops = [], [], []
    for number in range(1, trials + 1):
        others.append(bare(person, number))
        took_s, stop = start_and_stop(person, one, dice)
        ours.append(took_s)
        stops.append(stop)
        print(f"   {number}: start {took_s:.2f} s, bare {others[-1]:.2f} s, stop {stop.durable_s:.2f} s", flush=True)
    kept = {"ours_s": ours, "bare_s": others, "stops": stops}
    (folder / "measured.json").write_text(json.dumps(kept))


def start_and_stop(person: Person, one: RunDirectory, dice: random.Random) -> tuple[float, Stop]:
    """Starts the run by its batch script and warns it; returns the seconds to its first new step, and the stop."""
    attempt, started = newest_attempt(one) + 1, time.time()
    with (person.folder / "batch.log").open("ab") as log:
        batch = subprocess.Popen(["bash", one.submit_script], env=person.environment(), stdout=log, stderr=log)
        try:
            first = wait_for(lambda: newest_line(one, attempt), within_s=120, what="a step", poll_s=0.02)
            time.sleep(dice.uniform(1.0, 2.0) * STEP_S)
            warned = time.time()
            # As Slurm does it for --signal: to the ranks of all steps.
            command("scancel", "--signal=USR2", os.environ["SLURM_JOB_ID"])
            batch.wait(timeout=120)
        finally:
            if batch.poll() is None:
                batch.send_signal(signal.SIGKILL)
    assert "action" in ledger_lines(one)[-1], ledger_lines(one)[-1]
    last = newest_line(one, attempt)
    # By the times of the steps: a line is in the file up to half a second later.
    done = [int(line["step"]) for line in lines_of(one) if line["attempt"] == attempt and line["time_unix_s"] <= warned]
    complete = checkpoint_of(one.checkpoints, int(last["step"])) / "COMPLETE"
    stop = Stop(last["time_unix_s"] - warned, complete.stat().st_mtime - warned, max(done), int(last["step"]))
    return float(first["time_unix_s"]) - started, stop


def newest_line(run: RunDirectory, attempt: int) -> dict[str, float]:
    """Returns the newest step's line of an attempt, an empty one before its first."""
    return next((line for line in lines_of(run)[-1:] if line["attempt"] == attempt), {})


if __name__ == "__main__":
    measure(Path(sys.argv[1]), seed=int(sys.argv[2]), trials=int(sys.argv[3]))
