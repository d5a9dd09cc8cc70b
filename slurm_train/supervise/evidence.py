"""What the ranks of an attempt left on disk, and the cause of their end that follows from it.

`read_evidence` reads the run directory. When ranks have ended, any file may be unreadable or slow, so every fact has a
default. `diagnose` is a pure function of what was read and of what Slurm and the kernel report. It returns the cause,
the nodes at fault, and whether the attempt before failed in the same way. `decision.decide` says what follows.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_train.config.secrets import redact
from slurm_train.errors import EXIT_FAILURE, EXIT_WRONG_USE
from slurm_train.formatting import exit_code
from slurm_train.rundir.attempts import Round
from slurm_train.rundir.events import (
    FailureMark,
    Finding,
    bad_nodes_of,
    codes_of,
    errors_of,
    findings_of,
    first_of,
    read_events,
    read_marks,
    read_preflight,
)
from slurm_train.rundir.files import read_tail
from slurm_train.rundir.heartbeat import has_joined
from slurm_train.rundir.ledger import Attempt, End, Start, read_ledger
from slurm_train.rundir.lineage import first_step_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import read_account, step_of_attempt
from slurm_train.slurm.job_variables import is_job_variable
from slurm_train.slurm.records import NO_STEP, TaskEnd
from slurm_train.status.failure import crash_in, crash_of_child_in, last_words
from slurm_train.supervise.best_effort import BestEffort
from slurm_train.supervise.decision import (
    NODE_FAILURE,
    ends_without_progress,
    last_failed_on,
    node_of,
)

_DISK_FULL = "DISK_FULL"
"""The preflight's code: a person who submits sees the error at once, but a requeued run waits for free space."""
_ANY_RANK = re.compile(r"rank (\d+) on ")
_CRASHED_RANK = re.compile(
    r"ranks? (\d+)\S* on \S+: (?:Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception)"
)
_MISSING_KEY = re.compile(r"rank (?P<rank>\d+) on \S+: KeyError: '(?P<name>[A-Za-z_]\w*)'$")
# The innermost frame is `os.environ.__getitem__`; from 3.11 on its module is frozen, and without a line of source.
_IN_ENVIRON = r'File "[^"]*\bos(?:\.py|>)", line \d+, in __(?:get|del)item__\n(?:    .*\n)*KeyError: \'{name}\''
# What faulthandler writes: for each thread its frames, the innermost first.
_CRASHED_THREAD = re.compile(r"^(Current thread|Thread) .+:\n((?:  File .+\n?)*)", re.MULTILINE)
_CRASH_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$', re.MULTILINE)
_CRASH_BYTES = 256 * 1024
"""How much of a log's end is read for a crash: faulthandler writes 100 frames of each of 100 threads at most."""
_THROWN = re.compile(r"^ +what\(\):\s+(\S.*)$", re.MULTILINE)
_LONGEST_QUOTE = 300
_WORDLESS = re.compile(r"^the (?:script|function) ended with code \d+$")
_EXITED = "Exited with exit code "
_REPORT_S = 2.0
"""How long before the event of a hang its own mark may be left."""
_INSTALLED = ("/lib/python3.", "/lib64/python3.", "/site-packages/", "/dist-packages/", "<frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an attempt left in the run directory."""

    number: int
    """Of the attempt."""
    start: Start
    end: End
    """Before it is decided: exit code of srun, steps, newest commit, where the time went, who asked for a stop."""
    ledger: Sequence[Attempt]
    """The earlier attempts, oldest first."""
    findings: Sequence[Finding]
    """Of the preflight, the worst first."""
    mark: FailureMark | None
    """Of the rank that failed first."""
    marks: Sequence[FailureMark] = ()
    """Of all ranks, the earliest first."""
    previous_marks: Sequence[FailureMark]
    """Of all ranks of the attempt before."""
    stop: Mapping[str, Any]
    """The newest event of an agreed stop, else of a program that has ended after a stop signal; {} for none."""
    hang: Mapping[str, Any]
    """The newest event of a hang, {} for none."""
    had_joined: bool
    """Whether the ranks had heartbeats: the trainer's have, and those of a program that has called `session.join`."""

    @property
    def attempt(self) -> Attempt:
        """The attempt, as far as it is known."""
        return Attempt(self.number, self.start, self.end)

    @property
    def earlier_ends(self) -> Counter[str]:
        """Earlier attempts in a row without progress, by what ended them."""
        return ends_without_progress(self.ledger)

    @property
    def not_saved(self) -> str:
        """Why no save was made at the stop, for the ledger's note; "" where one was."""
        if self.stop.get("saved", True):
            return ""
        return (
            f"; no save at the stop: {self.stop['left_s']:.0f} s were left and a save takes {self.stop['save_s']:.0f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What Slurm and the kernel report when the ranks have ended."""

    violent_end: str
    """How the ranks ended by srun, or by the first mark, e.g. "rank 3 on node2: Killed"; "" for nothing."""
    ends: Sequence[TaskEnd] = ()
    """How single ranks ended, in the order in which it was told; without those that ended with 0."""
    silent_end: str = ""
    """How a rank ended without an exception, from `silent_end`; "" for none."""
    placed_mark: str = ""
    """The first mark, with the place where the rank or a process of its loader crashed; "" for none."""
    own_words: str = ""
    """Why srun ended of itself, or how a task ended that is no rank; "" where that is not known."""
    lost_nodes: tuple[str, ...]
    """Nodes that Slurm reports as lost, or that do not answer, of a job that keeps its other nodes."""
    had_oom_kill: bool
    """Whether the kernel of the head node ended a process for lack of memory during the attempt."""
    head_node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The cause of the end of an attempt, and what it means for the next one."""

    exit_code: int
    """Of the rank that failed first, else of srun."""
    cause: str
    """In one line, e.g. "rank 3 on node2: Killed"; "" where it is not known."""
    failed_on: tuple[str, ...]
    """The nodes that the attempt failed on, as far as known."""
    to_avoid: tuple[str, ...]
    """The nodes that the next attempt should not use."""
    is_repeated: bool
    """Whether the attempt before failed with the same exception at the same place, and there was no progress."""
    had_begun: bool
    """Whether the ranks were started: the preflight let them, and Slurm created their step."""
    lacks_room: bool
    """Whether the preflight found too little room on the disk."""


def read_evidence(
    run: RunDirectory,
    attempt: int,
    opening: Round,
    best_effort: BestEffort,
    *,
    exit_code: int,
    last_committed: int | None,
    has_account: bool,
) -> Evidence:
    """Returns what an attempt whose ranks have ended left; each fact has a default where it cannot be read.

    Args:
        run: the run.
        attempt: its number.
        opening: how it began.
        best_effort: bounds the time of each read.
        exit_code: of srun, or of the local ranks.
        last_committed: step of the newest checkpoint, None where that is not known.
        has_account: whether the ranks record where their time goes: the trainer's do, a user's own program does not.
    """
    end_unix_s = time.time()
    step_before = opening.first_step
    first_step = best_effort("the events", lambda: first_step_of(run, attempt, default=step_before), step_before)
    last_step = best_effort("the metrics", lambda: step_of_attempt(run, attempt, default=first_step), first_step)

    def account() -> dict[str, float]:
        return read_account(
            run, attempt, start_unix_s=opening.start_unix_s, end_unix_s=end_unix_s, step_before=step_before
        )

    seconds = best_effort("the account", account, dict[str, float]())
    if not seconds and has_account:
        # Without an account, all of the time was spent on starting.
        seconds = {"start_s": round(end_unix_s - opening.start_unix_s, 3)}
    attempts = best_effort("the ledger", lambda: read_ledger(run), list[Attempt]())
    start = next((one.start for one in attempts if one.number == attempt), Start())
    ledger = [one for one in attempts if one.number < attempt]
    findings = best_effort("the preflight's record", lambda: findings_of(read_preflight(run, attempt)), list[Finding]())
    marks = best_effort("the marks of the ranks", lambda: read_marks(run, attempt), list[FailureMark]())
    mark = first_of(marks)
    previous_marks: list[FailureMark] = []
    if mark is not None and ledger:
        previous = ledger[-1].number
        previous_marks = best_effort("the marks of the attempt before", lambda: read_marks(run, previous), [])
    events = best_effort("the events", lambda: read_events(run, attempt=attempt), list[dict[str, Any]]())
    newest_by_kind = {event.get("event"): event for event in events}
    stop = newest_by_kind.get("stop") or newest_by_kind.get("signal", {})
    end = End(
        time_unix_s=end_unix_s,
        exit_code=exit_code,
        first_step=first_step,
        last_step=last_step,
        step_before=step_before,
        last_committed=last_committed,
        asked_by=str(stop.get("asked_by", "")),
        found=codes_of(findings),
        seconds=seconds,
    )
    return Evidence(
        number=attempt,
        start=replace(start, time_unix_s=opening.start_unix_s),
        end=end,
        ledger=ledger,
        findings=findings,
        mark=mark,
        marks=marks,
        previous_marks=previous_marks,
        stop=stop,
        hang=newest_by_kind.get("hang", {}),
        had_joined=best_effort("the heartbeats", lambda: has_joined(run, attempt), False),
    )


def with_crash_place(end: str, run: RunDirectory, attempt: int) -> str:
    """Returns an end with the place in the program, e.g. "rank 3 on node2: Segmentation fault at model.py:41 in f".

    Args:
        end: which rank a signal ended; returned as it is for other ends, and where the rank's log has no stack.
        run: the run.
        attempt: number of the attempt.
    """
    match = _CRASHED_RANK.match(end)
    if match is None:
        rank = _ANY_RANK.match(end)
        log = read_tail(run.rank_log(attempt, int(rank[1])), _CRASH_BYTES) if rank else ""
        return end + _place_of_crash(crash_of_child_in(log, end))
    log = read_tail(run.rank_log(attempt, int(match[1])), _CRASH_BYTES)
    place = _place_of_crash(crash_in(log))
    # What C++ says of an exception that nobody catches, e.g. NCCL's watchdog of a collective.
    thrown = _THROWN.findall(log)
    return f"{end}{place}{f': {thrown[-1][:_LONGEST_QUOTE]}' if thrown else ''}"


def with_missing_variable(end: str, run: RunDirectory, attempt: int) -> str:
    """Returns an end with what exports a variable that the program has looked for in its environment.

    Args:
        end: the exception of a rank, e.g. "rank 0 on node1: KeyError: 'DATA_DIR'"; returned as it is for all others.
        run: the run.
        attempt: number of the attempt.
    """
    match = _MISSING_KEY.match(end)
    if match is None or is_job_variable(match["name"]):
        return end
    log = read_tail(run.rank_log(attempt, int(match["rank"])), _CRASH_BYTES)
    if re.search(_IN_ENVIRON.format(name=match["name"]), log) is None:
        return end
    name = match["name"]
    return (
        f"{end}; the job has no variable {name}: cluster.export=[{name}] takes that of the shell that submits, "
        f"cluster.env.{name}=VALUE sets one"
    )


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


def silent_end(
    run: RunDirectory, attempt: int, ends: Sequence[TaskEnd], *, marks: Sequence[FailureMark], num_ranks: int
) -> str:
    """Returns how a rank ended without an exception while the marks of others tell only of its loss; "" for none.

    It may have called `sys.exit` or `os._exit`, be no Python, or have found a Python that does not start on its node.

    Args:
        run: the run.
        attempt: number of the attempt.
        ends: how the ranks ended that did not end with 0; () where that is not known.
        marks: of all ranks, the earliest first.
        num_ranks: of the attempt.
    """
    mark = first_of(marks)
    if mark is not None and not mark.tells_of_loss:
        words = _words_in_log(run, attempt, mark.rank) if _WORDLESS.search(mark.message) else ""
        return f"{mark}{words}" if words else ""
    if not ends:
        return ""
    with_mark = {mark.rank for mark in marks}
    for end in ends:
        rank = next((rank for rank in end.tasks if rank not in with_mark), None)
        if rank is not None and marks and end is ends[0] and not end.words.startswith(_EXITED):
            # Slurm ends the others so, but not the first one.
            return f"rank {rank} on {end.node}: {end.words}"
        if rank is not None and end.words.startswith(_EXITED):
            code = exit_code(int(end.words.removeprefix(_EXITED)))
            return f"rank {rank} on {end.node}: ended with exit code {code}{_words_in_log(run, attempt, rank)}"
    ended_well = sorted(set(range(num_ranks)).difference(*(end.tasks for end in ends)))
    if not marks or not ended_well:
        return ""
    which = f"rank {ended_well[0]}" if len(ended_well) == 1 else f"{len(ended_well)} ranks, {ended_well[0]} the first,"
    return (
        f"{which} had ended with exit code 0 while others went on{_words_in_log(run, attempt, ended_well[0])}; then "
        f"{marks[0]}; all ranks must take the same number of steps and end together"
    )


def task_end(run: RunDirectory, attempt: int, ends: Sequence[TaskEnd]) -> str:
    """Returns how the first task of a step ended, with its last words; "" for none.

    For tasks that are no ranks: a launcher of torchrun, which may fail before it has started any, and those of a
    heterogeneous step, whose numbers are not the ranks'.

    Args:
        run: the run.
        attempt: number of the attempt at the start of the step.
        ends: of the step's tasks, as far as they did not end with 0.
    """
    for end in ends:
        if end.words.startswith(_EXITED):
            code = exit_code(int(end.words.removeprefix(_EXITED)))
            words = _words_in_log(run, attempt, end.tasks[0])
            return f"task {end.tasks[0]} on {end.node}: ended with exit code {code}{words}"
    return ""


def _words_in_log(run: RunDirectory, attempt: int, number: int) -> str:
    """Returns the last words of a rank or, where that has no log, of a task."""
    logs = [run.attempt_logs(attempt) / f"{kind}_{number}.log" for kind in ("rank", "node", "task")]
    line = redact(next(filter(None, (last_words(read_tail(log, _CRASH_BYTES)) for log in logs)), ""))
    return f"; its last words: {line[:_LONGEST_QUOTE]}" if line else ""


def diagnose(evidence: Evidence, around: Surroundings, *, has_failed: bool) -> Diagnosis:
    """Returns the cause of the end of an attempt, and what it means for the next one.

    Args:
        evidence: what it left.
        around: what Slurm and the kernel report.
        has_failed: whether srun, or the local ranks, ended with neither success nor the code of a requeue.
    """
    mark = evidence.mark
    errors = errors_of(evidence.findings)
    cause = _cause(evidence, around, has_failed=has_failed)
    is_same_failure = (
        mark is not None
        and cause in (str(mark), around.placed_mark)
        and not evidence.attempt.made_progress
        and any(mark.is_like(earlier) for earlier in evidence.previous_marks)
    )
    cause = _with_kernel(cause, evidence, around)
    if around.lost_nodes:
        cause = f"{NODE_FAILURE} on {','.join(around.lost_nodes)}"

    bad_nodes = tuple(bad_nodes_of(evidence.findings))
    failed_on = bad_nodes or _single(
        _node_of_error(errors) or node_of(cause) or (mark.host if mark is not None else "")
    )
    is_of_ranks = cause != "" and cause in (around.silent_end, around.placed_mark, str(mark or ""))
    if is_of_ranks and not _blames_node(cause, evidence, around.ends):
        failed_on = bad_nodes
    to_avoid: tuple[str, ...] = ()
    if around.lost_nodes:
        to_avoid = around.lost_nodes
    elif bad_nodes or failed_on == last_failed_on(evidence.ledger):
        # The same exception twice in a row comes from the program, not from the node.
        to_avoid = () if evidence.attempt.made_progress or is_same_failure else failed_on
    had_begun = not (has_failed and errors) and not around.violent_end.startswith(NO_STEP)
    # srun gives one code for all ranks; the code of the rank that failed first is more exact.
    exit_code = mark.exit_code if has_failed and mark is not None else evidence.end.exit_code or 0
    if exit_code == EXIT_WRONG_USE and mark is None and around.silent_end:
        # slurmstepd ends so, too, where a node lacks the program; ranks that refuse their input leave a mark.
        exit_code = EXIT_FAILURE
    return Diagnosis(
        exit_code=exit_code,
        cause=cause,
        failed_on=failed_on,
        to_avoid=to_avoid,
        # A person who starts the run again after a stop gets a new first try.
        is_repeated=is_same_failure and not evidence.ledger[-1].waits_for_person,
        had_begun=had_begun,
        lacks_room=not had_begun and any(error.code == _DISK_FULL for error in errors),
    )


def _cause(evidence: Evidence, around: Surroundings, *, has_failed: bool) -> str:
    # Ranks that hung were killed by the watchdog, and srun would name the one that died first.
    mark = evidence.mark
    sentence = str(evidence.hang.get("sentence", ""))
    if sentence:
        # A rank that failed, and whose threads keep its process, is what the others wait for.
        hung_unix_s = float(evidence.hang.get("time_unix_s", 0.0))
        has_failed_before = mark is not None and 0.0 < mark.time_unix_s < hung_unix_s - _REPORT_S
        return str(mark) if has_failed_before else sentence
    errors = errors_of(evidence.findings)
    if errors:
        return errors[0].line
    # srun ends with 0 after a node failure, so its output counts whatever its exit code is.
    if around.violent_end and not _failed_before_it(mark, around.ends):
        return around.violent_end
    if not has_failed:
        return ""
    return around.silent_end or around.placed_mark or str(mark or "") or around.own_words


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


def _blames_node(cause: str, evidence: Evidence, ends: Sequence[TaskEnd]) -> bool:
    """Returns whether a failure may be due to the node of its rank: not if ranks of other nodes failed alike.

    The node of a rank that has lost another one is not the node that is to blame.
    """
    mark = evidence.mark
    if mark is not None and cause.startswith(str(mark)):
        are_alike = any(other.host != mark.host and other.message == mark.message for other in evidence.marks)
        return not mark.tells_of_loss and not are_alike
    # Of a rank without a mark; the words begin with its node, unless ranks ended well too early.
    with_mark = {mark.rank for mark in evidence.marks}
    nodes = {end.node for end in ends if end.words.startswith(_EXITED) and not with_mark.issuperset(end.tasks)}
    return node_of(cause) != "" and len(nodes) <= 1


def _with_kernel(cause: str, evidence: Evidence, around: Surroundings) -> str:
    """Returns the cause; for a killed rank on the head node it also names an oom-kill by the kernel."""
    was_killed = evidence.end.exit_code == 128 + signal.SIGKILL
    is_on_head_node = not cause or (cause.endswith(": Killed") and node_of(cause) == around.head_node)
    if was_killed and is_on_head_node and around.had_oom_kill:
        return f"{cause or 'a rank was killed'} (an oom-kill by the kernel)"
    return cause


def _node_of_error(errors: Sequence[Finding]) -> str:
    """Returns the node of the first error, "" where it names none or several."""
    return errors[0].node if errors and ", " not in errors[0].node else ""


def _single(node: str) -> tuple[str, ...]:
    return (node,) if node else ()
