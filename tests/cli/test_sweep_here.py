"""A sweep on this machine, for real: each run is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.rundir.sweep import SweepDirectory, read_table
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.waiting import wait_for

SCRIPT = """
import pathlib, sys, time
kind, mended = sys.argv[1], pathlib.Path("mended")
if kind == "bad" and not mended.exists():
    sys.exit(5)
while kind == "slow" and not mended.exists():
    time.sleep(0.05)
"""

# What another command does meanwhile, which sweeps the last of the runs as well. The second run ends after it.
OTHERS = """
good = [run for run in pathlib.Path("runs/train").iterdir() if "good" in (run / "config.yaml").read_text()]
if kind == "first":
    for run in good:
        (run / "result.json").write_text("{}")
while not all((run / "result.json").exists() for run in good):
    time.sleep(0.05)
"""


@pytest.fixture
def person(tmp_path: Path) -> Person:
    (tmp_path / "train.py").write_text(SCRIPT)
    return Person(tmp_path)


@pytest.mark.parametrize("num_parallel", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_that_fails_ends_no_other_and_the_same_words_continue(num_parallel: int, person: Person) -> None:
    scripts = "script=[train.py,fine],[train.py,bad],[train.py,good]"
    words = ["-m", scripts, "run.processes=1", f"sweep.max_parallel={num_parallel}"]
    done = person.types(*words)
    assert done.code == 1 and "2 of 3 runs are finished" in done.err
    elements = read_table(SweepDirectory(Path(done.out.split()[1])))
    assert [(one.run.result.exists(), one.job) for one in elements] == [(True, None), (False, None), (True, None)]
    (person.folder / "mended").touch()
    again = person.types(*words)
    assert again.code == 0 and "2 runs are finished, 0 active; 1 to submit" in again.err
    assert [len(ledger_lines(one.run)) for one in elements] == [1, 2, 1]


@pytest.mark.parametrize("num_parallel", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_that_another_sweep_finishes_meanwhile_is_left_alone(num_parallel: int, person: Person) -> None:
    scripts = "script=[train.py,first],[train.py,fine],[train.py,good]"
    (person.folder / "train.py").write_text(f"{SCRIPT}{OTHERS}")
    done = person.types("-m", scripts, "run.processes=1", f"sweep.max_parallel={num_parallel}")
    assert done.code == 0 and "3 of 3 runs are finished" in done.err and "error" not in done.err
    assert "run 2: script=[train.py,good]  was finished by another command" in done.err


def started(person: Person, scripts: str) -> subprocess.Popen[str]:
    """Returns a sweep that trains one script after the other."""
    return subprocess.Popen(
        [sys.executable, "-m", "slurm_train", "-m", scripts, "run.processes=1"],
        cwd=person.folder,
        env=person.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_stops_the_run_at_work_and_starts_no_other(person: Person) -> None:
    process = started(person, "script=[train.py,slow],[train.py,fine]")
    sweep = SweepDirectory(Path(process.stdout.readline().split()[1]))
    first, second = (element.run for element in read_table(sweep))
    wait_for(lambda: ledger_lines(first), within_s=60, what="the first run")
    (person.folder / "mended").touch()
    # A terminal sends it to every process of the group.
    subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command continues" in err
    assert not second.epochs.exists()


def test_a_stopped_sweep_counts_the_runs_that_failed_before_as_well(person: Person) -> None:
    process = started(person, "script=[train.py,bad],[train.py,slow],[train.py,fine]")
    sweep = SweepDirectory(Path(process.stdout.readline().split()[1]))
    slow = read_table(sweep)[1].run
    wait_for(lambda: ledger_lines(slow), within_s=60, what="the second run")
    sweep.stop_file.touch()
    (person.folder / "mended").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "without a result: 2 runs" in err
