"""Time from process start to the first optimizer step: this toolkit's rank beside a bare DDP script. Local gloo ranks.

Both train the same model on the same kind of batches; the bare script does nothing but import torch, open the group,
wrap, and step. They run in turns, so noise of the machine hits both alike.

    python tests/benchmarks/bench_start_time.py [--ranks 2] [--rounds 7] [--out result.json]
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
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RANK_PROGRAM = REPOSITORY / "tests" / "train" / "training_rank.py"

BARE = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 3)).double()
model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
inputs, targets = torch.randn(6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))
nn.functional.cross_entropy(model(inputs), targets).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(str(time.time()))
dist.barrier()
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(options.rounds):
        for name, seconds in times.items():
            with tempfile.TemporaryDirectory() as scratch:
                seconds.append((bare if name == "bare" else ours)(Path(scratch), options.ranks))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["bare"], strict=True))
    print(f"{'start to first step':<22}{'median s':>10}   {options.ranks} ranks, {options.rounds} rounds")
    for name, seconds in medians.items():
        print(f"{name:<22}{seconds:>10.2f}")
    print(f"{'ours / bare':<22}{ratio:>10.2f}")
    if options.out:
        options.out.write_text(json.dumps({**medians, "ratio": ratio}) + "\n")


def bare(scratch: Path, ranks: int) -> float:
    """Returns the seconds of the bare script."""
    start = start_ranks([sys.executable, "-c", BARE, str(scratch / "time")], ranks)
    return float((scratch / "time").read_text()) - start


def ours(scratch: Path, ranks: int) -> float:
    """Returns the seconds of the trainer, by the time stamp in the line of its first step."""
    config = {
        "model": {"_target_": "small_training.Net"},
        "data": {"_target_": "small_training.Data"},
        "batch": {"local_size": 6},
        "train": {"max_steps": 1, "log_every_steps": 1, "threads": 1},
        "checkpoint": {"every_steps": None},
    }
    orders = {"run": str(scratch), "config": config, "port": free_port(), "attempt": 0}
    start = start_ranks([sys.executable, str(RANK_PROGRAM), json.dumps(orders)], ranks)
    first = json.loads((scratch / "metrics.jsonl").read_text().splitlines()[0])
    return float(first["time_unix_s"]) - start


def start_ranks(command: list[str], ranks: int) -> float:
    """Runs a command on all ranks to its end; returns the time at which the first was started."""
    env = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    start = time.time()
    processes = [
        subprocess.Popen(command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    texts = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(b"\n".join(texts).decode())
    return start


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
