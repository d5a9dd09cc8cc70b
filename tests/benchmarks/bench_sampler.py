"""The keyed permutation beside torch's DistributedSampler: first index, memory, indices per second, cost of a resume.

    python -m tests.benchmarks.bench_sampler [--largest 100000000] [--out result.json]

Each measurement is a process of its own, so that memory is what this one sampler took: the growth of the highest
resident size over what it was when everything was imported. DistributedSampler makes the list of an epoch before its
first index, for every rank anew; the permutation is arithmetic.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.options import json_of, read_options

RANKS = 8
EPOCH = 10**9
RESUMED = 5 * 10**8
BULK = 1 << 20
LIMITS = {"first index, ms": 1.0, "memory, MB": 1.0, "resume, ms": 10.0}
LEAST_INDICES_PER_S = 10e6


def main() -> int:
    """Measures, prints, and returns 1 if a promise about the permutation does not hold."""
    asked = read_options(largest=10**8, out=Path, measure=str, size=0)
    if asked.measure:
        print(json.dumps(MEASURES[asked.measure](asked.size)))
        return 0
    ours = _in_own_process("permutation", EPOCH)
    theirs = {
        size: {what: _in_own_process(what, size) for what in MEASURES}
        for size in (10**6, 10**7, 10**8)
        if size <= asked.largest
    }
    _print_table(ours, theirs)
    broken = [f"{name}: {ours[name]:.3f}, not below {limit:g}" for name, limit in LIMITS.items() if ours[name] >= limit]
    if ours["indices/s"] < LEAST_INDICES_PER_S:
        broken.append(f"{ours['indices/s'] / 1e6:.1f} million indices/s, not {LEAST_INDICES_PER_S / 1e6:g}")
    print("\n".join(broken) or "every promise holds")
    if asked.out:
        asked.out.write_text(json.dumps({"permutation": ours, "sizes": theirs}, indent=1) + "\n")
    return int(bool(broken))


def _print_table(ours: dict[str, float], theirs: dict[int, dict[str, dict[str, float]]]) -> None:
    print(
        f"permutation, epoch of {EPOCH:.0e} samples: first index {ours['first index, ms']:.3f} ms and "
        f"{ours['memory, MB']:.2f} MB, {ours['indices/s'] / 1e6:.0f} million indices/s, "
        f"resume at {RESUMED:.0e} {ours['resume, ms']:.3f} ms"
    )
    print(f"beside DistributedSampler, one of {RANKS} ranks:")
    print(f"{'samples':<32}" + "".join(f"{name:>18}" for name in LIMITS))
    for size, by_way in theirs.items():
        for way, found in by_way.items():
            print(f"{size:<10.0e}{way:<22}" + "".join(f"{found[name]:>18.3f}" for name in LIMITS))
        own, other = by_way.values()
        ratios = (other[name] / max(own[name], 1e-3) for name in LIMITS)
        print(f"{'':<10}{'ratio':<22}" + "".join(f"{ratio:>17.0f}x" for ratio in ratios))


def _in_own_process(what: str, size: int) -> dict[str, float]:
    return json_of("tests.benchmarks.bench_sampler", "--measure", what, "--size", str(size))


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
    resume_ms = 1e3 * statistics.median(_times_s(lambda: SampleOrder(size, seed=1).indices(middle, 1), times=21))
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
    "DistributedSampler": measure_distributed_sampler,
}


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
