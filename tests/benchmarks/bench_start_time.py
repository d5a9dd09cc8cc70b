"""Time from srun to the first optimizer step, at 8 and 32 ranks, against a bare DDP script under the same srun.

    python -m tests.benchmarks.bench_start_time [--rounds 3] [--sizes 1x8 4x8]

Both train the same small model on the same kind of batches, in turns inside one allocation. The bare script does
nothing but import torch, open the group, wrap the model and step; the toolkit's rank reads its run directory, meets the
others by handshake, looks for checkpoints, builds everything, logs.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_train.rundir.attempts import AttemptStart, open_attempt
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import TINY, Person, new_project

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


def in_allocations(module: str, *, doc: str | None, rounds: int, measure: Callable[[str, int], None]) -> None:
    """Calls `measure(size, rounds)` inside an allocation of each size that the command line names.

    Args:
        module: the benchmark's, which is started again in there.
        doc: its docstring, for --help.
        rounds: the default.
        measure: prints a line.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--sizes", nargs="*", default=["1x8", "4x8"])
    parser.add_argument("--inside", metavar="SIZE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if shutil.which("salloc") is None:
        print(f"{module}: not measured, there is no Slurm here")
        return
    if options.inside:
        measure(options.inside, options.rounds)
        return
    for size in options.sizes:
        nodes, gpus = size.split("x")
        again = [sys.executable, "-m", module, "--inside", size, "--rounds", str(options.rounds)]
        salloc = ["salloc", "--quiet", f"--nodes={nodes}", f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]
        subprocess.run([*salloc, *again], check=True)


def measure(size: str, rounds: int) -> None:
    """Runs both in turns inside the allocation that this process is in, and prints medians and the ratio."""
    folder = Path(tempfile.mkdtemp(prefix="slurm_train-bench-"))
    person = Person(new_project(folder))
    (folder / "bare.py").write_text(BARE)
    try:
        pairs = [(bare(person, number), ours(person, size, number)) for number in range(rounds + 1)][1:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bare_s, ours_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(mine / other for other, mine in pairs)
    print(
        f"start time {size}: bare script {bare_s:.1f} s, toolkit {ours_s:.1f} s = {ratio:.2f} x (promise: 1.2)",
        flush=True,
    )


def bare(person: Person, number: int) -> float:
    """Returns the seconds from srun to the bare script's first step."""
    out = person.folder / f"bare{number}.txt"
    env = person.environment() | {"MASTER_ADDR": hosts()[0], "MASTER_PORT": str(15000 + number)}
    started = time.time()
    subprocess.run(
        ["srun", "--kill-on-bad-exit=1", sys.executable, "bare.py", str(out)], cwd=person.folder, env=env, check=True
    )
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
    run = person.prepares(f"+cluster={size}", *words)
    # A rank waits for the secret of its attempt, which the supervisor makes elsewhere.
    nodes, ranks = hosts(), math.prod(map(int, size.split("x")))
    job_id = os.environ["SLURM_JOB_ID"]
    open_attempt(run, AttemptStart(job_id=job_id, restart_count=0, nodes=tuple(nodes), world_size=ranks))
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
    in_allocations("tests.benchmarks.bench_start_time", doc=__doc__, rounds=3, measure=measure)
