from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.schema import RequeueSection
from slurm_train.rundir.cause import Cause
from slurm_train.rundir.events import FailureMark, Finding
from slurm_train.rundir.ledger import Action, Attempt, End, Reason, Start
from slurm_train.supervise.actions import Decision
from slurm_train.supervise.decision import (
    advice_on,
    decide,
    ends_without_progress,
    last_bad_nodes,
    starts_without_progress,
)
from slurm_train.supervise.evidence import Traces
from slurm_train.supervise.growth import Growth

RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "Reason": "None", "Restarts": "0"}
PREEMPTED = {**RUNNING, "PreemptTime": "2026-01-31T09:41:24"}
TIME_LIMIT = {**RUNNING, "JobState": "COMPLETING", "Reason": "TimeLimit"}
CANCELLED = {**RUNNING, "JobState": "COMPLETING"}
REQUEUED = {**PREEMPTED, "JobState": "COMPLETING", "Restarts": "1"}
# Its limit is further away than any warning of it.
EARLY = {**RUNNING, "StartTime": "1", "EndTime": "86401"}

# A job whose ranks were asked to stop, saved, and said so.
THIS = Start(job_id="7")
SAVED = Traces(number=99, exit_code=75, start=THIS, end=End(time_unix_s=90.0), job=RUNNING, may_relaunch=True)
LOCAL = replace(SAVED, job=None, start=Start(), may_relaunch=False)

GROWTH = Growth(nodes=4, is_worth_it=True, pays_after_s=90.0, sentence="4 nodes instead of 3", exclude=("node2",))
NODE_FAILURE = Cause.of_lost_nodes(["node2"])
LOST: dict[str, Any] = {"lost_nodes": ("node2",), "cause": NODE_FAILURE}
MARK = FailureMark(rank=3, host="node2", exit_code=1, message="ValueError: no such layer", place="model.py:41 in f")
OTHERS = ("node1", "node4")


def ended(number: int, reason: Reason, *, action: Action = Action.REQUEUE, start: Start | None = None) -> Attempt:
    """Returns an attempt that has made no progress."""
    return Attempt(number, start or Start(time_unix_s=10.0), End(time_unix_s=90.0, reason=reason, action=action))


def after(**numbers: int) -> dict[str, Any]:
    """Returns the earlier attempts in a row without progress, by what ended them."""
    reasons = [Reason(name) for name, number in numbers.items() for _ in range(number)]
    return {"past": [ended(number, reason) for number, reason in enumerate(reasons)]}


def decided(
    traces: Traces,
    *,
    settings: RequeueSection | None = None,
    cause: Cause | None = None,
    avoid: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
    asked_by: str = "",
    **facts: Any,
) -> Decision:
    traces = replace(traces, end=replace(traces.end, asked_by=asked_by), **facts)
    return decide(traces, cause, settings=settings or RequeueSection(), avoid=avoid, others=others)


FULL = Finding(code="DISK_FULL", level="error", seen="0 GiB left", todo="free some", node="node1")
SICK = replace(FULL, code="GPU_SICK", blames_node=True)
RESTARTED: dict[str, Any] = {"job": {**RUNNING, "Restarts": "1"}, "start": replace(THIS, restart_count=1)}

# What is known besides that, or instead of it, and what follows.
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "finished, and a rank aborted after it": ("done finish", {"exit_code": 134, "is_finished": True}),
    "preempted": ("preempted requeue", {"job": PREEMPTED}),
    "warned before the limit": ("time_limit requeue", {}),
    "signalled by somebody": ("signalled requeue", {"asked_by": "TERM"}),
    "asked to stop for more nodes": ("growth requeue", {"asked_by": "USR2", "growth": GROWTH}),
    "preempted in that moment": ("preempted requeue", {"asked_by": "USR2", "growth": GROWTH, "job": PREEMPTED}),
    "cancelled in that moment": ("cancelled stop", {"asked_by": "USR2", "growth": GROWTH, "job": CANCELLED}),
    "failed instead of stopping": ("failed relaunch", {"growth": GROWTH, "exit_code": 1}),
    "the late end of a lost node's step": ("signalled requeue", {"asked_by": "another rank", "job": EARLY}),
    "warned, and another rank saw it first": ("time_limit requeue", {"asked_by": "another rank"}),
    "warned by hand, long before the limit": ("time_limit requeue", {"asked_by": "USR2", "job": EARLY}),
    "a script that dies of the warning": ("time_limit requeue", {"exit_code": 140, "may_relaunch": False}),
    "one rank dies of the warning, the others of its end": (
        "time_limit requeue",
        {"exit_code": 143, "may_relaunch": False, "cause": Cause.of("User defined signal 2", ranks=(3,), node="node2")},
    ),
    "cancelled, and a rank dies of the warning": ("cancelled stop", {"job": CANCELLED, "exit_code": 140}),
    "over the limit": ("time_limit requeue", {"job": TIME_LIMIT, "exit_code": 143}),
    "cancelled, ranks saved": ("cancelled stop", {"job": {**CANCELLED, "PreemptTime": "Unknown"}}),
    "cancelled and already so called": ("cancelled stop", {"job": {**RUNNING, "JobState": "CANCELLED"}}),
    "cancelled while it was being preempted": ("cancelled stop", {"job": {**PREEMPTED, "JobState": "CANCELLED"}}),
    "STOP by hand, then scancel": ("cancelled stop", {"stop_asked": Reason.STOPPED, "job": CANCELLED}),
    "`cancel` before its scancel": ("cancelled stop", {"stop_asked": Reason.CANCELLED, "job": PREEMPTED}),
    "stopped by the STOP file": ("stopped stop", {"stop_asked": Reason.STOPPED}),
    "stopped by file while preempted": ("stopped stop", {"stop_asked": Reason.STOPPED, "job": PREEMPTED}),
    "twice in a row on the same node": (
        "failed requeue",
        {"exit_code": 137, **after(failed=1), "avoid": ("node2",)},
    ),
    "a bad node does not add to the budget": (
        "failed stop",
        {"exit_code": 137, **after(failed=2), "avoid": ("node2",)},
    ),
    "the same exception twice": (
        "failed stop",
        {"exit_code": 1, **after(failed=1), "marks": [MARK], "previous_marks": [MARK], "cause": MARK.cause},
    ),
    "the same exception, and a person has started the run again": (
        "failed relaunch",
        {
            "exit_code": 1,
            "marks": [MARK],
            "previous_marks": [MARK],
            "cause": MARK.cause,
            "past": [ended(0, Reason.FAILED, action=Action.STOP)],
        },
    ),
    "too little room, after a restart": ("file_system requeue", {"exit_code": 2, "findings": [FULL], **RESTARTED}),
    "too little room at the first start": ("failed stop", {"exit_code": 2, "findings": [FULL]}),
    "too little room too often": (
        "failed stop",
        {"exit_code": 2, "findings": [FULL], **RESTARTED, **after(file_system=10)},
    ),
    "another finding, after a restart": ("failed stop", {"exit_code": 2, "findings": [SICK], **RESTARTED}),
    "and once more": ("failed stop", {"exit_code": 137, **after(failed=2)}),
    "wrong use is not tried again": ("failed stop", {"exit_code": 2}),
    "0 without a result is no success": ("failed relaunch", {"exit_code": 0}),
    "Slurm does not answer": ("unknown stop", {"job": None}),
    "Slurm does not answer and it failed": ("failed relaunch", {"job": None, "exit_code": 1}),
    "Slurm does not answer and it died of the warning": ("failed relaunch", {"job": None, "exit_code": 140}),
    "somebody requeued it by hand": ("requeued leave", {"job": {**CANCELLED, "Restarts": "1"}, "exit_code": 143}),
    "a node was lost and Slurm brought the job back": (
        "node_failure leave",
        {"job": {**CANCELLED, "Restarts": "1"}, "exit_code": 0, "cause": NODE_FAILURE},
    ),
    "a node was lost and srun says 0": ("node_failure relaunch", {"exit_code": 0, **LOST, "others": OTHERS}),
    "a node was lost and none is left": ("node_failure requeue", {"exit_code": 137, **LOST}),
    "a node was lost from a script's job": (
        "node_failure relaunch",
        {"exit_code": 1, **LOST, "others": OTHERS, "may_relaunch": False},
    ),
    "nodes were lost too often": (
        "node_failure stop",
        {"exit_code": 137, **LOST, "others": OTHERS, **after(node_failure=5)},
    ),
    "a node was lost and requeue is off": (
        "node_failure stop",
        {"exit_code": 137, **LOST, "others": OTHERS, "settings": RequeueSection(enabled=False)},
    ),
    "a node was lost while the job was being preempted": (
        "preempted requeue",
        {"job": PREEMPTED, "exit_code": 137, **LOST, "others": OTHERS},
    ),
    "a node was lost from a job that was cancelled": (
        "cancelled stop",
        {"job": CANCELLED, **LOST, "others": OTHERS},
    ),
    "a bad node and others in the job": (
        "failed relaunch",
        {"exit_code": 1, "avoid": ("node2",), "others": OTHERS},
    ),
    "requeue switched off": ("preempted stop", {"job": PREEMPTED, "settings": RequeueSection(enabled=False)}),
    "Slurm was quicker": ("preempted leave", {"job": REQUEUED}),
    "an earlier restart is not this one": (
        "preempted requeue",
        {"job": REQUEUED, "start": replace(THIS, restart_count=1)},
    ),
    "a second time limit without progress": ("time_limit requeue", after(time_limit=1)),
    "a third one": ("time_limit stop", after(time_limit=2)),
    "preemptions without progress": (
        "preempted requeue",
        {"job": PREEMPTED, **after(preempted=88, time_limit=9, failed=50)},
    ),
    "too many of them": ("preempted stop", {"job": PREEMPTED, **after(preempted=89)}),
    "signals count as preemptions": ("signalled stop", {"asked_by": "TERM", **after(preempted=89)}),
    "Slurm was quicker than the budget": ("preempted leave", {"job": REQUEUED, **after(preempted=89)}),
}
TABLE_HERE: dict[str, tuple[str, dict[str, Any]]] = {
    "a script here that Ctrl-C ends": ("stopped stop", {"exit_code": 140}),
    "local, stopped by Ctrl-C": ("stopped stop", {}),
    "local, failed": ("failed stop", {"exit_code": 1}),
}
ALL = {
    **{name: (SAVED, *case) for name, case in TABLE.items()},
    **{name: (LOCAL, *case) for name, case in TABLE_HERE.items()},
}


@pytest.mark.parametrize(("known", "expected", "facts"), ALL.values(), ids=ALL)
def test_what_follows_from_what_is_known(known: Traces, expected: str, facts: dict[str, Any]) -> None:
    decision = decided(known, **facts)
    assert f"{decision.reason} {decision.action}" == expected
    assert decision.note and "\n" not in decision.note


def test_a_save_that_is_refused_at_a_preemption_is_said() -> None:
    mark = replace(MARK, exit_code=2, message="RunError: the ranks hold different states")
    decision = decided(SAVED, job=PREEMPTED, exit_code=2, marks=[mark], cause=mark.cause)
    assert decision.action is Action.REQUEUE
    assert "refused" in decision.note and "rank 3 on node2: RunError: the ranks hold different states" in decision.note


def test_the_next_attempt_leaves_out_what_is_lost_or_bad() -> None:
    lost = decided(SAVED, exit_code=137, **LOST, avoid=("node2",), others=OTHERS)
    bad = decided(SAVED, exit_code=1, avoid=("node1", "node2"), others=("node4", "node5"))
    assert (lost.left_out, bad.left_out, lost.exclude) == (("node2",), ("node1", "node2"), ())
    # Slurm may not have noticed: the requeued job would get it again.
    assert decided(SAVED, exit_code=137, **LOST, avoid=("node2",)).exclude == ("node2",)


@pytest.mark.parametrize(("job", "is_over"), [(TIME_LIMIT, True), (RUNNING, False), (PREEMPTED, False)])
def test_only_a_job_over_its_limit_needs_the_plain_form_of_requeue(job: dict[str, str], is_over: bool) -> None:
    assert decided(SAVED, job=job).is_over is is_over


any_traces = st.builds(
    Traces,
    number=st.just(99),
    exit_code=st.sampled_from([0, 1, 2, 75, 137, 143]),
    end=st.builds(End, time_unix_s=st.just(90.0), asked_by=st.sampled_from(["", "TERM", "USR2", "another rank"])),
    past=st.integers(0, 9).map(lambda number: after(failed=number)["past"]),
    is_finished=st.booleans(),
    stop_asked=st.sampled_from([None, Reason.STOPPED, Reason.CANCELLED]),
    job=st.sampled_from([None, RUNNING, EARLY, PREEMPTED, TIME_LIMIT, CANCELLED, REQUEUED, {}]),
    start=st.builds(Start, job_id=st.sampled_from([None, "7"]), restart_count=st.integers(0, 2)),
    may_relaunch=st.booleans(),
)
any_settings = st.builds(RequeueSection, enabled=st.booleans(), max_failures_without_progress=st.integers(1, 5))


@settings(deadline=None)
@given(any_traces, any_settings, st.sampled_from([(), ("node2",)]))
def test_a_job_comes_back_only_where_slurm_said_why(
    traces: Traces, requeue: RequeueSection, avoid: tuple[str, ...]
) -> None:
    decision = decide(traces, None, settings=requeue, avoid=avoid)
    comes_back = decision.action in (Action.REQUEUE, Action.LEAVE)
    assert bool(decision.exclude) <= (decision.action is Action.REQUEUE and bool(avoid))
    if comes_back and not decision.exclude:
        assert traces.job is not None and not traces.stop_asked
        assert decision.reason in ("preempted", "time_limit", "requeued", "signalled", "node_failure")
    if decision.action is Action.REQUEUE:
        assert requeue.enabled
    if decision.action is Action.RELAUNCH:
        assert traces.may_relaunch and decision.reason is Reason.FAILED
    if traces.job is CANCELLED:
        assert decision.action in (Action.STOP, Action.FINISH), "a cancelled job is never brought back"
    if decision.action is Action.FINISH:
        assert traces.is_finished


def test_ends_count_since_the_newest_that_brought_the_run_on_or_stopped_it() -> None:
    vain = [
        *(ended(0, reason) for reason in (Reason.FAILED, Reason.PREEMPTED, Reason.LOST, Reason.REQUEUED)),
        Attempt(9, Start()),
    ]
    counts = {Reason.FAILED: 1, Reason.PREEMPTED: 2, Reason.NODE_FAILURE: 1}
    assert ends_without_progress(vain) == counts
    end = End(time_unix_s=90.0, reason=Reason.PREEMPTED, first_step=1, last_step=2)
    assert ends_without_progress([*vain, Attempt(1, Start(), end), *vain]) == counts
    stopped = ended(1, Reason.TIME_LIMIT, action=Action.STOP)
    assert ends_without_progress([*vain, stopped, ended(2, Reason.TIME_LIMIT)]) == {Reason.TIME_LIMIT: 1}


def test_starts_of_a_job_that_left_no_trace_count_as_starts_without_progress() -> None:
    full_disk = ended(0, Reason.FILE_SYSTEM, start=Start(job_id="7", restart_count=1))
    other_job = ended(0, Reason.FAILED, start=Start(job_id="6", restart_count=9))
    this_start = ended(0, Reason.FAILED, start=Start(job_id="7", restart_count=2))
    counts = [
        starts_without_progress(ledger, job_id="7", restart_count=2)
        for ledger in ([], [other_job], [full_disk], [this_start])
    ]
    assert counts == [3, 3, 2, 0]


@pytest.mark.parametrize(
    ("facts", "first_committed", "nodes"),
    [
        ({"failed_on": ("node2",)}, None, ("node2",)),
        ({"failed_on": ("node2",), "last_committed": 5}, 4, ()),
        ({"failed_on": ("node2",), "reason": Reason.PREEMPTED}, None, ()),
        ({}, None, ()),
    ],
)
def test_a_node_is_blamed_for_a_failure_without_progress_alone(
    facts: dict[str, Any], first_committed: int | None, nodes: tuple[str, ...]
) -> None:
    end = End(**{"time_unix_s": 90.0, "reason": Reason.FAILED, **facts})
    first = Attempt(0, Start(), End(time_unix_s=9.0, reason=Reason.FAILED, failed_on=("node1",)))
    assert last_bad_nodes([first, Attempt(1, Start(first_committed=first_committed), end)]) == nodes


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("rank 0 on a: RuntimeError: CUDA error: out of memory", "; out of GPU memory: lower batch.local_size"),
        ("rank 0 on a: Out Of Memory", "; out of the node's memory: raise cluster.memory_gb_per_node"),
        ("rank 0 on a: ValueError: memory", ""),
        ("rank 0 on a: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "; out of GPU memory"),
        ("rank 0 on a: OSError: [Errno 12] Cannot allocate memory", "; out of the node's memory"),
        (
            "rank 0 on a: RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
            "; the node's /dev/shm is full",
        ),
        (
            "rank 0 on a: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
            "; a process of the loader",
        ),
        (
            "rank 0 on a: DataLoader worker (pid 7) is killed by signal: Segmentation fault. at a.py:1 in f",
            "; the code of",
        ),
        ("rank 0 on a: RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", "; a process of the loader"),
        ("rank 0 on a: OSError: [Errno 24] Too many open files", "; raise the limit on open files"),
        ("rank 0 on a: OSError: [Errno 122] Disk quota exceeded: '/home/me'", "; make room or raise the quota"),
        ("rank 0 on a: OSError: [Errno 116] Stale file handle", "; nodes have written the same file"),
        ("rank 0 on a: AcceleratorError: CUDA error: device-side assert triggered", "; most often an index"),
        ("rank 0 on a: Aborted: Watchdog caught collective operation timeout: WorkNCCL(", "; a rank did not join"),
        ("rank 0 on a: DistNetworkError: ... EADDRINUSE", "; let the program take MASTER_ADDR"),
        ("rank 0 on a: Bus error at train.py:7 in read", "; most often a mapped file has become shorter"),
        ("rank 0 on a: Illegal instruction", "; a library was built for a newer processor"),
        ("Unable to satisfy cpu bind request", "; the CPUs of the job are not those that srun would bind to"),
        ("srun: CPU binding outside of job step allocation", "; the CPUs of the job are not those that srun would"),
        ("srun: unrecognized option '--auto-resume=1'", "; the srun of the job does not know it"),
        ("rank 0 on a: the program ended: unrecognized option '--lr'", ""),
        ("rank 0 on a: CPU time limit exceeded", "; the program, or a shell that it runs in, limits its processor"),
        ("rank 0 on a: ended with exit code 153 (as of signal 25, File size limit exceeded)", "; the program, or"),
        ("rank 0 on a: Bad system call", "; a filter of system calls"),
        ("rank 0 on a: Alarm clock", "; a timer"),
        (
            "rank 0 on a: RuntimeError: NCCL: Call to ibv_reg_mr failed with error Cannot allocate memory",
            "; InfiniBand",
        ),
        ("rank 0 on a: Hangup", ""),
        (
            "task 1 on a: ended with exit code 1; its last words: RendezvousConnectionError",
            "; the nodes have not",
        ),
        ("rank 0 on a: OSError: AF_UNIX path too long", "; the folder for temporary files"),
    ],
)
def test_what_is_known_to_help_against_an_end_is_said(cause: str, advice: str) -> None:
    found = advice_on(cause)
    assert found.startswith(advice) and bool(found) == bool(advice)
    assert decided(SAVED, exit_code=1, cause=Cause.of(cause)).note.startswith(cause + found)


@pytest.mark.parametrize(
    ("cause", "limits", "named"),
    [
        ("rank 0 on a: MemoryError", {"AS": 700_000 << 10}, "ulimit -v"),
        ("rank 0 on a: MemoryError", {"DATA": 1 << 30, "NPROC": 4096}, "ulimit -d"),
        ("rank 0 on a: MemoryError", {"NPROC": 4096, "CPU": 3}, "node's memory"),
        ("rank 0 on a: ImportError: libtorch.so: failed to map segment from shared object", {"AS": 1}, "ulimit -v"),
        ("rank 0 on a: RuntimeError: can't start new thread", {"NPROC": 25}, "ulimit -u"),
        ("rank 0 on a: CPU time limit exceeded", {"CPU": 3}, "3 s of processor time (ulimit -t)"),
        ("rank 0 on a: OSError: [Errno 27] File too large", {"FSIZE": 1 << 20, "AS": 1}, "1.0 MiB in one file"),
        ("rank 0 on a: OSError: [Errno 27] File too large", {}, "or the file system does"),
        # CUDA's own memory is no address space, and the node's is all gone.
        ("rank 0 on a: Out Of Memory", {"AS": 1 << 30}, "node's memory"),
        ("rank 0 on a: OutOfMemoryError: CUDA out of memory", {"AS": 1 << 30}, "GPU memory"),
    ],
)
def test_a_limit_is_the_cause_where_a_process_says_that_it_came_to_it(
    cause: str, limits: dict[str, int], named: str
) -> None:
    assert named in advice_on(cause, limits)
    assert named in decided(SAVED, exit_code=1, cause=Cause.of(cause), limits=limits).note


@pytest.mark.parametrize(
    "cause",
    [
        "OSError: [Errno 11] Unable to open file (unable to lock file, errno = 11, error message = 'Resource "
        "temporarily unavailable')",
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        "ValueError: File too large: 12 MB",
        "RuntimeError: NCCL error: Call to ibv_modify_qp failed with error Connection timed out errno 110",
        "ImportError: /tmp/x.so: failed to map segment from shared object: Operation not permitted",
    ],
)
def test_words_of_other_causes_name_no_limit(cause: str) -> None:
    limits = {"AS": 1 << 30, "DATA": 1 << 30, "NPROC": 4096, "CPU": 3600, "FSIZE": 1 << 30}
    assert advice_on(f"rank 0 on a: {cause}", limits) == ""


def test_a_code_without_words_names_the_signal_of_a_shell() -> None:
    for code, words in (
        (152, "code 152 (as of signal 24, CPU time limit exceeded)"),
        (255, "code 255;"),
        (3, "code 3;"),
    ):
        assert words in decided(SAVED, exit_code=code).note
