"""What one run of a study says: throughput from its metrics, shares of a step from its ranks' heartbeats."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from slurm_train.rundir.exchange import read_exchange
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.scaling.points import Point, Size

WARM_UP_LINES = 2
"""Lines of metrics at the beginning that are no measure: caches, buckets and clocks are still warming up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of the study."""

    point: Point
    step_s: float
    """Median over the lines of metrics after the warm-up."""
    per_s: float
    """Tokens or samples per second over all ranks."""
    unit: str
    """"tokens" or "samples"."""
    compute_s: float
    """A rank's own part of a step without the wait for data, on average."""
    data_s: float
    comm_s: float
    """What even the slowest rank waits for: the exchange itself."""
    uneven_s: float
    """What the average rank waits longer than that: for slower ranks."""
    gradient_bytes: float
    sent_bytes: float

    @property
    def size(self) -> Size:
        """Nodes and ranks."""
        return self.point.size

    def as_json(self) -> dict[str, Any]:
        """Returns what the study keeps of it."""
        return asdict(self)


def measure(run: RunDirectory, point: Point) -> Measured | None:
    """Returns what a finished run says, None where it says too little."""
    attempt = max(existing_attempts(run), default=-1)
    every = (line for line in read_lines(run.metrics) if "step_time_s" in line and line.get("attempt") == attempt)
    lines = list(every)[WARM_UP_LINES:]
    paces = [beat.pace for beat in read_beats(run, attempt).values() if beat.pace.samples]
    if not lines or not paces:
        return None
    step_s = median(line["step_time_s"] for line in lines)
    unit = "tokens" if "tokens_per_s" in lines[-1] else "samples"
    waits = [pace.wait_s / pace.samples for pace in paces]
    facts = read_exchange(run, attempt)
    return Measured(
        point=point,
        step_s=step_s,
        # Of the step, not a median of its own: of few lines the mean of rates is more than the rate of the mean.
        per_s=median(line[f"{unit}_per_s"] * line["step_time_s"] for line in lines) / step_s,
        unit=unit,
        compute_s=fmean((pace.own_s - pace.data_s) / pace.samples for pace in paces),
        data_s=fmean(pace.data_s / pace.samples for pace in paces),
        comm_s=min(waits),
        uneven_s=fmean(waits) - min(waits),
        gradient_bytes=facts.gradient_bytes if facts else 0.0,
        sent_bytes=facts.sent_bytes if facts else 0.0,
    )
