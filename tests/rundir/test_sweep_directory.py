from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.lookup import find_sweep
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import (
    Element,
    SweepDirectory,
    choosing_runs,
    existing_arrays,
    list_sweeps,
    read_table,
    record_array,
    submitting,
    wait_for_sweeps,
    write_table,
)


def new_sweep(root: Path, sweep_id: str = "9b1c44e0") -> SweepDirectory:
    sweep = SweepDirectory(root / "sweeps" / sweep_id)
    sweep.path.mkdir(parents=True)
    runs = [RunDirectory(root / "gpt-stdlib" / f"0000000{index}") for index in range(3)]
    write_table(sweep, [Element(index=i, run=run, overrides={"seed": str(i)}) for i, run in enumerate(runs)])
    return sweep


def new_array(
    sweep: SweepDirectory, number: int, runs: list[RunDirectory], job_id: str | None = None, *, is_array: bool = True
) -> None:
    array = sweep.array(number)
    array.path.mkdir(parents=True)
    array.runs.write_text("".join(f"{run.path}\n" for run in runs))
    array.script.write_text(f"#!/bin/bash\n#SBATCH --array=0-{len(runs) - 1}\n" if is_array else "#!/bin/bash\n")
    if job_id is not None:
        array.job.write_text(json.dumps({"job_id": job_id}))


def test_an_array_gives_its_elements_their_jobs_and_leaves_the_others(tmp_path: Path) -> None:
    sweep = new_sweep(tmp_path)
    line = {"index": 1, "run": "gpt-stdlib/00000001", "overrides": {"seed": "1"}, "job": None}
    assert json.loads(sweep.table.read_text().splitlines()[1]) == line
    runs = [element.run for element in read_table(sweep)]
    new_array(sweep, 0, runs, "12")
    new_array(sweep, 1, [runs[2], runs[0]], "40")
    elements = record_array(read_table(sweep), sweep.array(0), "12")
    assert [element.job for element in elements] == ["12_0", "12_1", "12_2"]
    assert [element.job for element in record_array(elements, sweep.array(1), "40")] == ["40_1", "12_1", "40_0"]
    new_array(sweep, 2, [runs[1]], "50", is_array=False)
    assert [element.job for element in record_array(elements, sweep.array(2), "50")] == ["12_0", "50", "12_2"]
    new_array(sweep, 1000, [])
    (sweep.arrays / "notes").mkdir()
    assert [array.number for array in existing_arrays(sweep)] == [0, 1, 2, 1000]


@pytest.mark.parametrize("word", ["9b1c", "sweeps/9b1c44e0", "12", "PATH"])
def test_a_sweep_is_found_by_what_a_person_types(word: str, tmp_path: Path) -> None:
    sweep = new_sweep(tmp_path)
    new_array(sweep, 0, [], "12")
    new_sweep(tmp_path, "77777777")
    assert find_sweep(tmp_path, str(sweep.path) if word == "PATH" else word) == sweep


def test_a_whole_id_means_its_sweep_also_beside_one_that_was_moved_aside(tmp_path: Path) -> None:
    sweep = new_sweep(tmp_path)
    new_sweep(tmp_path, f"{sweep.sweep_id}.old")
    assert find_sweep(tmp_path, sweep.sweep_id) == sweep


def test_a_word_that_names_no_sweep_or_several(tmp_path: Path) -> None:
    new_sweep(tmp_path, "9b1c44e0")
    new_sweep(tmp_path, "9b1c0000")
    assert [find_sweep(tmp_path, word) for word in ("gpt-stdlib", "9b1", "13", "9b1c44e1")] == [None] * 4
    with pytest.raises(RunError, match="'9b1c' is the beginning of several sweeps: 9b1c0000, 9b1c44e0"):
        find_sweep(tmp_path, "9b1c")
    assert {sweep.sweep_id for sweep in list_sweeps(tmp_path)} == {"9b1c44e0", "9b1c0000"}


def test_a_run_name_means_the_sweep_that_has_all_runs_of_it(tmp_path: Path) -> None:
    sweep = new_sweep(tmp_path)
    for element in read_table(sweep):
        element.run.path.mkdir(parents=True)
        element.run.config.touch()
    assert find_sweep(tmp_path, "gpt-stdlib") == sweep and find_sweep(tmp_path, "gpt") is None
    alone = RunDirectory(tmp_path / "gpt-stdlib" / "ffffffff")
    alone.path.mkdir()
    alone.config.touch()
    assert find_sweep(tmp_path, "gpt-stdlib") is None, "the name means a run of its own as well"


def test_a_command_that_submits_a_sweep_keeps_others_from_its_runs_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runs"
    sweep, other = (SweepDirectory(root / "sweeps" / name) for name in ("9b1c44e0", "36ca98a3"))
    first, second, third = (RunDirectory(root / "gpt" / name) for name in ("one", "two", "three"))
    said = list[str]()
    with choosing_runs(sweep, [first, second], wait_s=0.0, say=said.append):
        wait_for_sweeps(third, wait_s=0.0)
        with pytest.raises(RunError, match="submitting a sweep with gpt/two for more than 0 s"):
            wait_for_sweeps(second, wait_s=0.0)
        refused = pytest.raises(RunError, match="submitting runs of this sweep for more than 0 s")
        with refused, choosing_runs(other, [second, third], wait_s=0.0, say=said.append):
            raise AssertionError("two at once")
        held = pytest.raises(RunError, match="submitting a sweep with gpt/three")
        with choosing_runs(other, [third], wait_s=0.0, say=said.append), held:
            wait_for_sweeps(third, wait_s=0.0)
        thread = threading.Thread(target=lambda: wait_for_sweeps(first, wait_s=60.0))
        thread.start()
    thread.join(60.0)
    assert not (tmp_path / "new").exists() and said == []


def test_what_a_killed_submission_of_a_sweep_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "gpt" / "one")
    left = tmp_path / ".submitting_sweeps" / "tmpx"
    left.parent.mkdir()
    left.write_text("gpt/one\n")
    wait_for_sweeps(run, wait_s=0.0)
    with choosing_runs(SweepDirectory(tmp_path / "sweeps" / "9b1c44e0"), [run], wait_s=0.0, say=print):
        run.path.mkdir(parents=True)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt"]


def test_one_submitter_at_a_time(tmp_path: Path) -> None:
    sweep = SweepDirectory(tmp_path / "sweeps" / "9b1c44e0")
    refused = pytest.raises(RunError, match="being submitted or run by another command")
    with submitting(sweep), refused, submitting(sweep):
        raise AssertionError("two at once")
    with submitting(sweep):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be made"), submitting(SweepDirectory(tmp_path / "file" / "x")):
        pass
