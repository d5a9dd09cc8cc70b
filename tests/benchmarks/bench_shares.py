"""Shares by measured speed, beside equal ones: two ranks, of which the second has half the speed.

    python -m tests.benchmarks.bench_shares [--rounds 3] [--steps 40] [--out result.json]

A forward pass sleeps for each sample, twice as long on the second rank, so what there is to gain is known: with equal
shares the second rank takes 32 units for its 16 samples of 32, with the best ones the last rank takes 22 (22 and 10, or
21 and 11), 1.45 times less. Equal and measured shares take turns. Printed are the median step of each, their ratio in
the same round, and the shares.
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
from pathlib import Path
from typing import Any

from slurm_train.metrics import read_metrics
from slurm_train.rundir.events import read_events
from slurm_train.rundir.paths import RunDirectory

RANK_PROGRAM = Path(__file__).resolve().parents[1] / "train" / "training_rank.py"
RANKS, WARM_UP = 2, 5


def main() -> None:
    """Trains both ways in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    turns: list[dict[str, Any]] = []
    print(f"{'even ms':>10}{'measured ms':>13}{'ratio':>8}  shares")
    for _ in range(options.rounds):
        even_s, _ = step_of("even", steps=options.steps)
        measured_s, sizes = step_of("measured", steps=options.steps)
        turns.append({"even_s": even_s, "measured_s": measured_s, "ratio": even_s / measured_s, "sizes": sizes})
        print(f"{1e3 * even_s:>10.1f}{1e3 * measured_s:>13.1f}{even_s / measured_s:>8.2f}  {sizes}")
    if options.out:
        options.out.write_text(json.dumps(turns, indent=1) + "\n")


def step_of(shares: str, *, steps: int) -> tuple[float, list[int] | None]:
    """Returns the median step in seconds, and the shares that were measured."""
    config = {
        "model": {"_target_": "small_training.Net", "sample_s": 0.004},
        "data": {"_target_": "small_training.Data"},
        "batch": {"global_size": 32, "shares": shares},
        "train": {"max_steps": steps, "log_every_steps": 1, "threads": 1, "evaluate": False},
        "checkpoint": {"every_steps": None},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder, "run"))
        _train(run, config)
        times = [line["step_time_s"] for line in read_metrics(run.metrics) if "step_time_s" in line][WARM_UP:]
        sizes = [list(event["sizes"]) for event in read_events(run, "shares")]
        return statistics.median(times), sizes[0] if sizes else None


def _train(run: RunDirectory, config: dict[str, Any]) -> None:
    run.path.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    orders = json.dumps({"run": str(run.path), "config": config, "port": port, "attempt": 0})
    env = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_PROGRAM), orders],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [rank.communicate()[1] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("".join(said))


if __name__ == "__main__":
    main()
