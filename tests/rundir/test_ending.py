from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.jobs import has_ended
from slurm_train.rundir.layout import RunDirectory
from tests.support.run_facts import RunFacts, attempt

ENDS = [
    ("nothing yet", {}, False),
    ("running", {"ledger": attempt(0)}, False),
    ("requeued", {"ledger": attempt(0, action="requeue")}, False),
    ("stopped", {"ledger": attempt(0, action="stop")}, True),
    ("stopped, running again", {"ledger": (*attempt(0, action="stop"), *attempt(1))}, False),
    ("stopped, then submitted again", {"ledger": attempt(0, action="stop"), "job_ids": ("13",)}, False),
    (
        "submitted, then stopped",
        {"ledger": attempt(0, action="stop"), "job_ids": ("12",), "submitted_unix_s": 1.0},
        True,
    ),
    ("finished", {"ledger": attempt(0, action="finish"), "result": {}}, True),
]


@pytest.mark.parametrize(("facts", "ended"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_when_nothing_more_will_come(facts: dict[str, Any], ended: bool, tmp_path: Path) -> None:
    run = RunFacts(**facts).write(RunDirectory(tmp_path / "gpt" / "3f9a1c07"))
    assert has_ended(run) is ended


def test_a_result_without_an_end_line_is_the_end_a_minute_later(tmp_path: Path) -> None:
    run = RunFacts(ledger=attempt(0), result={}).write(RunDirectory(tmp_path / "gpt" / "3f9a1c07"))
    assert not has_ended(run), "rank 0 may still say something"
    os.utime(run.result, (1.0, 1.0))
    assert has_ended(run)
