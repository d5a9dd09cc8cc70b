"""A run with metrics on disk, to be followed by trackers; and what real trackers have kept of it."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig, TrackSection
from slurm_train.rundir.paths import RunDirectory
from tests.support import run_files

_BLOCK_BYTES = 32768


def make_run(root: Path, track: TrackSection | None = None, run_id: str = "3f9a1c07") -> RunDirectory:
    """Writes a run of one attempt without metrics."""
    run = RunDirectory(root / "runs" / "gpt" / run_id)
    for folder in (run.path, run.epochs, run.attempt_logs(0)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    run.config.write_text(dump_config(RunConfig(track=TrackSection() if track is None else track)))
    run.plan.write_text("{}")
    (run.epochs / "attempt_0").touch()
    return run


def step_line(step: int, *, attempt: int = 0, **more: Any) -> dict[str, Any]:
    """Returns a line of metrics; its loss tells step and attempt."""
    facts = {"mfu": None, "world_size": 1, "time_unix_s": 1000.0 + 100 * attempt + step}
    return {"step": step, "loss": step + attempt / 10, "attempt": attempt, **facts, **more}


def add_lines(run: RunDirectory, lines: Sequence[dict[str, Any]]) -> None:
    """Appends lines of metrics."""
    run_files.add_lines(run.metrics, lines)


def steps(first: int, last: int, *, attempt: int = 0) -> list[dict[str, Any]]:
    """Returns the lines of a stretch of steps."""
    return [step_line(step, attempt=attempt) for step in range(first, last + 1)]


def wandb_records(folder: Path) -> list[Any]:
    """Returns the records of every offline run below a folder, oldest first, as wandb's own message type."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("**/*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            found.append(record)
    return found


def _log_records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a file in LevelDB's log format, behind wandb's own header of seven bytes."""
    position, part = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        body = data[position + 7 : position + 7 + length]
        position += 7 + length
        part = body if kind in (1, 2) else part + body
        if kind in (1, 4):
            yield part


def wandb_points(folder: Path, key: str = "loss") -> list[tuple[int, float]]:
    """Returns (step, value) of a curve as wandb has kept it, in its order."""
    points = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            if key in items:
                points.append((items["step"], items[key]))
    return points


def query(database: Path, sql: str) -> list[tuple[Any, ...]]:
    """Returns the rows of a query."""
    connection = sqlite3.connect(database)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def mlflow_points(database: Path) -> list[tuple[int, float]]:
    """Returns (step, value) of the loss as MLflow has kept it, by time."""
    return query(database, "SELECT step, value FROM metrics WHERE key = 'loss' ORDER BY timestamp")


def trackio_points(database: Path) -> list[tuple[int, float]]:
    """Returns (step, value) of the loss as trackio has kept it, in its order."""
    rows = query(database, "SELECT step, metrics FROM metrics ORDER BY id")
    return [(step, json.loads(text)["loss"]) for step, text in rows if "loss" in json.loads(text)]


def tensorboard_points(folder: Path, key: str = "loss") -> list[tuple[int, float]]:
    """Returns (step, value) of a curve as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]
