"""One case of a rehearsal: a run that is started, disturbed at a moment, and started again by the same words."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from slurm_train.errors import ClusterError
from slurm_train.formatting import plain
from slurm_train.processes import cpu_s, descendants, environment_of, is_running, start_ticks
from slurm_train.rundir.events import read_marks
from slurm_train.rundir.files import read_json, read_tail
from slurm_train.rundir.ledger import End, read_attempt
from slurm_train.rundir.own_resume import read_own_resume, was_taken
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.session.client import RUN_DIR
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import scrubbed
from slurm_train.status.printed import newest_line
from slurm_train.tools.rehearsal.folder import Files, changed, copy_folder, files_in, is_checkpoint
from slurm_train.tools.rehearsal.marks import NOTES, Mark, MarkReader
from slurm_train.tools.rehearsal.otherwise import ProgramProcess, read_process

Signal = Literal["CONT", "TERM", "USR2", "KILL"]
_LOOK_S = 0.05
_LOOK_FOR_SAVE_S = 0.005
_SUPERVISOR_ENDS_S = 90.0
_LOOK_AGAIN_S = 0.5
_OUTLIVES_S = 6.0
"""Loader workers of torch look every 5 s whether their parent is there."""
_ENDED_BEFORE_S = 0.5
"""A process below a rank that ends so long before it, after a signal, has not ended with it."""
_READ_EVERY_S = 0.5
_BESIDE_RANK = "slurm_train/worker/watcher.py"
_TAIL_BYTES = 64 * 1024
_OF_TOOLKIT = (
    *("attempts.jsonl", "plan.json", "code", "code.json", "checkpoints", "epochs", "logs", "provenance.json", "jobs"),
    *("config.yaml", "metrics.jsonl", "saves.jsonl", "lock.json", "result.json", "job.json", "trackers", "compiled"),
    *("stragglers.jsonl", "evaluations", "submission.json", "submit.sh", "request.json", "changes.jsonl", "STOP"),
)
"""What this package itself writes into a run directory, besides `events@HOST.jsonl`."""


_AS_REQUEUED = ("--accept", "code")
"""For the second start: Slurm starts a requeued job without asking what its program has written beside its source."""


class SiteNotice(NamedTuple):
    """What Slurm gives a job before it kills it."""

    grace_s: float
    """From the first TERM of a preemption to the second one."""
    kill_wait_s: float
    """From the last TERM to KILL."""
    lead_s: float
    """From USR2 to the time limit."""


class SignalsAfter(NamedTuple):
    """Signals that are sent together."""

    wait_s: float
    """After the ones before."""
    names: tuple[Signal, ...]


def preemption(notice: SiteNotice) -> tuple[SignalsAfter, ...]:
    """Returns what Slurm sends at a preemption."""
    first = SignalsAfter(0, ("CONT", "TERM"))
    last = (SignalsAfter(notice.grace_s, ("TERM", "CONT", "TERM")),) if notice.grace_s else ()
    return (first, *last, SignalsAfter(notice.kill_wait_s, ("KILL",)))


def time_limit(notice: SiteNotice) -> tuple[SignalsAfter, ...]:
    """Returns what a job gets at its time limit: the warning that its script asks for, and the end."""
    return (
        SignalsAfter(0, ("USR2",)),
        SignalsAfter(notice.lead_s, ("CONT", "TERM")),
        SignalsAfter(notice.kill_wait_s, ("KILL",)),
    )


KILLED = (SignalsAfter(0, ("KILL",)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What happens to a run, and when."""

    key: str
    """A word, e.g. "preempted"; names the folder of the case."""
    label: str
    """For the table."""
    signals: tuple[SignalsAfter, ...] = ()
    """None: it is not disturbed."""
    place: tuple[float, float] | None = None
    """They are sent when this mark has been read."""
    after_s: float | None = None
    """They are sent so long after the start."""
    after_cpu_s: float | None = None
    """They are sent when the ranks have computed so long, whatever else the machine does."""
    in_save: bool = False
    """They are sent when, from `place` on, a checkpoint is being written."""
    words_after: tuple[str, ...] = ()
    """Added at the second start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOfRun:
    """One start of a run, as it was seen.

    Wide because it is a record of many witnesses.
    """

    marks: Mapping[object, Sequence[Mark]]
    started_s: float
    """By the monotonic clock, as the times of the marks."""
    signalled_s: float | None = None
    """When the first signal was sent, None where none was."""
    ended_s: float | None = None
    """When the ranks had ended; None where they had to be ended for want of time."""
    killed_by_notice: bool = False
    """Whether KILL was needed after signals that ask."""
    first_mark_cpu_s: float | None = None
    """How long the ranks had computed at their first mark; None where there was none or it is not seen."""
    was_in_save: bool = False
    exit_code: int = 0
    """Of the command."""
    end: End | None = None
    """Of its attempt, by the run's ledger."""
    is_finished: bool = False
    """Whether the run has a result."""
    files: Files = field(default_factory=dict)
    """All at its end, those of the toolkit left out."""
    written: frozenset[str] = frozenset()
    """Those that it has written."""
    beside_source: frozenset[str] = frozenset()
    """Those that it has written into the run's copy of the code."""
    saved_steps: tuple[str, ...] = ()
    """Names of the session's or trainer's checkpoints at its end."""
    outlived_by: tuple[str, ...] = ()
    """Processes below its ranks that ran on after their end."""
    ended_before: tuple[str, ...] = ()
    """Those that ended after the signal and before them."""
    processes: tuple[ProgramProcess, ...] = ()
    """Its ranks and those below them, but for short ones."""
    resumed_from: str = ""
    """The checkpoint that it has opened for its own resume, "" for none."""
    remarks: tuple[str, ...] = ()
    """What this package has printed about it."""
    last_words: str = ""
    traceback: str = ""
    """The line of its error, with the run's directory as its variable."""
    not_copied: str = ""
    """What its error is about: a place in its folder that the run's copy of the code has not, "" for none."""

    def of_kind(self, kind: object) -> list[Mark]:
        """Returns its marks of one kind."""
        return list(self.marks.get(kind, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All that was seen of the run of a case."""

    disturbance: Disturbance
    starts: tuple[StartOfRun, ...]
    run: Path | None
    """Its directory, None where none was written."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSetting:
    """What all cases of a rehearsal share."""

    words: tuple[str, ...]
    """Of the command line, those of the rehearsal included."""
    source: Path
    """The person's folder."""
    place: Path
    """Of the rehearsal."""
    env: Mapping[str, str]
    without: tuple[Path, ...] = ()
    """Folders in the person's that no run needs."""
    job_id: str | None = None
    """The allocation in which the runs are; None: this machine."""
    pattern: re.Pattern[str] | None = None
    must_stop: threading.Event = field(default_factory=threading.Event)
    """Ends all cases at once."""


Until = Callable[[MarkReader, float], bool]
"""Whether a start may be ended, by its marks and the seconds since it began."""


def play(
    setting: RehearsalSetting,
    disturbance: Disturbance,
    *,
    kind: object = None,
    enough: Until,
    enough_after: Until = lambda _reader, _seconds: True,
    words: Sequence[str] = (),
    start_timeout_s: float = 600.0,
) -> Course:
    """Runs one case from its copy of the folder to its end; everything that it has started has ended on return.

    Args:
        setting: what all cases share.
        disturbance: what happens in this one.
        kind: of the marks that `disturbance.place` is compared with.
        enough: whether the first start may be ended, where it is not disturbed or has not ended by the signals.
        enough_after: the same of the second start.
        words: further words of this case.
        start_timeout_s: how long a start may take to its first mark.

    Raises:
        RunError: the folder cannot be copied.
    """
    began_s = time.monotonic()
    case = _Case(setting, disturbance, kind=kind, words=words, start_timeout_s=start_timeout_s)
    starts = [case.start(enough, signals=disturbance.signals, more_words=())]
    if disturbance.signals and starts[0].signalled_s is not None and not setting.must_stop.is_set():
        more_words = (*_AS_REQUEUED, *disturbance.words_after)
        starts.append(case.start(enough_after, signals=(), more_words=more_words))
    run = case.run
    return Course(
        disturbance=disturbance,
        starts=tuple(starts),
        run=None if run is None else run.path,
        seconds=time.monotonic() - began_s,
    )


class _Case:
    def __init__(
        self,
        setting: RehearsalSetting,
        disturbance: Disturbance,
        *,
        kind: object,
        words: Sequence[str],
        start_timeout_s: float,
    ) -> None:
        self._setting = setting
        self._disturbance = disturbance
        self._kind = kind
        self._start_timeout_s = start_timeout_s
        self._place = setting.place / disturbance.key
        self._place.mkdir(parents=True)
        # A folder of its own, as the program may know what is beside it.
        self._folder = self._place / "folder" / setting.source.name
        self._folder.parent.mkdir()
        self._root = self._place / "runs"
        copy_folder(setting.source, self._folder, without=[*setting.without, setting.place])
        self._words = (*setting.words, *words, f"run.root={self._root}")
        self._num_starts = 0

    @property
    def run(self) -> RunDirectory | None:
        """The directory of the run, None as long as there is none."""
        config = next(self._root.glob("*/*/config.yaml"), None)
        return None if config is None else RunDirectory(config.parent)

    def start(self, enough: Until, *, signals: Sequence[SignalsAfter], more_words: Sequence[str]) -> StartOfRun:
        """Starts the run once, sends the signals, and returns what was seen of it.

        Long because what is seen at its end is listed in one place.
        """
        setting = self._setting
        before = self._files()
        attempt = 1 + max(existing_attempts(self.run), default=-1) if self.run is not None else 0
        log = self._place / f"start_{self._num_starts}.log"
        self._num_starts += 1
        command = [sys.executable, "-m", "slurm_train", *self._words, *more_words]
        env = {**setting.env, "PWD": str(self._folder)}
        started_s = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=env if setting.job_id else scrubbed(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ranks: RanksOfStart = (
            RanksHere(process)
            if setting.job_id is None
            else RanksOfStep(process, setting.job_id, attempt, SlurmCommands(setting.env))
        )
        reader = MarkReader(log, setting.pattern)
        seen = _Seen(source=self._source_files() if self.run is not None else None)
        try:
            self._attend(process, ranks, reader, seen, enough, signals=signals, attempt=attempt, started_s=started_s)
        finally:
            ranks.send("KILL")
            seen.outlived_by = ranks.end_survivors(within_s=_OUTLIVES_S if seen.ended_s is not None else 0.0)
            end_supervisor(process, ranks)
        self._read(reader, attempt)
        run = self.run
        record = None if run is None else read_attempt(run, attempt)
        after = self._files()
        text = plain(read_tail(log, _TAIL_BYTES))
        return StartOfRun(
            marks={kind: tuple(marks) for kind, marks in reader.by_kind.items()},
            started_s=started_s,
            signalled_s=seen.signalled_s,
            ended_s=seen.ended_s,
            killed_by_notice=seen.killed_by_notice,
            first_mark_cpu_s=seen.first_mark_cpu_s,
            was_in_save=seen.was_in_save,
            exit_code=process.returncode,
            end=None if record is None else record.end,
            is_finished=run is not None and read_json(run.result) is not None,
            files=after,
            written=frozenset(changed(before, after)),
            beside_source=frozenset(
                changed(seen.source or {}, self._source_files()) if seen.source is not None else ()
            ),
            saved_steps=() if run is None else _checkpoints(run),
            outlived_by=tuple(sorted(seen.outlived_by)),
            ended_before=tuple(ranks.ended_before()),
            processes=tuple(ranks.processes()),
            resumed_from="" if run is None else _resumed_from(run, attempt),
            remarks=_remarks(text),
            last_words=newest_line(of_program(text)),
            traceback=error_line(text if run is None else text.replace(str(run.path), f"${RUN_DIR}")),
            not_copied=self._not_copied(attempt),
        )

    def _attend(
        self,
        process: subprocess.Popen[bytes],
        ranks: RanksOfStart,
        reader: MarkReader,
        seen: _Seen,
        enough: Until,
        *,
        signals: Sequence[SignalsAfter],
        attempt: int,
        started_s: float,
    ) -> None:
        """Looks at a start until it has ended, or may be ended; sends the signals when their moment has come."""
        remaining = list(signals)
        due_s = 0.0
        while not self._setting.must_stop.is_set():
            ranks.look()
            if seen.source is None and ranks.are_there():
                # The copy of the code is whole, and the program is being imported.
                seen.source = self._source_files()
            now_s = time.monotonic()
            self._read(reader, attempt)
            if seen.first_mark_cpu_s is None and reader.by_kind:
                seen.first_mark_cpu_s = ranks.cpu_s()
            if process.poll() is not None or ranks.have_ended():
                seen.ended_s = time.monotonic()
                return
            waits_for_save = False
            if seen.signalled_s is not None:
                if remaining and now_s >= due_s:
                    self._send(ranks, remaining, seen)
                    due_s = now_s + (remaining[0].wait_s if remaining else 0.0)
            elif remaining and ranks.are_there() and self._is_moment(reader, ranks, now_s - started_s):
                waits_for_save = self._disturbance.in_save
                if not waits_for_save or self._save_begins(seen):
                    seen.signalled_s = time.monotonic()
                    self._send(ranks, remaining, seen)
                    due_s = seen.signalled_s + (remaining[0].wait_s if remaining else 0.0)
                    continue
            if seen.signalled_s is None and ranks.are_there() and enough(reader, now_s - started_s):
                return
            if not reader.by_kind and now_s - started_s > self._start_timeout_s:
                return
            time.sleep(_LOOK_FOR_SAVE_S if waits_for_save else _LOOK_S)

    def _send(self, ranks: RanksOfStart, remaining: list[SignalsAfter], seen: _Seen) -> None:
        names = remaining.pop(0).names
        asked_before = len(remaining) + 1 < len(self._disturbance.signals)
        seen.killed_by_notice |= names == ("KILL",) and asked_before
        for name in names:
            ranks.send(name)

    def _is_moment(self, reader: MarkReader, ranks: RanksOfStart, since_start_s: float) -> bool:
        disturbance = self._disturbance
        marks = reader.by_kind.get(self._kind, [])
        if disturbance.place is not None:
            return bool(marks) and marks[-1].place >= disturbance.place
        if marks:
            # Its start is over.
            return False
        if disturbance.after_cpu_s is not None:
            return (ranks.cpu_s() or 0.0) >= disturbance.after_cpu_s
        return disturbance.after_s is not None and since_start_s >= disturbance.after_s

    def _save_begins(self, seen: _Seen) -> bool:
        """Returns whether a checkpoint is being written, or was written since the last look."""
        run = self.run
        if run is not None:
            unfinished = [path for path in _listed(run.checkpoints) if not (path / "COMPLETE").exists()]
            seen.was_in_save = any(not path.name.startswith(".") for path in unfinished)
            if seen.was_in_save:
                return True
        files = {name: status for name, status in self._files().items() if is_checkpoint(name)}
        before = seen.checkpoints
        seen.checkpoints = files
        seen.was_in_save = before is not None and bool(changed(before, files))
        return seen.was_in_save

    def _read(self, reader: MarkReader, attempt: int) -> None:
        run = self.run
        if run is not None and self._setting.job_id is not None and run.rank_log(attempt, 0).exists():
            reader.log = run.rank_log(attempt, 0)
        reader.read(None if run is None else run.metrics, attempt=attempt)

    def _files(self) -> dict[str, tuple[int, int]]:
        run = self.run
        files = {
            os.path.relpath(self._folder.parent / name, self._folder): status
            for name, status in files_in(self._folder.parent).items()
        }
        if run is not None:
            in_run = files_in(run.path, without=_OF_TOOLKIT)
            files |= {name: status for name, status in in_run.items() if not name.startswith("events@")}
        return files

    def _not_copied(self, attempt: int) -> str:
        marks = [] if self.run is None else read_marks(self.run, attempt)
        place = next((mark.left_out for mark in marks if mark.left_out), "")
        return os.path.relpath(place, self._folder) if place else ""

    def _source_files(self) -> dict[str, tuple[int, int]]:
        return {} if self.run is None else files_in(self.run.code)


@dataclass(slots=True)
class _Seen:
    """What was seen of a start while it ran."""

    signalled_s: float | None = None
    ended_s: float | None = None
    killed_by_notice: bool = False
    first_mark_cpu_s: float | None = None
    was_in_save: bool = False
    checkpoints: Files | None = None
    source: Files | None = None
    """The run's copy of the code, before its program has written into it."""
    outlived_by: list[str] = field(default_factory=list)


def end_supervisor(process: subprocess.Popen[bytes], ranks: RanksOfStart) -> None:
    """Waits until the supervisor has ended, and kills ranks that it had been about to start.

    Args:
        process: the supervisor.
        ranks: those that it starts.
    """
    deadline_s = time.monotonic() + _SUPERVISOR_ENDS_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_AGAIN_S)
        ranks.look()
        ranks.send("KILL")
    if process.poll() is None:
        process.kill()
        process.wait()


# --- the ranks ---


class RanksOfStart(Protocol):
    """The ranks of a start, to which signals are sent."""

    def look(self) -> None:
        """Takes note of processes that are there now."""

    def are_there(self) -> bool:
        """Returns whether they have started."""

    def have_ended(self) -> bool:
        """Returns whether all that had started have ended."""

    def cpu_s(self) -> float | None:
        """Returns how long they and what is below them have computed, None where that is not seen."""

    def send(self, name: Signal) -> None:
        """Sends a signal to each of them that runs."""

    def end_survivors(self, *, within_s: float) -> list[str]:
        """Kills what they have left, and returns the names of what had outlived them for so long."""

    def ended_before(self) -> list[str]:
        """Returns the names of what was below them at the first signal, and ended well before them."""

    def processes(self) -> list[ProgramProcess]:
        """Returns them and what is below them, as far as it ran for long enough to be no passing helper."""


class RanksHere:
    """Processes of this machine: each rank leads a session, as start_local has it."""

    def __init__(self, supervisor: subprocess.Popen[bytes]) -> None:
        self._supervisor = supervisor
        self._ranks: dict[int, str] = {}
        self._below: dict[int, str] = {}
        """Process -> its start, of all that were seen below a rank."""
        self._at_signal: dict[int, str] | None = None
        """Process -> its name, of what was below them at the first signal."""
        self._ended_s: dict[int, float] = {}
        self._last_seen_s = 0.0
        self._read_s = 0.0
        self._newest: dict[int, ProgramProcess] = {}
        self._lasting: dict[int, ProgramProcess] = {}
        """Those that were the same at two readings; `exec` changes them."""

    def look(self) -> None:
        """See `RanksOfStart`."""
        for pid in _children(self._supervisor.pid):
            if pid not in self._ranks and "SLURM_TRAIN_ATTEMPT" in (env := environment_of(pid)) and "RANK" in env:
                self._ranks[pid] = start_ticks(pid)
        for rank in self._ranks:
            for pid in descendants(rank):
                if pid not in self._below:
                    self._below[pid] = start_ticks(pid)
        if self._at_signal is not None and not self.have_ended():
            self._last_seen_s = time.monotonic()
            for pid in self._at_signal.keys() - self._ended_s.keys():
                if not is_running(pid, self._below[pid]):
                    self._ended_s[pid] = self._last_seen_s
        if time.monotonic() >= self._read_s + _READ_EVERY_S:
            self._read_s = time.monotonic()
            for pid in (*self._ranks, *self._running()):
                self._read_process(pid)

    def _read_process(self, pid: int) -> None:
        process = read_process(pid)
        if process is None:
            return
        if self._newest.get(pid) == process:
            self._lasting[pid] = process
        self._newest[pid] = process

    def are_there(self) -> bool:
        """See `RanksOfStart`."""
        return bool(self._ranks)

    def have_ended(self) -> bool:
        """See `RanksOfStart`."""
        return bool(self._ranks) and not any(is_running(*rank) for rank in self._ranks.items())

    def cpu_s(self) -> float | None:
        """See `RanksOfStart`."""
        return sum(cpu_s(pid) for pid in (*self._ranks, *self._running()))

    def send(self, name: Signal) -> None:
        """See `RanksOfStart`."""
        if self._at_signal is None:
            self._at_signal = self.running_below()
        for pid, started in self._ranks.items():
            if is_running(pid, started):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, f"SIG{name}"))

    def end_survivors(self, *, within_s: float) -> list[str]:
        """See `RanksOfStart`."""
        deadline = time.monotonic() + within_s
        while (running := self.running_below()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return sorted(filter(None, set(running.values()))) if within_s else []

    def ended_before(self) -> list[str]:
        """See `RanksOfStart`."""
        latest_s = self._last_seen_s - _ENDED_BEFORE_S
        at_signal = self._at_signal or {}
        names = {at_signal[pid] for pid, ended_s in self._ended_s.items() if ended_s < latest_s}
        return sorted(filter(None, names))

    def processes(self) -> list[ProgramProcess]:
        """See `RanksOfStart`."""
        return list(self._lasting.values())

    def running_below(self) -> dict[int, str]:
        """Returns the processes that run below a rank now, each with its name."""
        # Asked anew: a child that was first seen before its `exec` had the name of its parent.
        return {pid: _name(pid) for pid in self._running()}

    def _running(self) -> list[int]:
        return [pid for pid, started in self._below.items() if started and is_running(pid, started)]


class RanksOfStep:
    """Tasks of a step of this allocation; Slurm signals them as at a preemption."""

    def __init__(self, attended: subprocess.Popen[bytes], job_id: str, attempt: int, commands: SlurmCommands) -> None:
        self._attended = attended
        self._job_id = job_id
        self._name = f"attempt_{attempt}"
        self._commands = commands
        self._step = ""
        self._looked_s = 0.0

    def look(self) -> None:
        """See `RanksOfStart`."""
        if self._step or time.monotonic() < self._looked_s + 1.0:
            return
        self._looked_s = time.monotonic()
        with contextlib.suppress(ClusterError):
            steps = self._commands.steps(self._job_id)
            self._step = next((step for step, name in steps.items() if name == self._name), "")

    def are_there(self) -> bool:
        """See `RanksOfStart`."""
        return bool(self._step)

    def have_ended(self) -> bool:
        """See `RanksOfStart`."""
        return self._attended.poll() is not None

    def cpu_s(self) -> float | None:
        """See `RanksOfStart`; processes of other nodes are not seen."""
        return None

    def send(self, name: Signal) -> None:
        """See `RanksOfStart`."""
        if not self._step:
            return
        with contextlib.suppress(ClusterError):
            if name == "KILL":
                self._commands.cancel_step(self._step, kill=True)
            elif name != "CONT":
                self._commands.ask_step(self._step, name=name)

    def end_survivors(self, *, within_s: float) -> list[str]:
        """See `RanksOfStart`; Slurm ends them."""
        del within_s
        return []

    def ended_before(self) -> list[str]:
        """See `RanksOfStart`; processes of other nodes are not seen."""
        return []

    def processes(self) -> list[ProgramProcess]:
        """See `RanksOfStart`; processes of other nodes are not seen."""
        return []


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())


def _name(pid: int) -> str:
    """Returns the first words of a process; "" where it has ended, and for what this package starts beside a rank."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:3]
        if not any(word.endswith(_BESIDE_RANK) for word in words):
            return " ".join(Path(word).name for word in words if word and not word.startswith("-"))
    return ""


# --- what is left at the end ---


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _checkpoints(run: RunDirectory) -> tuple[str, ...]:
    return tuple(path.name for path in _listed(run.checkpoints) if (path / "COMPLETE").exists())


def _resumed_from(run: RunDirectory, attempt: int) -> str:
    resume = read_own_resume(run, attempt)
    return resume.checkpoint if resume is not None and was_taken(run, attempt) else ""


_OWN_LINES = ("slurm_train: ", "error: ", "hint: ")


def _remarks(text: str) -> tuple[str, ...]:
    return tuple(line.removeprefix("slurm_train: ") for line in text.splitlines() if line.startswith(_OWN_LINES))


def of_program(text: str) -> str:
    """Returns the lines of a log that are not of this package."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(NOTES))


_ERROR = re.compile(r"^(?:[\w.]+(?:Error|Exception|Interrupt)\b.*|.*\b(?:[Ee]rror|ERROR)\b.*)$", re.MULTILINE)
_BEFORE_ERROR = re.compile(r"^(?:slurm_train: attempt \d+: (?:rank \d+ on \S+: )?)?(?:slurm_train\.errors\.\w+: )?")
"""What this package puts in front of an error."""


def error_line(text: str) -> str:
    """Returns the last line that names an error, "" for none."""
    found = _ERROR.findall(text)
    return _BEFORE_ERROR.sub("", str(found[-1]).strip()) if found else ""
