"""A scaling study: runs to time, their measurements, a model of the exchange, what limits the speed, and the report.

The model of a step on n ranks is t(n) = compute + alpha log2(n) + 2 (n - 1) / n x bytes / bandwidth. The last term is
the time of a ring all-reduce; alpha is the time that each doubling of the ranks adds, whatever the bytes. The model is
fitted to the time in which ranks wait for the exchange. What overlaps with the backward pass is not in it, so the
bandwidth is an effective one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from slurm_train.config.batch import recut_batch
from slurm_train.formatting import byte_size, columns, duration, table
from slurm_train.rundir.events import read_events
from slurm_train.rundir.files import read_lines
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.paths import RunDirectory, existing_attempts

Mode = Literal["local", "global"]


@dataclass(frozen=True, slots=True)
class Size:
    """So many nodes with so many ranks each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"


@dataclass(frozen=True, slots=True)
class StudyPoint:
    """One run of the study."""

    size: Size
    local_size: int
    """Samples per rank and micro-batch."""
    accumulation: int
    comm: str
    modes: tuple[Mode, ...]
    """The parts of the study that use it: a fixed batch of each rank ("local"), a fixed global batch, or both."""

    @property
    def global_size(self) -> int:
        """Samples per step."""
        return self.local_size * self.size.ranks * self.accumulation

    def __str__(self) -> str:
        return f"{self.size}, {self.local_size} x {self.accumulation} samples per rank, {self.comm}"


def plan_points(largest: Size, *, local_size: int, comms: Sequence[str]) -> list[StudyPoint]:
    """Returns the runs in the order in which they are made.

    Ways of exchanging after the first one are tried at the sizes that span nodes, at a fixed local batch; where all
    ranks are on one node, there.

    Args:
        largest: size.
        local_size: samples per rank and micro-batch at the largest size.
        comms: values of `ddp.comm`.
    """
    # One rank, one node, two nodes, four, ... up to all.
    counts = [2**power for power in range(20) if 2**power < largest.nodes]
    sizes = [Size(1, 1), *(Size(count, largest.per_node) for count in (*counts, largest.nodes))]
    whole = local_size * largest.ranks
    modes: dict[tuple[Size, int, int, str], tuple[Mode, ...]] = {}
    for size in sizes:
        modes[size, local_size, 1, comms[0]] = ("local",)
    # Three nodes of four do not share every batch.
    for size in dict.fromkeys(size for size in sizes if whole % size.ranks == 0):
        cut = recut_batch(whole, ranks=size.ranks, local_size=local_size)
        key = (size, cut.local_size, cut.accumulation, comms[0])
        modes[key] = (*modes.get(key, ()), "global")
    for comm in comms[1:]:
        for size in [size for size in sizes if size.nodes > 1] or [largest]:
            modes[size, local_size, 1, comm] = ("local",)
    return [StudyPoint(*key, modes=of_key) for key, of_key in modes.items()]


WARM_UP_LINES = 2
"""Lines of metrics at the beginning that are no measure: caches, buckets and clocks are still warming up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of the study."""

    point: StudyPoint
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
    sent_bytes: float

    @property
    def size(self) -> Size:
        """Nodes and ranks."""
        return self.point.size

    def efficiency(self, base: Measured) -> float:
        """Returns throughput per rank over that of another size, 1 for perfect scaling."""
        return (self.per_s / self.size.ranks) / (base.per_s / base.size.ranks)

    def ring_bytes(self, *, ranks: int = 0) -> float:
        """Returns the bytes that each rank of a ring sends in a step; among so many ranks if they are given."""
        ranks = ranks or self.size.ranks
        return 2.0 * (ranks - 1) / ranks * self.sent_bytes


def measure(run: RunDirectory, point: StudyPoint) -> Measured | None:
    """Returns what a finished run shows, None where it has too few lines."""
    attempt = max(existing_attempts(run), default=-1)
    every = (line for line in read_lines(run.metrics) if "step_time_s" in line and line.get("attempt") == attempt)
    lines = list(every)[WARM_UP_LINES:]
    if not lines:
        return None
    step_s = median(line["step_time_s"] for line in lines)
    unit = "tokens" if "tokens_per_s" in lines[-1] else "samples"
    if point.size.ranks == 1:
        # One rank waits for no other, and DDP, whose timers the paces come from, is not around its model.
        data_s = median(line["data_time_s"] for line in lines)
        compute_s = max(step_s - data_s, 0.0)
        waits = [0.0]
    else:
        paces = [beat.pace for beat in read_beats(run, attempt).values() if beat.pace.samples]
        if not paces:
            return None
        data_s = fmean(pace.data_s / pace.samples for pace in paces)
        compute_s = fmean((pace.own_s - pace.data_s) / pace.samples for pace in paces)
        waits = [pace.wait_s / pace.samples for pace in paces]
    facts = next(iter(read_events(run, "exchange", attempt=attempt)), {})
    return Measured(
        point=point,
        step_s=step_s,
        # Of the step, not a median of its own: of few lines the mean of rates is more than the rate of the mean.
        per_s=median(line[f"{unit}_per_s"] * line["step_time_s"] for line in lines) / step_s,
        unit=unit,
        compute_s=compute_s,
        data_s=data_s,
        comm_s=min(waits),
        uneven_s=fmean(waits) - min(waits),
        sent_bytes=float(facts.get("sent_bytes", 0.0)),
    )


@dataclass(frozen=True, slots=True)
class Model:
    """What an exchange costs."""

    alpha_s: float
    """Seconds for each doubling of the ranks."""
    bytes_per_s: float
    """Effective bandwidth; infinity where bytes cost nothing."""

    def comm_s(self, measured_size: Measured, *, ranks: int) -> float:
        """Returns what an exchange of as many bytes as in a run takes among so many ranks."""
        return self.alpha_s * math.log2(max(ranks, 1)) + measured_size.ring_bytes(ranks=ranks) / self.bytes_per_s


def fit(points: Sequence[Measured]) -> Model | None:
    """Returns the model that fits best, of which no part is negative; None where nothing was exchanged.

    Runs over several nodes count; where there are none, those on one node.

    Args:
        points: runs that exchange in the same way.
    """
    exchanging = [point for point in points if point.size.ranks > 1 and point.sent_bytes > 0]
    spanning = [measurement for measurement in exchanging if measurement.size.nodes > 1] or exchanging
    if not spanning:
        return None
    rows = [
        (math.log2(measurement.size.ranks), measurement.ring_bytes(), measurement.comm_s) for measurement in spanning
    ]
    alpha, per_byte = _least_squares(rows)
    return Model(alpha, 1.0 / per_byte if per_byte > 0 else math.inf)


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns the two non-negative factors that miss the times least, relative to the times."""
    import numpy as np

    measured = np.array(rows)
    relative = measured[:, :2] / np.maximum(measured[:, 2:], 1e-9)
    norms = np.linalg.norm(relative, axis=0)
    ones = np.ones(len(rows))
    fits = []
    # Of one size, or of sizes that are alike, the two cannot be told apart: of equal fits the first counts, the bytes.
    for columns_used in ([1], [0], [0, 1]):
        solution = np.linalg.lstsq(relative[:, columns_used] / norms[columns_used], ones, rcond=None)[0]
        factors = np.zeros(2)
        factors[columns_used] = solution / norms[columns_used]
        if min(factors) >= 0:
            error = round(sum((relative @ factors - 1.0) ** 2), 12)
            fits.append((error, float(factors[0]), float(factors[1])))
    _, alpha, per_byte = min(fits, key=lambda fit: fit[0])
    return alpha, per_byte


# Throughput per node of twice the nodes, over that of one node.
_PAYS = 0.7
_HARDLY = 0.5
_WORTH_A_WORD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that was measured, sorted."""

    local: tuple[Measured, ...]
    """Fixed local batch, plain exchange, by size."""
    fixed_global: tuple[Measured, ...]
    """Fixed global batch, plain exchange, by size."""
    other_exchanges: tuple[Measured, ...]
    """Other ways of exchanging, fixed local batch."""
    model: Model | None

    @property
    def largest(self) -> Measured:
        """The largest size at a fixed local batch."""
        return self.local[-1]


def sort_study(measured: Sequence[Measured], *, comm: str) -> Study:
    """Returns the study.

    Args:
        measured: all runs with enough lines; at least one at a fixed local batch.
        comm: the way of exchanging that counts as plain.
    """
    ordered = sorted(measured, key=lambda measurement: measurement.size.ranks)
    local = tuple(
        measurement for measurement in ordered if measurement.point.comm == comm and "local" in measurement.point.modes
    )
    fixed_global = tuple(
        measurement for measurement in ordered if measurement.point.comm == comm and "global" in measurement.point.modes
    )
    other_exchanges = tuple(measurement for measurement in ordered if measurement.point.comm != comm)
    return Study(local=local, fixed_global=fixed_global, other_exchanges=other_exchanges, model=fit(local))


def shares(study: Study) -> dict[str, float]:
    """Returns what the largest size's step goes into, as parts of it: "network", "uneven", "data", "crowd", "compute".

    "crowd" is what computing takes longer than on one rank alone: ranks that share memory, cores or a GPU.
    """
    largest = study.largest
    base = study.local[0]
    crowd_s = min(max(largest.compute_s - base.compute_s, 0.0), largest.compute_s)
    parts = {"network": largest.comm_s, "uneven": largest.uneven_s, "data": largest.data_s, "crowd": crowd_s}
    parts["compute"] = largest.compute_s - crowd_s
    step_s = max(largest.step_s, sum(parts.values()), 1e-12)
    return {name: seconds / step_s for name, seconds in parts.items()}


def verdict(study: Study) -> list[str]:
    """Returns the sentences, the most important first."""
    return [*_what_limits(study), *_more_nodes(study), *_ways(study)]


_LIMITS = {
    "network": "the network limits: {share:.0%} of a step is spent on the exchange of gradients",
    "exchange": "the exchange of gradients within the node limits: it is {share:.0%} of a step",
    "uneven": "uneven ranks limit: {share:.0%} of a step is spent waiting for the slower ones (`status` names them)",
    "data": "reading limits: {share:.0%} of a step is spent waiting for data (data.num_workers, data.prefetch)",
    "crowd": "the ranks of a node limit each other: {share:.0%} of a step is what computing takes longer than on one "
    "rank alone (shared cores, memory or power)",
}


def _what_limits(study: Study) -> list[str]:
    largest = study.largest
    share_of = shares(study)
    losses = {name: share for name, share in share_of.items() if name != "compute"}
    worst = max(losses, key=lambda name: losses[name])
    head = f"at {largest.size.nodes} nodes x {largest.size.per_node} a step takes {duration(largest.step_s)}"
    if losses[worst] < _WORTH_A_WORD:
        return [f"{head}; computing limits ({share_of['compute']:.0%} of it), and nothing else takes a tenth of it"]
    limit = _LIMITS["exchange" if worst == "network" and largest.size.nodes == 1 else worst]
    sentences = [f"{head}; {limit.format(share=losses[worst])}"]
    model = study.model
    if worst == "network" and model is not None:
        sent = largest.ring_bytes()
        sentences.append(
            f"each rank sends {byte_size(sent)} per step at an effective {in_bits(model.bytes_per_s)}, which takes "
            f"{duration(sent / model.bytes_per_s)}; each doubling of the ranks costs {duration(model.alpha_s)} more"
        )
    return sentences


def _more_nodes(study: Study) -> list[str]:
    largest = study.largest
    base = study.local[0]
    sentences = [f"efficiency {largest.efficiency(base):.0%} of {base.size.ranks} rank at a fixed local batch"]
    if study.model is None or largest.size.nodes < 2:
        return sentences
    alone = next((point for point in study.local if point.size.nodes == 1 and point.size != base.size), base)
    if largest.per_s <= alone.per_s:
        sentences.append(
            f"{largest.size.nodes} nodes are no faster than one: {largest.per_s:,.0f} against {alone.per_s:,.0f} per s"
        )
    longer_s = study.model.comm_s(largest, ranks=2 * largest.size.ranks) - largest.comm_s
    gain = 2 * largest.step_s / max(largest.step_s + longer_s, 1e-12)
    efficiency_then = largest.efficiency(alone) * gain / 2
    words = "pay" if efficiency_then >= _PAYS else "hardly pay" if efficiency_then >= _HARDLY else "do not pay"
    sentences.append(
        f"more nodes {words}: {2 * largest.size.nodes} would have {gain:.2f}x the throughput of {largest.size.nodes}, "
        f"and each of them {efficiency_then:.0%} of what one alone has"
    )
    return sentences


def _ways(study: Study) -> list[str]:
    at_full = [point for point in study.other_exchanges if point.size == study.largest.size]
    if not at_full:
        return []
    best = max(at_full, key=lambda point: point.per_s)
    gain = best.per_s / study.largest.per_s
    if gain < 1 + _WORTH_A_WORD / 2:
        return [f"no other way of exchanging is faster here; the best is ddp.comm={best.point.comm} ({gain:.2f}x)"]
    return [
        f"ddp.comm={best.point.comm} is {gain:.2f}x as fast here; see what it does to your loss before you rely on it"
    ]


def in_bits(bytes_per_s: float) -> str:
    """Returns a bandwidth, e.g. "96 Mbit/s"."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


# The study as text for a terminal, and as one HTML file that needs nothing else.

_BAR = 40


def render_text(study: Study) -> str:
    """Returns the whole report."""
    parts = [_sizes("fixed local batch", study.local)]
    if len(study.fixed_global) > 1:
        parts.append(_sizes("fixed global batch", study.fixed_global))
    parts.append(_bars(study.local))
    if study.other_exchanges:
        parts.append(_exchanges(study))
    parts.append("\n".join(f"- {sentence}" for sentence in verdict(study)))
    return "\n\n".join(parts)


def _sizes(title: str, points: Sequence[Measured]) -> str:
    base = points[0]
    unit = points[0].unit
    head = (title, "ranks", "samples/step", "step", f"{unit}/s", "speed-up", "efficiency", "network", "uneven", "data")
    rows = []
    for point in points:
        step_s = max(point.step_s, 1e-12)
        row = (
            str(point.size),
            str(point.size.ranks),
            str(point.point.global_size),
            duration(point.step_s),
            f"{point.per_s:,.0f}",
            f"{point.per_s / base.per_s:.2f}x",
            f"{point.efficiency(base):.0%}",
            f"{point.comm_s / step_s:.0%}",
            f"{point.uneven_s / step_s:.0%}",
            f"{point.data_s / step_s:.0%}",
        )
        rows.append(row)
    return table(head, rows, right=True)


def _bars(points: Sequence[Measured]) -> str:
    """A bar per size: what there is of what perfect scaling would give."""
    base = points[0]
    perfect = [point.size.ranks * base.per_s / base.size.ranks for point in points]
    lines = [f"throughput at a fixed local batch ('.' would be perfect scaling from {base.size.ranks} rank)"]
    for point, ideal in zip(points, perfect, strict=True):
        filled = round(_BAR * point.per_s / max(perfect[-1], point.per_s))
        bar = "#" * filled + "." * (round(_BAR * ideal / perfect[-1]) - filled)
        lines.append(f"  {point.size!s:<6} {bar} {point.per_s:,.0f} {point.unit}/s")
    return "\n".join(lines)


def _exchanges(study: Study) -> str:
    rows = [("exchange", "ranks", "step", "against plain", "sent per step", "bytes / bandwidth", "network")]
    for plain in study.local:
        same_size = [point for point in study.other_exchanges if point.size == plain.size]
        for measurement in (plain, *same_size) if same_size else ():
            limit = "-" if study.model is None else duration(measurement.ring_bytes() / study.model.bytes_per_s)
            gain = f"{measurement.per_s / plain.per_s:.2f}x"
            sent = byte_size(measurement.sent_bytes)
            name = f"{measurement.size} {measurement.point.comm}"
            ranks = str(measurement.size.ranks)
            rows.append((name, ranks, duration(measurement.step_s), gain, sent, limit, duration(measurement.comm_s)))
    return columns(rows, right=True)


_PARTS = {
    "compute_s": ("computing", "#4878a8"),
    "data_s": ("waiting for data", "#6aa84f"),
    "uneven_s": ("waiting for slower ranks", "#e69f00"),
    "comm_s": ("exchange", "#cc5a4a"),
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; font-size: 13px; }
.row { display: grid; grid-template-columns: 9em 1fr 6em; gap: .6em; margin: .3em 0; font-size: 13px; }
.bar { display: flex; height: 1.4em; }
i { height: 1em; min-width: 0; } .key i { display: inline-block; width: 1em; margin: 0 .4em 0 1em; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre { background: #242424; }
}
"""


def render_page(study: Study, *, title: str) -> str:
    """Returns the HTML of the page: the sentences, what a step of each run is spent on, and the text."""
    sentences = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in verdict(study))
    keys = "".join(f'<i style="background:{colour}"></i>{name}' for name, colour in _PARTS.values())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{sentences}</ul>"
        f'<h2>What a step is spent on</h2><p class="key">{keys}</p>{_steps((*study.local, *study.other_exchanges))}'
        f"<h2>Numbers</h2><pre>{html.escape(render_text(study))}</pre></body></html>\n"
    )


def _steps(runs: Sequence[Measured]) -> str:
    """A bar per run: the parts of a step, in time."""
    longest = max(sum(getattr(run, name) for name in _PARTS) for run in runs) or 1.0
    rows = []
    for run in runs:
        parts = "".join(
            f'<i style="width:{getattr(run, name) / longest:.2%};background:{colour}"></i>'
            for name, (_, colour) in _PARTS.items()
        )
        name = html.escape(f"{run.size} {run.point.comm}")
        rows.append(f'<div class="row">{name}<span class="bar">{parts}</span>{duration(run.step_s)}</div>')
    return "".join(rows)
