from __future__ import annotations

from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.standing.conditions import choose, value_of
from slurm_train.standing.facts import Subject


@pytest.fixture
def subjects(has_run: Any) -> list[Subject]:
    return [
        Subject(has_run("aaaa0000"), 0, {"optim.lr": "0.001", "seed": "1", "data": "text"}),
        Subject(has_run("bbbb0000"), 1, {"optim.lr": "0.0003", "seed": "1"}),
        Subject(has_run("cccc0000", cluster=False)),
    ]


CHOICES = [
    ([], ["aaaa0000", "bbbb0000", "cccc0000"]),
    (["optim.lr=1e-3"], ["aaaa0000", "cccc0000"]),
    (["seed=1.0"], ["aaaa0000", "bbbb0000"]),
    (["+seed=1", "optim.lr=3e-4"], ["bbbb0000"]),
    (["cluster=null"], ["cccc0000"]),
    (["requeue.enabled=True"], ["aaaa0000", "bbbb0000", "cccc0000"]),
    (["seed=77"], []),
    (["data=text"], ["aaaa0000"]),
]


@pytest.mark.parametrize(("conditions", "chosen"), CHOICES, ids=lambda value: " ".join(value))
def test_runs_are_chosen_by_what_they_were_given(
    conditions: list[str], chosen: list[str], subjects: list[Subject]
) -> None:
    assert [one.run.run_id for one in choose(subjects, conditions)] == chosen


def test_a_run_without_a_configuration_has_only_what_its_sweep_gave(subjects: list[Subject]) -> None:
    subjects[0].run.config.unlink()
    assert value_of(subjects[0], "seed") == "1" and value_of(subjects[0], "train.max_steps") is None


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("optim.lr", "--where 'optim.lr' is no condition"),
        ("=1", "--where '=1' is no condition"),
        ("optim.lrr=1", "no run has the key 'optim.lrr'"),
    ],
)
def test_a_condition_that_cannot_hold_is_refused(condition: str, message: str, subjects: list[Subject]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(subjects, [condition])
    assert caught.value.message == message
