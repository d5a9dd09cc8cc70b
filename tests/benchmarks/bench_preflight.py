"""What the preflight costs: time from srun to the first optimizer step at 8 and 32 ranks, with it and without.

    python -m tests.benchmarks.bench_preflight [--rounds 5] [--sizes 1x8 4x8]

Both in turns inside one allocation; the ratio is the median over rounds. The look itself is timed by rank 0.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.preflight import read_record
from tests.benchmarks.bench_start_time import ours
from tests.support.command_line import Person, new_project


def main() -> None:
    """Takes an allocation per size and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=["1x8", "4x8"])
    parser.add_argument("--inside", metavar="SIZE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if shutil.which("salloc") is None:
        print("preflight: not measured, there is no Slurm here")
        return
    if options.inside:
        measure(options.inside, options.rounds)
        return
    for size in options.sizes:
        nodes, gpus = size.split("x")
        again = [sys.executable, "-m", __spec__.name, "--inside", size, "--rounds", str(options.rounds)]
        salloc = ["salloc", "--quiet", f"--nodes={nodes}", f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]
        subprocess.run([*salloc, *again], check=True)


def measure(size: str, rounds: int) -> None:
    """Runs both in turns inside the allocation that this process is in, and prints medians and the ratio."""
    folder = Path(tempfile.mkdtemp(prefix="slurm_train-bench-"))
    person = Person(new_project(folder))
    try:
        pairs = [_pair(person, size, number) for number in range(rounds + 1)][1:]
        looks = [float(read_record(RunDirectory(path), 0)["seconds"]) for path in folder.glob("runs/start*on/*")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    off_s, on_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(on / off for off, on in pairs)
    print(
        f"preflight {size}: {off_s:.1f} s to the first step without, {on_s:.1f} s with = {ratio:.2f} x; "
        f"the look takes {statistics.median(looks):.2f} s, of which most is waiting for the last rank to start",
        flush=True,
    )


def _pair(person: Person, size: str, number: int) -> tuple[float, float]:
    """Returns the seconds without and with it; who goes first changes from round to round."""
    both = {"off": "preflight.enabled=false", "on": "preflight.enabled=true"}
    order = list(both) if number % 2 else list(both)[::-1]
    took = {name: ours(person, size, number, both[name], f"run.name=start{number}{name}") for name in order}
    return took["off"], took["on"]


if __name__ == "__main__":
    main()
