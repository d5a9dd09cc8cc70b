from __future__ import annotations

import pytest

from slurm_train.errors import ConfigError
from slurm_train.slurm.records import Phase
from slurm_train.standing.states import MEANINGS, RunState, read_states, state_of_phase, state_of_reason


def test_every_phase_of_a_job_is_a_state_and_every_state_has_a_meaning() -> None:
    assert {state_of_phase(phase).label for phase in Phase} >= {"queued", "running", "node failure", "out of memory"}
    assert list(MEANINGS) == list(RunState)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("done", RunState.COMPLETED),
        ("time_limit", RunState.TIMEOUT),
        ("node_failure", RunState.NODE_FAILURE),
        ("lost", RunState.LOST),
        ("", RunState.UNKNOWN),
    ],
)
def test_the_state_of_a_reason_of_the_ledger(reason: str, state: RunState) -> None:
    assert state_of_reason(reason) is state


def test_states_are_read_as_people_write_them() -> None:
    found = read_states("running, not started,missing,Time-Limit,pending", option="--state")
    assert found == {RunState.RUNNING, RunState.NOT_STARTED, RunState.TIMEOUT, RunState.QUEUED}


@pytest.mark.parametrize(
    ("text", "message"),
    [("runing", "--state runing: there is no state 'runing'"), (",", "--state ,: no state is named")],
)
def test_a_word_that_is_no_state_is_refused_with_those_that_are(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_states(text, option="--state")
    assert caught.value.message == message and "running" in caught.value.hint


def test_a_state_that_makes_no_sense_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="'running'"):
        read_states("running", option="--only", of=(RunState.FAILED,))
