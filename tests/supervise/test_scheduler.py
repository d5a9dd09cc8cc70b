from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import ControllerAway
from slurm_train.supervise.scheduler import ask_patiently, bring_back, wait_for_the_end
from tests.fakes.slurm_commands import FakeSlurmCommands

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
    return bring_back("7", commands, restart_count=0, sleep=sleep, **words)  # type: ignore[arg-type]


def test_a_job_comes_back_after_the_controller_does() -> None:
    away = Away(fake(), pauses=6)
    assert bring(away.commands, away.sleep)
    assert away.commands.requeued == ["7"]
    assert away.pauses == [1, 2, 4, 8, 10, 10]


def test_a_controller_that_stays_away_is_an_error_in_the_end() -> None:
    away = Away(fake(), pauses=99)
    with pytest.raises(ControllerAway):
        ask_patiently(lambda: away.commands.restarts("7"), limit_s=0.5, sleep=away.sleep)
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
    wait_for_the_end(lambda: False, limit_s=0.01)


def test_a_requeue_that_slurm_has_surely_written_down_frees_the_nodes() -> None:
    """KillWait, which would end the script otherwise, is half a minute at most sites."""
    answers: list[bool] = []
    wait_for_the_end(lambda: not answers.append(True), written_after_s=0.03, pause_s=0.01)
    assert 2 <= len(answers) <= 10


def test_a_requeue_that_a_killed_slurmctld_has_forgotten_is_asked_for_again() -> None:
    """It has the job running in its files when it comes back; `requeue` looks first and asks where it must."""
    said = iter([True, False, False])
    asked: list[float] = []

    def comes_back() -> bool:
        asked.append(time.monotonic())
        return next(said, True)

    wait_for_the_end(comes_back, written_after_s=0.03, pause_s=0.01)
    assert len(asked) >= 5 and asked[-1] - asked[2] >= 0.03
