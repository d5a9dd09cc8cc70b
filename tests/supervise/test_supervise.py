from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, RunError
from slurm_train.rundir.attempts import AttemptStart, read_ledger
from slurm_train.rundir.events import FailureMark, append_event, fatal_line, leave_mark, read_preflight, write_preflight
from slurm_train.rundir.files import append_line
from slurm_train.rundir.jobs import Holder, read_holder, take_lock
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import Spent, account_path, last_step
from slurm_train.supervise import supervisor as module
from slurm_train.supervise.decision import Decision
from slurm_train.supervise.supervisor import Site, come_back_later, ignore_stop_signals, supervise

ME = Holder(job_id="7", host="node1", pid=1, started="1")
OTHER = Holder(job_id="8", host="node2", pid=2, started="2")
RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "Reason": "None", "Restarts": "0"}
PREEMPTED = {**RUNNING, "PreemptTime": "2026-01-31T09:41:24"}


@dataclass
class World:
    """A run and the site around it; what happened is kept in `events`, in order."""

    run: RunDirectory
    job: dict[str, str] | None = field(default_factory=lambda: dict(RUNNING))
    next_job: Callable[[], dict[str, str]] | None = None
    """Instead of `job`, where the record changes."""
    requeue_works: bool = True
    lives: bool = True
    can_relaunch: bool = False
    clears: bool = True
    new_job: str = ""
    past_ends: tuple[str, ...] = ()
    restart_count: int = 0
    committed: int | None = None
    """Step of the newest checkpoint; None for a user's own code."""
    delays_s: list[int] = field(default_factory=list)
    explain: Callable[[int], str] = lambda _attempt: ""
    events: list[str] = field(default_factory=list)
    ledger_at_requeue: list[dict[str, object]] = field(default_factory=list)
    holder_at_requeue: Holder | None = ME

    def supervise(self, launch: Callable[[int], int], *, enabled: bool = True, is_own_code: bool = False) -> int:
        return supervise(self.run, RequeueSection(enabled=enabled), self.site(), launch, is_own_code=is_own_code)

    def site(self) -> Site:
        return Site(
            start=AttemptStart(job_id="7", restart_count=self.restart_count, nodes=("node1",), world_size=8),
            holder=ME,
            is_alive=lambda _holder: self.lives,
            explain=self.explain,
            show_job=lambda: self.job if self.next_job is None else self.next_job(),
            requeue=self._requeue,
            resubmit=self._resubmit,
            can_avoid=lambda _node: True,
            clear=lambda _attempt: self.clears,
            past_ends=lambda _job: self.past_ends,
            can_relaunch=self.can_relaunch,
            committed_step=None if self.committed is None else lambda: int(str(self.committed)),
        )

    def _requeue(self, decision: Decision) -> bool:
        self.events.append(f"requeue without {decision.exclude}" if decision.exclude else "requeue")
        self.delays_s.append(decision.delay_s)
        with contextlib.suppress(OSError):
            self.ledger_at_requeue = read_ledger(self.run)
            self.holder_at_requeue = read_holder(self.run)
        return self.requeue_works

    def _resubmit(self, _decision: Decision) -> str:
        self.events.append("resubmit")
        return self.new_job

    def ranks(self, code: int, *, steps: int = 0, commits: bool = False, result: bool = False) -> Callable[[int], int]:
        """Returns ranks that make steps, perhaps commit or finish, and end with a code."""

        def launch(attempt: int) -> int:
            self.events.append(f"launch {attempt}")
            assert read_holder(self.run) == ME
            for step in range(steps):
                append_line(self.run.metrics, {"step": last_step(self.run) + 1, "loss": 1.0, "n": step})
            if commits:
                self.committed = (self.committed or 0) + 10
            if result:
                self.run.result.write_text("{}")
            return code

        return launch


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(RunDirectory(tmp_path))
    monkeypatch.setattr(module, "wait_for_the_end", lambda _comes_back: world.events.append("wait"))
    yield world
    assert read_holder(world.run) in (None, OTHER), "the lock is given back, whatever happened"


def ledger_line(world: World) -> dict[str, object]:
    (line,) = read_ledger(world.run)
    return {key: value for key, value in line.items() if not key.endswith("time_unix_s") and key != "event"}


START_FACTS = {"attempt": 0, "job_id": "7", "restart_count": 0, "nodes": ["node1"], "world_size": 8}


def test_a_run_that_finishes_is_booked_as_done(world: World) -> None:
    assert world.supervise(world.ranks(0, steps=3, result=True)) == 0
    line = ledger_line(world)
    # Ranks that never met were starting all the time.
    assert 0 <= float(str(line.pop("start_s"))) < 5
    assert line == START_FACTS | {
        "reason": "done",
        "action": "finish",
        "note": "the run is finished",
        "exit_code": 0,
        "first_step": 0,
        "last_step": 3,
    }
    assert world.events == ["launch 0"]


def test_a_finished_run_is_not_run_again(world: World) -> None:
    world.run.result.write_text("{}")
    assert world.supervise(world.ranks(1)) == 0
    assert world.events == [] and read_ledger(world.run) == []


def test_a_preempted_run_is_requeued_after_its_line_is_on_disk(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.job = PREEMPTED
    assert world.supervise(world.ranks(75, steps=2)) == 75
    assert world.events == ["launch 0", "requeue", "wait"]
    (line,) = world.ledger_at_requeue
    assert (line["reason"], line["action"], line["last_step"]) == ("preempted", "requeue", 2)
    assert world.holder_at_requeue is None, "the next attempt must find the lock free"
    assert "attempt 0: preempted; the job is requeued" in capsys.readouterr().err


def test_a_requeue_that_slurm_does_not_confirm_is_a_failure(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.job, world.requeue_works = PREEMPTED, False
    assert world.supervise(world.ranks(75)) == 1
    assert world.events == ["launch 0", "requeue", "resubmit"]
    assert "Slurm did not confirm the requeue" in capsys.readouterr().err


def test_a_job_that_slurm_requeued_itself_is_left_alone(world: World) -> None:
    world.job = {**PREEMPTED, "Restarts": "1"}
    assert world.supervise(world.ranks(75)) == 75
    assert world.events == ["launch 0", "wait"]


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (143, 143), (0, 1)])
def test_a_cancelled_job_stays_cancelled(code: int, expected: int, world: World) -> None:
    world.job = {**RUNNING, "JobState": "COMPLETING"}
    assert world.supervise(world.ranks(code, steps=1)) == expected
    assert world.events == ["launch 0"]
    assert ledger_line(world)["reason"] == "cancelled"


ENDING = {**PREEMPTED, "JobState": "COMPLETING"}


@pytest.mark.parametrize(
    ("job", "ends", "events", "reason"),
    [
        (ENDING, ("CANCELLED",), ["launch 0"], "cancelled"),
        (ENDING, ("PREEMPTED",), ["launch 0", "requeue", "resubmit"], "preempted"),
        (ENDING, (), ["launch 0", "requeue", "resubmit"], "preempted"),
    ],
    ids=["cancelled in the grace", "its grace ran out", "no accounting"],
)
def test_a_job_cancelled_while_it_is_preempted_gets_no_successor(
    job: dict[str, str], ends: tuple[str, ...], events: list[str], reason: str, world: World
) -> None:
    world.job, world.past_ends, world.requeue_works = job, ends, False
    assert world.supervise(world.ranks(75)) != 0
    assert world.events == events and ledger_line(world)["reason"] == reason


def test_a_job_cancelled_before_its_requeue_gets_no_successor(world: World) -> None:
    """The requeue does nothing then; the job's record says why."""
    jobs = iter([RUNNING, {**RUNNING, "JobState": "COMPLETING"}])
    world.job, world.requeue_works, world.next_job = None, False, lambda: next(jobs)
    assert world.supervise(world.ranks(75, steps=1)) == 1
    assert world.events == ["launch 0", "requeue"]
    line = ledger_line(world)
    assert (line["reason"], line["action"], line["last_step"]) == ("cancelled", "stop", 1)


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (137, 137), (0, 1)])
def test_ranks_that_fail_fail_the_job(code: int, expected: int, world: World) -> None:
    assert world.supervise(world.ranks(code)) == expected, "0 without a result must not look like success"
    assert ledger_line(world)["reason"] == "failed"


def test_a_stop_file_stops(world: World) -> None:
    def launch(attempt: int) -> int:
        world.run.stop_file.touch()
        return world.ranks(75)(attempt)

    assert world.supervise(launch) == 75
    assert (ledger_line(world)["reason"], world.events) == ("stopped", ["launch 0"])


def test_requeue_can_be_switched_off(world: World) -> None:
    world.job = PREEMPTED
    assert world.supervise(world.ranks(75), enabled=False) == 75
    assert world.events == ["launch 0"]


def test_a_run_that_somebody_else_runs_is_not_touched(world: World) -> None:
    take_lock(world.run, OTHER, is_alive=lambda _holder: True)
    with pytest.raises(RunError, match="is being run by Slurm job 8"):
        world.supervise(world.ranks(0))
    assert world.events == [] and read_ledger(world.run) == []
    assert read_holder(world.run) == OTHER


def test_a_dead_holder_is_overtaken(world: World) -> None:
    take_lock(world.run, OTHER, is_alive=lambda _holder: True)
    world.lives = False
    assert world.supervise(world.ranks(0, result=True)) == 0


@pytest.mark.parametrize("error", [OSError("no srun"), KeyboardInterrupt()])
def test_the_lock_is_given_back_when_the_launch_breaks(error: BaseException, world: World) -> None:
    def launch(_attempt: int) -> int:
        raise error

    with pytest.raises(type(error)):
        world.supervise(launch)
    assert read_holder(world.run) is None


def test_failures_are_started_again_here_until_three_bring_no_step(world: World) -> None:
    world.can_relaunch = True
    assert world.supervise(world.ranks(137)) == 137
    assert world.events == ["launch 0", "launch 1", "launch 2"]
    assert [entry["action"] for entry in read_ledger(world.run)] == ["relaunch", "relaunch", "stop"]


def test_a_new_step_and_the_ends_that_are_nobodys_fault_leave_the_budget_alone(world: World) -> None:
    for job, code, steps in ((RUNNING, 75, 0), (PREEMPTED, 75, 0), (RUNNING, 1, 0), (RUNNING, 1, 0), (RUNNING, 1, 1)):
        world.job = job
        world.supervise(world.ranks(code, steps=steps))
    world.job, world.can_relaunch, world.events = RUNNING, True, []
    world.supervise(world.ranks(137))
    assert world.events == ["launch 5", "launch 6", "launch 7"]


def test_the_first_rank_to_fail_is_named_and_its_code_counts(world: World) -> None:
    def launch(attempt: int) -> int:
        world.events.append(f"launch {attempt}")
        mark = FailureMark(rank=3, host="node2", exit_code=2, message="no such layer")
        leave_mark(world.run, attempt, mark)
        return 143

    world.can_relaunch = True
    world.supervise(launch)
    assert world.events == ["launch 0"], "wrong use is not tried again"
    assert ledger_line(world)["note"] == "rank 3 on node2: no such layer"


DONE_OR_NOT = [
    (0, RUNNING, 0, "done"),
    (0, None, 0, "done"),
    (0, {**RUNNING, "JobState": "COMPLETING"}, 1, "cancelled"),
    (0, {**RUNNING, "JobState": "NODE_FAIL"}, 1, "failed"),
    (3, RUNNING, 3, "failed"),
]


@pytest.mark.parametrize(("code", "job", "expected", "reason"), DONE_OR_NOT)
def test_own_code_is_done_when_it_ends_well_undisturbed(
    code: int, job: dict[str, str] | None, expected: int, reason: str, world: World
) -> None:
    world.job = job
    assert world.supervise(world.ranks(code), is_own_code=True) == expected
    assert ledger_line(world)["reason"] == reason
    assert world.run.result.exists() == (reason == "done")
    if reason == "done":
        assert json.loads(world.run.result.read_text())["exit_code"] == 0


def test_ranks_that_do_not_end_are_left_to_a_requeue(world: World) -> None:
    world.can_relaunch, world.clears = True, False
    assert world.supervise(world.ranks(137)) == 75
    assert world.events == ["launch 0", "requeue", "wait"]
    assert "what is left of the ranks does not end" in str(ledger_line(world)["note"])


def test_a_node_that_fails_twice_in_a_row_is_left_out(world: World) -> None:
    def launch(attempt: int) -> int:
        world.events.append(f"launch {attempt}")
        leave_mark(world.run, attempt, FailureMark(rank=3, host="node2", exit_code=1, message="ECC error"))
        return 1

    world.can_relaunch = True
    assert world.supervise(launch) == 75
    assert world.events == ["launch 0", "launch 1", "requeue without node2", "wait"]
    assert [entry["failed_on"] for entry in read_ledger(world.run)] == ["node2", "node2"]


def test_an_overtaken_supervisor_writes_nothing_more(world: World) -> None:
    def launch(_attempt: int) -> int:
        (world.run.epochs / "attempt_1").touch()
        return 75

    world.job = PREEMPTED
    with pytest.raises(RunError, match="overtaken by attempt 1"):
        world.supervise(launch)
    assert "reason" not in ledger_line(world) and world.events == []


@pytest.mark.parametrize(
    ("ends", "reason"), [(("PREEMPTED",), "preempted"), (("NODE_FAIL",), "node_failure"), ((), "requeued")]
)
def test_accounting_tells_why_slurm_restarted_a_job(ends: tuple[str, ...], reason: str, world: World) -> None:
    world.job, world.past_ends = {**RUNNING, "JobState": "COMPLETING", "Restarts": "1"}, ends
    assert world.supervise(world.ranks(75)) == 75
    assert ledger_line(world)["reason"] == reason and world.events == ["launch 0", "wait"]


@pytest.mark.parametrize(("new_job", "code"), [("8", 75), ("", 1)])
def test_where_a_job_cannot_be_requeued_another_takes_over(new_job: str, code: int, world: World) -> None:
    world.job, world.requeue_works, world.new_job = PREEMPTED, False, new_job
    assert world.supervise(world.ranks(75)) == code
    assert world.events == ["launch 0", "requeue", "resubmit"]


def test_attempts_that_nobody_closed_are_closed_by_the_next(world: World) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        world.supervise(_breaks)
    world.restart_count, world.past_ends = 1, ("NODE_FAIL",)
    assert world.supervise(world.ranks(0, result=True)) == 0
    first, second = read_ledger(world.run)
    assert (first["reason"], first["action"], second["reason"]) == ("node_failure", "lost", "done")


def _breaks(_attempt: int) -> int:
    raise RuntimeError("lost")


def test_what_rank_0_measured_gets_into_the_ledger(world: World) -> None:
    def launch(attempt: int) -> int:
        spent = Spent(begin_unix_s=time.time() + 5, first_step=0, steps=4, step_s=8.0, data_wait_s=1.0)
        spent.write(account_path(world.run, attempt))
        return world.ranks(0, result=True)(attempt)

    append_line(world.run.metrics, {"step": 2})
    world.supervise(launch)
    line = ledger_line(world)
    assert line["start_s"] == pytest.approx(5, abs=0.5)
    assert (line["step_s"], line["data_wait_s"], line["lost_work_s"]) == (8.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("asked_by", "saved", "note"),
    [
        ("clock", True, "time_limit; the job is requeued and continues from its checkpoint"),
        ("TERM", False, "time_limit; the job is requeued and continues from its checkpoint; no save at the stop: 4 s "),
    ],
)
def test_the_ledger_says_who_asked_and_whether_it_was_saved(
    asked_by: str, saved: bool, note: str, world: World
) -> None:
    def launch(attempt: int) -> int:
        for number in (attempt - 1, attempt):
            words = {"asked_by": asked_by if number == attempt else "file", "saved": saved}
            append_event(world.run, "stop", attempt=number, step=4, left_s=4.0, save_s=60.0, **words)
        return 75

    world.supervise(launch)
    line = ledger_line(world)
    assert line["asked_by"] == asked_by and str(line["note"]).startswith(note)


def test_last_step_is_the_newest_on_record(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert last_step(run) == 0
    for step in (1, 2, 3, 2):
        append_line(run.metrics, {"step": step})
    append_line(run.metrics, {"note": "no step"})
    assert last_step(run) == 3


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


def unfit(world: World, *, level: str = "error", node: str = "node3", blames: bool = True) -> Callable[[int], int]:
    """Returns ranks that the preflight does not let train."""

    def launch(attempt: int) -> int:
        world.events.append(f"launch {attempt}")
        line = f"GPU_SICK {node}: seen; todo"
        facts = {"code": "GPU_SICK", "level": level, "node": node, "seen": "seen", "line": line, "blames_node": blames}
        write_preflight(world.run, attempt, {"findings": [facts]})
        return EXIT_FAILURE if level == "error" else EXIT_DONE

    return launch


def test_a_node_that_was_found_bad_is_left_out_at_once(world: World) -> None:
    world.can_relaunch = True
    world.explain = lambda attempt: fatal_line(read_preflight(world.run, attempt))
    world.supervise(unfit(world))
    assert world.events[:2] == ["launch 0", "requeue without node3"]
    (entry,) = read_ledger(world.run)
    assert entry["note"] == "GPU_SICK node3: seen; todo; the job is requeued without node3"
    assert (entry["failed_on"], entry["found"]) == ("node3", "GPU_SICK node3")


def test_several_bad_nodes_are_left_out_together(world: World) -> None:
    world.can_relaunch = True
    world.supervise(unfit(world, node="node3, node4"))
    assert world.events[:2] == ["launch 0", "requeue without node3,node4"]


def test_where_nobody_is_to_blame_the_ranks_are_started_again(world: World) -> None:
    world.can_relaunch = True
    world.supervise(unfit(world, blames=False))
    assert world.events[:2] == ["launch 0", "launch 1"]


def test_own_code_that_has_not_begun_may_be_started_again(world: World) -> None:
    world.can_relaunch = True
    world.supervise(unfit(world), is_own_code=True)
    assert world.events[:2] == ["launch 0", "requeue without node3"]


def test_a_warning_is_in_the_ledger_and_changes_nothing(world: World) -> None:
    world.supervise(unfit(world, level="warning"), is_own_code=True)
    (entry,) = read_ledger(world.run)
    assert (entry["reason"], entry["found"]) == ("done", "GPU_SICK node3")


def time_limits(world: World, number: int, **ranks: bool) -> list[int]:
    codes = []
    for _ in range(number):
        codes.append(world.supervise(world.ranks(75, steps=1, **ranks)))
        world.restart_count += 1
    return codes


def test_time_limits_without_a_new_checkpoint_stop_the_run_with_a_reason(world: World) -> None:
    world.committed = -1
    assert time_limits(world, 3) == [75, 75, 75] and world.events[-1] == "launch 2"
    *before, newest = read_ledger(world.run)
    assert [entry["action"] for entry in before] == ["requeue", "requeue"]
    assert (newest["reason"], newest["action"]) == ("time_limit", "stop")
    assert "time_limit; 3 time limits in a row without a new checkpoint (the last attempt ran " in str(newest["note"])
    assert "raise cluster.time_limit_min" in str(newest["note"])
    # Whoever starts it again after that has the whole budget.
    assert time_limits(world, 3) == [75, 75, 75] and len(read_ledger(world.run)) == 6


def test_a_new_checkpoint_clears_the_budget_and_logged_steps_do_not(world: World) -> None:
    world.committed = -1
    time_limits(world, 2)
    time_limits(world, 1, commits=True)
    time_limits(world, 2)
    assert {entry["action"] for entry in read_ledger(world.run)} == {"requeue"}
    assert [entry["last_committed"] for entry in read_ledger(world.run)] == [-1, -1, 9, 9, 9]
    time_limits(world, 1)
    assert read_ledger(world.run)[-1]["action"] == "stop"


def test_failures_between_two_logged_lines_stop_nothing_that_commits(world: World) -> None:
    world.committed, world.can_relaunch, left = 0, True, iter([True] * 5 + [False] * 9)

    def launch(attempt: int) -> int:
        return world.ranks(137, commits=next(left))(attempt)

    assert world.supervise(launch) == 137
    assert world.events == [f"launch {attempt}" for attempt in range(8)]
    assert "3 failures in a row without a new checkpoint" in str(read_ledger(world.run)[-1]["note"])


def test_a_user_s_own_code_may_come_back_without_end(world: World) -> None:
    assert time_limits(world, 8) == [75] * 8
    assert {entry["action"] for entry in read_ledger(world.run)} == {"requeue"}


def test_fifty_preemptions_before_the_first_checkpoint_stop_nothing(world: World) -> None:
    world.committed, world.job = -1, PREEMPTED
    assert {world.supervise(world.ranks(75)) for _ in range(50)} == {75}
    assert {entry["action"] for entry in read_ledger(world.run)} == {"requeue"}


def test_a_job_that_loses_its_node_each_time_is_ended_at_a_start(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.committed, world.past_ends = -1, ("NODE_FAIL",) * 9
    for world.restart_count in range(6):
        with pytest.raises(RuntimeError):
            world.supervise(_breaks)
    world.restart_count = 6
    assert world.supervise(world.ranks(0)) == EXIT_FAILURE and world.events == []
    newest = read_ledger(world.run)[-1]
    assert (newest["attempt"], newest["reason"], newest["action"]) == (5, "node_failure", "stop")
    assert "node_failure; 6 lost nodes in a row without a new checkpoint" in str(newest["note"])
    assert "nothing is started: 6 lost nodes in a row" in capsys.readouterr().err
    world.restart_count = 0
    assert world.supervise(world.ranks(0, result=True)) == 0, "a person's own start"


BROKEN = [
    ("metrics.jsonl", None),
    ("attempts.jsonl", None),
    ("events.jsonl", '{"event": "stop", "attempt": 0}\n'),
    ("events.jsonl", '{"event": "stop", "attempt": 0, "saved": false, "left_s": null, "save_s": "x"}\n'),
    ("events.jsonl", None),
    ("logs/attempt_0/failures.jsonl", '{"rank": 1}\n'),
    ("logs/attempt_0/failures.jsonl", None),
    ("logs/attempt_0/timing.json", "{}"),
    ("logs/attempt_0/timing.json", '{"begin_unix_s": "x"}'),
    ("logs/attempt_0/preflight.json", '{"findings": [{}]}'),
    ("logs/attempt_0/preflight.json", '{"findings": [3]}'),
    ("lock.json", None),
    ("checkpoints", "no folder"),
]


@pytest.mark.parametrize(("name", "content"), BROKEN)
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

    world.job = PREEMPTED
    assert world.supervise(launch) == 75
    assert world.events[-2:] == ["requeue", "wait"]
    if name == "lock.json":
        world.run.lock.rmdir()


def test_a_full_disk_at_the_end_of_the_ranks_costs_the_ledger_s_line_alone(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.MonkeyPatch.context() as patch:

        def launch(attempt: int) -> int:
            patch.setattr(module, "close_attempt", full)
            return world.ranks(75, steps=2)(attempt)

        world.job = PREEMPTED
        assert world.supervise(launch) == 75 and world.events == ["launch 0", "requeue", "wait"]
    assert "the ledger: OSError: [Errno 122] Disk quota exceeded; the run goes on without" in capsys.readouterr().err
    world.restart_count, world.past_ends, world.job = 1, ("PREEMPTED",), RUNNING
    assert world.supervise(world.ranks(0, result=True)) == 0
    assert [entry["reason"] for entry in read_ledger(world.run)] == ["preempted", "done"]


def test_own_code_that_has_ended_well_is_done_though_the_disk_is_full(world: World) -> None:
    def launch(_attempt: int) -> int:
        world.run.result.with_name(f".result.json.{os.getpid()}.tmp").mkdir()
        return 0

    assert world.supervise(launch, is_own_code=True) == EXIT_DONE
    assert ledger_line(world)["reason"] == "done"


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_start_that_cannot_write_comes_back_later_each_time(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """No start leaves a trace, so Slurm's own count tells their number."""
    codes = []
    for world.restart_count in range(11):
        codes.append(come_back_later(world.run, world.site(), FULL))
    assert codes == [75] * 10 + [1]
    assert world.delays_s == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600]
    assert "that was start 11 in a row, so the job ends; `resume` continues" in capsys.readouterr().err


def test_a_launch_that_finds_the_disk_full_is_on_record_and_uses_no_budget_of_failures(world: World) -> None:
    def launch(_attempt: int) -> int:
        raise FULL

    for world.restart_count in range(4):
        with pytest.raises(OSError, match="No space left"):
            world.supervise(launch)
        assert come_back_later(world.run, world.site(), FULL) == 75
    assert {(entry["reason"], entry["action"]) for entry in read_ledger(world.run)} == {("file_system", "requeue")}
    assert world.delays_s == [60, 120, 240, 480]
    world.restart_count = 4
    assert world.supervise(world.ranks(0, result=True)) == 0


@pytest.mark.parametrize(("restart_count", "code"), [(0, 2), (1, 75)])
def test_a_run_that_comes_back_to_too_little_room_is_put_off(restart_count: int, code: int, world: World) -> None:
    def launch(attempt: int) -> int:
        facts = {"code": "DISK_FULL", "level": "error", "node": "node1", "line": "DISK_FULL node1: 3 MiB are left"}
        write_preflight(world.run, attempt, {"findings": [facts]})
        return 2

    world.restart_count, world.can_relaunch = restart_count, True
    assert world.supervise(launch) == code
    assert world.delays_s == ([60] if restart_count else [])
    assert ledger_line(world)["reason"] == ("file_system" if restart_count else "failed")


def test_what_does_not_pass_by_itself_is_an_error(world: World) -> None:
    with pytest.raises(FileNotFoundError):
        come_back_later(world.run, world.site(), FileNotFoundError("no srun"))
