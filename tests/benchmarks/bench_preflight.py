"""What the preflight costs: time from srun until the last rank begins its script, at 8 and 32 ranks, with and without.

    python -m tests.benchmarks.bench_preflight [--rounds 5] [--sizes 1x8 4x8]

The script is `date`, so no rank imports torch and all that is timed is interpreters and the look. Both in turns inside
one allocation; the difference is the median over rounds.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.bench_start_time import in_allocations, run_step, srun_line
from tests.support.command_line import Person, new_project

_PORT = "15900"


def measure(size: str, rounds: int) -> None:
    """Runs both in turns inside the allocation that this process is in, and prints medians and their difference."""
    folder = Path(tempfile.mkdtemp(prefix="slurm_train-bench-"))
    person = Person(new_project(folder))
    try:
        pairs = [_pair(person, size, number) for number in range(rounds + 1)][1:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    off_s, on_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    more_s = statistics.median(on - off for off, on in pairs)
    print(
        f"preflight {size}: the last rank begins after {off_s:.1f} s without, {on_s:.1f} s with: {more_s:+.2f} s "
        f"(median of {rounds} pairs; promise: 10 s at 32 ranks)",
        flush=True,
    )


def _pair(person: Person, size: str, number: int) -> tuple[float, float]:
    """Returns the seconds without and with it; who goes first changes from round to round."""
    both = {"off": "preflight.enabled=false", "on": "preflight.enabled=true"}
    order = list(both) if number % 2 else list(both)[::-1]
    took = {name: _last_begins_s(person, size, f"start{number}{name}", both[name]) for name in order}
    return took["off"], took["on"]


def _last_begins_s(person: Person, size: str, name: str, word: str) -> float:
    run, command = srun_line(person, size, "script=[date,+%s.%N]", f"run.name={name}", word)
    started = run_step(person, run, command, MASTER_PORT=_PORT)
    logs = list(run.attempt_logs(0).glob("rank_*.log"))
    return max(float(log.read_text().split()[-1]) for log in logs) - started


if __name__ == "__main__":
    in_allocations("tests.benchmarks.bench_preflight", doc=__doc__, rounds=5, measure=measure)
