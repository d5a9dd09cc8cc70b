from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.peers.faults import flip_byte
from docs.peers.outcome import StepDone, judge

pytestmark = pytest.mark.full


def steps(*numbers: int, start: int = 0) -> list[StepDone]:
    return [StepDone(number, start) for number in numbers]


FACTS: dict[str, Any] = {"state": "COMPLETED", "restarts": 1, "steps": steps(1, 2, 3), "num_steps": 3}
FACTS |= {"digest": "a", "golden": "a"}
BESIDE = [*steps(1, 2), *steps(1, start=1), *steps(3), *steps(2, 3, start=1)]


@pytest.mark.parametrize(
    ("facts", "cell"),
    [
        ({"steps": steps(1, 2, 1, 2, 3)}, "COMPLETED, 1 restart, 2 steps twice, weights equal"),
        ({"digest": "b"}, "COMPLETED, 1 restart, no step twice, **other weights**"),
        (
            {"steps": BESIDE},
            "COMPLETED, 1 restart, 3 steps twice, **1 beside the new ranks by old ones**, weights equal",
        ),
        # Never ended, whatever Slurm says.
        ({"steps": steps(1), "digest": "", "restarts": 0}, "**COMPLETED, 2 steps never**, no step twice"),
    ],
    ids=["steps again", "other weights", "old ranks beside the new", "never ended"],
)
def test_what_became_of_a_training(facts: dict[str, Any], cell: str) -> None:
    assert judge(**{**FACTS, **facts}).cell(ends_cancelled=False) == cell


def test_a_cancelled_job_that_comes_back_is_told() -> None:
    cancelled = judge(**{**FACTS, "state": "CANCELLED", "restarts": 0, "digest": ""})
    assert cancelled.cell(ends_cancelled=True) == "CANCELLED"
    assert judge(**FACTS).cell(ends_cancelled=True) == "**COMPLETED, 1 restart**"


def test_one_byte_is_flipped_and_the_time_stays(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(bytes(range(100)))
    before = file.stat().st_mtime_ns
    flip_byte(file)
    after = file.read_bytes()
    assert [index for index in range(100) if after[index] != index] == [50] and file.stat().st_mtime_ns == before
