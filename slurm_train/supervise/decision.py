"""What to do when the ranks of an attempt have ended: a pure function of what they left and what Slurm says.

srun's exit code alone is not enough (it is 0 after a node failure), and the signals of a preemption and of a scancel
are the same. So the decision is made from the marks that ranks leave and from the job's own record. A cancelled job is
never requeued.

The number of ends without progress is limited. Progress is a checkpoint that was committed in the attempt. Attempts in
a row without one are counted by what ended them. The count starts again after an attempt with a new checkpoint, and
after the run was stopped and a person started it again. Two such failures in a row on the same node are blamed on the
node, since a broken program fails on any node. Changing nodes does not reset the count, so the third failure ends the
run on whichever node it happens.

A lost or bad node is left out where the run can continue on the other nodes of its job, see `nodes`; then nothing is
requeued.

`supervisor.Supervisor._decide` makes the final decision: it asks Slurm whether somebody cancelled the job meanwhile,
requeues where the ranks cannot be started again in this allocation, and waits where the disk is full.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_REQUEUE, EXIT_WRONG_USE
from slurm_train.formatting import exit_code
from slurm_train.rundir.events import GPU_MEMORY
from slurm_train.rundir.ledger import Action, Attempt, Reason
from slurm_train.slurm.allocation import compact_nodelist
from slurm_train.slurm.limits import Limits, in_words, way_out
from slurm_train.slurm.records import WARNED
from slurm_train.supervise.growth import Growth

_KINDS = {
    "time_limit": "time_limit",
    "node_failure": "node_failure",
    "lost": "node_failure",
    "preempted": "preempted",
    "requeued": "preempted",
    "signalled": "preempted",
    "file_system": "file_system",
    "growth": "growth",
}
# A time limit that is too short is too short the next time as well. Nodes fail by themselves now and then. A run does
# not cause its preemptions: 50 in a row, even before the first step, must not stop it.
_BUDGETS = {
    "time_limit": (
        1,
        "time limits",
        "the limit is shorter than the start and the way to a checkpoint: raise cluster.time_limit_min, or lower "
        "checkpoint.every_steps",
    ),
    "node_failure": (
        2,
        "lost nodes",
        "the run itself may bring its nodes down (memory, driver): see the logs of these attempts",
    ),
    "preempted": (30, "preemptions", "lower checkpoint.every_steps, or ask for another partition or QOS"),
}
"""By kind: how many ends in a row use up one of `requeue.max_returns_without_progress`; their name; what to do."""
_UNLIMITED: Limits = {}
_TOO_LARGE = r"File size limit exceeded|\[Errno 27\]"
_NO_MEMORY = r"\bMemoryError|[Cc]an(?:'t|not) allocate memory|bad_alloc"
# Not the words of EAGAIN alone: HDF5 says them of a lock, and a socket of its peer.
_NO_THREADS = r"can't start new thread|pthread_create failed|Thread creation failed|fork: .*Resource temporarily"
# Of a folder that is mounted noexec it is "Operation not permitted".
_NO_ADDRESSES = rf"{_NO_MEMORY}|{_NO_THREADS}|failed to map segment from shared object(?!: Operation)"
# What a process that comes to its limit says; a node that is full says some of it as well.
_BY_LIMIT = {
    "CPU": re.compile("CPU time limit exceeded"),
    "FSIZE": re.compile(_TOO_LARGE),
    "NPROC": re.compile(_NO_THREADS),
    "AS": re.compile(_NO_ADDRESSES),
    "DATA": re.compile(_NO_ADDRESSES),
}
_ADVICE = (
    (
        GPU_MEMORY,
        "out of GPU memory: lower batch.local_size (the global batch stays), or set "
        "parallel.activation_checkpointing=full or parallel.dp_shard=N; `plan --suggest GIB` lists what fits",
    ),
    (
        re.compile(r"ibv_\w+.*Cannot allocate memory"),
        "InfiniBand has to lock its buffers in memory: `ulimit -l unlimited` before submitting or in cluster.setup",
    ),
    (
        re.compile(rf"Out Of Memory|OUT_OF_MEMORY|oom-kill|{_NO_MEMORY}"),
        "out of the node's memory: raise cluster.memory_gb_per_node (0: all of it), or lower data.num_workers or "
        "batch.local_size",
    ),
    (
        re.compile("Bus error.*shared memory|insufficient shared memory|unable to .*shared memory|/dev/shm"),
        "the node's /dev/shm is full, or what a container has of it: use fewer processes of the loader "
        "(data.num_workers) or smaller batches",
    ),
    (
        re.compile(r"DataLoader worker .*killed by signal: (?:Segmentation|Aborted|Illegal|Floating)"),
        "the code of the data set, or a library that it calls, has crashed in a process of the loader: its stacks are "
        "in the log of the rank",
    ),
    (
        re.compile(r"DataLoader worker .*(?:killed by signal: Killed|exited unexpectedly)"),
        "a process of the loader was ended, most often for lack of memory: raise cluster.memory_gb_per_node (0: all of "
        "it), or use fewer of them (data.num_workers)",
    ),
    (
        re.compile("Too many open files|received 0 items of ancdata"),
        "raise the limit on open files with a line of cluster.setup (ulimit -n 65536), or share the loader's tensors "
        "by torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    (
        re.compile("AF_UNIX path too long"),
        "the folder for temporary files has too long a path for sockets below it (107 bytes): cluster.env.TMPDIR=/tmp, "
        "or a line of cluster.setup",
    ),
    (
        re.compile("Disk quota exceeded|No space left on device"),
        "make room or raise the quota; caches go elsewhere with cluster.env, e.g. cluster.env.HF_HOME=DIR, "
        "cluster.env.TRITON_CACHE_DIR=/tmp/triton",
    ),
    (
        re.compile("Stale file handle"),
        "nodes have written the same file of a shared file system, most often of a cache: give each node its own, e.g. "
        "cluster.env.TRITON_CACHE_DIR=/tmp/triton",
    ),
    (
        re.compile("device-side assert"),
        "most often an index, a label or a token that is out of range: cluster.env.CUDA_LAUNCH_BLOCKING=1 shows the "
        "line",
    ),
    (
        re.compile("Watchdog caught collective operation timeout"),
        "a rank did not join this collective in time: the watch over hangs names it if health.hang_timeout_s is "
        "shorter than the group's time-out",
    ),
    (
        re.compile("Address already in use|EADDRINUSE"),
        "let the program take MASTER_ADDR and MASTER_PORT from its environment, which differ from attempt to attempt",
    ),
    (
        re.compile("RendezvousConnectionError|RendezvousTimeoutError"),
        "the nodes have not met under torchrun, which has no preflight: `doctor` with cluster.launcher=srun says which "
        "node or port is closed",
    ),
    (
        re.compile("Bus error"),
        "most often a mapped file has become shorter, its disk has failed, or /dev/shm is full",
    ),
    (
        re.compile("CPU time limit exceeded"),
        "the program, or a shell that it runs in, limits its processor time (ulimit -t)",
    ),
    (
        re.compile(_TOO_LARGE),
        "the program, or a shell that it runs in, limits the size of its files (ulimit -f), or the file system does",
    ),
    (
        re.compile("Bad system call"),
        "a filter of system calls (seccomp), of a container or of the site, ends whoever calls what it forbids",
    ),
    (
        re.compile("Alarm clock"),
        "a timer that the program or a library has set (alarm, setitimer) has run out, and nothing handles it",
    ),
    (
        re.compile("Illegal instruction"),
        "a library was built for a newer processor than this node's: choose nodes with cluster.constraint or "
        "cluster.exclude",
    ),
    (
        re.compile("srun: .*option"),
        "the srun of the job does not know it: a misspelt name, an option of another release, or of a plugin that is "
        "not installed here; leave it out of cluster.srun and container",
    ),
    (
        re.compile("(?i)cpu bind(?:ing outside| request)"),
        "the CPUs of the job are not those that srun would bind to: cluster.srun.cpu-bind=none",
    ),
)
_ON_NODE = re.compile(r"^(?:ranks? [\d,-]+ on|node failure on|no answer from) (?P<node>[^\s:,\[\]]+)(?::| within |$)")

NODE_FAILURE = "node failure"
"""First words of the cause when a node was lost."""
_KILLED_BY_WARNING = 128 + signal.SIGUSR2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAtEnd:
    """The job whose ranks have ended."""

    is_slurm: bool
    """Whether this is a Slurm job at all."""
    record: Mapping[str, str] | None = None
    """`scontrol show job` as a mapping; None without Slurm or where Slurm does not answer."""
    restart_count: int = 0
    """Restarts of the job when this attempt began."""
    is_early: bool = False
    """Whether the time limit was further away than any warning of it."""
    can_relaunch: bool = False
    """Whether the ranks may be started again in this allocation: they resume by themselves."""

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has requeued the job since the attempt began."""
        return self.record is not None and _restarts(self.record) > self.restart_count


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAtEnd:
    """Nodes that matter for what follows, by name."""

    lost: tuple[str, ...] = ()
    """Those that Slurm reports as lost, or that do not answer, of a job that keeps its other nodes."""
    bad: tuple[str, ...] = ()
    """Those that were found bad, or that the last failures have in common; empty if the job cannot do without them."""
    next: tuple[str, ...] = ()
    """Those that the next attempt can use in this job without lost or bad ones; empty where too few are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The course of the run up to this end."""

    failures_without_progress: int = 0
    """Failures in a row, this one included, that ended without a new checkpoint."""
    earlier_ends: Mapping[str, int] | None = None
    """Earlier attempts in a row without a new checkpoint, by what ended them, from `ends_without_progress`; None if
    this attempt saved one, or where that is not known."""
    is_repeated: bool = False
    """Whether the attempt before failed with the same exception at the same place, and no checkpoint came between."""
    summary: str = ""
    """How the attempt went, in words, from `course_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is known when the ranks have ended."""

    exit_code: int
    """Of the rank that failed first, else of srun, or of the local ranks."""
    is_finished: bool = False
    """Whether `result.json` exists."""
    ended_early: str = ""
    """Why a program that ended with 0 has not come to its end, from `own_end.judge`; "" of other ends."""
    stop_asked: bool = False
    """Whether a person asked by the STOP file."""
    asked_by: str = ""
    """How rank 0 was asked to stop: "TERM", "USR2", "clock", "file", "another rank"; "" if it was not, or not known."""
    cause: str = ""
    """What the first failing rank printed last, as far as known."""
    growth: Growth | None = None
    """Why the ranks were asked to stop for more nodes; None if they were not."""
    limits: Limits = field(default_factory=dict)
    """Those of each rank, as they are those of the supervisor."""
    settings: RequeueSection
    """When to requeue or relaunch."""
    job: JobAtEnd
    nodes: NodesAtEnd = NodesAtEnd()
    course: Course = Course()


@dataclass(frozen=True, slots=True)
class Decision:
    """What happened and what follows from it."""

    reason: Reason
    action: Action
    note: str
    """One line for the ledger and the person."""
    exclude: tuple[str, ...] = ()
    """Nodes that the job must not get again."""
    is_over: bool = False
    """Whether the job has reached its time limit: then only the plain form of requeue starts it again."""
    delay_s: int = 0
    """Seconds that must pass before the job starts again."""
    left_out: tuple[str, ...] = ()
    """Nodes that the next attempt, in the same allocation, does not use."""


CANCELLED = Decision(Reason.CANCELLED, Action.STOP, "the job was cancelled; `resume` continues the run")


def decide(outcome: Outcome) -> Decision:
    """Returns the decision for an outcome; see the table in docs/endings.md."""
    # The result is written after the last checkpoint, so how the processes ended afterwards does not matter.
    if outcome.is_finished:
        return Decision(Reason.DONE, Action.FINISH, "the run is finished")
    if outcome.ended_early:
        return Decision(Reason.ENDED_EARLY, Action.STOP, f"{outcome.ended_early}; `resume` continues the run")
    reason = _reason(outcome)
    if reason is Reason.CANCELLED:
        return CANCELLED
    if reason is Reason.STOPPED:
        return Decision(reason, Action.STOP, "stopped as asked; the same command continues the run")
    if reason is Reason.NODE_FAILURE and not outcome.job.is_requeued:
        return _decide_loss(outcome)
    if reason in (Reason.REQUEUED, Reason.NODE_FAILURE):
        prefix = f"{outcome.cause}; " if reason is Reason.NODE_FAILURE else ""
        return Decision(reason, Action.LEAVE, f"{prefix}Slurm has requeued the job itself")
    if reason in (Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.SIGNALLED, Reason.GROWTH):
        return _decide_return(outcome, reason)
    if reason is Reason.UNKNOWN:
        return Decision(
            reason,
            Action.STOP,
            "the run saved and stopped; Slurm does not say why, so it is not requeued; `resume` continues it",
        )
    return _decide_failure(outcome)


def _reason(outcome: Outcome) -> Reason:
    job = outcome.job
    by_slurm = None if job.record is None else slurm_reason(job.record, job.restart_count)
    if outcome.stop_asked:
        # `cancel` leaves a STOP file as well.
        return Reason.CANCELLED if by_slurm is Reason.CANCELLED else Reason.STOPPED
    if by_slurm is Reason.REQUEUED and outcome.cause.startswith(NODE_FAILURE):
        return Reason.NODE_FAILURE
    if by_slurm is not None:
        return by_slurm
    if outcome.nodes.lost:
        return Reason.NODE_FAILURE
    # Ranks may die of the signal that warns of the limit; an unmodified script does.
    was_warned = outcome.exit_code == _KILLED_BY_WARNING or WARNED in outcome.cause
    if was_warned and (job.record is not None or not job.is_slurm):
        # On this machine the same signal passes Ctrl-C on.
        return Reason.TIME_LIMIT if job.is_slurm else Reason.STOPPED
    if outcome.exit_code != EXIT_REQUEUE:
        return Reason.FAILED
    if job.record is None:
        return Reason.UNKNOWN if job.is_slurm else Reason.STOPPED
    if outcome.growth is not None:
        return Reason.GROWTH
    # Slurm has recorded no reason. The warning of the limit is USR2. A TERM without a record comes from `scancel
    # --signal`, or from the late end of a lost node's step, which may reach the other ranks first.
    if outcome.asked_by == "TERM" or (outcome.asked_by == "another rank" and job.is_early):
        return Reason.SIGNALLED
    return Reason.TIME_LIMIT


def slurm_reason(job: Mapping[str, str], restart_count: int) -> Reason | None:
    """Returns why a job ends, or ended, from its record alone; None where the record has no reason.

    Args:
        job: `scontrol show job` as a mapping.
        restart_count: restarts of the job when the attempt began.
    """
    state = job.get("JobState", "")
    if state == "CANCELLED":
        # Also a job that was being preempted when its user cancelled it.
        return Reason.CANCELLED
    if job.get("PreemptTime", "None") not in ("None", "Unknown", ""):
        return Reason.PREEMPTED
    if is_over_its_limit(job):
        return Reason.TIME_LIMIT
    if _restarts(job) > restart_count:
        return Reason.REQUEUED
    return Reason.CANCELLED if state == "COMPLETING" else None


def is_over_its_limit(job: Mapping[str, str]) -> bool:
    """Returns whether the time limit has ended a job; such a job cannot be cancelled any more."""
    return job.get("Reason") == "TimeLimit" and job.get("JobState") != "CANCELLED"


def _restarts(job: Mapping[str, str]) -> int:
    return int(job.get("Restarts", "0"))


def _decide_return(outcome: Outcome, reason: Reason) -> Decision:
    if not outcome.settings.enabled:
        return Decision(reason, Action.STOP, f"{reason}; requeue.enabled=false, so the run waits for `resume`")
    if outcome.job.is_requeued:
        return Decision(reason, Action.LEAVE, f"{reason}; Slurm has requeued the job itself")
    refusal = _spent(outcome, reason)
    if refusal:
        return Decision(reason, Action.STOP, f"{reason}; {refusal}")
    if reason is Reason.GROWTH:
        assert outcome.growth is not None, "the reason comes from it"
        note = f"grows: {outcome.growth.sentence}; Slurm is asked to requeue the job"
        return Decision(reason, Action.REQUEUE, note, exclude=outcome.growth.exclude)
    is_over = outcome.job.record is not None and is_over_its_limit(outcome.job.record)
    cause = "signalled to stop, and Slurm has no reason on record" if reason is Reason.SIGNALLED else reason
    note = f"{cause}; Slurm is asked to requeue the job, which continues from its checkpoint"
    return Decision(reason, Action.REQUEUE, note, is_over=is_over)


def _decide_loss(outcome: Outcome) -> Decision:
    cause = outcome.cause
    if not outcome.settings.enabled:
        return Decision(
            Reason.NODE_FAILURE, Action.STOP, f"{cause}; requeue.enabled=false, so the run waits for `resume`"
        )
    refusal = _spent(outcome, Reason.NODE_FAILURE)
    if refusal:
        return Decision(Reason.NODE_FAILURE, Action.STOP, f"{cause}; {refusal}")
    nodes = outcome.nodes
    if nodes.next:
        return Decision(Reason.NODE_FAILURE, Action.RELAUNCH, f"{cause}; {_on_others(nodes)}", left_out=nodes.lost)
    note = f"{cause}; the nodes that are left are too few, so Slurm is asked to requeue the job"
    return Decision(Reason.NODE_FAILURE, Action.REQUEUE, note, exclude=nodes.bad)


def _on_others(nodes: NodesAtEnd) -> str:
    return f"the ranks are started again on {compact_nodelist(nodes.next)} of this allocation"


def _spent(outcome: Outcome, reason: Reason) -> str:
    """Returns in words why the run must not be started again after such an end, "" where it may."""
    earlier_ends = outcome.course.earlier_ends
    if earlier_ends is None:
        return ""
    counts = Counter(earlier_ends) + Counter([_KINDS[reason]])
    max_returns = outcome.settings.max_returns_without_progress
    return used_up(counts, reason=reason, max_returns=max_returns, course=outcome.course.summary)


def _decide_failure(outcome: Outcome) -> Decision:
    cause = outcome.cause or f"the ranks ended with code {exit_code(outcome.exit_code)}; see the logs of this attempt"
    cause += advice_on(cause, outcome.limits)
    # Wrong use fails in the same way again, so it is not retried.
    if not outcome.job.can_relaunch or outcome.exit_code == EXIT_WRONG_USE:
        return Decision(Reason.FAILED, Action.STOP, cause)
    failures = outcome.course.failures_without_progress
    if failures >= outcome.settings.max_failures_without_progress:
        note = f"{failures} failures in a row without a new checkpoint: {cause}"
        return Decision(Reason.FAILED, Action.STOP, note)
    if outcome.course.is_repeated:
        note = (
            f"{cause}; the attempt before failed alike and no checkpoint came between, so it is not tried a third time"
        )
        return Decision(
            Reason.FAILED, Action.STOP, f"{note}: correct it, then `resume` with --accept code or a setting"
        )
    nodes = outcome.nodes
    if nodes.bad and nodes.next:
        return Decision(Reason.FAILED, Action.RELAUNCH, f"{cause}; {_on_others(nodes)}", left_out=nodes.bad)
    if nodes.bad and outcome.settings.enabled:
        note = f"{cause}; Slurm is asked to requeue the job without {','.join(nodes.bad)}"
        return Decision(Reason.FAILED, Action.REQUEUE, note, exclude=nodes.bad)
    return Decision(Reason.FAILED, Action.RELAUNCH, f"{cause}; the ranks are started again in this allocation")


def advice_on(cause: str, limits: Limits = _UNLIMITED) -> str:
    """Returns what to change after an end of a known kind, e.g. "; out of GPU memory: ..."; "" for other kinds.

    Args:
        cause: what is known of the end: the message of torch, of srun or of the kernel, or Slurm's state.
        limits: of each rank.
    """
    for limit, pattern in _BY_LIMIT.items():
        if limit in limits and pattern.search(cause):
            return f"; a process may have {in_words(limits, limit)} here: {way_out([limit])}"
    for pattern, advice in _ADVICE:
        if pattern.search(cause):
            return f"; {advice}"
    return ""


def ends_without_progress(ledger: Sequence[Attempt]) -> Counter[str]:
    """Returns how many attempts in a row ended without progress, by kind: "failed", "time_limit", "file_system", ..."""
    counts: Counter[str] = Counter()
    for attempt in reversed(ledger):
        if attempt.end is None:
            continue
        if attempt.made_progress or attempt.waits_for_person:
            break
        counts[_KINDS.get(attempt.end.reason, "failed")] += 1
    return counts


def used_up(counts: Mapping[str, int], *, reason: str, max_returns: int, course: str) -> str:
    """Returns in words why a run must not be started again after such an end, "" where it may.

    Args:
        counts: as returned by `ends_without_progress`, this end included.
        reason: what ended the newest attempt.
        max_returns: `requeue.max_returns_without_progress`.
        course: how that attempt went, from `course_of`.
    """
    kind = _KINDS.get(reason, "")
    if kind not in _BUDGETS:
        return ""
    weight, ends, advice = _BUDGETS[kind]
    if counts.get(kind, 0) < max_returns * weight:
        return ""
    return f"{counts[kind]} {ends} in a row without a new checkpoint ({course}): {advice}; `resume` tries again"


def course_of(attempt: Attempt) -> str:
    """Returns how long an attempt ran, and how much of it before its first step."""
    before_s = attempt.spent_s("start_s", "rendezvous_s", "load_s", "compile_s")
    return f"the last attempt ran {attempt.held_s:.0f} s, {before_s:.0f} s of it before its first step"


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


def node_of(cause: str) -> str:
    """Returns the node in words like "rank 3 on node2: Killed", "" where none or several are named."""
    match = _ON_NODE.match(cause)
    return match["node"] if match else ""


def last_failed_on(ledger: Sequence[Attempt]) -> tuple[str, ...]:
    """Returns the nodes that the newest attempt failed on without progress, () if it did not fail or made progress."""
    newest = ledger[-1] if ledger else None
    if newest is None or newest.end is None or newest.end.reason is not Reason.FAILED or newest.made_progress:
        return ()
    return newest.end.failed_on
