"""What the campaigns with light ranks look for is found where it is planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support.light_runs import lives, problems_of

pytestmark = pytest.mark.full

_FIRST = ("11", 100.0, 110.0, [])


@pytest.mark.parametrize(
    ("second", "problems"),
    [
        (("12", 110.1, 120.0, []), []),
        (("12", 109.9, 120.0, []), ["jobs 11 and 12 trained at the same time"]),
        (("12", 111.0, 120.0, ["config.yaml"]), ["config.yaml changed while job 12 trained"]),
    ],
    ids=["one after the other", "at the same time", "rewritten"],
)
def test_two_lives_of_a_run(second: tuple[str, float, float, list[str]], problems: list[str], tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    for job, begin, end, changed in (second, _FIRST):
        told = ((begin, []), (end, changed))
        lines = [{"job": job, "time_unix_s": time_unix_s, "changed": names} for time_unix_s, names in told]
        (tmp_path / "seen" / job).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunDirectory(tmp_path)
    assert [life.job for life in lives(run)] == ["11", "12"]
    assert list(problems_of(run)) == problems
