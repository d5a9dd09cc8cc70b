"""The ledger of a run: one start line and one end line per attempt, read and written as records.

A later end line of an attempt adds to the earlier one: what became of a requeue is known after it was decided. Lines
of every version are read here; a value that is missing or is none leaves its field as it is without it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from slurm_train.formatting import as_float
from slurm_train.rundir.cause import Cause
from slurm_train.rundir.files import append_line, fields_of, read_lines
from slurm_train.rundir.paths import RunDirectory


class _Word(str, enum.Enum):
    """A word of the ledger; in texts and in JSON it is the word alone."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, format_spec: str) -> str:
        return format(str(self.value), format_spec)


class Reason(_Word):
    """Why an attempt ended."""

    DONE = "done"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    REQUEUED = "requeued"
    SIGNALLED = "signalled"
    NODE_FAILURE = "node_failure"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    FAILED = "failed"
    FILE_SYSTEM = "file_system"
    GROWTH = "growth"
    ENDED_EARLY = "ended_early"
    LOST = "lost"
    """Its supervisor was killed or lost; the next one has written the end line."""
    UNKNOWN = "unknown"
    """The ranks saved and stopped, and Slurm does not say why; also what no version here knows."""


class Action(_Word):
    """What follows from an end. It is written before it is done, since Slurm ends the supervisor by a requeue."""

    FINISH = "finish"
    REQUEUE = "requeue"
    RELAUNCH = "relaunch"
    """The ranks are started again in the same allocation."""
    LEAVE = "leave"
    """Slurm has requeued the job by itself."""
    STOP = "stop"
    """Nothing starts the run again: that is for a person."""
    LOST = "lost"
    """Nobody was there to decide."""


NOT_REQUEUED = "not_requeued"
"""`outcome` of an attempt that was to be requeued: neither did Slurm do that, nor could another job be submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Who opened an attempt, when and where."""

    time_unix_s: float = 0.0
    job_id: str | None = None
    """Slurm job id, array-safe ("12_3"), or None for a local run."""
    restart_count: int = 0
    """How often Slurm had restarted this job."""
    nodes: tuple[str, ...] = ()
    """Hosts of the allocation."""
    world_size: int = 1
    """Ranks."""
    first_committed: int | None = None
    """Step of the newest checkpoint, -1 if there was none; None if unknown, as with a user's own code."""
    follows: int | None = None
    """The attempt in whose step torchrun started the ranks again; None: this one began a step."""
    changes: int = 0
    """How many accepted changes the run had."""
    accepted: tuple[str, ...] = ()
    """What of them this attempt was the first to carry."""

    @property
    def job_start(self) -> tuple[str | None, int]:
        """Which start of which job it was."""
        return self.job_id, self.restart_count


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an attempt ended, and what follows from it.

    Wide because it is a record of a file.
    """

    time_unix_s: float
    exit_code: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    step_before: int | None = None
    """Furthest step on record before the attempt; runs of earlier versions have none."""
    last_committed: int | None = None
    """Step of the newest checkpoint, None where that is not known."""
    asked_by: str = ""
    """How rank 0 was asked to stop, e.g. "TERM"; "" if it was not, or that is not known."""
    found: str = ""
    """Codes of what the preflight has found."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time went, by cause, e.g. "step_s"; "lost_work_s" is a part of the steps, "queue_s" came before."""
    reason: Reason = Reason.UNKNOWN
    action: Action | None = None
    note: str = ""
    """One line for a person."""
    cause: Cause | None = None
    """Why it ended; None where that is not known, and where nothing has failed."""
    outcome: str = ""
    """What became of the action, `NOT_REQUEUED`; "" where nothing is known against it."""
    failed_on: tuple[str, ...] = ()
    """The nodes that it failed on, as far as known."""
    left_out: tuple[str, ...] = ()
    """Nodes that the next attempt, in the same allocation, does not use."""
    grow_to: int | None = None
    """Nodes that the run was requeued for."""
    pays_after_s: float | None = None
    """Seconds on that many nodes after which the requeue has been paid for."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt by the ledger."""

    number: int
    start: Start
    end: End | None = None
    """None while it runs, or if nobody has recorded how it ended."""

    @property
    def action(self) -> Action | None:
        """What follows from its end, None where that is not recorded."""
        return None if self.end is None else self.end.action

    @property
    def reason(self) -> Reason | None:
        """Why it ended, None where that is not recorded."""
        return None if self.end is None else self.end.reason

    @property
    def note(self) -> str:
        """What a person is told of its end, "" where nothing is recorded."""
        return "" if self.end is None else self.end.note

    @property
    def last_unix_s(self) -> float:
        """When it ended, or began where it has recorded no end."""
        return self.start.time_unix_s if self.end is None else self.end.time_unix_s

    @property
    def held_s(self) -> float:
        """How long it held its nodes; one that runs, until now."""
        end_unix_s = time.time() if self.end is None else self.end.time_unix_s
        return max(0.0, end_unix_s - self.start.time_unix_s)

    @property
    def made_progress(self) -> bool:
        """Whether it made progress: a new commit where checkpoints are known, else a new step."""
        end = self.end
        if end is None:
            return False
        if self.start.first_committed is not None and end.last_committed is not None:
            # It may be lower after a rollback; rollbacks have a limit of their own.
            return self.start.first_committed != end.last_committed
        # Steps that were done before do not count: a run that fails at one step would be started again for ever.
        step_before = end.first_step if end.step_before is None else end.step_before
        return (end.last_step or 0) > (step_before or 0)

    @property
    def waits_for_person(self) -> bool:
        """Whether nothing starts the run again after it."""
        return self.action is Action.STOP or (self.end is not None and self.end.outcome == NOT_REQUEUED)

    @property
    def comes_back(self) -> bool:
        """Whether Slurm was to start the run again after it, as far as the ledger has it."""
        return self.action in (Action.REQUEUE, Action.LEAVE) and not self.waits_for_person

    def spent_s(self, *causes: str) -> float:
        """Returns the seconds that went into some causes."""
        return 0.0 if self.end is None else sum(self.end.seconds.get(cause, 0.0) for cause in causes)


def read_ledger(run: RunDirectory) -> list[Attempt]:
    """Returns the attempts of a run, the oldest first; lines that are torn are left out."""
    starts: dict[int, dict[str, Any]] = {}
    ends: dict[int, dict[str, Any]] = {}
    for line in read_lines(run.attempts):
        number = line.get("attempt")
        if isinstance(number, int) and as_float(line.get("time_unix_s")) is not None:
            of_kind = ends if line.get("event") == "end" else starts
            of_kind.setdefault(number, {}).update(line)
    attempts = []
    for number in sorted(starts.keys() | ends.keys()):
        end = _end_of(ends[number]) if number in ends else None
        # Without its start line it is as short as can be.
        facts = starts.get(number) or {"time_unix_s": ends[number]["time_unix_s"]}
        attempts.append(Attempt(number, Start(**fields_of(Start, facts)), end))
    return attempts


def read_attempt(run: RunDirectory, number: int) -> Attempt | None:
    """Returns one attempt, None where the ledger has nothing about it."""
    return next((attempt for attempt in read_ledger(run) if attempt.number == number), None)


_NODES = ("failed_on", "left_out")
"""Names with commas between them; the nodes of a start are a list."""
_NOT_SPENT = ("pays_after_s", "time_unix_s")


def _end_of(line: Mapping[str, Any]) -> End:
    names = [key for key, value in line.items() if key.endswith("_s") and as_float(value) is not None]
    seconds = {key: line[key] for key in names if key not in _NOT_SPENT}
    nodes = {key: list(filter(None, str(line[key]).split(","))) for key in _NODES if key in line}
    end = End(**fields_of(End, {**line, **nodes, "seconds": seconds}))
    # Lines of earlier versions have the cause as a part of their note alone.
    if end.reason is Reason.FAILED and "cause" not in line:
        return replace(end, cause=Cause.of_note(end.note))
    return end


def start_facts(start: Start) -> dict[str, Any]:
    """Returns a start as it is written: what is only known of some starts is left out of the others."""
    always = ("job_id", "restart_count", "nodes", "world_size", "first_committed")
    return _stated(start, always)


def record_start(run: RunDirectory, number: int, start: Start) -> None:
    """Writes the start line of an attempt."""
    append_line(run.attempts, {"event": "start", "attempt": number, **start_facts(start)}, durable=True)


def record_end(run: RunDirectory, number: int, end: End) -> None:
    """Writes the end line of an attempt; for one that has a line, what has become known since."""
    facts = _stated(end, ("reason",))
    seconds = facts.pop("seconds", {})
    facts |= {key: ",".join(facts[key]) for key in _NODES if key in facts}
    facts |= {} if end.cause is None else {"cause": asdict(end.cause)}
    append_line(run.attempts, {"event": "end", "attempt": number, **facts, **seconds}, durable=True)


def _stated(record: Any, always: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of a record that have another value than without it, and some others."""
    facts = {}
    for one in fields(record):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        value = getattr(record, one.name)
        if one.name in always or value != default:
            facts[one.name] = value
    return facts
