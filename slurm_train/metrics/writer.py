"""metrics.jsonl: one JSON object per logged step, appended by rank 0, readable at any moment.

Floats are written in full precision, so two runs can be compared bit for bit. Nothing is ever rewritten: after a
resume the newer attempt's lines supersede the older ones, and `read_metrics` gives what counts. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from slurm_train.rundir.files import read_lines

STEP_KEYS = (
    "step",
    "epoch",
    "samples",
    "tokens",
    "loss",
    "lr",
    "grad_norm",
    "step_time_s",
    "data_time_s",
    "tokens_per_s",
    "samples_per_s",
    "mfu",
    "attempt",
    "world_size",
    "time_unix_s",
    "samples_digest",
)
"""Keys of a step's line, in order; `tokens_per_s` or `samples_per_s` and `samples_digest` only where they apply."""


class MetricsWriter:
    """Appends lines to metrics.jsonl; one `write` call each, so a line is whole or absent.

    Args:
        path: the file; made if absent.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        end_torn_line(self._descriptor, path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one line; keys keep their order."""
        os.write(self._descriptor, (json.dumps(values, separators=(", ", ": ")) + "\n").encode())

    def close(self) -> None:
        """Makes the lines durable and closes the file."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def end_torn_line(descriptor: int, path: Path) -> None:
    """Ends the line that a killed writer left half, so that the next one is not lost with it."""
    size = os.fstat(descriptor).st_size
    if not size:
        return
    with path.open("rb") as file:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            os.write(descriptor, b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that count, in step order: a newer attempt supersedes older ones from its first step on.

    Args:
        path: a metrics.jsonl; an absent one has no lines.
    """
    lines = [line for line in read_lines(path) if "step" in line and "attempt" in line]
    kept: list[dict[str, Any]] = []
    first_step = first_evaluation = float("inf")
    for attempt in sorted({line["attempt"] for line in lines}, reverse=True):
        of_attempt = _newest_of(line for line in lines if line["attempt"] == attempt)
        steps = [line for line in of_attempt if "loss" in line]
        evaluations = [line for line in of_attempt if "loss" not in line]
        # An attempt may begin by repeating the evaluation of the very step it resumed from; that step itself stays.
        limit = min(first_step, first_evaluation)
        kept = (
            sorted(
                [line for line in steps if line["step"] < first_step]
                + [line for line in evaluations if line["step"] < limit],
                key=lambda line: line["step"],
            )
            + kept
        )
        first_step = min([first_step, *(line["step"] for line in steps)])
        first_evaluation = min([first_evaluation, *(line["step"] for line in evaluations)])
    return kept


def _newest_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns an attempt's lines without those of steps that it went back behind (a rollback)."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if "loss" in line:
            while kept and kept[-1]["step"] >= line["step"]:
                kept.pop()
        kept.append(line)
    return kept
