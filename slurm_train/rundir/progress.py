"""How far a run is, read from its files alone: the newest line of metrics.jsonl, without reading the rest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from slurm_train.rundir.layout import RunDirectory

_TAIL_BYTES = 65536


def last_lines(path: Path, *, tail_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """Returns the JSON objects at the end of a file of lines, oldest first; whole lines only."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines()
    if size > tail_bytes:
        lines = lines[1:]
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def newest_training_line(path: Path) -> dict[str, Any] | None:
    """Returns the newest line with a training loss, None before the first."""
    return next((line for line in reversed(last_lines(path)) if "loss" in line), None)


def last_step(run: RunDirectory) -> int:
    """Returns the newest optimizer step on record in metrics.jsonl, 0 before the first."""
    return max((int(line.get("step", 0)) for line in last_lines(run.metrics)), default=0)
