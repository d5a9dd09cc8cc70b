"""The keyed permutation beside torch's DistributedSampler: first index, memory, indices per second, cost of a resume.

    python -m tests.benchmarks.bench_sampler [--largest 100000000] [--out result.json]

Each measurement is a process of its own, so that memory is what this one sampler took: the growth of the highest
resident size over what it was when everything was imported. DistributedSampler makes the list of an epoch before its
first index, for every rank anew; the permutation is arithmetic.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 8
EPOCH = 10**9
RESUMED = 5 * 10**8
BULK = 1 << 20
LIMITS = {"first index, ms": 1.0, "memory, MB": 1.0, "resume, ms": 10.0}
LEAST_INDICES_PER_S = 10e6


def main() -> int:
    """Measures, prints, and returns 1 if a promise about the permutation does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10**8, help="samples of DistributedSampler's largest epoch")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, size = options.measure
        print(json.dumps(MEASURES[what](int(size))))
        return 0
    ours = _in_own_process("permutation", EPOCH)
    theirs = {}
    for size in (10**6, 10**7, 10**8):
        if size <= options.largest:
            theirs[size] = (_in_own_process("permutation", size), _in_own_process("distributed_sampler", size))
    _print_table(ours, theirs)
    broken = [f"{name}: {ours[name]:.3f}, not below {limit:g}" for name, limit in LIMITS.items() if ours[name] >= limit]
    if ours["indices/s"] < LEAST_INDICES_PER_S:
        broken.append(f"{ours['indices/s'] / 1e6:.1f} million indices/s, not {LEAST_INDICES_PER_S / 1e6:g}")
    print("\n".join(broken) or "every promise holds")
    if options.out:
        options.out.write_text(json.dumps({"permutation": ours, "sizes": theirs}, indent=1) + "\n")
    return int(bool(broken))


def _print_table(ours: dict[str, float], theirs: dict[int, tuple[dict[str, float], dict[str, float]]]) -> None:
    print(
        f"permutation, epoch of {EPOCH:.0e} samples: first index {ours['first index, ms']:.3f} ms and "
        f"{ours['memory, MB']:.2f} MB, {ours['indices/s'] / 1e6:.0f} million indices/s, "
        f"resume at {RESUMED:.0e} {ours['resume, ms']:.3f} ms"
    )
    print(f"beside DistributedSampler, one of {RANKS} ranks:")
    header = ("samples", "", "first index, ms", "memory, MB", "resume in the middle, ms")
    print(f"{header[0]:<10}{header[1]:<22}{header[2]:>16}{header[3]:>13}{header[4]:>26}")
    names = ("first index, ms", "memory, MB", "resume, ms")
    for size, (own, other) in theirs.items():
        for who, found in (("permutation", own), ("DistributedSampler", other)):
            values = [found[name] for name in names]
            print(f"{size:<10.0e}{who:<22}{values[0]:>16.3f}{values[1]:>13.2f}{values[2]:>26.3f}")
        ratios = [other[name] / max(own[name], 1e-3) for name in names]
        print(f"{'':<10}{'ratio':<22}{ratios[0]:>15.0f}x{ratios[1]:>12.0f}x{ratios[2]:>25.0f}x")


def _in_own_process(what: str, size: int) -> dict[str, float]:
    words = [sys.executable, "-m", "tests.benchmarks.bench_sampler", "--measure", what, str(size)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure_permutation(size: int) -> dict[str, float]:
    """Returns what the order of samples costs for an epoch of so many."""
    import numpy as np

    from slurm_train.data.order import KeyedPermutation, SampleOrder

    KeyedPermutation(size, seed=1, epoch=1)(np.arange(4, dtype=np.int64))  # numpy's own first call
    before = _peak_mb()
    start = time.perf_counter()
    SampleOrder(size, seed=1).indices(0, 1)
    first_ms = 1e3 * (time.perf_counter() - start)
    memory_mb = _peak_mb() - before
    middle = RESUMED if size == EPOCH else size // 2
    resume_ms = _median_ms(lambda: SampleOrder(size, seed=1).indices(middle, 1))
    order = SampleOrder(size, seed=1)
    bulk = min(BULK, size)
    # The best of many: whatever else this machine does can only slow it down.
    speed = bulk / min(_times_s(lambda: order.indices(0, bulk), times=40))
    return {"first index, ms": first_ms, "memory, MB": memory_mb, "resume, ms": resume_ms, "indices/s": speed}


def measure_distributed_sampler(size: int) -> dict[str, float]:
    """Returns what torch's sampler costs one rank: its list, and skipping to the middle as a resume does."""
    from torch.utils.data import DistributedSampler

    class Sized:
        def __len__(self) -> int:
            return size

    before = _peak_mb()
    start = time.perf_counter()
    sampler: Any = DistributedSampler(Sized(), num_replicas=RANKS, rank=0, seed=1)  # type: ignore[arg-type,var-annotated]
    indices = iter(sampler)
    next(indices)
    first_ms = 1e3 * (time.perf_counter() - start)
    memory_mb = _peak_mb() - before
    del indices
    # What a resume without a stateful sampler does: a fresh iterator, and every consumed index thrown away.
    start = time.perf_counter()
    for number, _ in enumerate(sampler):
        if number == len(sampler) // 2:
            break
    resume_ms = 1e3 * (time.perf_counter() - start)
    return {"first index, ms": first_ms, "memory, MB": memory_mb, "resume, ms": resume_ms}


MEASURES: dict[str, Callable[[int], dict[str, float]]] = {
    "permutation": measure_permutation,
    "distributed_sampler": measure_distributed_sampler,
}


def _median_ms(work: Callable[[], object]) -> float:
    return 1e3 * statistics.median(_times_s(work, times=21))


def _times_s(work: Callable[[], object], *, times: int) -> list[float]:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
