"""What `data.num_workers=auto` saves where a sample takes time to read, against no workers, side by side.

    python -m tests.benchmarks.bench_reading [--sample-ms 5] [--batches 40]

A sample waits, as for a file on a network, and a micro-batch has eight. Starting the workers counts. Ends with 1 where
`auto` takes more than 0.8 of the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice

import torch
from torch.utils.data import Dataset

from slurm_train.config.batch import BatchShare
from slurm_train.data.batches import BatchStream, GlobalBatches
from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.data.order import SampleOrder
from slurm_train.data.workers import AutoWorkers

NUM_CPUS = 10
MICRO_BATCH = 8
MOST = 0.8


class Waits(Dataset[torch.Tensor]):
    """Takes time for each sample."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sample_s)
        return torch.tensor(index)


def seconds(num_workers: int | AutoWorkers, *, sample_s: float, batches: int) -> float:
    """Returns how long some micro-batches take to read."""
    start_s = time.perf_counter()
    source = MapStyleSource(Waits(sample_s), num_workers=num_workers, seed=5)
    order = GlobalBatches(SampleOrder(len(source), seed=1), global_size=MICRO_BATCH)
    draws = order.draws(BatchShare(rank=0, accumulation=1, shares=(MICRO_BATCH,)), start_samples=0)
    for _ in islice(BatchStream(source, draws), batches):
        pass
    return time.perf_counter() - start_s


def main() -> int:
    """Prints the ratio; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample-ms", type=float, default=5.0)
    parser.add_argument("--batches", type=int, default=40)
    args = parser.parse_args()
    sample_s = args.sample_ms / 1000
    without_s = seconds(0, sample_s=sample_s, batches=args.batches)
    auto_s = seconds(AutoWorkers(cpus=NUM_CPUS), sample_s=sample_s, batches=args.batches)
    print(f"data.num_workers=auto: {auto_s:.2f} s, no workers: {without_s:.2f} s, ratio {auto_s / without_s:.2f}")
    return 0 if auto_s <= MOST * without_s else 1


if __name__ == "__main__":
    sys.exit(main())
