"""The history of a run, what it left on disk and what a driver saw and did meanwhile, and the rules that judge it.

Each rule is a pure function that returns what is wrong, one line each: monotone commits, one writer at a time, no gap,
the same values whenever a step is done, every sample exactly once per epoch, and the end of the golden run.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE
from slurm_train.rundir.files import read_json, read_lines
from slurm_train.rundir.paths import RunDirectory, existing_attempts, list_checkpoints, name_of
from tests.support.ledgers import ledger_lines
from tests.support.waiting import repeating

COMPARED = ("samples", "loss", "lr", "grad_norm", "samples_digest")
"""Keys of a step's line that must have the same bits whenever and wherever the step is done."""
Line = Mapping[str, Any]
ZOMBIE_S = 10.0
"""Ranks that outlive their attempt may write lines for so long; a reader passes over them."""


class Written(NamedTuple):
    """A checkpoint with a marker."""

    step: int
    attempt: int
    """Who wrote it; -1 where it went away while it was looked at."""
    complete_unix_s: float
    """When its marker appeared."""


class Look(NamedTuple):
    """The checkpoints with a marker that were there at one moment, newest first."""

    time_unix_s: float
    checkpoints: tuple[Written, ...]

    @property
    def newest(self) -> int:
        """Step of the newest, 0 where there was none."""
        return self.checkpoints[0].step if self.checkpoints else 0


class Consumed(NamedTuple):
    """The samples that one rank's optimizer step was given, in order (see `counted`)."""

    attempt: int
    rank: int
    step: int
    samples: tuple[int, ...]


class History(NamedTuple):
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

    lines: tuple[Line, ...]
    started: tuple[int, ...]
    opened_unix_s: Mapping[int, float]
    ledger: tuple[Line, ...]
    seen: tuple[Look, ...]
    consumed: tuple[Consumed, ...] = ()
    faults: tuple[str, ...] = ()
    result: Line | None = None

    @property
    def written(self) -> tuple[Written, ...]:
        """Every checkpoint that was ever seen."""
        return tuple({(one.step, one.attempt): one for look in self.seen for one in look.checkpoints}.values())


def read_history(run: RunDirectory, *, seen: Iterable[Look] = (), faults: Iterable[str] = ()) -> History:
    """Returns the history of a run that nobody writes any more."""
    return History(
        lines=tuple(line for line in read_lines(run.metrics) if "loss" in line),
        started=tuple(int(line["attempt"]) for line in read_lines(run.attempts) if line.get("event") == "start"),
        opened_unix_s={
            attempt: (run.epochs / f"attempt_{attempt}").stat().st_mtime for attempt in existing_attempts(run)
        },
        ledger=tuple(ledger_lines(run)),
        seen=(*seen, look(run)),
        consumed=tuple(_consumed(run)),
        faults=tuple(faults),
        result=read_json(run.result),
    )


def look(run: RunDirectory) -> Look:
    """Returns the checkpoints whose marker is there now; cheap enough for many times a second."""
    found = []
    for path in list_checkpoints(run.checkpoints):
        with suppress(OSError):
            complete_unix_s = (path / COMPLETE_FILE).stat().st_mtime
            found.append(Written(name_of(path).step, _writer(path), complete_unix_s))
    return Look(time.time(), tuple(found))


@contextmanager
def watching(run: RunDirectory, seen: list[Look]) -> Iterator[None]:
    """Looks at a run all the time while the body runs, and appends to `seen` without repetitions."""

    def watch() -> None:
        now = look(run)
        if not seen or now.checkpoints != seen[-1].checkpoints:
            seen.append(now)

    with repeating(watch, every_s=0.1):
        yield


def _writer(path: Path) -> int:
    try:
        return int(json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))["attempt"])
    except (OSError, ValueError, KeyError):
        return -1


def _consumed(run: RunDirectory) -> Iterator[Consumed]:
    for path in sorted((run.path / "consumed").glob("attempt_*_rank_*.jsonl")):
        _, attempt, _, rank = path.stem.split("_")
        for line in read_lines(path):
            yield Consumed(int(attempt), int(rank), line["step"], tuple(line["samples"]))


def check(history: History, *, golden: History, num_samples: int) -> list[str]:
    """Returns everything that is wrong with a finished run.

    Args:
        history: the run.
        golden: the same run, left alone.
        num_samples: samples of an epoch.
    """
    return [
        *lost_commits(history),
        *second_writers(history),
        *gaps(history),
        *unequal_repetitions(history),
        *wrong_samples(history, num_samples=num_samples),
        *unlike_golden(history, golden),
    ]


def lost_commits(history: History) -> Iterator[str]:
    """A checkpoint that was seen is never lost: the newest never gets older, and no attempt starts before it."""
    for before, after in pairwise(history.seen):
        if after.newest < before.newest:
            yield f"checkpoint {before.newest} was there, later the newest was {after.newest}"
    for attempt, start in starts(history).items():
        earlier = [look for look in history.seen if look.time_unix_s < history.opened_unix_s.get(attempt, 0.0)]
        newest = max((look.newest for look in earlier), default=0)
        if start < newest:
            yield f"attempt {attempt} began after step {start}, checkpoint {newest} was there before"


def second_writers(history: History) -> Iterator[str]:
    """One writer at a time: nothing of an attempt becomes visible once the next one is open."""
    for attempt, count in Counter(history.started).items():
        if count > 1:
            yield f"attempt {attempt} was opened {count} times"
        if attempt not in history.opened_unix_s:
            yield f"attempt {attempt} has no epoch file"
    for one in history.written:
        if one.attempt >= 0 and one.complete_unix_s > _next_opened(history, one.attempt):
            yield f"checkpoint {one.step} of attempt {one.attempt} became visible after the next attempt was open"
    for line in history.lines:
        late_s = line["time_unix_s"] - _next_opened(history, line["attempt"])
        if late_s > ZOMBIE_S:
            yield f"attempt {line['attempt']} wrote step {line['step']} {late_s:.1f} s after the next one was open"


def gaps(history: History) -> Iterator[str]:
    """The steps that count are 1, 2, ... to the last one, and each attempt does its own in order."""
    by_attempt: dict[int, list[int]] = defaultdict(list)
    for line in history.lines:
        by_attempt[line["attempt"]].append(line["step"])
    for attempt, steps in sorted(by_attempt.items()):
        if steps != list(range(steps[0], steps[0] + len(steps))):
            yield f"attempt {attempt} did the steps {_in_words(steps)}"
    done = sorted({line["step"] for line in history.lines})
    last = history.result["step"] if history.result else max(done, default=0)
    if done != list(range(1, last + 1)):
        yield f"the history has the steps {_in_words(done)}, and ends at {last}"


def unequal_repetitions(history: History) -> Iterator[str]:
    """Every line of a step equals the step's first line, and a rank that repeats a step gets the same samples."""
    first = {line["step"]: {**line, "whose": f"attempt {line['attempt']}"} for line in reversed(history.lines)}
    yield from _unequal(history.lines, first)
    samples: dict[tuple[int, int], tuple[int, ...]] = {}
    for one in history.consumed:
        if samples.setdefault((one.step, one.rank), one.samples) != one.samples:
            yield f"step {one.step} of rank {one.rank} was given other samples in attempt {one.attempt}"


def wrong_samples(history: History, *, num_samples: int) -> Iterator[str]:
    """Over the steps that count, every epoch has each sample exactly once, on whatever rank."""
    order: list[int] = []
    world = {(line["attempt"], line["step"]): line["world_size"] for line in history.lines}
    for step, of_step in committed(history).items():
        ranks = [one.rank for one in of_step]
        expected = world.get((of_step[0].attempt, step))
        if ranks != list(range(expected or 0)):
            yield f"step {step} of attempt {of_step[0].attempt} was counted by the ranks {ranks} of {expected}"
        order += [sample for one in of_step for sample in one.samples]
    for epoch, begin in enumerate(range(0, len(order), num_samples)):
        counts = Counter(order[begin : begin + num_samples])
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        if twice:
            yield f"epoch {epoch}: {len(twice)} samples more than once, e.g. {twice[:3]}"
    if not order or (history.result and len(order) != history.result["samples"]):
        yield f"{len(order)} samples were counted, the result says {(history.result or {}).get('samples')}"


def unlike_golden(history: History, golden: History) -> Iterator[str]:
    """Every line has the golden run's bits, and so have the final weights."""
    yield from _unequal(history.lines, {line["step"]: line for line in golden.lines})
    for name in ("step", "samples", "weights_digest"):
        found = [(one.result or {}).get(name) for one in (history, golden)]
        if found[0] is None or found[0] != found[1]:
            yield f"{name} at the end: {found[0]!r}, golden {found[1]!r}"


def _unequal(lines: Iterable[Line], right: Mapping[int, Line]) -> Iterator[str]:
    """Yields where a line differs from that of its step in `right`, which is an attempt's or the golden run's."""
    for line in lines:
        other = right.get(line["step"], {})
        for name in COMPARED:
            if line.get(name) != other.get(name):
                found, whose = f"{line.get(name)!r} in attempt {line['attempt']}", other.get("whose", "golden")
                yield f"step {line['step']} {name}: {found}, {whose} {other.get(name)!r}"


def starts(history: History) -> dict[int, int]:
    """Returns the step that each attempt resumed from, for those that got to do a step."""
    done = [(line["attempt"], line["step"]) for line in history.lines]
    done += [(one.attempt, one.step) for one in history.consumed]
    # The lowest step of each attempt comes last.
    return {attempt: step - 1 for attempt, step in sorted(done, reverse=True)}


def committed(history: History) -> dict[int, list[Consumed]]:
    """Returns what the ranks consumed in each step that counts, in rank order: the newest attempt that did it."""
    newest = {one.step: one.attempt for one in sorted(history.consumed)}
    kept: dict[int, list[Consumed]] = {step: [] for step in sorted(newest)}
    for one in sorted(history.consumed):
        if one.attempt == newest[one.step]:
            kept[one.step].append(one)
    return kept


def _next_opened(history: History, attempt: int) -> float:
    return min((at for number, at in history.opened_unix_s.items() if number > attempt), default=float("inf"))


def _in_words(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:3]))
    return f"{shown} ... {steps[-1]} ({len(steps)} of them)" if len(steps) > 4 else ", ".join(map(str, steps))
