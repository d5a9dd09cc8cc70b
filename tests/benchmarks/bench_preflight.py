"""What the preflight costs: time from srun until the last rank begins its script, at 8 and 32 ranks, with and without.

    python -m tests.benchmarks.bench_preflight [--rounds 5] [--sizes 1x8 4x8]

The script is `date`, so no rank imports torch and all that is timed is interpreters and the look. Both in turns inside
one allocation; the difference is the median over rounds.
"""

from __future__ import annotations

from tests.benchmarks.bench_start_time import Pair, in_allocations, run_step, srun_line
from tests.support.command_line import Person

_PORT = "15900"


def measure(person: Person, size: str, number: int) -> Pair:
    """Runs it without and with the preflight; who goes first changes from round to round."""
    order = ("false", "true") if number % 2 else ("true", "false")
    took = {enabled: _last_begins_s(person, size, number, enabled) for enabled in order}
    return took["false"], took["true"]


def _last_begins_s(person: Person, size: str, number: int, enabled: str) -> float:
    words = ("script=[date,+%s.%N]", f"run.name=start{number}{enabled}", f"preflight.enabled={enabled}")
    run, command = srun_line(person, size, *words)
    started = run_step(person, run, command, MASTER_PORT=_PORT)
    logs = list(run.attempt_logs(0).glob("rank_*.log"))
    return max(float(log.read_text().split()[-1]) for log in logs) - started


if __name__ == "__main__":
    in_allocations(
        "tests.benchmarks.bench_preflight",
        rounds=5,
        measure=measure,
        words="preflight {size}: the last rank begins after {other:.1f} s without, {own:.1f} s with: {more:+.2f} s "
        "(median of {rounds} pairs; promise: 10 s at 32 ranks)",
    )
