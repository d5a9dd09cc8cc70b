"""What saving took: how long training stood still, until when a checkpoint was durable, how large it was."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_train.report.curve import Curve
from slurm_train.report.plot import Plot
from slurm_train.report.quantity import as_float, byte_size, duration
from slurm_train.report.record import Stored

_MOST_DOTS = 1000


def save_plot(saves: Sequence[Mapping[str, Any]]) -> Plot:
    """Returns the saves that succeeded, by step."""
    good = [save for save in saves if not save.get("error")][-_MOST_DOTS:]
    longest_s = max((as_float(save.get("save_s")) or 0.0 for save in good), default=0.0)
    unit, factor = ("s", 1.0) if longest_s >= 2 else ("ms", 1000.0)
    curves = [
        _curve("until durable", "save_s", good, factor, "one"),
        _curve("training stood still", "stall_s", good, factor, "two"),
    ]
    return Plot(
        key="saves",
        title="Time of a save",
        curves=[curve for curve in curves if len(curve.x)],
        y_label=unit,
        note="" if good else "no save is on record",
        from_zero=True,
    )


def _curve(name: str, key: str, saves: Sequence[Mapping[str, Any]], factor: float, colour: str) -> Curve:
    points = [
        (float(save["step"]), factor * value, byte_size(as_float(save.get("bytes")) or 0.0))
        for save in saves
        if (value := as_float(save.get(key))) is not None
    ]
    steps, values, sizes = zip(*points, strict=True) if points else ((), (), ())
    return Curve(name=name, x=steps, y=values, kind="dots", colour=colour, labels=sizes)


def summary(saves: Sequence[Mapping[str, Any]], stored: Sequence[Stored]) -> str:
    """Returns what is to be said of a run's checkpoints in a few sentences."""
    sentences = []
    good = [save for save in saves if not save.get("error")]
    if good:
        stalls = [as_float(save.get("stall_s")) or 0.0 for save in good]
        size = byte_size(as_float(good[-1].get("bytes")) or 0.0)
        sentences.append(
            f"{len(good):,} saves, the newest of {size}. Training stood still for {duration(sum(stalls))} altogether: "
            f"{duration(statistics.median(stalls))} in the middle, {duration(max(stalls))} at most."
        )
    if len(good) < len(saves):
        sentences.append(f"{len(saves) - len(good)} failed.")
    if stored:
        whole = [one for one in stored if one.num_bytes is not None]
        kept = ", ".join(f"step {one.step} ({byte_size(one.num_bytes or 0)})" for one in whole[-8:])
        sentences.append(f"On disk now: {kept or 'none that is whole'}.")
        if len(whole) < len(stored):
            sentences.append(f"{len(stored) - len(whole)} on disk are not whole.")
    return " ".join(sentences) or "No checkpoint was written."
