"""A sweep on this machine, for real: each run is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.sweep import SweepDirectory, read_table
from tests.support.command_line import Person
from tests.support.waiting import wait_for

SCRIPT = """
import pathlib, sys, time
if sys.argv[1] == "bad" and not pathlib.Path(sys.argv[2]).exists():
    sys.exit(5)
while sys.argv[1] == "slow" and not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
print("trained", sys.argv[1])
"""


@pytest.fixture
def person(tmp_path: Path) -> Person:
    (tmp_path / "train.py").write_text(SCRIPT)
    return Person(tmp_path)


def words_of(folder: Path, *kinds: str) -> list[str]:
    scripts = ",".join(f"[train.py,{kind},{folder}/mended]" for kind in kinds)
    return ["-m", f"script={scripts}", "run.processes=1"]


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_a_run_that_fails_ends_no_other_and_the_same_words_continue(num_parallel: int, person: Person) -> None:
    words = [*words_of(person.folder, "fine", "bad", "good"), f"sweep.max_parallel={num_parallel}"]
    done = person.types(*words)
    sweep = SweepDirectory(Path(done.out.split()[1]))
    assert done.code == 1 and "2 of 3 runs are finished" in done.err
    runs = [element.run for element in read_table(sweep)]
    assert [run.result.exists() for run in runs] == [True, False, True]
    assert [element.job for element in read_table(sweep)] == [None] * 3
    (person.folder / "mended").touch()
    again = person.types(*words)
    assert again.code == 0 and "2 runs are finished, 0 active; 1 to submit" in again.err
    assert [len(read_ledger(run)) for run in runs] == [1, 2, 1]


def test_ctrl_c_stops_the_run_at_work_and_starts_no_other(person: Person) -> None:
    words = [sys.executable, "-m", "slurm_train", *words_of(person.folder, "slow", "fine")]
    process = subprocess.Popen(
        words,
        cwd=person.folder,
        env=person.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    sweep = SweepDirectory(Path(process.stdout.readline().split()[1]))
    first, second = (element.run for element in read_table(sweep))
    wait_for(lambda: read_ledger(first), within_s=60, what="the first run")
    (person.folder / "mended").touch()
    # A terminal sends it to every process of the group.
    subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command continues" in err
    assert not second.epochs.exists()
