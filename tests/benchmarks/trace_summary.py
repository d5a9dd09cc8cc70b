"""Where a step's time goes, from a trace of torch.profiler: the longest kernels, and the gaps between kernels.

    python -m tests.benchmarks.trace_summary TRACE.json

A trace without a GPU is summarised by operations: the time that each spends itself, without those that it calls.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_NAME = 90
_NUM_ROWS, _NUM_GAPS = 20, 8


class Span(NamedTuple):
    """Something that took time, in microseconds."""

    start: float
    end: float
    name: str
    place: tuple[Any, Any]
    """Device and stream, or process and thread."""


class Total(NamedTuple):
    """All calls of one name."""

    name: str
    us: float
    calls: int


class Gap(NamedTuple):
    """Time in which no kernel ran on a device."""

    us: float
    after: str
    before: str


class Summary(NamedTuple):
    """What a trace says."""

    kind: str
    """"kernels" or "operations"."""
    span_us: float
    """From the first begin to the last end."""
    busy_us: float
    """In which at least one of them ran."""
    totals: list[Total]
    gaps: list[Gap]


def read(path: Path) -> dict[str, Any]:
    """Returns a chrome trace, also a compressed one."""
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def summarise(trace: Mapping[str, Any]) -> Summary:
    """Returns what a trace says.

    Args:
        trace: as `export_chrome_trace` writes it: "traceEvents" with "ph", "cat", "ts" and "dur".
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    kind = "kernels" if any(event.get("cat") in _ON_GPU for event in events) else "operations"
    spans = [_span(event) for event in events if event.get("cat") in (_ON_GPU if kind == "kernels" else ("cpu_op",))]
    times = [(span.name, span.end - span.start) for span in spans] if kind == "kernels" else _own_times(spans)
    # Nested spans overlap, which a union takes as it is.
    busy, gaps = _coverage(spans)
    span_us = max((one.end for one in spans), default=0.0) - min((one.start for one in spans), default=0.0)
    return Summary(kind, span_us, busy, _totals(times), gaps)


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(start, start + float(event["dur"]), str(event["name"]), (event.get("pid"), event.get("tid")))


def _totals(times: Iterable[tuple[str, float]]) -> list[Total]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in times:
        found[name].append(us)
    return sorted((Total(name, sum(own), len(own)) for name, own in found.items()), key=lambda one: -one.us)


def _own_times(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Returns the time of each span without those inside of it, on its thread."""
    found: list[tuple[str, float]] = []
    by_place: dict[tuple[Any, Any], list[Span]] = defaultdict(list)
    for span in spans:
        by_place[span.place].append(span)
    for own in by_place.values():
        open_ones: list[list[Any]] = []
        for span in sorted(own, key=lambda one: (one.start, -one.end)):
            while open_ones and open_ones[-1][0].end <= span.start:
                done = open_ones.pop()
                found.append((done[0].name, done[1]))
            if open_ones:
                open_ones[-1][1] -= span.end - span.start
            open_ones.append([span, span.end - span.start])
        found += [(one[0].name, one[1]) for one in open_ones]
    return found


def _coverage(spans: Sequence[Span]) -> tuple[float, list[Gap]]:
    """Returns the time in which something runs, and the longest times in which nothing does."""
    busy, gaps, ordered = 0.0, list[Gap](), sorted(spans, key=lambda span: (span.start, span.end))
    reached, last = (ordered[0].start, "") if ordered else (0.0, "")
    for span in ordered:
        if span.start > reached:
            gaps.append(Gap(span.start - reached, last, span.name))
        if span.end > reached:
            busy += span.end - max(span.start, reached)
            reached, last = span.end, span.name
    return busy, sorted(gaps, key=lambda gap: -gap.us)


def table(found: Summary, *, steps: int = 1) -> str:
    """Returns a summary of a trace of so many steps as Markdown."""
    span_us, idle_us = found.span_us, found.span_us - found.busy_us
    share = 100 * idle_us / span_us if span_us else 0.0
    # A gap of a few microseconds is what a launch takes; all longer ones are worth a look.
    long_ones = [gap for gap in found.gaps if gap.us >= 10]
    lines = [
        f"{len(found.totals)} kinds of {found.kind}, {sum(one.calls for one in found.totals) / steps:.0f} calls and "
        f"{span_us / steps / 1e3:.2f} ms per step; nothing runs for {idle_us / steps / 1e3:.2f} ms of it "
        f"({share:.1f} %), {len(long_ones) / steps:.0f} times for 10 us or longer.",
        "",
        f"| {found.kind} | ms per step | % | calls per step | us per call |",
        "|---|--:|--:|--:|--:|",
    ]
    total_us = sum(one.us for one in found.totals) or 1.0
    for one in found.totals[:_NUM_ROWS]:
        row = f"{one.us / steps / 1e3:.3f} | {100 * one.us / total_us:.1f} | {one.calls / steps:.1f}"
        lines.append(f"| {_short(one.name)} | {row} | {one.us / one.calls:.1f} |")
    lines += ["", "| gap, us | after | before |", "|--:|---|---|"]
    lines += [f"| {gap.us:.1f} | {_short(gap.after)} | {_short(gap.before)} |" for gap in found.gaps[:_NUM_GAPS]]
    return "\n".join(lines)


def _short(name: str) -> str:
    name = name.replace("|", "\\|").replace("\n", " ")
    return f"`{name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + '...'}`"


if __name__ == "__main__":
    print(table(summarise(read(Path(sys.argv[1])))))
