from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, RunError
from slurm_train.rundir.attempts import note_saved, open_attempt
from slurm_train.rundir.events import FailureMark, append_event, leave_mark, note_signal, write_preflight
from slurm_train.rundir.files import append_line
from slurm_train.rundir.jobs import Holder, read_holder, take_lock
from slurm_train.rundir.ledger import NOT_REQUEUED, Start, read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.signs import Group, note_group
from slurm_train.rundir.sweep import Element
from slurm_train.rundir.timing import ProgramProgress, last_step
from slurm_train.slurm.queue_view import KnownJobs
from slurm_train.slurm.records import StepEnd, TaskEnd
from slurm_train.status.run_status import RunState, read_files, status_of
from slurm_train.supervise import job as module
from slurm_train.supervise.actions import Decision
from slurm_train.supervise.job import Job
from slurm_train.supervise.notify import Notifier
from slurm_train.supervise.requeue import requeue_after_error
from slurm_train.supervise.step import Step
from slurm_train.supervise.supervisor import Supervisor, close_lost, ignore_stop_signals, on_stop
from tests.support.ledgers import close_attempt, ledger_lines

ME = Holder(job_id="7", host="node1", pid=1, started="1")
OTHER = Holder(job_id="8", host="node2", pid=2, started="2")
RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "Reason": "None", "Restarts": "0"}
PREEMPTED = {**RUNNING, "PreemptTime": "2026-01-31T09:41:24"}
ENDING = {**PREEMPTED, "JobState": "COMPLETING"}
CANCELLED = {**RUNNING, "JobState": "COMPLETING"}
FULL = OSError(errno.ENOSPC, "No space left on device")


def start(job_id: str | None = "7", restart_count: int = 0) -> Start:
    return Start(job_id=job_id, restart_count=restart_count, nodes=("node1",), world_size=8)


class Ranks(Step):
    """The ranks of a world, which says what becomes of them."""

    def __init__(self, world: World) -> None:
        super().__init__(start())
        self._world = world

    def run(self, attempt: int) -> int:
        return self._world.launch(attempt)

    def ended(self, attempt: int) -> StepEnd:
        return StepEnd(violent=self._world.killed)

    def num_oom_kills(self) -> int:
        return self._world.oom_kills

    def can_avoid(self, nodes: Sequence[str]) -> bool:
        return self._world.has_spare_nodes

    def lost_nodes(self, job: Mapping[str, str] | None) -> Sequence[str]:
        return self._world.lost

    def nodes_without(self, nodes: Sequence[str]) -> Sequence[str]:
        return self._world.others if nodes else ()

    def use(self, nodes: Sequence[str], *, without: Sequence[str]) -> None:
        self._world.events.append(f"use {','.join(nodes)} without {','.join(without)}")
        self._world.lost = ()

    def clear(self, attempt: int) -> bool:
        return self._world.clears


class World(Job):
    """A run and its job; what happened is kept in `events`, in order."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__({})
        self.run, self.holder, self.job_id = run, ME, "7"
        self.step = Ranks(self)
        self.jobs: list[dict[str, str] | None] = [dict(RUNNING)]
        """The job's record; where there are several, each look takes one away."""
        self.requeue_works, self.lives, self.clears = True, True, True
        self.new_job, self.ends = "", tuple[str, ...]()
        self.killed: TaskEnd | None = None
        self.lost, self.others = tuple[str, ...](), tuple[str, ...]()
        self.oom_kills, self.has_spare_nodes = 0, True
        self.committed: int | None = None
        """Step of the newest checkpoint; None for a user's own code."""
        self.events, self.delays_s = list[str](), list[int]()
        self.ledger_at_requeue: list[dict[str, object]] = []
        self.holder_at_requeue: Holder | None = ME

    def restarted(self, count: int) -> None:
        self.step.start = start(restart_count=count)
        self.restart_count = count

    def supervisor(self, *, enabled: bool = True, is_own_code: bool = False) -> Supervisor:
        committed_step = None if self.committed is None else lambda: int(str(self.committed))
        settings = RequeueSection(enabled=enabled)
        return Supervisor(self.run, self, self.step, settings, committed_step=committed_step, is_own_code=is_own_code)

    def supervise(self, launch: Callable[[int], int], **words: bool) -> int:
        self.launch = launch
        return self.supervisor(**words).supervise()

    def is_alive(self, holder: Holder) -> bool:
        return self.lives

    def show(self) -> dict[str, str] | None:
        return self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]

    def past_ends(self, job_id: str) -> Sequence[str]:
        return self.ends

    def requeue(self, decision: Decision) -> bool:
        self.events.append(f"requeue without {','.join(decision.exclude)}" if decision.exclude else "requeue")
        self.delays_s.append(decision.delay_s)
        with contextlib.suppress(OSError):
            self.ledger_at_requeue = ledger_lines(self.run)
            self.holder_at_requeue = read_holder(self.run.lock)
        return self.requeue_works

    def resubmit(self, decision: Decision) -> str:
        self.events.append("resubmit")
        return self.new_job

    def ranks(
        self,
        code: int,
        *,
        steps: int = 0,
        commits: bool = False,
        result: bool = False,
        leaves: Callable[[int], object] = lambda _attempt: None,
    ) -> Callable[[int], int]:
        """Returns ranks that make steps, perhaps commit, finish or leave something behind, and end with a code."""

        def launch(attempt: int) -> int:
            self.events.append(f"launch {attempt}")
            assert read_holder(self.run.lock) == ME
            for step in range(steps):
                append_line(self.run.metrics, {"step": last_step(self.run) + 1, "loss": 1.0, "n": step})
            if commits:
                self.committed = (self.committed or 0) + 10
            if result:
                self.run.result.write_text("{}")
            leaves(attempt)
            return code

        return launch

    def failing(self, code: int, *, rank: int = 3, message: str, place: str = "") -> Callable[[int], int]:
        """Returns ranks of which one on node2 fails and says so."""
        mark = FailureMark(rank=rank, host="node2", exit_code=code, message=message, place=place)
        return self.ranks(code, leaves=lambda attempt: leave_mark(self.run, attempt, mark))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(RunDirectory(tmp_path))
    monkeypatch.setattr(module, "wait_until_requeued", lambda _comes_back: world.events.append("wait"))
    yield world
    assert read_holder(world.run.lock) in (None, OTHER), "the lock is given back, whatever happened"


def newest(world: World) -> dict[str, Any]:
    return ledger_lines(world.run)[-1]


OUTCOMES: dict[str, tuple[dict[str, Any], int, int, list[str], str]] = {
    # what Slurm answers, the ranks' code, the exit code of all, what was done, the reason on record
    "preempted": ({"jobs": [PREEMPTED]}, 75, 75, ["requeue", "wait"], "preempted"),
    "not confirmed": ({"jobs": [PREEMPTED], "requeue_works": False}, 75, 1, ["requeue", "resubmit"], "preempted"),
    "another takes over": (
        {"jobs": [PREEMPTED], "requeue_works": False, "new_job": "8"},
        *(75, 75, ["requeue", "resubmit"], "preempted"),
    ),
    "requeued by Slurm": ({"jobs": [{**PREEMPTED, "Restarts": "1"}]}, 75, 75, ["wait"], "preempted"),
    "cancelled, ended well": ({"jobs": [CANCELLED]}, 0, 1, [], "cancelled"),
    "cancelled in the grace": ({"jobs": [ENDING], "ends": ("CANCELLED",)}, 75, 75, [], "cancelled"),
    "the grace ran out": (
        {"jobs": [ENDING], "ends": ("PREEMPTED",), "requeue_works": False},
        *(75, 1, ["requeue", "resubmit"], "preempted"),
    ),
    # The requeue does nothing then; the job's record says why.
    "cancelled before its requeue": (
        {"jobs": [RUNNING, CANCELLED], "requeue_works": False},
        *(75, 1, ["requeue"], "cancelled"),
    ),
    "0 without a result": ({}, 0, 1, [], "failed"),
    "ranks that do not end": (
        {"can_relaunch": True, "clears": False},
        *(137, 75, ["requeue", "wait"], "failed"),
    ),
    "restarted: preempted": (
        {"jobs": [{**CANCELLED, "Restarts": "1"}], "ends": ("PREEMPTED",)},
        *(75, 75, ["wait"], "preempted"),
    ),
    "restarted: lost node": (
        {"jobs": [{**CANCELLED, "Restarts": "1"}], "ends": ("NODE_FAIL",)},
        *(75, 75, ["wait"], "node_failure"),
    ),
}


@pytest.mark.parametrize("case", OUTCOMES.values(), ids=OUTCOMES)
def test_how_an_attempt_ends_and_what_is_done(
    case: tuple[dict[str, Any], int, int, list[str], str], world: World
) -> None:
    answers, code, expected, events, reason = case
    for name, value in answers.items():
        setattr(world.step if name == "can_relaunch" else world, name, list(value) if name == "jobs" else value)
    assert world.supervise(world.ranks(code, steps=1)) == expected
    assert world.events == ["launch 0", *events]
    assert (newest(world)["reason"], newest(world)["last_step"]) == (reason, 1)
    if "requeue" in events:
        assert world.ledger_at_requeue[0]["last_step"] == 1, "all is on disk before Slurm ends this process"
        assert world.holder_at_requeue is None, "the next attempt must find the lock free"


@pytest.mark.parametrize(
    ("new_job", "refusals", "outcome", "words"),
    [
        ("8", (), None, "job 8 takes over"),
        ("", ("job 7 could not be requeued: not allowed", "no other job could be submitted: limit"), "x", "limit"),
        ("", (), "x", "did not confirm"),
    ],
)
def test_the_ledger_and_the_person_are_told_what_became_of_a_requeue(
    new_job: str, refusals: tuple[str, ...], outcome: str | None, words: str, world: World
) -> None:
    world.jobs, world.requeue_works, world.new_job, world.refusals = [PREEMPTED], False, new_job, refusals
    told: list[tuple[str, str]] = []

    def notify(event: str, *, note: str, **_: Any) -> None:
        told.append((event, note))

    world.launch = world.ranks(75, steps=1)
    Supervisor(world.run, world, world.step, RequeueSection(), notify=cast("Notifier", notify)).supervise()
    entry = newest(world)
    assert (entry["reason"], entry["action"], entry["last_step"]) == ("preempted", "requeue", 1)
    assert entry.get("outcome") == (outcome and NOT_REQUEUED) and words in entry["note"]
    attempt = read_ledger(world.run)[-1]
    assert attempt.waits_for_person == bool(outcome) and attempt.comes_back != bool(outcome)
    assert [event for event, _ in told] == (["failed"] if outcome else [])
    assert world.ledger_at_requeue[0]["end_time_unix_s"] == entry["end_time_unix_s"], "it ended when it ended"


def test_a_run_that_finishes_is_booked_as_done_and_not_run_again(world: World) -> None:
    assert world.supervise(world.ranks(0, steps=3, result=True)) == 0
    facts = {"exit_code": 0, "reason": "done", "action": "finish", "first_step": 0, "last_step": 3}
    assert newest(world).items() >= facts.items()
    assert world.supervise(world.ranks(1)) == 0
    assert world.events == ["launch 0"] and len(ledger_lines(world.run)) == 1


def test_a_run_that_somebody_else_runs_is_touched_when_that_one_is_gone(world: World) -> None:
    take_lock(world.run.lock, OTHER, is_alive=lambda _holder: True)
    with pytest.raises(RunError, match="is being run by Slurm job 8"):
        world.supervise(world.ranks(0))
    assert world.events == [] and ledger_lines(world.run) == [] and read_holder(world.run.lock) == OTHER
    world.lives = False
    assert world.supervise(world.ranks(0, result=True)) == 0


@pytest.mark.parametrize("exit_code", [0, 1, 75])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_directory_that_is_moved_meanwhile_is_neither_finished_nor_made_anew(
    is_replaced: bool, exit_code: int, world: World
) -> None:
    path = world.run.path

    def move(attempt: int) -> int:
        path.rename(path.with_name(f"{path.name}-moved"))
        if is_replaced:
            path.mkdir()
        return exit_code

    with pytest.raises(RunError, match="was moved or removed while the run was at work"):
        world.supervise(move)
    assert path.exists() == is_replaced and (not is_replaced or list(path.iterdir()) == [])
    assert world.events == [], "no requeue: another start would not find the run either"


def raises(error: BaseException) -> Callable[[int], int]:
    def launch(_attempt: int) -> int:
        raise error

    return launch


def test_the_lock_is_given_back_when_the_launch_breaks(world: World) -> None:
    with pytest.raises(KeyboardInterrupt):
        world.supervise(raises(KeyboardInterrupt()))
    assert read_holder(world.run.lock) is None


def test_failures_are_started_again_here_until_three_bring_no_step(world: World) -> None:
    """Ends that are nobody's fault, and a new step, leave the budget alone."""
    for job, code, steps in ((RUNNING, 75, 0), (PREEMPTED, 75, 0), (RUNNING, 1, 0), (RUNNING, 1, 0), (RUNNING, 1, 1)):
        world.jobs = [job]
        world.supervise(world.ranks(code, steps=steps))
    world.jobs, world.step.can_relaunch, world.events = [RUNNING], True, []
    assert world.supervise(world.ranks(137)) == 137
    assert world.events == ["launch 5", "launch 6", "launch 7"]
    assert [entry["action"] for entry in ledger_lines(world.run)][-3:] == ["relaunch", "relaunch", "stop"]


def test_the_first_rank_to_fail_is_named_and_its_code_counts(world: World) -> None:
    mark = FailureMark(rank=3, host="node2", exit_code=2, message="no such layer")
    world.step.can_relaunch = True
    world.supervise(world.ranks(143, leaves=lambda attempt: leave_mark(world.run, attempt, mark)))
    assert world.events == ["launch 0"], "wrong use is not tried again"
    assert newest(world)["note"] == "rank 3 on node2: no such layer"


@pytest.mark.parametrize(
    ("job", "expected", "reason"),
    [
        (RUNNING, 0, "done"),
        (None, 0, "done"),
        ({**RUNNING, "JobState": "NODE_FAIL"}, 1, "failed"),
        (PREEMPTED, 75, "preempted"),
        ({**RUNNING, "Reason": "TimeLimit", "JobState": "COMPLETING"}, 75, "time_limit"),
        (CANCELLED, 75, "cancelled"),
    ],
)
def test_own_code_that_ends_with_0_is_done_where_slurm_has_not_ended_it(
    job: dict[str, str] | None, expected: int, reason: str, world: World
) -> None:
    world.jobs = [job]
    assert world.supervise(world.ranks(0), is_own_code=True) == expected
    assert newest(world)["reason"] == reason
    assert world.run.result.exists() == (reason == "done")


def told(world: World, **facts: Any) -> Callable[[int], object]:
    return lambda attempt: ProgramProgress(**facts).write(world.run.program(attempt))


@pytest.mark.parametrize(
    ("leaves", "expected", "reason", "asked_by"),
    [
        (lambda world: lambda _attempt: world.run.stop_file.touch(), 75, "stopped", None),
        (lambda world: lambda attempt: note_signal(world.run, attempt, "TERM"), 75, "signalled", "TERM"),
        (lambda world: lambda attempt: note_signal(world.run, attempt, "USR2"), 75, "time_limit", "USR2"),
        (lambda world: lambda attempt: note_saved(world.run, attempt), 75, "time_limit", None),
        (lambda world: told(world, step=32, max_steps=36), 1, "ended_early", None),
        (lambda world: told(world, step=36, max_steps=36, save_step=36), 1, "ended_early", None),
        (lambda world: told(world, step=36, max_steps=36), 0, "done", None),
    ],
)
def test_what_own_code_was_asked_and_has_told_decides_on_its_0(
    leaves: Callable[[World], Callable[[int], object]],
    expected: int,
    reason: str,
    asked_by: str | None,
    world: World,
) -> None:
    assert world.supervise(world.ranks(0, leaves=leaves(world)), is_own_code=True) == expected
    assert (newest(world)["reason"], newest(world).get("asked_by")) == (reason, asked_by)
    assert world.run.result.exists() == (reason == "done")
    assert ("requeue" in world.events) == (reason in ("signalled", "time_limit"))


def test_ranks_that_were_several_programs_are_named_where_the_run_has_finished(world: World) -> None:
    def leaves(attempt: int) -> None:
        note_group(world.run, attempt, Group(size=0, remark="it trains"))

    assert world.supervise(world.ranks(0, leaves=leaves), is_own_code=True) == 0
    assert newest(world)["note"] == "the run is finished; it trains"
    status = status_of(Element(run=world.run), read_files(world.run), KnownJobs(), now_unix_s=time.time())
    assert (status.state, status.note) == (RunState.FINISHED, "it trains")


def test_a_node_that_fails_twice_in_a_row_is_left_out(world: World) -> None:
    world.step.can_relaunch = True
    assert world.supervise(world.failing(1, message="ECC error")) == 75
    assert world.events == ["launch 0", "launch 1", "requeue without node2", "wait"]
    assert [entry["failed_on"] for entry in ledger_lines(world.run)] == ["node2", "node2"]


def test_ranks_that_are_started_again_here_have_not_waited_in_the_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "queue_s", lambda: 30.0)
    world.step.can_relaunch = True
    world.supervise(world.failing(1, message="ECC error"))
    assert [entry["queue_s"] for entry in ledger_lines(world.run)] == [30.0, 0.0]


def test_a_node_that_the_job_cannot_do_without_is_tried_again(world: World) -> None:
    world.step.can_relaunch, world.has_spare_nodes = True, False
    assert world.supervise(world.failing(1, message="ECC error")) == 1
    assert world.events == ["launch 0", "launch 1", "launch 2"]


@pytest.mark.parametrize(
    ("others", "events"),
    [
        (("node1", "node4"), ["use node1,node4 without node2", "launch 1"]),
        ((), ["requeue without node2", "wait"]),
    ],
)
def test_a_lost_node_is_left_or_the_job_requeued(others: tuple[str, ...], events: list[str], world: World) -> None:
    world.lost, world.others = ("node2",), others

    def launch(attempt: int) -> int:
        return world.ranks(137 if attempt == 0 else 0, result=attempt > 0)(attempt)

    world.supervise(launch)
    first = ledger_lines(world.run)[0]
    assert world.events == ["launch 0", *events]
    assert first["reason"] == "node_failure" and first["note"].startswith("node failure on node2; ")
    assert first.get("left_out") == ("node2" if others else None)


def test_an_overtaken_supervisor_writes_nothing_more(world: World) -> None:
    world.jobs = [PREEMPTED]
    with pytest.raises(RunError, match="overtaken by attempt 1"):
        world.supervise(world.ranks(75, leaves=lambda _attempt: (world.run.epochs / "attempt_1").touch()))
    assert "reason" not in newest(world) and world.events == ["launch 0"]


@pytest.mark.parametrize(
    ("job_id", "restart_count", "ends", "reason"),
    [
        pytest.param("7", 0, ("NODE_FAIL",), "node_failure", id="accounting has it"),
        pytest.param("7", 1, ("PREEMPTED", "TIMEOUT"), "time_limit", id="its own start counts"),
        pytest.param("7", 0, (), "node_failure", id="no accounting, restarted"),
        pytest.param("6", 0, (), "lost", id="no accounting, another job"),
        pytest.param("7", 1, (), "lost", id="no accounting, this start"),
    ],
)
def test_attempts_that_nobody_closed_are_closed_at_their_last_sign_of_life(
    job_id: str | None, restart_count: int, ends: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    close_attempt(run, open_attempt(run, start()), {"reason": "failed", "last_step": 3})
    lost = open_attempt(run, start(job_id, restart_count))
    last_sign_unix_s = time.time() + 500
    log = run.attempt_logs(lost) / "rank_0.log"
    log.touch()
    os.utime(log, (last_sign_unix_s, last_sign_unix_s))
    close_lost(run, start(restart_count=1), past_ends=lambda _job: ends, last_step=8)
    first, second = ledger_lines(run)
    assert (first["reason"], first["last_step"]) == ("failed", 3)
    assert (second["reason"], second["action"], second["last_step"]) == (reason, "lost", 8) and second["note"]
    assert second["end_time_unix_s"] == pytest.approx(last_sign_unix_s, rel=0, abs=0.01)


@pytest.mark.parametrize(
    ("cause", "before_s", "reason"),
    [
        ("PREEMPTION", 0, "preempted"),
        ("JOB REQUEUE", 0, "requeued"),
        ("TIME LIMIT", 0, "time_limit"),
        # Of an earlier start of the job.
        ("PREEMPTION", 100, "node_failure"),
        ("", 0, "node_failure"),
    ],
)
def test_without_accounting_the_batch_log_says_why_a_supervisor_was_killed(
    cause: str, before_s: int, reason: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    open_attempt(run, start())
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - before_s))
    line = f"slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED AT {at} DUE TO {cause} ***\n" if cause else ""
    (run.logs / "batch.log").write_text(line)
    close_lost(run, start(restart_count=1), past_ends=lambda _job: (), last_step=8)
    assert ledger_lines(run)[0]["reason"] == reason


# Half of the limit is left, and half of the minute by which Slurm may be early.
@pytest.mark.parametrize(("left_min", "reason"), [(50, "signalled"), (30.5, "time_limit"), (25, "time_limit")])
def test_a_stop_that_another_rank_saw_first_is_the_limits_only_where_a_warning_may_have_come(
    left_min: float, reason: str, world: World
) -> None:
    def leaves(attempt: int) -> None:
        append_event(world.run, "stop", attempt=attempt, asked_by="another rank", saved=False, left_s=4.0, save_s=60.0)
        # Of a rank that has not joined; the agreed stop counts.
        append_event(world.run, "signal", attempt=attempt, asked_by="TERM")

    end_unix_s = time.time() + 60 * left_min
    times = {"StartTime": end_unix_s - 3600, "EndTime": end_unix_s}
    written = {key: time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at)) for key, at in times.items()}
    world.jobs = [{**RUNNING, **written}]
    world.supervise(world.ranks(75, leaves=leaves))
    assert newest(world)["reason"] == reason
    assert "; no save at the stop: 4 s " in newest(world)["note"]


def test_the_supervisor_outlives_the_signals_that_stop_the_ranks() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        ignore_stop_signals()
        for number in numbers:
            signal.raise_signal(number)
            assert callable(signal.getsignal(number)), "a handler: an ignored signal would be inherited by the ranks"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("finding", "is_own_code", "events"),
    [
        ({"node": "node3, node4"}, False, ["launch 0", "requeue without node3,node4"]),
        ({"blames_node": False}, False, ["launch 0", "launch 1"]),
        # None of it has begun, so it may be started again.
        ({}, True, ["launch 0", "requeue without node3"]),
    ],
)
def test_what_the_preflight_finds(finding: dict[str, Any], is_own_code: bool, events: list[str], world: World) -> None:
    facts = {
        "code": "GPU_SICK",
        "level": "error",
        "node": "node3",
        "seen": "seen",
        "todo": "todo",
        "blames_node": True,
    } | finding
    world.step.can_relaunch = True
    world.supervise(
        world.ranks(1, leaves=lambda attempt: write_preflight(world.run, attempt, {"findings": [facts]})),
        is_own_code=is_own_code,
    )
    assert world.events[: len(events)] == events
    assert ledger_lines(world.run)[0]["found"] == f"GPU_SICK {facts['node']}"


def time_limits(world: World, number: int, **ranks: bool) -> list[int]:
    codes = []
    for _ in range(number):
        codes.append(world.supervise(world.ranks(75, steps=1, **ranks)))
        world.restarted(world.step.start.restart_count + 1)
    return codes


def test_time_limits_without_a_new_checkpoint_stop_the_run_with_a_reason(world: World) -> None:
    world.committed = -1
    assert time_limits(world, 3) == [75, 75, 75] and world.events[-1] == "launch 2"
    assert [entry["action"] for entry in ledger_lines(world.run)] == ["requeue", "requeue", "stop"]
    note = str(newest(world)["note"])
    assert "3 time limits in a row without a new checkpoint" in note and "cluster.time_limit_min" in note
    # Whoever starts it again after that has the whole budget.
    assert time_limits(world, 3) == [75, 75, 75] and len(ledger_lines(world.run)) == 6


def test_a_new_checkpoint_clears_the_budget_and_logged_steps_do_not(world: World) -> None:
    world.committed = -1
    time_limits(world, 2)
    time_limits(world, 1, commits=True)
    time_limits(world, 2)
    assert {entry["action"] for entry in ledger_lines(world.run)} == {"requeue"}
    time_limits(world, 1)
    assert newest(world)["action"] == "stop"


def test_own_code_comes_back_without_end(world: World) -> None:
    assert time_limits(world, 8) == [75] * 8
    assert {entry["action"] for entry in ledger_lines(world.run)} == {"requeue"}


def test_a_job_that_loses_its_node_each_time_is_ended_at_a_start(world: World) -> None:
    world.committed, world.ends = -1, ("NODE_FAIL",) * 9
    # The last one is a person's own start, which the budget of Slurm's starts does not refuse.
    for count in (0, 1, 2, 3, 4, 5, 0):
        world.restarted(count)
        with pytest.raises(RuntimeError):
            world.supervise(raises(RuntimeError("lost")))
    world.restarted(6)
    assert world.supervise(world.ranks(0)) == EXIT_FAILURE and world.events == []
    entry = newest(world)
    assert (entry["attempt"], entry["reason"], entry["action"]) == (6, "node_failure", "stop")
    world.restarted(0)
    assert world.supervise(world.ranks(0, result=True)) == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", None),
        ("attempts.jsonl", None),
        ("events.jsonl", '{"event": "stop", "attempt": 0, "saved": false, "left_s": null, "save_s": "x"}\n'),
        ("events.jsonl", None),
        ("logs/attempt_0/failures.jsonl", None),
        ("logs/attempt_0/timing.json", '{"begin_unix_s": "x"}'),
        ("logs/attempt_0/preflight.json", '{"findings": [3]}'),
        ("lock.json", None),
        ("checkpoints", "no folder"),
    ],
)
def test_nothing_that_cannot_be_read_or_written_keeps_a_job_from_its_requeue(
    name: str, content: str | None, world: World
) -> None:
    world.committed = -1

    def launch(attempt: int) -> int:
        path = world.run.path / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_text(content)
        return world.ranks(75)(attempt) if name != "lock.json" else 75

    world.jobs = [PREEMPTED]
    assert world.supervise(launch) == 75
    assert world.events[-2:] == ["requeue", "wait"]
    if name == "lock.json":
        world.run.lock.rmdir()


def test_own_code_that_has_ended_well_is_done_though_the_disk_is_full(world: World) -> None:
    def launch(_attempt: int) -> int:
        world.run.result.with_name(f".result.json.{os.getpid()}.tmp").mkdir()
        return 0

    assert world.supervise(launch, is_own_code=True) == EXIT_DONE
    assert newest(world)["reason"] == "done"


def test_a_start_that_cannot_write_comes_back_later_each_time(world: World) -> None:
    """No start leaves a trace, so Slurm's own count tells their number."""
    codes = []
    for count in range(11):
        world.restarted(count)
        codes.append(requeue_after_error(world.run, world, FULL))
    assert codes == [75] * 10 + [1]
    assert world.delays_s == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600]
    for lasting in (FileNotFoundError("no srun"), OSError(errno.EINVAL, "Invalid argument")):
        with pytest.raises(type(lasting)):  # does not pass by itself
            requeue_after_error(world.run, world, lasting)


def test_what_becomes_of_a_start_without_an_attempt_is_not_written_into_another(world: World) -> None:
    world.supervise(world.ranks(75))
    ledger = ledger_lines(world.run)
    world.restarted(1)
    world.requeue_works, world.new_job = False, "9"
    assert requeue_after_error(world.run, world, FULL) == 75
    assert world.events[-1] == "resubmit" and ledger_lines(world.run) == ledger


def test_a_launch_that_finds_the_disk_full_is_on_record_and_uses_no_budget_of_failures(world: World) -> None:
    for count in range(4):
        world.restarted(count)
        with pytest.raises(OSError, match="No space left"):
            world.supervise(raises(FULL))
        assert requeue_after_error(world.run, world, FULL) == 75
    assert {(entry["reason"], entry["action"]) for entry in ledger_lines(world.run)} == {("file_system", "requeue")}
    assert world.delays_s == [60, 120, 240, 480]
    world.restarted(4)
    assert world.supervise(world.ranks(0, result=True)) == 0


def without_room(world: World) -> Callable[[int], int]:
    """Returns ranks that end as the preflight finds too little room."""
    facts = {"code": "DISK_FULL", "level": "error", "node": "node1", "seen": "3 MiB are left", "todo": "x"}
    return world.ranks(2, leaves=lambda attempt: write_preflight(world.run, attempt, {"findings": [facts]}))


def test_a_run_that_was_cancelled_does_not_wait_for_room(world: World) -> None:
    world.restarted(1)
    world.jobs = [CANCELLED]
    world.supervise(without_room(world))
    assert newest(world)["reason"] == "cancelled" and world.events == ["launch 0"]


@pytest.mark.parametrize(("restart_count", "code"), [(0, 2), (1, 75)])
def test_a_run_that_comes_back_to_too_little_room_is_put_off(restart_count: int, code: int, world: World) -> None:
    launch = without_room(world)
    world.restarted(restart_count)
    world.step.can_relaunch = True
    assert world.supervise(launch) == code
    assert world.delays_s == ([60] if restart_count else [])
    assert newest(world)["reason"] == ("file_system" if restart_count else "failed")


SAME = ("ValueError: no such layer", "model.py:41 in forward")
FIT = "OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB"


@pytest.mark.parametrize(
    ("marks", "commits", "num_launches"),
    [
        # The same exception at the same place, on whatever rank: not a third time.
        ((SAME, SAME, SAME), False, 2),
        (((FIT.format(20), SAME[1]), (FIT.format(24), SAME[1])), False, 2),
        # A checkpoint came between, so it is another part of the data.
        ((SAME, SAME, SAME, SAME), True, 4),
        # Another message or place, or one that may pass by itself: up to requeue.max_failures_without_progress.
        ((SAME, ("ValueError: no", SAME[1]), SAME), False, 3),
        ((SAME, (SAME[0], "model.py:40 in forward"), SAME), False, 3),
        ((("OSError: gone", ""),) * 3, False, 3),
    ],
)
def test_the_same_exception_twice_is_not_tried_a_third_time(
    marks: Sequence[tuple[str, str]], commits: bool, num_launches: int, world: World
) -> None:
    world.committed, world.step.can_relaunch = 0, True

    def launch(attempt: int) -> int:
        if attempt == len(marks):
            return world.ranks(0, result=True)(attempt)
        message, place = marks[attempt]
        mark = FailureMark(rank=attempt % 2, host=f"node{attempt % 2}", exit_code=1, message=message, place=place)
        leave_mark(world.run, attempt, mark)
        return world.ranks(1, commits=commits)(attempt)

    world.supervise(launch)
    assert world.events[:num_launches] == [f"launch {attempt}" for attempt in range(num_launches)]
    entry = ledger_lines(world.run)[num_launches - 1]
    assert (entry["action"], "so it is not tried a third time" in entry["note"]) == (
        "relaunch" if commits else "stop",
        num_launches == 2,
    )


def test_a_person_may_try_the_same_again(world: World) -> None:
    world.committed, world.step.can_relaunch = 0, True

    for total in (2, 4):
        world.supervise(world.failing(1, message=SAME[0], place=SAME[1]))
        assert len(ledger_lines(world.run)) == total


@pytest.mark.parametrize(
    ("end", "oom_kills", "note"),
    [
        (None, 1, "a rank was killed (an oom-kill by the kernel); out of the node's memory: raise cluster.memory_gb"),
        (
            TaskEnd((3,), "node1", "Killed"),
            1,
            "rank 3 on node1: Killed (an oom-kill by the kernel); out of the node's memory: ",
        ),
        # What the kernel of another node did is not known here.
        (TaskEnd((3,), "node2", "Killed"), 1, "rank 3 on node2: Killed"),
        (TaskEnd((3,), "node1", "Killed"), 0, "rank 3 on node1: Killed"),
        (
            TaskEnd((3,), "node2", "Out Of Memory"),
            0,
            "rank 3 on node2: Out Of Memory; out of the node's memory: raise ",
        ),
    ],
)
def test_an_end_for_want_of_memory_is_called_so(end: TaskEnd | None, oom_kills: int, note: str, world: World) -> None:
    world.killed = end

    def launch(attempt: int) -> int:
        world.oom_kills += oom_kills
        return world.ranks(137)(attempt)

    world.supervise(launch)
    said = str(newest(world)["note"])
    assert said.startswith(note) and ("memory" in said) == ("memory" in note)


@pytest.mark.parametrize(("handler", "asked"), [(signal.SIG_DFL, ["HUP", "TERM"]), (signal.SIG_IGN, ["TERM"])])
def test_a_closed_terminal_asks_for_a_stop_unless_it_is_ignored(handler: signal.Handlers, asked: list[str]) -> None:
    """`nohup` has the programs that it starts ignore it."""
    before = signal.signal(signal.SIGHUP, handler)
    heard: list[str] = []
    number = "HUP"
    try:
        with on_stop(lambda: heard.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            number = "TERM"
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == asked and signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
