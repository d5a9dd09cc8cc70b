"""The history of one run: what it left on disk, and what a driver saw and did meanwhile. `checker` judges it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import read_json, read_lines
from slurm_train.rundir.layout import RunDirectory, existing_attempts, list_checkpoints, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that was done to a run."""

    time_unix_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint with a marker."""

    step: int
    attempt: int
    """Who wrote it; -1 where it went away while it was looked at."""
    complete_unix_s: float
    """When its marker appeared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The checkpoints with a marker that were there at one moment, newest first."""

    time_unix_s: float
    checkpoints: tuple[Written, ...]

    @property
    def newest(self) -> int:
        """Step of the newest, 0 where there was none."""
        return self.checkpoints[0].step if self.checkpoints else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """The samples that one rank's optimizer step was given, in order (see `counted`)."""

    attempt: int
    rank: int
    step: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Everything that is known of a run.

    Args:
        lines: every line of metrics.jsonl with a training loss, in the file's order.
        started: attempts with a start line in the ledger, in its order.
        opened_unix_s: when each attempt's epoch file was made.
        ledger: one mapping per attempt.
        seen: checkpoints over time, oldest look first; the last one is how the run was left.
        consumed: samples per step; empty where the run did not count them.
        faults: what was done to it.
        result: content of result.json, None where there is none.
    """

    lines: tuple[Mapping[str, Any], ...]
    started: tuple[int, ...]
    opened_unix_s: Mapping[int, float]
    ledger: tuple[Mapping[str, Any], ...]
    seen: tuple[Seen, ...]
    consumed: tuple[Consumed, ...] = ()
    faults: tuple[Fault, ...] = ()
    result: Mapping[str, Any] | None = None

    @property
    def written(self) -> tuple[Written, ...]:
        """Every checkpoint that was ever seen."""
        return tuple({(one.step, one.attempt): one for look in self.seen for one in look.checkpoints}.values())


def read_history(run: RunDirectory, *, seen: Iterable[Seen] = (), faults: Iterable[Fault] = ()) -> History:
    """Returns the history of a run that nobody writes any more."""
    return History(
        lines=tuple(line for line in read_lines(run.metrics) if "loss" in line),
        started=tuple(int(line["attempt"]) for line in read_lines(run.attempts) if line.get("event") == "start"),
        opened_unix_s={
            attempt: (run.epochs / f"attempt_{attempt}").stat().st_mtime for attempt in existing_attempts(run)
        },
        ledger=tuple(read_ledger(run)),
        seen=(*seen, look(run)),
        consumed=tuple(_consumed(run)),
        faults=tuple(faults),
        result=read_json(run.result),
    )


def look(run: RunDirectory) -> Seen:
    """Returns the checkpoints whose marker is there now; cheap enough for many times a second."""
    found = []
    for path in list_checkpoints(run.checkpoints):
        with suppress(OSError):
            complete_unix_s = (path / COMPLETE_FILE).stat().st_mtime
            found.append(Written(step=name_of(path).step, attempt=_writer(path), complete_unix_s=complete_unix_s))
    return Seen(time_unix_s=time.time(), checkpoints=tuple(found))


@contextmanager
def watching(run: RunDirectory, *, every_s: float = 0.1) -> Iterator[list[Seen]]:
    """Looks at a run all the time while the body runs; gives the list that fills meanwhile, without repetitions."""
    seen, done = [look(run)], threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            now = look(run)
            if now.checkpoints != seen[-1].checkpoints:
                seen.append(now)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _writer(path: Path) -> int:
    try:
        return int(json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))["attempt"])
    except (OSError, ValueError, KeyError):
        return -1


def _consumed(run: RunDirectory) -> Iterator[Consumed]:
    for path in sorted((run.path / "consumed").glob("attempt_*_rank_*.jsonl")):
        _, attempt, _, rank = path.stem.split("_")
        for line in read_lines(path):
            samples = tuple(line["samples"])
            yield Consumed(attempt=int(attempt), rank=int(rank), step=line["step"], samples=samples)
