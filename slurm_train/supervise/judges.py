"""The judges of every launch, and what they ask for; those of a job of Slurm are in `job_judges`.

- the hang watchdog kills ranks that make no progress. It runs outside of the ranks, so it works also if a rank is
  stopped or blocked in a driver; a stopped rank does not react to TERM either
- the search for stragglers changes nothing about the run
- the notice of the job's end for the ranks: the warning before the limit is fixed at submission, and scripts that were
  typed by hand have none
- the preflight's findings for the batch log
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from slurm_train.config.parallel import solve_layout
from slurm_train.config.program import program_of
from slurm_train.config.schema import ParallelSection, RunConfig
from slurm_train.config.secrets import redact
from slurm_train.errors import EXIT_FAILURE, ClusterError
from slurm_train.rundir.events import FailureMark, Finding, append_event, leave_mark
from slurm_train.rundir.files import read_tail, write_record
from slurm_train.rundir.heartbeat import NOT_WATCHED, Beat, Limits, limits_of, note_oldest
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.signs import Remarks, Signs, note_remarks
from slurm_train.rundir.timing import Notice, PaceWindow, Slowdown, append_window
from slurm_train.status.failure import error_at_end
from slurm_train.supervise.best_effort import say
from slurm_train.supervise.hang import Flights, Hang, Observer, read_flights
from slurm_train.supervise.look import Look, Ranks
from slurm_train.supervise.own_resume import OwnResumeCheck
from slurm_train.supervise.silence import apart_sentence, explain, idle_sentence, is_evident
from slurm_train.supervise.stragglers import WindowCutter, WindowJudge
from slurm_train.supervise.watch import Judge, Verdict, Watch
from slurm_train.trust import read_bytes, read_text

_LOG_BYTES = 1 << 16
_LONGEST_QUOTE = 200

EndRanks = Callable[[Mapping[int, Beat]], None]
"""Kills the ranks with these heartbeats; called again every few seconds until they have ended."""


def watch_ranks(
    run: RunDirectory,
    attempt: int,
    config: RunConfig,
    *,
    world_size: int,
    end_ranks: EndRanks,
    is_halted: Callable[[], bool] = lambda: False,
) -> Watch:
    """Returns a watch with the judges that every launch needs: of hangs and of stragglers.

    Args:
        run: the run.
        attempt: number of the attempt.
        config: which of them are wanted. A user's own program is watched from outside, and from its first report to
            the session on by its heartbeats.
        world_size: ranks.
        end_ranks: kills them.
        is_halted: see `HangWatchdog`.
    """
    program = program_of(config)
    watch = Watch(run, attempt, world_size=world_size, has_watchers=not program.reports)
    if config.own_resume.words:
        watch.add(OwnResumeCheck(run, end_ranks=end_ranks))
    limits = limits_of(config)
    if limits is not None:
        for kind in (HangWatchdog,) if program.reports else (HangWatchdog, SilenceWatchdog):
            watch.add(kind(run, limits, end_ranks=end_ranks, is_halted=is_halted))
    if config.health.pace_every_steps is not None:
        parallel = program.used.parallel
        watch.add(StragglerSearch(run, excess=config.health.straggler_excess, parallel=parallel))
    return watch


class HangWatchdog(Judge):
    """Ends an attempt's ranks when they hang, also if the record of the hang cannot be written.

    Args:
        run: the run.
        limits: how long ranks may make no progress.
        end_ranks: kills them.
        is_halted: asks whether somebody has stopped the ranks through Slurm, and not this process; they have the whole
            time-out again then.
    """

    name = "the hang watchdog"
    _KILL_AGAIN_S = 5.0
    _REPORT_WITHIN_S = 5.0
    """Longest time that the ranks are kept alive for the report; the promise is time-out + 10 s."""
    _STACKS_WITHIN_S = 2.0
    """Longest time that the report waits for missing stacks: the processes that write them may wait for a CPU."""

    def __init__(
        self,
        run: RunDirectory,
        limits: Limits,
        *,
        end_ranks: EndRanks,
        is_halted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self._limits = limits
        self._end_ranks = end_ranks
        self._is_halted = is_halted
        self._attempt = -1
        self._report: threading.Thread | None = None
        self._again_s = 0.0

    def begin(self, ranks: Ranks) -> None:
        """Watches new ranks from now on, and drops all that is known of earlier ones."""
        self._attempt = ranks.attempt
        self._observer = Observer(self._limits, world_size=ranks.world_size)
        self._beats: dict[int, Beat] = {}
        """The newest readable heartbeat of each rank; they name the processes that are killed."""

    def __call__(self, look: Look) -> Verdict | None:
        """Ends the ranks if they hang, every few seconds until they have ended."""
        if self._report is not None:
            return self._kill if look.now_s >= self._again_s else None
        ranks = look.ranks
        if ranks.attempt != self._attempt:
            self.begin(ranks)
        beats = self.beats_of(ranks)
        self._beats |= beats
        self._observer.look(beats, began_s=ranks.began_s, ended_s=ranks.ended_s)
        return self._end if self.is_hung() else None

    def last(self, look: Look) -> Verdict | None:  # noqa: ARG002  # what was seen last is of no use here
        """Waits a few seconds for a report that is still being written."""
        report = self._report
        return None if report is None else partial(report.join, self._REPORT_WITHIN_S)

    def _end(self) -> None:
        if self._is_halted():
            self._observer.restart()
            return
        # The report comes before the kill, since ranks that lose a peer leave marks, too. But a file system that
        # does not answer must not delay the kill.
        self._report = threading.Thread(target=self._write_report, daemon=True)
        self._report.start()
        self._report.join(self._REPORT_WITHIN_S)
        self._kill()

    def _kill(self) -> None:
        self._again_s = time.monotonic() + self._KILL_AGAIN_S
        try:
            self._end_ranks(self._beats)
        except ClusterError as err:
            say(f"the hung ranks could not be ended yet: {err.message}")

    def beats_of(self, ranks: Ranks) -> Mapping[int, Beat]:
        """Returns the heartbeats that count."""
        return ranks.beats

    def is_hung(self) -> bool:
        """Returns whether the ranks are to be ended."""
        return self._observer.is_hung()

    def explain(self, stacks: Mapping[int, str], flights: Mapping[int, Flights]) -> Hang:
        """Returns which ranks are behind, and where they are."""
        return self._observer.explain(stacks, flights)

    def _left_by_ranks(self, *, within_s: float = 0.0) -> tuple[dict[int, str], dict[int, Flights]]:
        """Returns the stacks and the flight records of the ranks that have left some.

        Args:
            within_s: how long to wait for the stacks of all ranks; a stopped rank writes none.
        """
        run = self._run
        attempt = self._attempt
        deadline_s = time.monotonic() + within_s
        stacks: dict[int, str] = {}
        while True:
            for rank in self._beats.keys() - stacks.keys():
                with contextlib.suppress(OSError):
                    stack = read_text(run.stacks(attempt, rank), errors="replace")
                    # The file is there, empty, before it is written.
                    if stack:
                        stacks[rank] = stack
            if len(stacks) == len(self._beats) or time.monotonic() >= deadline_s:
                break
            time.sleep(0.1)
        flights: dict[int, Flights] = {}
        for rank in self._beats:
            with contextlib.suppress(OSError):
                flights[rank] = read_flights(read_bytes(run.flight(attempt, rank)))
        return stacks, flights

    def _write_report(self) -> None:
        run = self._run
        attempt = self._attempt
        hang = self.explain(*self._left_by_ranks(within_s=self._STACKS_WITHIN_S))
        with contextlib.suppress(OSError):
            hang = _with_words(hang, read_tail(run.rank_log(attempt, hang.ranks[0]), _LOG_BYTES))
        mark = FailureMark(rank=hang.ranks[0], host=hang.host, exit_code=EXIT_FAILURE, message=hang.activity)
        facts = {"ranks": list(hang.ranks), "host": hang.host, "step": hang.step, "phase": hang.phase}
        # The mark comes before the message: where rank 0 shares this process's log, a line counts as a sign of life of
        # that rank, and its watcher removes its stacks unless the hang is on record.
        self._write_down(lambda: leave_mark(run, attempt, mark))
        say(f"the ranks hang: {hang}; stacks in {run.attempt_logs(attempt)}; they are ended ({socket.gethostname()})")
        self._write_down(lambda: append_event(run, "hang", attempt=attempt, sentence=str(hang), **facts))

    def _write_down(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as err:
            say(f"the hang could not be written down: {err}")


def _with_words(hang: Hang, log: str) -> Hang:
    """Returns a hang with the error at the end of the rank's log.

    A thread or a process of the rank may have failed, and the rank waits for what that was to bring.
    """
    error = redact(error_at_end(log))[:_LONGEST_QUOTE]
    is_news = error and error not in hang.activity
    return replace(hang, activity=f"{hang.activity}; its log ends with {error}") if is_news else hang


class SilenceWatchdog(HangWatchdog):
    """Ends the ranks of a script or function if none shows a sign of life and one waits for a rank that cannot arrive.

    If a program was silent for some time and then continued, it may later be silent for twice that time. Ranks that are
    silent without proof that one waits for another are not ended; `status` reports them, and which GPUs are idle.
    """

    name = "the watch over the program"
    _IDLE_GPU_S = 1800.0

    def begin(self, ranks: Ranks) -> None:
        """Watches new ranks from now on."""
        super().begin(ranks)
        self._signs: dict[int, Signs] = {}
        self._silent_s = 0.0
        self._longest_s = 0.0
        self._remarks = Remarks()
        self._has_said = False
        """Whether the silence was printed: on this machine rank 0 may share its log, where a line is a sign of life."""
        self._has_said_apart = False

    def __call__(self, look: Look) -> Verdict | None:
        """Ends the ranks if they hang, else remarks on what can be said of them, if that has changed."""
        verdict = super().__call__(look)
        is_done = verdict is not None or self._report is not None
        return verdict if is_done else self._remark_on(look.ranks)

    def beats_of(self, ranks: Ranks) -> Mapping[int, Beat]:
        """Returns the newest signs as heartbeats; marks of the program itself count as well."""
        self._signs |= ranks.signs
        # Ranks that report to the session are watched by their heartbeats.
        self._reports = len(ranks.beats) >= len(ranks.signs) and all(
            mark.phase not in NOT_WATCHED for mark in ranks.beats.values()
        )
        return ranks.watched_beats()

    def is_hung(self) -> bool:
        """Returns whether all ranks are silent for too long, and one of them waits for a rank that cannot arrive."""
        silent_s = self._silence_s()
        if silent_s is None:
            return False
        if silent_s < self._silent_s:
            self._longest_s = max(self._longest_s, self._silent_s)
        self._silent_s = silent_s
        return self._is_too_long() and is_evident(self._signs)

    def _silence_s(self) -> float | None:
        return None if self._reports else self._observer.silent_s()

    def _is_too_long(self) -> bool:
        return self._silent_s > max(self._limits.steady_s, 2 * self._longest_s)

    def explain(self, stacks: Mapping[int, str], flights: Mapping[int, Flights]) -> Hang:
        """Returns for which ranks the others wait, and where they are."""
        return explain(self._signs, silent_s=self._silent_s, stacks=stacks, flights=flights)

    def _remark_on(self, ranks: Ranks) -> Verdict | None:
        """Has remarks written for `status` if others are made than before; a longer time in one is no difference."""
        earlier = self._remarks
        is_silent = bool(earlier.silence)
        remarks = replace(earlier, apart=apart_sentence(self._signs, ranks.group))
        if self._silence_s() is not None:
            is_silent = self._is_too_long()
            remarks = replace(remarks, idle_gpus=idle_sentence(self._signs, after_s=self._IDLE_GPU_S))
        if is_silent != bool(earlier.silence) or _kinds(remarks) != _kinds(earlier):
            return partial(self._remark, remarks, is_silent=is_silent)
        return None

    def _remark(self, remarks: Remarks, *, is_silent: bool) -> None:
        if not is_silent:
            remarks = replace(remarks, silence="")
        elif not remarks.silence:
            remarks = replace(remarks, silence=f"{self.explain(*self._left_by_ranks())}; it may wait for something")
        self._remarks = remarks
        if remarks.silence and not self._has_said:
            self._has_said = True
            say(f"{remarks.silence}; nothing is ended")
        if remarks.apart and not self._has_said_apart:
            self._has_said_apart = True
            say(remarks.apart)
        with contextlib.suppress(OSError):
            note_remarks(self._run, self._attempt, remarks)


def _kinds(remarks: Remarks) -> list[str]:
    return [name for name, text in asdict(remarks).items() if text]


class StragglerSearch(Judge):
    """Compares the ranks' heartbeats, window by window, and reports once which ranks delay the others.

    The ranks spend time on their own sampling only. This judge also has the oldest heartbeat written for `status`; the
    hang watchdog must not write while it watches, since a write may wait for a file server for ever.

    Args:
        run: the run.
        excess: see `WindowJudge`.
        parallel: how the ranks cut the model.
        first_window_s: length of the first window; later ones grow.
    """

    name = "the search for stragglers"
    _NOTE_EVERY_S = 5.0

    def __init__(
        self, run: RunDirectory, *, excess: float, parallel: ParallelSection, first_window_s: float = 3.0
    ) -> None:
        self._run = run
        self._excess = excess
        self._first_window_s = first_window_s
        self._parallel = parallel
        self._reported: set[tuple[str, tuple[int, ...]]] = set()
        self._note_s = 0.0
        self._attempt = -1

    def _begin(self, ranks: Ranks) -> None:
        """Begins the first window of new ranks."""
        self._attempt = ranks.attempt
        # A line has some 50 bytes per rank: a thousand ranks get one in eight minutes.
        longest_s = 60.0 * max(1.0, ranks.world_size / 128)
        layout = solve_layout(self._parallel, world_size=ranks.world_size)
        # Stages of a pipeline and parts of a sequence have work of different sizes.
        alike = None if layout.is_replicated else list(layout.groups(("dp_replicate", "dp_shard", "tp")))
        self._judge = WindowJudge(excess=self._excess, alike=alike)
        self._cutter = WindowCutter(
            ranks.attempt, world_size=ranks.world_size, first_s=self._first_window_s, longest_s=longest_s
        )

    def __call__(self, look: Look) -> Verdict | None:
        """Has a window that is full written, with what is found in it."""
        windows = self._full_windows(look.ranks)
        is_due = look.now_s >= self._note_s
        if is_due:
            self._note_s = look.now_s + self._NOTE_EVERY_S
        return partial(self._write, look.ranks, windows, notes=is_due) if windows or is_due else None

    def last(self, look: Look) -> Verdict | None:
        """Has the last windows written."""
        windows = self._full_windows(look.ranks)
        last_window = self._cutter.last_window()
        if last_window is not None:
            # It is shorter than the others, so nothing is concluded from it.
            windows.append(last_window)
        return partial(self._write, look.ranks, windows, notes=False)

    def _full_windows(self, ranks: Ranks) -> list[PaceWindow]:
        if ranks.attempt != self._attempt:
            self._begin(ranks)
        window = self._cutter.look(ranks.beats, ranks.unix_s)
        return [] if window is None else [self._judge.judge(window)]

    def _write(self, ranks: Ranks, windows: Sequence[PaceWindow], *, notes: bool) -> None:
        if notes:
            with contextlib.suppress(OSError):
                note_oldest(self._run, ranks.attempt, ranks.beats)
        for window in windows:
            append_window(self._run, window)
            for finding in window.findings:
                self._report(ranks.attempt, finding)

    def _report(self, attempt: int, finding: Slowdown) -> None:
        if (finding.kind, finding.ranks) in self._reported:
            return
        self._reported.add((finding.kind, finding.ranks))
        with contextlib.suppress(OSError):
            append_event(self._run, "slow", attempt=attempt, **asdict(finding))
        say(f"{finding.sentence}; {finding.advice}")


class NoticeKeeper(Judge):
    """Asks Slurm when the job will be ended, and writes that time down for the ranks.

    A limit that was extended, or moved by a suspension, is noticed here. Slurm is asked once in ten minutes, and once a
    minute when the end is near.

    Args:
        run: the run.
        ask: asks Slurm; raises ClusterError where it does not answer.
    """

    name = "the notice of the job's end"
    _FAR_S = 600.0
    _NEAR_S = 60.0
    _IS_NEAR_S = 1200.0
    _ASK_AGAIN_S = 20.0
    _SUSPENDED_S = 10.0
    """A pause of this length means that the job, with this process, was suspended; then the limit has moved."""

    def __init__(self, run: RunDirectory, *, ask: Callable[[], Notice]) -> None:
        self._run = run
        self._ask = ask
        self._newest_notice: Notice | None = None
        self._written_for = -1
        """The attempt whose ranks have been told."""
        self._due_s = 0.0
        self._looked_s = 0.0

    def __call__(self, look: Look) -> Verdict | None:
        """Asks Slurm where that is due, and tells ranks that torchrun has started again."""
        was_suspended = look.now_s - self._looked_s > self._SUSPENDED_S
        self._looked_s = look.now_s
        if look.now_s >= self._due_s or was_suspended:
            return partial(self._ask_slurm, look.ranks.attempt)
        if self._newest_notice is not None and look.ranks.attempt != self._written_for:
            return partial(self._write, look.ranks.attempt, self._newest_notice)
        return None

    def _ask_slurm(self, attempt: int) -> None:
        self._due_s = time.monotonic() + self._ASK_AGAIN_S
        # Until Slurm answers, the notice before stays valid.
        with contextlib.suppress(ClusterError):
            notice = self._ask()
            if notice != self._newest_notice:
                self._write(attempt, notice)
                self._newest_notice = notice
            is_near = notice.end_unix_s is not None and notice.end_unix_s - time.time() < self._IS_NEAR_S
            self._due_s = time.monotonic() + (self._NEAR_S if is_near else self._FAR_S)
        self._looked_s = time.monotonic()

    def _write(self, attempt: int, notice: Notice) -> None:
        # The folder of an attempt that torchrun has begun may not be there yet.
        write_record(self._run.notice(attempt), notice)
        self._written_for = attempt


class FindingsRelay(Judge):
    """Prints each of the preflight's findings once, as soon as rank 0 has written it down.

    Args:
        say: prints a line.
    """

    name = "the preflight's findings"

    def __init__(self, *, say: Callable[[str], None] = say) -> None:
        self._say = say
        self._printed: set[Finding] = set()

    def __call__(self, look: Look) -> Verdict | None:
        """Prints those that are new."""
        lines = [finding.line for finding in look.findings if finding not in self._printed]
        self._printed.update(look.findings)
        return partial(self._print, lines) if lines else None

    def last(self, look: Look) -> Verdict | None:
        """Prints those that are new."""
        return self(look)

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(line)
