"""Time from srun to the first optimizer step, at 8 and 32 ranks, against a bare DDP script under the same srun.

    python -m tests.benchmarks.bench_start_time [--rounds 3] [--sizes 1x8 4x8]

Both train the same small model on the same kind of batches, in turns inside one allocation. The bare script does
nothing but import torch, open the group, wrap the model and step; the toolkit's rank reads its run directory, meets the
others by handshake, looks for checkpoints, builds everything, logs.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import TINY, Person, new_project
from tests.support.options import read_options

BARE = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from tiny import Numbers, Tiny
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
model = nn.parallel.DistributedDataParallel(Tiny(), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
inputs, targets = Numbers()[slice(rank * 2, rank * 2 + 2)]
nn.functional.mse_loss(model(inputs), targets).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
if rank == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
dist.barrier()
os._exit(0)
"""


Pair = tuple[float, float]
"""Seconds of one round: without or bare, with or ours."""


def in_allocations(module: str, *, rounds: int, measure: Callable[[Person, str, int], Pair], words: str) -> None:
    """Calls `measure(person, size, number)` inside an allocation of each size that the command line names.

    Args:
        module: the benchmark's, which is started again in there.
        rounds: the default.
        measure: measures the two of a round.
        words: of the line that is printed, with {size}, {rounds}, and the medians {other}, {own}, {ratio} and {more}.
    """
    asked = read_options(rounds=rounds, sizes=("1x8", "4x8"), inside=str)
    if shutil.which("salloc") is None:
        print(f"{module}: not measured, there is no Slurm here")
        return
    if asked.inside:
        with in_a_project() as person:
            pairs = [measure(person, asked.inside, number) for number in range(asked.rounds + 1)][1:]
        other, own = (median(column) for column in zip(*pairs, strict=True))
        ratio, more = median(b / a for a, b in pairs), median(b - a for a, b in pairs)
        print(words.format(size=asked.inside, rounds=asked.rounds, other=other, own=own, ratio=ratio, more=more))
        return
    for size in asked.sizes:
        nodes, gpus = size.split("x")
        again = [sys.executable, "-m", module, "--inside", size, "--rounds", str(asked.rounds)]
        salloc = ["salloc", "--quiet", f"--nodes={nodes}", f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]
        subprocess.run([*salloc, *again], check=True)


@contextmanager
def in_a_project() -> Iterator[Person]:
    """Gives somebody in a folder with the tiny model, which goes away at the end."""
    with tempfile.TemporaryDirectory(prefix="slurm_train-bench-", ignore_cleanup_errors=True) as folder:
        yield Person(new_project(Path(folder)))


def measure(person: Person, size: str, number: int) -> Pair:
    """Runs both inside the allocation that this process is in."""
    (person.folder / "bare.py").write_text(BARE)
    return bare(person, number), ours(person, size, number)


def bare(person: Person, number: int) -> float:
    """Returns the seconds from srun to the first step of the script `bare.py`."""
    out = person.folder / f"bare{number}.txt"
    env = person.environment() | {"MASTER_ADDR": hosts()[0], "MASTER_PORT": str(15000 + number % 1000)}
    command = ["srun", "--kill-on-bad-exit=1", sys.executable, "bare.py", str(out)]
    started = time.time()
    subprocess.run(command, cwd=person.folder, env=env, check=True, timeout=120)
    return float(out.read_text()) - started


def ours(person: Person, size: str, number: int) -> float:
    """Returns the seconds from srun to the toolkit's first step, from its own srun line."""
    run, command = srun_line(person, size, *TINY, "batch.global_size=64", f"run.name=start{number}")
    started = run_step(person, run, command)
    first = next(line for line in read_lines(run.metrics) if line.get("step") == 1)
    return float(first["time_unix_s"]) - started


def srun_line(person: Person, size: str, *words: str) -> tuple[RunDirectory, list[str]]:
    """Returns a run that is prepared for its first attempt, and the srun command of its script.

    Args:
        person: who types it.
        size: of the cluster, e.g. "4x8".
        words: of the run.
    """
    # As many CPUs as `salloc` gives: more would not fit into its allocation.
    run = person.prepares(f"+cluster={size}", "cluster.cpus_per_gpu=1", *words)
    # A rank waits for the secret of its attempt, which the supervisor makes elsewhere.
    nodes, ranks = hosts(), math.prod(map(int, size.split("x")))
    job_id = os.environ["SLURM_JOB_ID"]
    open_attempt(run, Start(job_id=job_id, restart_count=0, nodes=tuple(nodes), world_size=ranks))
    script = run.submit_script.read_text().replace("\\\n", " ")
    line = next(line for line in script.splitlines() if "supervise" in line)
    return run, [word.replace("{attempt}", "0") for word in shlex.split(line.partition(" -- ")[2])]


def run_step(person: Person, run: RunDirectory, command: Sequence[str], **more: str) -> float:
    """Runs the ranks of a run to their end inside this allocation, and returns when srun was called (unix time).

    Args:
        person: who types it.
        run: what `srun_line` gave.
        command: likewise.
        more: of the ranks' environment.
    """
    env = person.environment() | {"SLURM_TRAIN_ATTEMPT": "0", "MASTER_ADDR": hosts()[0], "PYTHONUNBUFFERED": "1"}
    started = time.time()
    subprocess.run(command, cwd=run.code, env=env | more, check=True)
    return started


def hosts() -> list[str]:
    """Returns the allocation's nodes."""
    words = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


if __name__ == "__main__":
    in_allocations(
        "tests.benchmarks.bench_start_time",
        rounds=3,
        measure=measure,
        words="start time {size}: bare script {other:.1f} s, toolkit {own:.1f} s = {ratio:.2f} x (promise: 1.2)",
    )
