"""A scancel at every moment between two commands of the supervisor, against a controller that follows Slurm's rules.

The rules are those of 22.05 (job_mgr.c, tried on a real one): the plain form of requeue brings a cancelled job back,
the `incomplete` form does nothing to it; both show as COMPLETING; a job over its limit cannot be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import ClusterError
from slurm_train.rundir.jobs import Holder, record_job
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.commands import ControllerAway
from slurm_train.slurm.records import JobState
from slurm_train.supervise import job as job_module
from slurm_train.supervise.actions import Decision
from slurm_train.supervise.continuation import continued_job, is_cancelled
from slurm_train.supervise.job import Job, requeue_job
from slurm_train.supervise.supervisor import Supervisor
from tests.fakes.slurm_commands import job_state
from tests.support.steps import FunctionStep

JOB = "7"


@dataclass
class Controller:
    """One job, the supervisor's commands about it, and a user who cancels before one of them."""

    base: str = "RUNNING"
    is_ending: bool = False
    preempted: bool = False
    num_restarts: int = 0
    may_requeue: bool = True
    lost_answers: int = 0
    has_accounting: bool = True
    cancel_before: int | None = None
    asked: int = 0
    was_cancelled: bool = False
    continuation: bool = False
    ends: list[str] = field(default_factory=list)

    def scancel(self) -> None:
        """A finished job says that it is already completing; the user is told."""
        if self.base in ("RUNNING", "PENDING"):
            self.was_cancelled = True
            self.base, self.is_ending = "CANCELLED", True

    def _command(self) -> None:
        if self.asked == self.cancel_before:
            self.scancel()
        self.asked += 1

    def show_job(self, _job: str = JOB) -> dict[str, str]:
        self._command()
        return {
            "JobState": "COMPLETING" if self.is_ending else self.base,
            "PreemptTime": "2026-11-20T12:00:00" if self.preempted else "None",
            "Reason": "TimeLimit" if self.base == "TIMEOUT" else "None",
            "Restarts": str(self.num_restarts),
        }

    def restarts(self, _job: str = JOB) -> int:
        return int(self.show_job()["Restarts"])

    def requeue(self, _job: str, *, is_over: bool = False) -> None:
        self._command()
        if not self.may_requeue:
            raise ClusterError("Requested operation is presently disabled")
        if self.base == "PENDING" and is_over:
            raise ClusterError("Job is pending execution")
        if is_over or self.base == "RUNNING":
            self.ends.append("REQUEUED")
            self.base, self.is_ending, self.num_restarts, self.preempted = "PENDING", True, self.num_restarts + 1, False
        if self.lost_answers:
            self.lost_answers -= 1
            raise ControllerAway("the answer was lost")

    def allow_requeue(self, _job: str) -> None:
        self._command()
        raise ClusterError("Access denied")

    def ended_states(self, _job: str = JOB) -> list[str]:
        if not self.has_accounting:
            return []
        self._command()
        return [*self.ends, *([self.base] if self.base not in ("RUNNING", "PENDING") else [])]

    def job_states(self, _jobs: object) -> dict[str, JobState]:
        return {JOB: job_state(JOB, self.base)}


@dataclass(frozen=True)
class Case:
    """What the ranks left, and where Slurm stands when they have ended."""

    name: str
    make: Callable[[], Controller]
    code: int = 75


CASES = [
    Case("warned before the limit", Controller),
    Case("preempted, in the grace", lambda: Controller(preempted=True)),
    Case("the grace is over and the site cancels", lambda: Controller("PREEMPTED", is_ending=True, preempted=True)),
    Case("over the limit", lambda: Controller("TIMEOUT", is_ending=True)),
    Case("requeue is forbidden", lambda: Controller(may_requeue=False)),
    Case("requeue is forbidden in the grace", lambda: Controller(preempted=True, may_requeue=False)),
    Case("an answer is lost", lambda: Controller(lost_answers=1)),
    Case("an answer is lost over the limit", lambda: Controller("TIMEOUT", is_ending=True, lost_answers=2)),
    Case("a rank died and its step does not end", Controller, code=137),
]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job_module, "wait_until_requeued", lambda _: None)
    yield


class OwnJob(Job):
    """The supervisor's job, at a controller."""

    def __init__(self, run: RunDirectory, controller: Controller, job_id: str = JOB) -> None:
        super().__init__({})
        self.job_id = job_id
        self.holder = Holder(job_id=job_id, host="node1", pid=1, started="1")
        self._run, self._controller = run, controller

    def show(self) -> dict[str, str]:
        return self._controller.show_job()

    def past_ends(self, job_id: str) -> list[str]:
        return self._controller.ended_states(job_id)

    def requeue(self, decision: Decision) -> bool:
        commands: Any = self._controller
        try:
            return requeue_job(JOB, commands, restart_count=0, is_over=decision.is_over, sleep=lambda _s: None)
        except ClusterError:
            return False

    def resubmit(self, decision: Decision) -> str:
        self._controller._command()
        self._controller.continuation = True
        record_job(self._run, "8", continues=JOB)
        return "8"


class Ranks(FunctionStep):
    """Ranks whose step does not end."""

    can_relaunch = True

    def clear(self, attempt: int) -> bool:
        return False


def end_an_attempt(folder: Path, controller: Controller, code: int) -> None:
    """Runs the supervisor as the batch script does, from the end of the ranks on."""
    run = RunDirectory(folder)
    run.path.mkdir(parents=True)
    record_job(run, JOB)
    Supervisor(run, OwnJob(run, controller), Ranks(lambda _attempt: code, job_id=JOB), RequeueSection()).supervise()
    controller.is_ending = False
    if controller.base == "RUNNING":
        controller.base = "FAILED"


def problem(folder: Path, controller: Controller, code: int) -> str:
    """Returns how a cancelled run would come back, "" where it does not."""
    end_an_attempt(folder, controller, code)
    if not controller.was_cancelled:
        return ""
    if controller.base != "CANCELLED":
        return f"the cancelled job is {controller.base}"
    before = continued_job(RunDirectory(folder), "8", {})
    begins = controller.continuation and before is not None and not is_cancelled(before, controller)  # type: ignore[arg-type]
    return "a continuation begins" if begins else ""


@pytest.mark.parametrize("has_accounting", [True, False], ids=["accounting", "no accounting"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_cancel_at_any_moment_wins(case: Case, has_accounting: bool, tmp_path: Path) -> None:
    calm = case.make()
    calm.has_accounting = has_accounting
    end_an_attempt(tmp_path / "calm", calm, case.code)
    assert calm.num_restarts == 1 or calm.continuation, "left alone, the run comes back"
    for moment in range(calm.asked + 2):
        controller = case.make()
        controller.has_accounting, controller.cancel_before = has_accounting, moment
        assert problem(tmp_path / str(moment), controller, case.code) == "", f"cancelled before command {moment}"


def test_the_check_finds_the_plain_form_of_requeue(tmp_path: Path) -> None:
    class Plain(Controller):
        def requeue(self, job: str, *, is_over: bool = False) -> None:  # planted: always the plain form
            super().requeue(job, is_over=True)

    found = {problem(tmp_path / str(moment), Plain(cancel_before=moment), 75) for moment in range(6)}
    assert "the cancelled job is PENDING" in found


def test_a_cancel_in_the_grace_is_called_one(tmp_path: Path) -> None:
    controller = Controller(preempted=True, cancel_before=0)
    end_an_attempt(tmp_path / "run", controller, 75)
    assert not controller.continuation and controller.num_restarts == 0
    ledger = (tmp_path / "run" / "attempts.jsonl").read_text()
    assert '"reason":"cancelled","action":"stop"' in ledger


def test_a_job_that_comes_after_cancel_does_not_begin(tmp_path: Path) -> None:
    run, controller = RunDirectory(tmp_path / "run"), Controller()
    run.path.mkdir()
    run.stop_file.touch()
    started: list[int] = []
    ranks = Ranks(lambda attempt: started.append(attempt) or 0, job_id="8")
    assert Supervisor(run, OwnJob(run, controller, "8"), ranks, RequeueSection()).supervise() == 1
    assert started == []
