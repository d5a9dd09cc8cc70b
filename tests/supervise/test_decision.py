from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.schema import RequeueSection
from slurm_train.rundir.ledger import Action, Attempt, Reason
from slurm_train.supervise.decision import (
    Course,
    JobAtEnd,
    NodesAtEnd,
    Outcome,
    advice_on,
    decide,
    ends_without_progress,
    last_failed_on,
    node_of,
    starts_without_progress,
)
from slurm_train.supervise.growth import Growth
from tests.support.ledgers import attempt_of

RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "Reason": "None", "Restarts": "0"}
PREEMPTED = {**RUNNING, "PreemptTime": "2026-01-31T09:41:24"}
TIME_LIMIT = {**RUNNING, "JobState": "COMPLETING", "Reason": "TimeLimit"}
CANCELLED = {**RUNNING, "JobState": "COMPLETING"}
REQUEUED = {**PREEMPTED, "JobState": "COMPLETING", "Restarts": "1"}

# A job whose ranks were asked to stop, saved, and said so.
SAVED = Outcome(
    exit_code=75,
    settings=RequeueSection(),
    job=JobAtEnd(is_slurm=True, record=RUNNING, can_relaunch=True),
)
LOCAL = replace(SAVED, job=JobAtEnd(is_slurm=False))
GROUPS = ("job", "nodes", "course")

GROWTH = Growth(nodes=4, is_worth_it=True, pays_after_s=90.0, sentence="4 nodes instead of 3", exclude=("node2",))
LOST: dict[str, Any] = {"lost": ("node2",), "cause": "node failure on node2"}


def with_facts(outcome: Outcome, **facts: Any) -> Outcome:
    """Returns the outcome with other facts, each by its name, in whichever group it stands."""
    for group in GROUPS:
        part = getattr(outcome, group)
        names = {field.name for field in fields(part)} & facts.keys()
        outcome = replace(outcome, **{group: replace(part, **{name: facts.pop(name) for name in names})})
    return replace(outcome, **facts)


# What is known besides that, or instead of it, and what follows.
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "finished, and a rank aborted after it": ("done finish", {"exit_code": 134, "is_finished": True}),
    "preempted": ("preempted requeue", {"record": PREEMPTED}),
    "warned before the limit": ("time_limit requeue", {}),
    "signalled by somebody": ("signalled requeue", {"asked_by": "TERM"}),
    "asked to stop for more nodes": ("growth requeue", {"asked_by": "USR2", "growth": GROWTH}),
    "preempted in that moment": ("preempted requeue", {"asked_by": "USR2", "growth": GROWTH, "record": PREEMPTED}),
    "cancelled in that moment": ("cancelled stop", {"asked_by": "USR2", "growth": GROWTH, "record": CANCELLED}),
    "failed instead of stopping": ("failed relaunch", {"growth": GROWTH, "exit_code": 1}),
    "the late end of a lost node's step": ("signalled requeue", {"asked_by": "another rank", "is_early": True}),
    "warned, and another rank saw it first": ("time_limit requeue", {"asked_by": "another rank"}),
    "warned by hand, long before the limit": ("time_limit requeue", {"asked_by": "USR2", "is_early": True}),
    "a script that dies of the warning": ("time_limit requeue", {"exit_code": 140, "can_relaunch": False}),
    "one rank dies of the warning, the others of its end": (
        "time_limit requeue",
        {"exit_code": 143, "can_relaunch": False, "cause": "rank 3 on node2: User defined signal 2"},
    ),
    "cancelled, and a rank dies of the warning": ("cancelled stop", {"record": CANCELLED, "exit_code": 140}),
    "over the limit": ("time_limit requeue", {"record": TIME_LIMIT, "exit_code": 143}),
    "cancelled, ranks saved": ("cancelled stop", {"record": {**CANCELLED, "PreemptTime": "Unknown"}}),
    "cancelled and already so called": ("cancelled stop", {"record": {**RUNNING, "JobState": "CANCELLED"}}),
    "cancelled while it was being preempted": ("cancelled stop", {"record": {**PREEMPTED, "JobState": "CANCELLED"}}),
    "`cancel` leaves a STOP file, too": ("cancelled stop", {"stop_asked": True, "record": CANCELLED}),
    "stopped by the STOP file": ("stopped stop", {"stop_asked": True}),
    "stopped by file while preempted": ("stopped stop", {"stop_asked": True, "record": PREEMPTED}),
    "twice in a row on the same node": (
        "failed requeue",
        {"exit_code": 137, "failures_without_progress": 2, "bad": ("node2",)},
    ),
    "a bad node does not add to the budget": (
        "failed stop",
        {"exit_code": 137, "failures_without_progress": 3, "bad": ("node2",)},
    ),
    "the same exception twice": ("failed stop", {"exit_code": 1, "failures_without_progress": 2, "is_repeated": True}),
    "and once more": ("failed stop", {"exit_code": 137, "failures_without_progress": 3}),
    "wrong use is not tried again": ("failed stop", {"exit_code": 2}),
    "0 without a result is no success": ("failed relaunch", {"exit_code": 0}),
    "Slurm does not answer": ("unknown stop", {"record": None}),
    "Slurm does not answer and it failed": ("failed relaunch", {"record": None, "exit_code": 1}),
    "Slurm does not answer and it died of the warning": ("failed relaunch", {"record": None, "exit_code": 140}),
    "somebody requeued it by hand": ("requeued leave", {"record": {**CANCELLED, "Restarts": "1"}, "exit_code": 143}),
    "a node was lost and Slurm brought the job back": (
        "node_failure leave",
        {"record": {**CANCELLED, "Restarts": "1"}, "exit_code": 0, "cause": "node failure on node2"},
    ),
    "a node was lost and srun says 0": ("node_failure relaunch", {"exit_code": 0, **LOST, "next": ("node1", "node4")}),
    "a node was lost and none is left": ("node_failure requeue", {"exit_code": 137, **LOST}),
    "a node was lost from a script's job": (
        "node_failure relaunch",
        {"exit_code": 1, **LOST, "next": ("node1", "node4"), "can_relaunch": False},
    ),
    "nodes were lost too often": (
        "node_failure stop",
        {"exit_code": 137, **LOST, "next": ("node1", "node4"), "earlier_ends": {"node_failure": 5}},
    ),
    "a node was lost and requeue is off": (
        "node_failure stop",
        {"exit_code": 137, **LOST, "next": ("node1", "node4"), "settings": RequeueSection(enabled=False)},
    ),
    "a node was lost while the job was being preempted": (
        "preempted requeue",
        {"record": PREEMPTED, "exit_code": 137, **LOST, "next": ("node1", "node4")},
    ),
    "a node was lost from a job that was cancelled": (
        "cancelled stop",
        {"record": CANCELLED, **LOST, "next": ("node1", "node4")},
    ),
    "a bad node and others in the job": (
        "failed relaunch",
        {"exit_code": 1, "failures_without_progress": 1, "bad": ("node2",), "next": ("node1", "node4")},
    ),
    "requeue switched off": ("preempted stop", {"record": PREEMPTED, "settings": RequeueSection(enabled=False)}),
    "Slurm was quicker": ("preempted leave", {"record": REQUEUED}),
    "an earlier restart is not this one": ("preempted requeue", {"record": REQUEUED, "restart_count": 1}),
    "a second time limit without progress": ("time_limit requeue", {"earlier_ends": {"time_limit": 1}}),
    "a third one": ("time_limit stop", {"earlier_ends": {"time_limit": 2}}),
    "preemptions without progress": (
        "preempted requeue",
        {"record": PREEMPTED, "earlier_ends": {"preempted": 88, "time_limit": 9}, "failures_without_progress": 50},
    ),
    "too many of them": ("preempted stop", {"record": PREEMPTED, "earlier_ends": {"preempted": 89}}),
    "signals count as preemptions": ("signalled stop", {"asked_by": "TERM", "earlier_ends": {"preempted": 89}}),
    "Slurm was quicker than the budget": ("preempted leave", {"record": REQUEUED, "earlier_ends": {"preempted": 89}}),
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
def test_what_follows_from_what_is_known(known: Outcome, expected: str, facts: dict[str, Any]) -> None:
    decision = decide(with_facts(known, **facts))
    assert f"{decision.reason} {decision.action}" == expected
    assert decision.note and "\n" not in decision.note


def test_the_next_attempt_leaves_out_what_is_lost_or_bad() -> None:
    lost = decide(with_facts(SAVED, exit_code=137, **LOST, next=("node1", "node4")))
    nodes = NodesAtEnd(bad=("node1", "node2"), next=("node4", "node5"))
    bad = decide(replace(SAVED, exit_code=1, nodes=nodes, cause="no GPU"))
    assert (lost.left_out, bad.left_out, lost.exclude) == (("node2",), ("node1", "node2"), ())
    # Slurm may not have noticed: the requeued job would get it again.
    assert decide(with_facts(SAVED, exit_code=137, **LOST, bad=("node2",))).exclude == ("node2",)


@pytest.mark.parametrize(("job", "is_over"), [(TIME_LIMIT, True), (RUNNING, False), (PREEMPTED, False)])
def test_only_a_job_over_its_limit_needs_the_plain_form_of_requeue(job: dict[str, str], is_over: bool) -> None:
    assert decide(with_facts(SAVED, record=job)).is_over is is_over


outcomes = st.builds(
    Outcome,
    exit_code=st.sampled_from([0, 1, 2, 75, 137, 143]),
    is_finished=st.booleans(),
    stop_asked=st.booleans(),
    settings=st.builds(RequeueSection, enabled=st.booleans(), max_failures_without_progress=st.integers(1, 5)),
    asked_by=st.sampled_from(["", "TERM", "USR2", "another rank"]),
    job=st.builds(
        JobAtEnd,
        is_slurm=st.booleans(),
        record=st.sampled_from([None, RUNNING, PREEMPTED, TIME_LIMIT, CANCELLED, REQUEUED, {}]),
        restart_count=st.integers(0, 2),
        is_early=st.booleans(),
        can_relaunch=st.booleans(),
    ),
    nodes=st.builds(NodesAtEnd, bad=st.sampled_from([(), ("node2",)])),
    course=st.builds(Course, failures_without_progress=st.integers(0, 9)),
)


@settings(deadline=None)
@given(outcomes)
def test_a_job_comes_back_only_where_slurm_said_why(outcome: Outcome) -> None:
    decision = decide(outcome)
    assert isinstance(decision.reason, Reason) and isinstance(decision.action, Action)
    assert bool(decision.exclude) <= (decision.action == "requeue" and bool(outcome.nodes.bad))
    if decision.action in ("requeue", "leave") and not decision.exclude:
        assert outcome.job.record is not None and not outcome.stop_asked
        assert decision.reason in ("preempted", "time_limit", "requeued", "signalled", "node_failure")
    if decision.action == "requeue":
        assert outcome.settings.enabled
    if decision.action == "relaunch":
        assert outcome.job.can_relaunch and decision.reason == "failed"
    if outcome.job.record is CANCELLED:
        assert decision.action in ("stop", "finish"), "a cancelled job is never brought back"
    if decision.action == "finish":
        assert outcome.is_finished


def end(reason: str, **facts: Any) -> Attempt:
    values = {"action": "requeue", "end_time_unix_s": 90.0, "time_unix_s": 10.0, **facts}
    return attempt_of(reason=reason, **values)


def test_ends_count_since_the_newest_that_brought_the_run_on_or_stopped_it() -> None:
    vain = [end("failed"), end("preempted"), end("lost"), end("requeued"), attempt_of(attempt=9)]
    assert ends_without_progress(vain) == {"failed": 1, "preempted": 2, "node_failure": 1}
    assert ends_without_progress([*vain, end("preempted", first_step=1, last_step=2), *vain]) == ends_without_progress(
        vain
    )
    assert ends_without_progress([*vain, end("time_limit", action="stop"), end("time_limit")]) == {"time_limit": 1}


def test_starts_of_a_job_that_left_no_trace_count_as_starts_without_progress() -> None:
    full_disk = end("file_system", job_id="7", restart_count=1)
    other_job = end("failed", job_id="6", restart_count=9)
    counts = [
        starts_without_progress(ledger, job_id="7", restart_count=2)
        for ledger in ([], [other_job], [full_disk], [end("failed", job_id="7", restart_count=2)])
    ]
    assert counts == [3, 3, 2, 0]


@pytest.mark.parametrize(
    ("newest_end", "node"),
    [
        (end("failed", failed_on="node2"), "node2"),
        (end("failed", failed_on="node2", first_committed=4, last_committed=5), ""),
        (end("preempted", failed_on="node2"), ""),
        (end("failed"), ""),
    ],
)
def test_a_node_is_blamed_for_a_failure_without_progress_alone(newest_end: Attempt, node: str) -> None:
    assert last_failed_on([end("failed", failed_on="node1"), newest_end]) == ((node,) if node else ())


@pytest.mark.parametrize(
    ("cause", "node"),
    [
        ("rank 3 on node2: Killed", "node2"),
        ("ranks 0-3 on node2: Killed", "node2"),
        ("node failure on node2", "node2"),
        ("node failure on node[2-3]", ""),
        ("no answer from node2, node3 within 25 s", ""),
        ("srun itself was killed by signal 9", ""),
    ],
)
def test_the_node_of_a_cause(cause: str, node: str) -> None:
    assert node_of(cause) == node


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
    assert decide(replace(SAVED, exit_code=1, cause=cause)).note.startswith(cause + found)


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
    assert named in decide(replace(SAVED, exit_code=1, cause=cause, limits=limits)).note


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
        assert words in decide(replace(SAVED, exit_code=code)).note
