"""What an attempt has left when its ranks have ended, and the cause of the end that follows from it.

`Traces.read` reads the run directory and asks Slurm. Any file may be unreadable or slow then, so every read is bounded
and every fact has a default. `cause_of` is a function of the traces alone. `decision.decide` says what follows.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_train.config.secrets import redact
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE
from slurm_train.formatting import exit_code
from slurm_train.rundir.attempts import Round, first_round
from slurm_train.rundir.cause import CHILD_CRASH, CRASH, EXIT, KILLED, NOT_CREATED, Cause
from slurm_train.rundir.events import (
    FailureMark,
    Finding,
    codes_of,
    errors_of,
    findings_of,
    first_of,
    read_events,
    read_marks,
    read_preflight,
)
from slurm_train.rundir.files import is_there, read_tail
from slurm_train.rundir.heartbeat import has_joined
from slurm_train.rundir.jobs import stop_asked
from slurm_train.rundir.ledger import Attempt, End, Reason, Start, read_ledger
from slurm_train.rundir.lineage import first_step_of
from slurm_train.rundir.own_resume import BEGAN_ANEW
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import read_account, step_of_attempt
from slurm_train.slurm.job_variables import is_job_variable
from slurm_train.slurm.limits import Limits, read_limits
from slurm_train.slurm.records import StepEnd, TaskEnd
from slurm_train.status.failure import crash_in, crash_of_child_in, last_words
from slurm_train.supervise.actions import slurm_reason
from slurm_train.supervise.best_effort import BestEffort
from slurm_train.supervise.growth import Growth
from slurm_train.supervise.job import Job
from slurm_train.supervise.own_end import EndKind, OwnEnd, judge, read_end
from slurm_train.supervise.step import Step

# What Python says of a variable that the environment lacks: the innermost frame is `os.environ.__getitem__`, and from
# 3.11 on its module is frozen, and without a line of source.
_NOT_IN_ENVIRON = re.compile(
    r'File "[^"]*\bos(?:\.py|>)", line \d+, in __(?:get|del)item__\n(?:    .*\n)*(KeyError: \'([A-Za-z_]\w*)\')'
)
# What faulthandler writes: for each thread its frames, the innermost first.
_CRASHED_THREAD = re.compile(r"^(Current thread|Thread) .+:\n((?:  File .+\n?)*)", re.MULTILINE)
_CRASH_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$', re.MULTILINE)
_LOG_BYTES = 256 * 1024
"""How much of a log's end is read for a crash: faulthandler writes 100 frames of each of 100 threads at most."""
_THROWN = re.compile(r"^ +what\(\):\s+(\S.*)$", re.MULTILINE)
_LONGEST_QUOTE = 300
_REPORT_S = 2.0
"""How long before the event of a hang its own mark may be left."""
_INSTALLED = ("/lib/python3.", "/lib64/python3.", "/site-packages/", "/dist-packages/", "<frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """All that is known when the ranks of an attempt have ended. Wide because it is a record of many witnesses."""

    number: int
    """Of the attempt."""
    exit_code: int
    """Of srun, or of the local ranks."""
    start: Start
    """Its job, nodes and ranks."""
    end: End
    """What the ledger gets besides the decision: steps, newest commit, where the time went, what was found."""
    past: Sequence[Attempt] = ()
    """The earlier attempts, oldest first."""
    findings: Sequence[Finding] = ()
    """Of the preflight, the worst first."""
    marks: Sequence[FailureMark] = ()
    """Of all ranks that failed, the earliest first."""
    previous_marks: Sequence[FailureMark] = ()
    """Of all ranks of the attempt before."""
    stop: Mapping[str, Any] = field(default_factory=dict)
    """The newest event of an agreed stop, else of a program that has ended after a stop signal; {} for none."""
    hang: Mapping[str, Any] = field(default_factory=dict)
    """The newest event of a hang, {} for none."""
    had_joined: bool = False
    """Whether the ranks had heartbeats: the trainer's have, and those of a program that has called `session.join`."""
    read_log: Callable[[int], str] = lambda _number: ""
    """Returns the end of the log of a rank or, where that has none, of a task."""
    is_own_code: bool = False
    """Whether the ranks run a person's own program, which writes no result and may know no checkpoints."""
    end_of_own: EndKind | None = None
    """What it means that a person's own program has ended with 0; None of other ends."""
    ended_early: str = ""
    """Why such a program has not come to its end; "" of other ends."""
    is_finished: bool = False
    """Whether `result.json` exists."""
    stop_asked: Reason | None = None
    """What a person asked for by the STOP file: CANCELLED by `cancel`, STOPPED by hand; None without a file."""
    limits: Limits = field(default_factory=dict)
    """Those of each rank, as they are those of the supervisor."""

    # What Slurm and the kernel say.

    job: Mapping[str, str] | None = None
    """`scontrol show job` as a mapping; None without Slurm or where Slurm does not answer."""
    step: StepEnd = field(default_factory=StepEnd)
    """How the ranks, or the tasks of srun, ended by what started them."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that Slurm reports as lost, or that do not answer, of a job that keeps its other nodes."""
    had_oom_kill: bool = False
    """Whether the kernel of the head node ended a process for lack of memory during the attempt."""
    growth: Growth | None = None
    """Why the ranks were asked to stop for more nodes; None if they were not."""
    may_relaunch: bool = False
    """Whether ranks may be started again in this allocation at all."""

    @classmethod
    def read(
        cls,
        run: RunDirectory,
        attempt: int,
        opening: Round,
        exit_code: int,
        *,
        job: Job,
        step: Step,
        best_effort: BestEffort,
        last_committed: int | None,
        is_own_code: bool,
        had_oom_kill: bool,
    ) -> Traces:
        """Returns what can be read of an attempt whose ranks have ended.

        Long because each fact stands beside the default that it has where it cannot be read.

        Args:
            run: the run.
            attempt: its number.
            opening: how it began.
            exit_code: of srun, or of the local ranks.
            job: the job of this process.
            step: has run the ranks.
            best_effort: bounds the time of each read.
            last_committed: step of the newest checkpoint, None where that is not known.
            is_own_code: whether the ranks run a person's own program.
            had_oom_kill: whether the kernel of this node ended a process for lack of memory meanwhile.
        """
        end_unix_s = time.time()
        record = job.show()
        ledger = best_effort("the ledger", lambda: read_ledger(run), list[Attempt]())
        past = [earlier for earlier in ledger if earlier.number < attempt]
        this = next((one for one in ledger if one.number == attempt), None)
        no_events = list[dict[str, Any]]()
        events = best_effort("the events", lambda: read_events(run, attempt=attempt), no_events)
        newest_by_kind = {event.get("event"): event for event in events}
        stop = newest_by_kind.get("stop") or newest_by_kind.get("signal", {})
        no_marks = list[FailureMark]()
        marks = best_effort("the marks of the ranks", lambda: read_marks(run, attempt), no_marks)
        previous_marks = no_marks
        if marks and past:
            previous = past[-1].number
            previous_marks = best_effort("the marks of the attempt before", lambda: read_marks(run, previous), no_marks)
        no_findings = list[Finding]()
        findings = best_effort("the preflight's record", lambda: findings_of(read_preflight(run, attempt)), no_findings)
        end = _read_account(run, attempt, opening, best_effort, end_unix_s=end_unix_s, has_account=not is_own_code)
        asked_by = str(stop.get("asked_by", ""))
        first = best_effort("the attempt", lambda: first_round(run, attempt), attempt)
        traces = cls(
            number=attempt,
            exit_code=exit_code,
            start=replace(step.start, time_unix_s=opening.start_unix_s) if this is None else this.start,
            end=replace(
                end,
                exit_code=exit_code,
                last_committed=last_committed,
                asked_by=asked_by,
                found=codes_of(findings),
            ),
            past=past,
            findings=findings,
            marks=marks,
            previous_marks=previous_marks,
            stop=stop,
            hang=newest_by_kind.get("hang", {}),
            had_joined=best_effort("the heartbeats", lambda: has_joined(run, attempt), False),
            read_log=lambda number: best_effort("a log", lambda: _log_of(run, (attempt, first), number), ""),
            is_own_code=is_own_code,
            is_finished=best_effort("the result", lambda: is_there(run.result), False),
            stop_asked=best_effort("the STOP file", lambda: stop_asked(run), None),
            limits=read_limits(),
            job=record,
            step=best_effort("the output of srun", lambda: step.ended(attempt), StepEnd()),
            lost_nodes=tuple(step.lost_nodes(record)),
            had_oom_kill=had_oom_kill,
            growth=step.growth,
            may_relaunch=step.can_relaunch,
        )
        if BEGAN_ANEW in newest_by_kind:
            return replace(traces, ended_early=str(newest_by_kind[BEGAN_ANEW].get("sentence")))
        end_of_own, ended_early = traces._judge_own_end(run, best_effort)
        return replace(traces, end_of_own=end_of_own, ended_early=ended_early)

    def _judge_own_end(self, run: RunDirectory, best_effort: BestEffort) -> tuple[EndKind | None, str]:
        """Returns what it means that a person's own program has ended with 0, and why it was early."""
        if not self.is_own_code or self.exit_code != EXIT_DONE or self.lost_nodes:
            return None, ""
        by_slurm = None if self.job is None else slurm_reason(self.job, self.start.restart_count)
        if self.job is not None and by_slurm is None and self.job.get("JobState") != "RUNNING":
            # srun ends with 0 after a node failure, too; the job's state tells the two apart.
            return None, ""
        was_asked = bool(self.stop_asked or by_slurm or self.end.asked_by or self.growth)
        end = best_effort(
            "the end of the program",
            lambda: read_end(run, self.number, [*self.past, self.this], was_asked=was_asked),
            OwnEnd(was_asked=was_asked),
        )
        return judge(end)

    @property
    def has_failed(self) -> bool:
        """Whether srun, or the local ranks, ended with neither success nor the code of a requeue."""
        return self.exit_code not in (EXIT_DONE, EXIT_REQUEUE)

    @property
    def mark(self) -> FailureMark | None:
        """The mark of the rank that failed first."""
        return first_of(self.marks)

    @property
    def this(self) -> Attempt:
        """The attempt itself, as far as it has ended."""
        return Attempt(self.number, self.start, self.end)

    @property
    def violent_end(self) -> Cause | None:
        """How a signal ended ranks, or something the whole step; None for neither."""
        end = self.step.violent
        return None if end is None else Cause.of(end.words, ranks=end.tasks, node=end.node)

    @property
    def ends(self) -> Sequence[TaskEnd]:
        """How single ranks ended that did not end with 0, in the order in which it was told."""
        return self.step.tasks if self.step.are_ranks else ()

    @property
    def had_begun(self) -> bool:
        """Whether the ranks were started: the preflight let them, and Slurm created their step."""
        was_refused = self.violent_end is not None and self.violent_end.kind == NOT_CREATED
        return not (self.has_failed and errors_of(self.findings)) and not was_refused

    @property
    def not_saved(self) -> str:
        """Why no save was made at the stop, for the ledger's note; "" where one was."""
        if self.stop.get("saved", True):
            return ""
        return (
            f"; no save at the stop: {self.stop['left_s']:.0f} s were left and a save takes {self.stop['save_s']:.0f} s"
        )


def _read_account(
    run: RunDirectory, attempt: int, opening: Round, best_effort: BestEffort, *, end_unix_s: float, has_account: bool
) -> End:
    """Returns first and last step of an attempt, and where its time went.

    Args:
        run: the run.
        attempt: its number.
        opening: how it began.
        best_effort: bounds the time of each read.
        end_unix_s: when its ranks had ended.
        has_account: whether the ranks record where their time goes: the trainer's do, a person's own program does not.
    """
    step_before = opening.first_step
    first_step = best_effort("the events", lambda: first_step_of(run, attempt, default=step_before), step_before)
    last_step = best_effort("the metrics", lambda: step_of_attempt(run, attempt, default=first_step), first_step)
    wall = {"start_unix_s": opening.start_unix_s, "end_unix_s": end_unix_s}
    seconds = best_effort(
        "the account", lambda: read_account(run, attempt, **wall, step_before=step_before), dict[str, float]()
    )
    if not seconds and has_account:
        # Without an account, all of the time was spent on starting.
        seconds = {"start_s": round(end_unix_s - opening.start_unix_s, 3)}
    return End(
        time_unix_s=end_unix_s, first_step=first_step, last_step=last_step, step_before=step_before, seconds=seconds
    )


def _log_of(run: RunDirectory, attempts: Sequence[int], number: int) -> str:
    """Returns the end of the first log with words of a rank or, where that has none, of a task."""
    folders = map(run.attempt_logs, dict.fromkeys(attempts))
    logs = [folder / f"{kind}_{number}.log" for folder in folders for kind in ("rank", "node", "task")]
    return next((text for log in logs if (text := read_tail(log, _LOG_BYTES)).strip()), "")


# --- the cause ---


def cause_of(traces: Traces) -> Cause | None:
    """Returns why an attempt ended, by the best witness; None where nothing was said, or no rank has failed."""
    if traces.lost_nodes:
        return Cause.of_lost_nodes(traces.lost_nodes)
    cause = _told(traces)
    was_killed = traces.exit_code == 128 + signal.SIGKILL
    is_on_head_node = cause is None or (cause.kind == KILLED and traces.start.nodes[:1] == (cause.node,))
    if was_killed and is_on_head_node and traces.had_oom_kill:
        return (cause or Cause(words="a rank was killed")).adding(" (an oom-kill by the kernel)")
    return cause


def _told(traces: Traces) -> Cause | None:
    # Ranks that hung were killed by the watchdog, and srun would name the one that died first.
    mark = traces.mark
    if traces.hang.get("sentence"):
        # A rank that failed, and whose threads keep its process, is what the others wait for.
        hung_unix_s = float(traces.hang.get("time_unix_s", 0.0))
        has_failed_before = mark is not None and 0.0 < mark.time_unix_s < hung_unix_s - _REPORT_S
        return _of_mark(mark, traces) if mark is not None and has_failed_before else Cause.of_hang(traces.hang)
    errors = errors_of(traces.findings)
    if errors:
        return errors[0].cause
    # srun ends with 0 after a node failure, so its output counts whatever its exit code is.
    if traces.violent_end is not None and not _failed_before_it(mark, traces.ends):
        return _with_crash(traces.violent_end, traces)
    if not traces.has_failed:
        return None
    if mark is not None and not mark.tells_of_loss:
        return _of_mark(mark, traces)
    return _of_silent_rank(traces) or (mark.cause if mark is not None else _of_starter(traces))


def _failed_before_it(mark: FailureMark | None, ends: Sequence[TaskEnd]) -> bool:
    """Returns whether a rank failed by itself before a signal ended others: Slurm kills those that outlive its end."""
    if mark is None or mark.tells_of_loss:
        return False
    for end in ends:
        if end.is_violent:
            return False
        if mark.rank in end.tasks:
            return True
    return False


def _of_mark(mark: FailureMark, traces: Traces) -> Cause:
    """Returns what the rank that failed first has said, and what its log adds; ranks of other nodes may say the same.

    Where srun says nothing, torchrun's launcher has left a mark of a rank that a signal ended.
    """
    cause = mark.cause
    if any(other.host != mark.host and other.message == mark.message for other in traces.marks):
        cause = replace(cause, blames_node=False)
    if cause.kind == EXIT:
        return cause.adding(_last_words(traces, mark.rank))
    cause = _with_crash(cause, traces)
    log = traces.read_log(mark.rank) if traces.start.job_id is not None else ""
    name = dict(_NOT_IN_ENVIRON.findall(log)).get(mark.message, "")
    if not name or is_job_variable(name):
        return cause
    return cause.adding(
        f"; the job has no variable {name}: cluster.export=[{name}] takes that of the shell that submits, "
        f"cluster.env.{name}=VALUE sets one",
    )


def _with_crash(cause: Cause, traces: Traces) -> Cause:
    """Returns a cause with the place in the program, e.g. "rank 3 on node2: Segmentation fault at model.py:41 in f".

    Of other ends than crashes, and where the rank's log has no stacks, the cause is returned as it is.
    """
    if not cause.ranks or cause.kind not in (CRASH, CHILD_CRASH):
        return cause
    log = traces.read_log(cause.ranks[0])
    if cause.kind == CHILD_CRASH:
        return cause.adding(_place_of_crash(crash_of_child_in(log)))
    # What C++ says of an exception that nobody catches, e.g. NCCL's watchdog of a collective.
    thrown = _THROWN.findall(log)
    quote = f": {thrown[-1][:_LONGEST_QUOTE]}" if thrown else ""
    return cause.adding(_place_of_crash(crash_in(log)) + quote)


def _place_of_crash(crash: str) -> str:
    """Returns where a program crashed by its stacks, e.g. " at model.py:41 in f"; "" for no stacks."""
    threads = [(which, _CRASH_FRAME.findall(frames)) for which, frames in _CRASHED_THREAD.findall(crash)]
    at_fault = next((frames for which, frames in threads if which == "Current thread"), [])
    if at_fault:
        return f" at {_place_in_program(at_fault)}"
    # A thread of torch without Python frames, e.g. NCCL's; the main thread shows what the program was doing.
    main = next((frames for _, frames in threads if frames and frames[-1][2] != "_bootstrap"), [])
    return f", the main thread at {_place_in_program(main)}" if main else ""


def _place_in_program(frames: Sequence[tuple[str, str, str]]) -> str:
    """Returns the innermost frame of the person's own program; without one, the innermost of all."""
    in_program = [frame for frame in frames if not any(folder in frame[0] for folder in _INSTALLED)]
    file, line, function = (in_program or frames)[0]
    return f"{Path(file).name}:{line} in {function}"


def _of_silent_rank(traces: Traces) -> Cause | None:
    """Returns how a rank ended without an exception while the marks of others tell only of its loss; None for none.

    It may have called `sys.exit` or `os._exit`, be no Python, or have found a Python that does not start on its node.
    """
    ends = traces.ends
    if not ends:
        return None
    with_mark = {mark.rank for mark in traces.marks}
    exited = {end.node for end in ends if end.exit_code is not None and not with_mark.issuperset(end.tasks)}
    for end in ends:
        rank = next((rank for rank in end.tasks if rank not in with_mark), None)
        if rank is None:
            continue
        if end.exit_code is not None:
            words = f"ended with exit code {exit_code(end.exit_code)}{_last_words(traces, rank)}"
        elif traces.marks and end is ends[0]:
            # Slurm ends the others so, but not the first one.
            words = end.words
        else:
            continue
        # Where ranks of several nodes have ended so, none of the nodes is at fault.
        return replace(Cause.of(words, ranks=(rank,), node=end.node), blames_node=len(exited) <= 1)
    ended_well = sorted(set(range(traces.start.world_size)).difference(*(end.tasks for end in ends)))
    if not traces.marks or not ended_well:
        return None
    which = f"rank {ended_well[0]}" if len(ended_well) == 1 else f"{len(ended_well)} ranks, {ended_well[0]} the first,"
    return Cause.of(
        f"{which} had ended with exit code 0 while others went on{_last_words(traces, ended_well[0])}; then "
        f"{traces.marks[0].cause}; all ranks must take the same number of steps and end together"
    )


def _of_starter(traces: Traces) -> Cause | None:
    """Returns why what starts the ranks has ended: srun, or a task of it that is no rank.

    A launcher of torchrun may fail before it has started any rank, and those of a heterogeneous step have other numbers
    than the ranks.
    """
    if traces.step.own_words:
        return Cause.of(traces.step.own_words)
    for end in traces.step.tasks:
        if end.exit_code is not None:
            task = end.tasks[0]
            code = exit_code(end.exit_code)
            return Cause.of(f"task {task} on {end.node}: ended with exit code {code}{_last_words(traces, task)}")
    return None


def _last_words(traces: Traces, number: int) -> str:
    """Returns the last words of a rank or task, for the end of a sentence."""
    line = redact(last_words(traces.read_log(number)))
    return f"; its last words: {line[:_LONGEST_QUOTE]}" if line else ""
