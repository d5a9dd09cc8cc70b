from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.attempts import AttemptStart, open_attempt, read_ledger
from slurm_train.rundir.events import (
    AcceptedChange,
    covers_code,
    covers_config,
    covers_data,
    read_changes,
    record_change,
)
from slurm_train.rundir.layout import RunDirectory

LR = AcceptedChange(number=1, step=40, config={"optim.lr": [0.3, 0.1]})
CODE = AcceptedChange(number=2, step=80, code={"old": "a", "new": "b", "files": ["x.py: +1 -0"]})
BACK = AcceptedChange(number=3, step=90, config={"optim.lr": [0.1, 0.3]}, data={"old": "d1", "new": ""})
START = AttemptStart(job_id=None, restart_count=0, nodes=("n1",), world_size=1)


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_changes(run) == []
    for change in (LR, CODE, BACK):
        record_change(run, change)
    found = read_changes(run)
    assert [(item.number, item.step, item.names) for item in found] == [
        (1, 40, ["optim.lr"]),
        (2, 80, ["code"]),
        (3, 90, ["optim.lr", "data"]),
    ]
    assert all(item.time_unix_s > 1e9 for item in found)


def test_only_the_newest_value_is_covered() -> None:
    assert covers_config([LR], "optim.lr", 0.1) and not covers_config([LR], "optim.lr", 0.3)
    assert covers_config([LR, CODE, BACK], "optim.lr", 0.3) and not covers_config([LR, CODE, BACK], "optim.lr", 0.1)
    assert not covers_config([LR], "seed", 0)
    assert covers_code([LR, CODE], "b") and not covers_code([LR, CODE], "c") and not covers_code([], "b")
    assert covers_data([BACK], old="d1", new="anything") and not covers_data([BACK], old="d2", new="d1")


def test_an_attempt_says_what_it_is_the_first_to_carry(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    open_attempt(run, START)
    record_change(run, LR)
    record_change(run, CODE)
    open_attempt(run, START)
    open_attempt(run, START)
    facts = [(entry.get("changes"), entry.get("accepted")) for entry in read_ledger(run)]
    assert facts == [(None, None), (2, ["optim.lr", "code"]), (2, None)]
