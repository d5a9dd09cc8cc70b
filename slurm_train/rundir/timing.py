"""What an attempt's time was spent on, how far it is, how much notice it gets; what the ranks' steps took.

Rank 0 keeps sums in `timing.json`, the supervisor books them in the ledger, `status` shows them. All are seconds of
one rank. The causes of an attempt add up to its wall-clock time: what lies before rank 0 was ready to meet the others
is its start, what lies after its last account is its end. Lost work is a part of the steps.

The supervisor writes what Slurm knows about the job's end into `notice.json` of the attempt. So the ranks, which may
run in a container, need none of Slurm's commands to know how long they have.

`step_times_<r>.json` of an attempt counts a rank's steps in fixed buckets, a sixteenth of a doubling wide, so a
quantile is right to 2 %. Adding a step costs a microsecond and no memory; a rank that is killed loses what it added
since the last writing. `stragglers.jsonl` has a line for each window of some seconds: seconds per step of every rank,
and which of them delay the others. Nothing depends on these two, so neither is made durable. No torch here.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.rundir.files import (
    append_line,
    last_lines,
    listed,
    make_folder,
    read_json,
    read_lines,
    read_record,
    to_records,
    write_record,
)
from slurm_train.rundir.ledger import Attempt
from slurm_train.rundir.paths import RunDirectory, existing_attempts


def last_step(run: RunDirectory) -> int:
    """Returns the furthest optimizer step on record in metrics.jsonl, 0 before the first.

    An attempt that went back and has not come as far since does not change it, see `step_of_attempt`.
    """
    return max((int(line.get("step", 0)) for line in last_lines(run.metrics)), default=0)


def step_of_attempt(run: RunDirectory, attempt: int, *, default: int) -> int:
    """Returns the step of an attempt's newest line in metrics.jsonl, `default` where it has none."""
    lines = [line for line in last_lines(run.metrics) if line.get("attempt", attempt) == attempt]
    return int(lines[-1].get("step", default)) if lines else default


CAUSES = (
    "start_s",
    "rendezvous_s",
    "load_s",
    "compile_s",
    "step_s",
    "data_wait_s",
    "checkpoint_stall_s",
    "evaluate_s",
    "suspended_s",
    "end_s",
)
"""What the wall-clock time of an attempt consists of; rank 0 keeps sums of all but the first and the last."""


@dataclass(slots=True, kw_only=True)
class Spent:
    """Rank 0's sums.

    Wide because it is a record of a file: one number for each use of the time.
    """

    begin_unix_s: float
    """When rank 0 was ready to meet the others; time in which it was suspended before is taken out."""
    first_step: int = 0
    """The step that this attempt resumed from."""
    steps: int = 0
    rolled_back_steps: int = 0
    """Steps that a rollback threw away."""
    rendezvous_s: float = 0.0
    """The ranks found each other."""
    load_s: float = 0.0
    """The checkpoint was loaded; also after a rollback."""
    compile_s: float = 0.0
    """The pass before the first step, in which torch.compile does its work."""
    step_s: float = 0.0
    """Steps, without the wait for data."""
    data_wait_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    """Training stood still for a save, that of a stop included."""
    evaluate_s: float = 0.0
    suspended_s: float = 0.0
    """The job was suspended."""
    longest_step_s: float = 0.0
    """Mean step of the slowest window."""
    longest_save_s: float = 0.0
    """Longest time until a save was durable; 0 before the first."""
    longest_evaluation_s: float = 0.0
    end_unix_s: float = 0.0
    """When these sums were written."""

    def add_steps(self, steps: int, *, seconds: float, data_wait_s: float) -> None:
        """Adds steps that took so long together, of which they waited for data so long."""
        self.steps += steps
        self.step_s += max(0.0, seconds - data_wait_s)
        self.data_wait_s += data_wait_s
        self.longest_step_s = max(self.longest_step_s, seconds / max(steps, 1))

    def add_save(self, seconds: float) -> None:
        """Counts a save that was durable after so long."""
        self.longest_save_s = max(self.longest_save_s, seconds)

    def add(self, cause: str, seconds: float) -> None:
        """Adds seconds to an account; "" is not counted."""
        if cause:
            setattr(self, cause, getattr(self, cause) + seconds)

    def write(self, path: Path) -> None:
        """Writes the sums for the supervisor; a lost write costs a few seconds of an account."""
        self.end_unix_s = time.time()
        # Where the time went is not worth a run: a full disk must not end it here.
        with contextlib.suppress(OSError):
            write_record(path, self)


@dataclass(slots=True, kw_only=True)
class ProgramProgress:
    """How far a user's own program has come in an attempt, as it has told its session; rank 0's file."""

    step: int = 0
    """The newest reported step; before the first report that of the checkpoint which the program continues."""
    max_steps: int | None = None
    """Of the whole training, as reported; None where it was not."""
    save_step: int = -1
    """Step of the newest save that has begun; -1 for none."""
    has_told_end: bool = False
    """Whether the program has called `mark("end")` without having been told to stop."""

    @property
    def newest_step(self) -> int:
        """The furthest step that it has told, by a report or by a save that has begun."""
        return max(self.step, self.save_step)

    @property
    def is_at_end(self) -> bool:
        """Whether the program has said that its training is over, or has reported its last step."""
        return self.has_told_end or (self.max_steps is not None and self.step >= self.max_steps)

    def write(self, path: Path) -> None:
        """Writes the record for the supervisor; a disk that refuses it costs no run."""
        with contextlib.suppress(OSError):
            write_record(path, self)


def read_program(run: RunDirectory, attempt: int) -> ProgramProgress | None:
    """Returns what a program has told in an attempt, None of one that has not joined the session."""
    return read_record(run.program(attempt), ProgramProgress)


def read_account(
    run: RunDirectory, attempt: int, *, start_unix_s: float, end_unix_s: float, step_before: int
) -> dict[str, float]:
    """Returns seconds per cause for the ledger; empty where rank 0 never came to meet the others.

    Args:
        run: the run.
        attempt: its number.
        start_unix_s: when the attempt began.
        end_unix_s: when it ended.
        step_before: newest step on record before it; what it did again of those is lost work.
    """
    spent = read_record(run.account(attempt), Spent)
    if spent is None:
        return {}
    _add_unbooked(spent, run, attempt)
    seconds = {"start_s": max(0.0, spent.begin_unix_s - start_unix_s)}
    seconds |= {cause: getattr(spent, cause) for cause in CAUSES[1:-1]}
    seconds["end_s"] = max(0.0, end_unix_s - start_unix_s - sum(seconds.values()))
    again = min(max(0, step_before - spent.first_step), spent.steps) + spent.rolled_back_steps
    seconds["lost_work_s"] = spent.step_s * min(1.0, again / max(spent.steps, 1))
    return {cause: round(value, 3) for cause, value in seconds.items()}


def _add_unbooked(spent: Spent, run: RunDirectory, attempt: int) -> None:
    """Adds the steps that are on record since the sums were written: a killed rank 0 wrote them seconds before."""
    step = spent.first_step + spent.steps
    # More lines than a run logs between two writings of its sums.
    for line in last_lines(run.metrics, tail_bytes=1 << 20):
        if line.get("attempt") != attempt or "step_time_s" not in line:
            continue
        num = int(line["step"]) - step
        if float(line["time_unix_s"]) > spent.end_unix_s and num > 0:
            waited_s = num * line.get("data_time_s", 0.0)
            spent.add_steps(num, seconds=num * line["step_time_s"], data_wait_s=waited_s)
        step = int(line["step"])


@dataclass(frozen=True, slots=True)
class Goodput:
    """How much of the time that nodes were held went into steps that count."""

    productive_s: float
    allocated_s: float
    """Without the time in which the job was suspended."""
    losses_s: Mapping[str, float]
    """What the rest went into, by cause, largest first; "lost_work_s" are steps that were done again."""

    @property
    def share(self) -> float:
        """Productive over allocated time, from 0 to 1."""
        return self.productive_s / self.allocated_s if self.allocated_s > 0 else 0.0


def goodput(ledger: Sequence[Attempt]) -> Goodput:
    """Returns the goodput of a run from its attempts that have ended."""
    ended = [attempt for attempt in ledger if attempt.end is not None]
    total = {cause: sum(attempt.spent_s(cause) for attempt in ended) for cause in (*CAUSES, "lost_work_s")}
    lost = {cause: seconds for cause, seconds in total.items() if cause not in ("step_s", "suspended_s")}
    return Goodput(
        productive_s=total["step_s"] - total["lost_work_s"],
        allocated_s=sum(attempt.held_s for attempt in ended) - total["suspended_s"],
        losses_s=dict(sorted(lost.items(), key=lambda item: -item[1])),
    )


# --- how much notice an attempt gets ---

_UNKNOWN_LEAD_S = 120.0
_MARGIN_S = 15.0
# The slowest so far is not the slowest to come.
_SAFETY = 1.5
_LEAST_LEAD_S = 10.0


def read_measured(run: RunDirectory) -> Spent | None:
    """Returns the sums of the newest attempt that has saved, which measured what a stop takes; None if none has."""
    accounts = (read_record(run.account(attempt), Spent) for attempt in reversed(existing_attempts(run)))
    return next((spent for spent in accounts if spent is not None and spent.longest_save_s > 0), None)


def lead_s(measured: Spent | None, *, limit_s: float | None) -> float:
    """Returns how long before its end a run should be asked to stop.

    Args:
        measured: what its stop takes; None where no save was measured yet.
        limit_s: the job's time limit; a run that is asked at once would never get anywhere.
    """
    if measured is None or measured.longest_save_s <= 0:
        return _UNKNOWN_LEAD_S if limit_s is None else min(_UNKNOWN_LEAD_S, max(_LEAST_LEAD_S, limit_s / 4))
    # The stop is agreed upon a step late, an evaluation that has begun may have to end, and a save under way comes
    # before the last one.
    stop_s = 2 * measured.longest_step_s + measured.longest_evaluation_s + 2 * measured.longest_save_s
    needed_s = _MARGIN_S + _SAFETY * stop_s
    return needed_s if limit_s is None else min(needed_s, max(_LEAST_LEAD_S, limit_s / 2))


def warning_lead_s(setting: int | str, run: RunDirectory, *, limit_s: float | None) -> int:
    """Returns the seconds for `--signal=USR2@...`.

    Args:
        setting: `requeue.warn_before_limit_s`: seconds, or "auto".
        run: earlier attempts of it have measured what a stop takes.
        limit_s: the job's time limit, None where it is the partition's.
    """
    return setting if isinstance(setting, int) else math.ceil(lead_s(read_measured(run), limit_s=limit_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What Slurm knows about a job's end; None for what is not known."""

    end_unix_s: float | None = None
    """When the time limit ends it."""
    limit_s: float | None = None
    """Length of the limit."""
    kill_wait_s: float | None = None
    """From the last TERM to KILL."""
    grace_s: float | None = None
    """From the first TERM of a preemption to its last; 0 if there is no preemption, None if accounting does not say."""


def read_notice(run: RunDirectory, attempt: int) -> Notice:
    """Returns the notice; all None where there is none, as without Slurm."""
    return read_record(run.notice(attempt), Notice) or Notice()


def time_left_s(notice: Notice, *, asked_by: str, since_s: float, now_unix_s: float) -> float | None:
    """Returns the seconds until a rank that was asked to stop is killed; None if it is not killed, or unknown.

    A TERM may mean preemption or scancel. The longer grace time is assumed, and one that is not known as long enough:
    a save that is cut off leaves the checkpoint before it as it was.

    Args:
        notice: what Slurm knows.
        asked_by: how the rank was asked: "TERM", "USR2", "clock", "file", or "another rank".
        since_s: how long ago.
        now_unix_s: the time.
    """
    if notice.kill_wait_s is None:
        return None
    to_end_s = math.inf if notice.end_unix_s is None else notice.end_unix_s - now_unix_s
    left_s = max(to_end_s, 0.0) + notice.kill_wait_s
    if asked_by == "TERM":
        asked_at_the_limit = to_end_s + since_s <= 0
        grace_s = 0.0 if asked_at_the_limit else math.inf if notice.grace_s is None else notice.grace_s
        after_term_s = grace_s + notice.kill_wait_s - since_s
        left_s = after_term_s if asked_at_the_limit else min(left_s, after_term_s)
    return None if math.isinf(left_s) else max(left_s, 0.0)


# --- what the ranks' steps took ---

_PER_DOUBLING = 16
# From 1 us to 18 hours; what lies outside counts as the nearest.
_LOWEST = -20 * _PER_DOUBLING
_LAST = 36 * _PER_DOUBLING - 1
# Often at first, so that a short attempt leaves something; a thousand ranks write a file system 17 times a second.
_FIRST_AFTER_S = 5.0
_LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class Histogram:
    """Durations by bucket."""

    counts: dict[int, int] = field(default_factory=dict)
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts a duration."""
        bucket = int(math.log2(seconds) * _PER_DOUBLING - _LOWEST) if seconds > 0.0 else 0
        bucket = 0 if bucket < 0 else min(bucket, _LAST)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        if seconds > self.longest_s:
            self.longest_s = seconds

    @property
    def num(self) -> int:
        """How many durations were added."""
        return sum(self.counts.values())

    def quantile_s(self, share: float) -> float:
        """Returns the duration that so many of 1 are not above, 0 where there is none."""
        left = share * self.num
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return min(math.pow(2.0, (bucket + _LOWEST + 0.5) / _PER_DOUBLING), self.longest_s or math.inf)
        return self.longest_s


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank's steps took in one attempt."""

    rank: int
    host: str
    step: Histogram
    """Whole steps, the wait for data and for the other ranks included."""
    data_wait: Histogram
    """The part of them that waited for data."""


class StepTimes:
    """This rank's counts of one attempt.

    Args:
        run: the run.
        attempt: number of the attempt.
        rank: this rank.
        host: its node.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        *,
        rank: int,
        host: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._path = run.step_times(attempt, rank)
        self._times = RankTimes(rank, host, Histogram(), Histogram())
        self._clock = clock
        self._pause_s = _FIRST_AFTER_S
        self._due_s = clock() + _FIRST_AFTER_S

    def add(self, step_s: float, data_wait_s: float) -> None:
        """Adds a step and the part of it that waited for data."""
        self._times.step.add(step_s)
        self._times.data_wait.add(data_wait_s)

    def keep_when_due(self) -> None:
        """Writes the counts now and then; the heartbeat's thread calls it."""
        now = self._clock()
        if now >= self._due_s:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due_s = now + self._pause_s
            self.keep()

    def keep(self) -> None:
        """Writes the counts; a file system that refuses costs a picture, never the run."""
        # Copies, since the loop may add a bucket while this thread writes.
        step, data_wait = (
            replace(times, counts=times.counts.copy()) for times in (self._times.step, self._times.data_wait)
        )
        if step.counts:
            with contextlib.suppress(OSError):
                make_folder(self._path.parent, within=self._run.path)
                write_record(self._path, replace(self._times, step=step, data_wait=data_wait))


def read_step_times(run: RunDirectory, attempt: int) -> list[RankTimes]:
    """Returns what the ranks of an attempt have left, by rank; a file that is none is passed over."""
    paths = [path for path in listed(run.attempt_logs(attempt)) if re.fullmatch(r"step_times_\d+\.json", path.name)]
    return sorted(to_records(RankTimes, map(read_json, paths)), key=lambda times: times.rank)


class RankPace(NamedTuple):
    """What one rank spent a step on in one window, on average."""

    rank: int
    host: str
    own_s: float
    """Everything but the wait for others."""
    wait_s: float
    """Waiting for the others' gradients, once its own were done."""
    data_s: float
    """The part of the own time that waited for data."""
    uneven_s: float
    """How much the own time differs from step to step for this rank alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Why steps take longer than they would have to, in words."""

    kind: str
    """"straggler": some ranks delay the others; "uneven": now one rank, now another; "data": all wait for data."""
    ranks: tuple[int, ...] = ()
    """Who it is; empty where it is everybody."""
    hosts: tuple[str, ...] = ()
    factor: float = 1.0
    """Stragglers: their own time over the others'."""
    lost_share: float
    """The part of each step that is lost by it, from 0 to 1."""
    sentence: str
    """One line with names and numbers."""
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceWindow:
    """One line of the file."""

    attempt: int
    begin_unix_s: float
    end_unix_s: float
    from_step: int
    to_step: int
    samples: int
    """Steps that were looked at on the rank with the fewest."""
    ranks: tuple[RankPace, ...]
    findings: tuple[Slowdown, ...] = ()
    """What has held for several windows up to this one."""


def append_window(run: RunDirectory, window: PaceWindow) -> None:
    """Adds a line; a file system that refuses costs a picture, never the run."""
    with contextlib.suppress(OSError):
        append_line(run.stragglers, asdict(window))


def read_windows(run: RunDirectory) -> list[PaceWindow]:
    """Returns all windows, oldest first; a line that is none is passed over."""
    return to_records(PaceWindow, read_lines(run.stragglers))


def newest_window(run: RunDirectory) -> PaceWindow | None:
    """Returns the newest window without reading the others, None before the first."""
    return next(reversed(to_records(PaceWindow, last_lines(run.stragglers))), None)


def all_findings(windows: Sequence[PaceWindow]) -> list[tuple[PaceWindow, Slowdown]]:
    """Returns each finding once, with the window in which it was first made."""
    seen: dict[tuple[Any, ...], tuple[PaceWindow, Slowdown]] = {}
    for window in windows:
        for finding in window.findings:
            seen.setdefault((window.attempt, finding.kind, finding.ranks), (window, finding))
    return list(seen.values())
