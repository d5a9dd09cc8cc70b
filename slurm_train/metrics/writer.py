"""metrics.jsonl: one JSON object per logged step, appended by rank 0, readable at any moment.

Floats are written in full precision, so two runs can be compared bit for bit. Nothing is ever rewritten: after a
resume the newer attempt's lines supersede the older ones, and `read_metrics` returns those that count. No torch here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.rundir.files import open_file, read_lines, write_all


class MetricsWriter:
    """Appends lines to metrics.jsonl; one `write` call each, so a line is whole or absent.

    Args:
        path: the file; made if absent.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            # Ends the line that a killed writer left half, so that the next one is not lost with it.
            os.write(self._descriptor, b"\n")

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one line; keys keep their order."""
        write_all(self._descriptor, (json.dumps(values, separators=(", ", ": ")) + "\n").encode())

    def close(self) -> None:
        """Makes the lines durable and closes the file."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)


class Head(NamedTuple):
    """The part of a line that decides whether it counts."""

    attempt: int
    step: int
    trains: bool
    """It is the line of a step, not of an evaluation."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that count, in step order: a newer attempt supersedes older ones from its first step on.

    Args:
        path: a metrics.jsonl; an absent one has no lines.
    """
    lines = list(metric_lines(path))
    return [lines[position] for position in counting([head_of(line) for line in lines])]


def metric_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all lines of a metrics.jsonl as they were written, superseded ones included."""
    return (line for line in read_lines(path) if type(line.get("step")) is int and type(line.get("attempt")) is int)


def head_of(line: Mapping[str, Any]) -> Head:
    """Returns the part of a line that decides whether it counts."""
    return Head(line["attempt"], line["step"], "loss" in line)


def counting(heads: Sequence[Head]) -> list[int]:
    """Returns the positions of the lines that count, in step order.

    Args:
        heads: of all lines, as they were written.
    """
    positions: dict[int, list[int]] = {}
    for position, head in enumerate(heads):
        positions.setdefault(head.attempt, []).append(position)
    kept: list[int] = []
    # The first step, and the first step that was evaluated, of all newer attempts.
    first = {True: math.inf, False: math.inf}
    for attempt in sorted(positions, reverse=True):
        of_attempt = _newest_of(positions[attempt], heads)
        # An attempt may begin by repeating the evaluation of the very step it resumed from; that step itself stays.
        limit = {True: first[True], False: min(first.values())}
        counted = [position for position in of_attempt if heads[position].step < limit[heads[position].trains]]
        kept = sorted(counted, key=lambda position: heads[position].step) + kept
        for _, step, trains in (heads[position] for position in of_attempt):
            first[trains] = min(first[trains], step)
    return kept


def _newest_of(positions: Iterable[int], heads: Sequence[Head]) -> list[int]:
    """Returns an attempt's lines without those of steps that it went back behind (a rollback)."""
    kept: list[int] = []
    for position in positions:
        if heads[position].trains:
            while kept and heads[kept[-1]].step >= heads[position].step:
                kept.pop()
        kept.append(position)
    return kept
