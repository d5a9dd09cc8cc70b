"""What is known on disk of one tracker of a run: its id, how far it has been sent, and what is wrong with it.

One writer at a time: the process that follows the run. The id is durable before anything is sent under it.
"""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_train.rundir.files import fsync_directory, read_json, size_of, write_atomic
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.private import make_private

_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState:
    """One tracker of one run."""

    key: str
    """Chosen once, see `TrackedRun`."""
    tracker_id: str | None = None
    place: str = ""
    sent_bytes: int = 0
    """Length of the part of metrics.jsonl that the tracker has taken."""
    sure_bytes: int = 0
    """Length of the part that it can no longer lose; a new process begins here."""
    problem: str = ""
    """Why the newest attempt to reach it failed; "" when it works."""


def state_path(run: RunDirectory, name: str) -> Path:
    """Returns the file of a tracker."""
    return run.trackers / f"{name}.json"


def read_state(run: RunDirectory, name: str) -> TrackerState | None:
    """Returns what is known of a tracker, None where it was never asked."""
    found = read_json(state_path(run, name))
    if found is None or "key" not in found:
        return None
    names = TrackerState.__dataclass_fields__
    return TrackerState(**{key: value for key, value in found.items() if key in names})


def tracker_ids(run: RunDirectory) -> dict[str, dict[str, str]]:
    """Returns {"trackers": {"wandb": "5d2030c7-8a1f04", ...}} for a checkpoint's manifest; {} where there are none."""
    if not run.trackers.is_dir():
        return {}
    states = {path.stem: read_state(run, path.stem) for path in sorted(run.trackers.glob("*.json"))}
    ids = {name: state.tracker_id for name, state in states.items() if state is not None and state.tracker_id}
    return {"trackers": ids} if ids else {}


def write_state(run: RunDirectory, name: str, state: TrackerState, *, durable: bool = False) -> None:
    """Replaces what is known of a tracker."""
    write_atomic(state_path(run, name), json.dumps(asdict(state)) + "\n", durable=durable)


def first_state(run: RunDirectory, name: str) -> TrackerState:
    """Returns what is known of a tracker; chooses its key, durably, where nothing is."""
    found = read_state(run, name)
    if found is None:
        make_private(run.trackers)
        fsync_directory(run.path)
        found = TrackerState(key=f"{run.run_id}-{secrets.token_hex(3)}")
        write_state(run, name, found, durable=True)
    # The file may have been cut since, with a run directory that was put back from a copy.
    size = size_of(run.metrics)
    return found if found.sure_bytes <= size else replace(found, sent_bytes=0, sure_bytes=0)


def new_lines(path: Path, offset: int) -> tuple[list[Mapping[str, Any]], int]:
    """Returns whole lines of metrics behind an offset, and the offset behind them; a part of a file at a time.

    Args:
        path: a metrics.jsonl; an absent one has no lines.
        offset: bytes that are known already.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_CHUNK_BYTES)
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    return list(_parsed(whole)), offset + len(whole)


def num_unsent(run: RunDirectory, name: str) -> int:
    """Returns how many lines a tracker has not taken."""
    state = read_state(run, name)
    offset, count = (0 if state is None else state.sent_bytes), 0
    while True:
        lines, end = new_lines(run.metrics, offset)
        if end == offset:
            return count
        offset, count = end, count + len(lines)


def why_ended(state: TrackerState | None, code: int, *, timeout_s: float) -> str:
    """Returns why a process that followed a run ended before its time.

    Args:
        state: what it has left.
        code: its return code, negative for a signal.
        timeout_s: longest that a call of the tracker was to take.
    """
    if code == -signal.SIGALRM:
        return f"it did not answer within {timeout_s:g} s"
    return state.problem if state is not None and state.problem else f"its process ended with code {code}"


def _parsed(data: bytes) -> Iterator[Mapping[str, Any]]:
    for text in data.splitlines():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            yield value
