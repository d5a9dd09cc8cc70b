from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Action, Reason, Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.commands import ControllerAway
from slurm_train.slurm.policy import Qos
from slurm_train.supervise import job as module
from slurm_train.supervise.actions import Decision
from slurm_train.supervise.job import SlurmJob, ask_with_retries, requeue_job, wait_until_requeued
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.ledgers import close_attempt

RUNNING = {"JobState": "RUNNING", "Restarts": "0"}


class Away:
    """A controller that does not answer for so many pauses."""

    def __init__(self, commands: FakeSlurmCommands, pauses: int) -> None:
        self.commands, self.pauses = commands, list[float]()
        self._left = pauses
        commands.error = ControllerAway("away")

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._left -= 1
        if self._left <= 0:
            self.commands.error = None


def fake(**fields: str) -> FakeSlurmCommands:
    return FakeSlurmCommands(fields={"7": {**RUNNING, **fields}})


def bring(commands: FakeSlurmCommands, sleep: Callable[[float], None] = lambda _s: None, **words: int | bool) -> bool:
    return requeue_job("7", commands, restart_count=0, sleep=sleep, **words)  # type: ignore[arg-type]


def test_a_job_comes_back_after_the_controller_does() -> None:
    away = Away(fake(), pauses=6)
    assert bring(away.commands, away.sleep)
    assert away.commands.requeued == ["7"]
    assert away.pauses == [1, 2, 4, 8, 10, 10]


def test_a_controller_that_stays_away_is_an_error_in_the_end() -> None:
    away = Away(fake(), pauses=99)
    with pytest.raises(ControllerAway):
        ask_with_retries(lambda: away.commands.restarts("7"), limit_s=0.5, sleep=away.sleep)
    assert away.pauses == []


def test_an_answer_that_was_lost_is_not_asked_for_twice() -> None:
    commands = fake(Restarts="1")
    assert bring(commands) and commands.requeued == []


def test_a_cancelled_job_is_not_brought_back() -> None:
    assert not bring(fake(JobState="COMPLETING"))


@pytest.mark.parametrize("reason", ["None", "TimeLimit"])
@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "RUNNING"])
def test_the_plain_form_is_used_only_for_a_job_that_is_still_over_its_limit(state: str, reason: str) -> None:
    commands, is_over = fake(JobState=state, Reason=reason), reason == "TimeLimit" and state != "CANCELLED"
    assert bring(commands, is_over=True) is is_over
    assert commands.requeued == (["7"] if is_over else [])


def test_a_job_that_may_not_be_requeued_is_allowed_to_first() -> None:
    commands = fake(Requeue="0")
    assert bring(commands) and commands.fields["7"]["Requeue"] == "1"


def test_a_refusal_is_final() -> None:
    commands = FakeSlurmCommands()
    with pytest.raises(ClusterError, match="Invalid job id"):
        bring(commands)


def test_waiting_for_the_end_gives_up() -> None:
    wait_until_requeued(lambda: False, limit_s=0.01)


def test_a_requeue_that_slurm_has_surely_written_down_frees_the_nodes() -> None:
    """KillWait, which would end the script otherwise, is half a minute at most sites."""
    answers: list[bool] = []
    wait_until_requeued(lambda: not answers.append(True), written_after_s=0.03, pause_s=0.01)
    assert 2 <= len(answers) <= 10


def test_a_requeue_that_a_killed_slurmctld_has_forgotten_is_asked_for_again() -> None:
    """It has the job running in its files when it comes back; `requeue` looks first and asks where it must."""
    said = iter([True, False, False])
    asked: list[float] = []

    def comes_back() -> bool:
        asked.append(time.monotonic())
        return next(said, True)

    wait_until_requeued(comes_back, written_after_s=0.03, pause_s=0.01)
    assert len(asked) >= 5 and asked[-1] - asked[2] >= 0.03


@pytest.mark.parametrize(("state", "cancelled"), [("CANCELLED", True), ("TIMEOUT", False), ("RUNNING", False)])
def test_a_job_knows_whether_the_one_that_it_continues_was_cancelled(
    tmp_path: Path, state: str, cancelled: bool
) -> None:
    allocation = Allocation(requeue_id="7", restart_count=0, nodes=("node1",), tasks_per_node=(1,))
    for continues, expected in (("6", cancelled), ("5", False), (None, False)):
        job = SlurmJob(RunDirectory(tmp_path), allocation, {}, retry_s=0.0, continues=continues)
        job.commands = FakeSlurmCommands([job_state("6", state)])  # type: ignore[assignment]
        assert job.is_predecessor_cancelled() is expected


def test_a_controller_that_does_not_answer_says_nothing_of_the_job_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = Allocation(requeue_id="7", restart_count=0, nodes=("node1",), tasks_per_node=(1,))
    job = SlurmJob(RunDirectory(tmp_path), allocation, {}, retry_s=0.0, continues="6")
    job.commands = FakeSlurmCommands([job_state("6", "CANCELLED")])  # type: ignore[assignment]
    job.commands.error = ControllerAway("away")  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "ask_with_retries", lambda ask: ask())
    assert not job.is_predecessor_cancelled()


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_job_is_put_off_and_kept_off_nodes_where_it_was_requeued(tmp_path: Path, state: str) -> None:
    allocation = Allocation(requeue_id="7", restart_count=0, nodes=("node1",), tasks_per_node=(1,))
    job = SlurmJob(RunDirectory(tmp_path), allocation, {}, retry_s=0.0)
    job.commands = commands = fake(JobState=state)  # type: ignore[assignment]
    decision = Decision(Reason.NODE_FAILURE, Action.REQUEUE, "", exclude=("node1",), delay_s=60)
    is_requeued = job.requeue(decision)
    assert is_requeued is (state == "RUNNING"), "a cancelled job completes"
    found = (commands.fields["7"].get("ExcNodeList"), commands.delays_s)
    assert found == (("node1", {"7": 60}) if is_requeued else (None, {}))


# --- a job that Slurm brings back by itself ---


def job_with(tmp_path: Path, **fields: str) -> tuple[SlurmJob, FakeSlurmCommands]:
    """Returns job 7, and its fake."""
    allocation = Allocation(requeue_id="7", restart_count=0, nodes=("node1",), tasks_per_node=(1,))
    job = SlurmJob(RunDirectory(tmp_path), allocation, {}, retry_s=0.0)
    job.commands = commands = FakeSlurmCommands(fields={"7": {**RUNNING, "Requeue": "1", **fields}})  # type: ignore[assignment]
    return job, commands


def test_a_job_may_be_preempted_where_another_qos_preempts_its_own(tmp_path: Path) -> None:
    job, commands = job_with(tmp_path, QOS="normal", Partition="main")
    assert not job.may_be_preempted()
    commands.config |= {"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}
    commands.qos = {"normal": Qos(name="normal"), "urgent": Qos(name="urgent", preempts=("normal",))}
    assert job.may_be_preempted()


@pytest.mark.parametrize(
    ("fields", "may_return"),
    [
        pytest.param({}, "0", id="it fails"),
        pytest.param({"Restarts": "1"}, "1", id="it was requeued"),
        pytest.param({"JobState": "COMPLETING"}, "1", id="somebody ends it"),
        pytest.param({"ExpeditedRequeue": "No"}, "1", id="Slurm holds no such job"),
    ],
)
def test_an_expedited_job_that_fails_ends(fields: dict[str, str], may_return: str, tmp_path: Path) -> None:
    job, commands = job_with(tmp_path, **{"ExpeditedRequeue": "Yes", **fields})
    assert job.end_for_good(1) == 1
    assert commands.fields["7"]["Requeue"] == may_return


@pytest.mark.parametrize(
    ("settings", "fields", "code"),
    [
        ({"RequeueExit": "(null)", "RequeueExitHold": "(null)"}, {}, 1),
        ({"RequeueExit": "1", "RequeueExitHold": "2-4,9"}, {}, 5),
        ({"RequeueExit": "75"}, {}, 1),
        ({"RequeueExit": "1-255"}, {}, 1),
        ({"RequeueExit": "1"}, {"Restarts": "1"}, 1),
    ],
)
def test_a_job_that_fails_ends_with_a_code_for_which_the_site_does_not_start_it_again(
    settings: dict[str, str], fields: dict[str, str], code: int, tmp_path: Path
) -> None:
    job, commands = job_with(tmp_path, **fields)
    commands.config = settings
    assert job.end_for_good(1) == code


@pytest.mark.parametrize(
    ("facts", "restart_count", "has_left"),
    [
        ({"action": "stop", "reason": "failed"}, 1, True),
        ({"action": "stop", "reason": "failed"}, 0, False),
        # What was decided without an answer of Slurm; and what was decided otherwise.
        ({"action": "stop", "reason": "unknown"}, 1, False),
        ({"action": "requeue", "reason": "preempted", "outcome": "not_requeued"}, 1, False),
    ],
    ids=["a later start", "the same start", "Slurm did not answer", "a requeue that was not confirmed"],
)
def test_a_job_that_has_stopped_for_good_begins_nothing_at_its_next_start(
    facts: dict[str, str], restart_count: int, has_left: bool, tmp_path: Path
) -> None:
    job, _ = job_with(tmp_path)
    start = Start(job_id="7", restart_count=0, nodes=("node1",), world_size=1)
    close_attempt(job._run, open_attempt(job._run, start), facts)
    job.restart_count = restart_count
    assert job.has_left() == has_left
