"""What the look for stragglers costs per step: our loop with it off, as it is by default, and at every second step.

    python -m tests.benchmarks.bench_pace [--rounds 30] [--out result.json]

Two gloo ranks; the three loops train the same model in turns in one process group, so noise of the machine hits all
alike. The ratios are medians over rounds, each to the loop without the look in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_step_time import CASES, RANKS, our_loop

WAYS: dict[str, Any] = {"off": None, "auto": "auto", "every 2": 2}


def main() -> None:
    """Starts the ranks of each case and prints rank 0's table; in a rank, measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.case:
        measure(options.case, rounds=options.rounds, out=options.out)
        return
    results = {case: run_ranks(case, options.rounds) for case in CASES}
    print(f"{'step of':<10}{'look':<10}{'median ms':>10}{'x off':>8}{'CPU x off':>11}")
    for case, ways in results.items():
        for name, facts in ways.items():
            print(f"{case:<10}{name:<10}{facts['ms']:>10.3f}{facts['ratio']:>8.3f}{facts['cpu_ratio']:>11.3f}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def run_ranks(case: str, rounds: int) -> dict[str, dict[str, float]]:
    """Runs the ranks of a case; returns what rank 0 measured."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        words = [sys.executable, "-m", "tests.benchmarks.bench_pace", "--case", case]
        words += ["--rounds", str(rounds), "--out", str(out)]
        env = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "BENCH_SCRATCH": scratch, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(words, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
        found: dict[str, dict[str, float]] = json.loads(out.read_text())
        return found


def measure(case: str, *, rounds: int, out: Path) -> None:
    """One rank: all ways in turns."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    hidden, layers, batch, steps = CASES[case]
    loops = {name: our_loop(hidden, layers, batch, rank, pace=pace) for name, pace in WAYS.items()}
    for loop in loops.values():
        loop(2 * steps)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            samples[name].append(loops[name](steps))
    if rank == 0:
        out.write_text(json.dumps({name: summary(times, samples["off"]) for name, times in samples.items()}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def summary(times: list[tuple[float, float]], off: list[tuple[float, float]]) -> dict[str, float]:
    """Medians per step, and medians of the ratios to the loop without the look in the same round."""
    return {
        "ms": 1e3 * statistics.median(wall for wall, _ in times),
        "ratio": statistics.median(a[0] / b[0] for a, b in zip(times, off, strict=True)),
        "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(times, off, strict=True)),
    }


if __name__ == "__main__":
    main()
