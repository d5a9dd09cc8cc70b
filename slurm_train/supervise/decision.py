"""What to do when the ranks of an attempt have ended: a pure function of what they left and what Slurm says.

srun's exit code alone is not enough (it is 0 after a node failure), and the signals of a preemption and of a scancel
are the same. So the decision is made from the marks that ranks leave and from the job's own record. A cancelled job is
never requeued.

The number of ends without progress is limited. Progress is a checkpoint that was committed in the attempt. Attempts in
a row without one are counted by what ended them. The count starts again after an attempt with a new checkpoint, and
after the run was stopped and a person started it again. Two such failures in a row on the same node are blamed on the
node, since a broken program fails on any node. Three failures in a row end the run, also on different nodes.

A lost or bad node is left out where the run can continue on the other nodes of its job, see `nodes`; then nothing is
requeued.

`supervisor.Supervisor._decide` makes the final decision: it asks Slurm whether somebody cancelled the job meanwhile,
and requeues where the ranks cannot be started again in this allocation.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_FAILURE, EXIT_REQUEUE, EXIT_WRONG_USE
from slurm_train.formatting import exit_code
from slurm_train.rundir.cause import NODE_FAILURE, WARNED, Cause, kinds_of
from slurm_train.rundir.events import bad_nodes_of, errors_of
from slurm_train.rundir.ledger import Action, Attempt, Reason
from slurm_train.slurm.allocation import compact_nodelist
from slurm_train.slurm.limits import Limits, in_words, way_out
from slurm_train.slurm.records import end_and_limit
from slurm_train.supervise.actions import CANCELLED, Decision, is_over_its_limit, restarts_in, slurm_reason
from slurm_train.supervise.evidence import Traces
from slurm_train.supervise.own_end import EndKind

_COUNTED_AS = {
    Reason.TIME_LIMIT: Reason.TIME_LIMIT,
    Reason.NODE_FAILURE: Reason.NODE_FAILURE,
    Reason.LOST: Reason.NODE_FAILURE,
    Reason.PREEMPTED: Reason.PREEMPTED,
    Reason.REQUEUED: Reason.PREEMPTED,
    Reason.SIGNALLED: Reason.PREEMPTED,
    Reason.FILE_SYSTEM: Reason.FILE_SYSTEM,
    Reason.GROWTH: Reason.GROWTH,
}
"""Ends of all other reasons count as failures."""
# A time limit that is too short is too short the next time as well. Nodes fail by themselves now and then. A run does
# not cause its preemptions: 50 in a row, even before the first step, must not stop it.
_BUDGETS = {
    Reason.TIME_LIMIT: (
        1,
        "time limits",
        "the limit is shorter than the start and the way to a checkpoint: raise cluster.time_limit_min, or lower "
        "checkpoint.every_steps",
    ),
    Reason.NODE_FAILURE: (
        2,
        "lost nodes",
        "the run itself may bring its nodes down (memory, driver): see the logs of these attempts",
    ),
    Reason.PREEMPTED: (30, "preemptions", "lower checkpoint.every_steps, or ask for another partition or QOS"),
}
"""By kind: how many ends in a row use up one of `requeue.max_returns_without_progress`; their name; what to do."""
_UNLIMITED: Limits = {}
_KILLED_BY_WARNING = 128 + signal.SIGUSR2
_DISK_FULL = "DISK_FULL"
"""The preflight's code: a person who submits sees the error at once, but a requeued run waits for free space."""
MOST_FAILED_STARTS = 10
"""After so many starts in a row that could not write, or found too little room, the run waits for a person."""
FIRST_DELAY_S = 60
"""How long a job waits after the first failure of the file system."""
_LONGEST_DELAY_S = 3600


def decide(
    traces: Traces,
    cause: Cause | None,
    *,
    settings: RequeueSection,
    avoid: Sequence[str] = (),
    others: Sequence[str] = (),
) -> Decision:
    """Returns what follows from an end; see the table in docs/slurm.md.

    Args:
        traces: what is known of the end.
        cause: why the attempt ended, from `evidence.cause_of`.
        settings: when to requeue or relaunch.
        avoid: nodes that the next attempt should not use, see `nodes_to_avoid`; () if the job cannot do without them.
        others: those that it can use in this job instead; () where too few are left.
    """
    # The result is written after the last checkpoint, so how the processes ended afterwards does not matter.
    if traces.is_finished or traces.end_of_own is EndKind.FINISHED:
        return Decision(Reason.DONE, Action.FINISH, "the run is finished")
    if traces.ended_early:
        return Decision(Reason.ENDED_EARLY, Action.STOP, f"{traces.ended_early}; `resume` continues the run")
    reason = _reason(traces, cause, settings)
    if reason is Reason.CANCELLED:
        return CANCELLED
    if reason is Reason.STOPPED:
        return Decision(reason, Action.STOP, "stopped as asked; the same command continues the run")
    if reason is Reason.NODE_FAILURE and not _is_requeued(traces):
        return _decide_loss(traces, cause, settings, avoid=avoid, others=others)
    if reason in (Reason.REQUEUED, Reason.NODE_FAILURE):
        prefix = f"{cause}; " if reason is Reason.NODE_FAILURE else ""
        return Decision(reason, Action.LEAVE, f"{prefix}Slurm has requeued the job itself")
    if reason in (Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.SIGNALLED, Reason.GROWTH):
        return _decide_return(traces, cause, reason, settings)
    if reason is Reason.UNKNOWN:
        note = "the run saved and stopped; Slurm does not say why, so it is not requeued; `resume` continues it"
        return Decision(reason, Action.STOP, note)
    return _decide_failure(traces, cause, settings, avoid=avoid, others=others)


def _reason(traces: Traces, cause: Cause | None, settings: RequeueSection) -> Reason:
    job = traces.job
    is_slurm = traces.start.job_id is not None
    code = exit_code_of(traces, cause)
    kind = "" if cause is None else cause.kind
    by_slurm = None if job is None else slurm_reason(job, traces.start.restart_count)
    if traces.stop_asked is not None:
        # `cancel` writes the file before it calls scancel, so Slurm may not show it yet.
        return by_slurm if by_slurm is Reason.CANCELLED else traces.stop_asked
    if by_slurm is Reason.REQUEUED and kind == NODE_FAILURE:
        return Reason.NODE_FAILURE
    if by_slurm is not None:
        return by_slurm
    if traces.lost_nodes:
        return Reason.NODE_FAILURE
    # Ranks may die of the signal that warns of the limit; an unmodified script does.
    was_warned = code == _KILLED_BY_WARNING or kind == WARNED
    if was_warned and (job is not None or not is_slurm):
        # On this machine the same signal passes Ctrl-C on.
        return Reason.TIME_LIMIT if is_slurm else Reason.STOPPED
    if code != EXIT_REQUEUE:
        return Reason.FAILED
    if job is None:
        return Reason.UNKNOWN if is_slurm else Reason.STOPPED
    if traces.growth is not None:
        return Reason.GROWTH
    # Slurm has recorded no reason. The warning of the limit is USR2. A TERM without a record comes from `scancel
    # --signal`, or from the late end of a lost node's step, which may reach the other ranks first.
    asked_by = traces.end.asked_by
    if asked_by == "TERM" or (asked_by == "another rank" and _is_early(traces, job, settings)):
        return Reason.SIGNALLED
    return Reason.TIME_LIMIT


def exit_code_of(traces: Traces, cause: Cause | None) -> int:
    """Returns the exit code of the rank that failed first, else of srun, which has one code for all ranks."""
    if traces.end_of_own is EndKind.STOPPED:
        return EXIT_REQUEUE
    mark = traces.mark
    code = mark.exit_code if traces.has_failed and mark is not None else traces.exit_code
    if code == EXIT_WRONG_USE and mark is None and cause is not None and cause.ranks:
        # slurmstepd ends so, too, where a node lacks the program; ranks that refuse their input leave a mark.
        return EXIT_FAILURE
    return code


def _is_requeued(traces: Traces) -> bool:
    """Returns whether Slurm has requeued the job since the attempt began."""
    return traces.job is not None and restarts_in(traces.job) > traces.start.restart_count


def _is_early(traces: Traces, job: Mapping[str, str], settings: RequeueSection) -> bool:
    """Returns whether a job's limit is further away than any warning of it: `auto` is at most half of the limit."""
    end_unix_s, limit_s = end_and_limit(job)
    if end_unix_s is None or limit_s is None:
        return False
    warning = settings.warn_before_limit_s
    lead_s = max(limit_s / 2, warning if isinstance(warning, int) else 0.0)
    # Slurm may send the warning a minute early.
    return end_unix_s - traces.end.time_unix_s > 60.0 + lead_s


def _decide_return(traces: Traces, cause: Cause | None, reason: Reason, settings: RequeueSection) -> Decision:
    if not settings.enabled:
        return Decision(reason, Action.STOP, f"{reason}; requeue.enabled=false, so the run waits for `resume`")
    if _is_requeued(traces):
        return Decision(reason, Action.LEAVE, f"{reason}; Slurm has requeued the job itself")
    refusal = _spent(traces, reason, settings)
    if refusal:
        return Decision(reason, Action.STOP, f"{reason}; {refusal}")
    if reason is Reason.GROWTH:
        assert traces.growth is not None, "the reason comes from it"
        note = f"grows: {traces.growth.sentence}; Slurm is asked to requeue the job"
        return Decision(reason, Action.REQUEUE, note, exclude=traces.growth.exclude)
    is_over = traces.job is not None and is_over_its_limit(traces.job)
    was = "signalled to stop, and Slurm has no reason on record" if reason is Reason.SIGNALLED else str(reason)
    if exit_code_of(traces, cause) == EXIT_WRONG_USE:
        # E.g. a save of a state that no checkpoint can keep: then the steps of each attempt are lost.
        was = f"{was}, and the ranks refused to go on: {cause}"
    note = f"{was}; Slurm is asked to requeue the job"
    return Decision(reason, Action.REQUEUE, note, is_over=is_over)


def _decide_loss(
    traces: Traces, cause: Cause | None, settings: RequeueSection, *, avoid: Sequence[str], others: Sequence[str]
) -> Decision:
    reason = Reason.NODE_FAILURE
    if not settings.enabled:
        return Decision(reason, Action.STOP, f"{cause}; requeue.enabled=false, so the run waits for `resume`")
    refusal = _spent(traces, reason, settings)
    if refusal:
        return Decision(reason, Action.STOP, f"{cause}; {refusal}")
    if others:
        return Decision(reason, Action.RELAUNCH, f"{cause}; {_on(others)}", left_out=traces.lost_nodes)
    note = f"{cause}; the nodes that are left are too few, so Slurm is asked to requeue the job"
    return Decision(reason, Action.REQUEUE, note, exclude=tuple(avoid))


def _on(nodes: Sequence[str]) -> str:
    return f"the ranks are started again on {compact_nodelist(nodes)} of this allocation"


def _spent(traces: Traces, reason: Reason, settings: RequeueSection) -> str:
    """Returns in words why the run must not be started again after such an end, "" where it may."""
    is_known = not traces.is_own_code or traces.end.last_committed is not None
    if traces.this.made_progress or not is_known:
        return ""
    counts = ends_without_progress(traces.past) + Counter([_COUNTED_AS[reason]])
    return used_up(counts, reason, max_returns=settings.max_returns_without_progress, newest=traces.this)


def _decide_failure(
    traces: Traces, cause: Cause | None, settings: RequeueSection, *, avoid: Sequence[str], others: Sequence[str]
) -> Decision:
    reason = Reason.FAILED
    code = exit_code_of(traces, cause)
    words = str(cause or f"the ranks ended with code {exit_code(code)}; see the logs of this attempt")
    words += advice_on(words, traces.limits)
    # A job that Slurm has restarted and that found too little free space on the disk waits for space.
    tries = ends_without_progress(traces.past)[Reason.FILE_SYSTEM] + 1
    may_wait = settings.enabled and traces.start.restart_count > 0 and tries <= MOST_FAILED_STARTS
    if may_wait and not traces.had_begun and any(one.code == _DISK_FULL for one in errors_of(traces.findings)):
        return delayed_requeue(str(cause), tries)
    # Wrong use fails in the same way again, so it is not retried.
    if not _can_relaunch(traces, settings) or code == EXIT_WRONG_USE:
        return Decision(reason, Action.STOP, words)
    failures = 0 if traces.this.made_progress else ends_without_progress(traces.past)[reason] + 1
    if failures >= settings.max_failures_without_progress:
        note = f"{failures} failures in a row without a new checkpoint: {words}"
        return Decision(reason, Action.STOP, note)
    # A person who starts the run again after a stop gets a new first try.
    if fails_alike(traces, cause) and not traces.past[-1].waits_for_person:
        note = (
            f"{words}; the attempt before failed alike and no checkpoint came between, so it is not tried a third time"
        )
        return Decision(reason, Action.STOP, f"{note}: correct it, then `resume` with --accept code or a setting")
    if avoid and others:
        return Decision(reason, Action.RELAUNCH, f"{words}; {_on(others)}", left_out=tuple(avoid))
    if avoid and settings.enabled:
        note = f"{words}; Slurm is asked to requeue the job without {','.join(avoid)}"
        return Decision(reason, Action.REQUEUE, note, exclude=tuple(avoid))
    return Decision(reason, Action.RELAUNCH, f"{words}; the ranks are started again in this allocation")


def _can_relaunch(traces: Traces, settings: RequeueSection) -> bool:
    """Returns whether the ranks may be started again in this allocation: they resume by themselves."""
    if not (settings.enabled and traces.may_relaunch):
        return False
    # A user's own code that failed resumes if it has joined the session. Code that hung is started again as after a
    # preemption. If the nodes were found unfit, the code has not run at all.
    return not traces.is_own_code or traces.had_joined or bool(traces.hang) or not traces.had_begun


def fails_alike(traces: Traces, cause: Cause | None) -> bool:
    """Returns whether the attempt before failed with the same exception at the same place, without progress since."""
    mark = traces.mark
    # A cause with a place is an exception of the rank that has left the first mark.
    if mark is None or cause is None or not cause.place or traces.this.made_progress:
        return False
    # Thousands of ranks may have said the same.
    earlier = {one.message: one for one in traces.previous_marks if one.place == mark.place}
    return any(mark.cause.is_like(one.cause) for one in earlier.values())


def failed_on(traces: Traces, cause: Cause | None) -> tuple[str, ...]:
    """Returns the nodes that an attempt failed on, as far as known."""
    bad_nodes = tuple(bad_nodes_of(traces.findings))
    if bad_nodes:
        return bad_nodes
    if cause is not None and (cause.ranks or cause.node):
        return (cause.node,) if cause.blames_node else ()
    mark = traces.mark
    return (mark.host,) if mark is not None and not mark.tells_of_loss else ()


def nodes_to_avoid(traces: Traces, cause: Cause | None) -> tuple[str, ...]:
    """Returns the nodes that the next attempt should not use: lost and bad ones, and one that has failed twice."""
    if traces.lost_nodes:
        return traces.lost_nodes
    nodes = failed_on(traces, cause)
    is_suspect = bool(bad_nodes_of(traces.findings)) or nodes == last_bad_nodes(traces.past)
    # The same exception twice in a row comes from the program, not from the node.
    return nodes if is_suspect and not traces.this.made_progress and not fails_alike(traces, cause) else ()


def advice_on(words: str, limits: Limits = _UNLIMITED) -> str:
    """Returns what to change after an end of a known kind, e.g. "; out of GPU memory: ..."; "" for other kinds.

    Args:
        words: what is known of the end: the message of torch, of srun or of the kernel, or Slurm's state.
        limits: of each rank.
    """
    kinds = kinds_of(words)
    reached = next((limit for kind in kinds for limit in kind.limits if limit in limits), "")
    if reached:
        return f"; a process may have {in_words(limits, reached)} here: {way_out([reached])}"
    return next((f"; {kind.advice}" for kind in kinds if kind.advice), "")


def delayed_requeue(problem: str, tries: int) -> Decision:
    """Returns that the job is requeued for later, the later the more often it was tried."""
    delay_s = min(FIRST_DELAY_S << max(tries - 1, 0), _LONGEST_DELAY_S)
    note = f"{problem}; Slurm is asked to requeue the job, for {delay_s} s later"
    return Decision(Reason.FILE_SYSTEM, Action.REQUEUE, note, delay_s=delay_s)


def ends_without_progress(ledger: Sequence[Attempt]) -> Counter[Reason]:
    """Returns how many attempts in a row ended without progress, by the reason that they count as."""
    counts: Counter[Reason] = Counter()
    for attempt in reversed(ledger):
        if attempt.end is None:
            continue
        if attempt.made_progress or attempt.waits_for_person:
            break
        counts[_COUNTED_AS.get(attempt.end.reason, Reason.FAILED)] += 1
    return counts


def used_up(counts: Mapping[Reason, int], reason: Reason, *, max_returns: int, newest: Attempt) -> str:
    """Returns in words why a run must not be started again after such an end, "" where it may.

    Args:
        counts: as returned by `ends_without_progress`, this end included.
        reason: what ended the newest attempt.
        max_returns: `requeue.max_returns_without_progress`.
        newest: that attempt.
    """
    kind = _COUNTED_AS.get(reason, Reason.FAILED)
    if kind not in _BUDGETS:
        return ""
    weight, ends, advice = _BUDGETS[kind]
    if counts.get(kind, 0) < max_returns * weight:
        return ""
    before_s = newest.spent_s("start_s", "rendezvous_s", "load_s", "compile_s")
    course = f"the last attempt ran {newest.held_s:.0f} s, {before_s:.0f} s of it before its first step"
    return f"{counts[kind]} {ends} in a row without a new checkpoint ({course}): {advice}; `resume` tries again"


def starts_without_progress(ledger: Sequence[Attempt], *, job_id: str | None, restart_count: int) -> int:
    """Returns how many starts of a job in a row, this one included, could not write the files of an attempt.

    Args:
        ledger: the run's; starts that could write nothing are missing in it, but Slurm has counted them.
        job_id: the job.
        restart_count: how often Slurm had restarted it when this start began.
    """
    recorded = [attempt.start.restart_count for attempt in ledger if attempt.start.job_id == job_id]
    without_trace = restart_count - max(recorded, default=-1)
    return max(without_trace, 0) + ends_without_progress(ledger)[Reason.FILE_SYSTEM]


def last_bad_nodes(ledger: Sequence[Attempt]) -> tuple[str, ...]:
    """Returns the nodes that the newest attempt failed on without progress; () if it did not fail, or made progress."""
    end = ledger[-1].end if ledger else None
    if end is None or end.reason is not Reason.FAILED or ledger[-1].made_progress:
        return ()
    return end.failed_on
