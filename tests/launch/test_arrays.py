from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurm_train.launch.arrays import ArrayPlan, cut_arrays, max_array_size, render_array, submit_arrays
from slurm_train.launch.batch_script import render_script
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.plans import make_plan

GOLDEN = Path(__file__).parent / "golden" / "array_16.sh"
SWEEP = SweepDirectory(Path("/home/user/it's mine/runs/sweeps/9b1c44e0"))


def scripts(count: int, **cluster: object) -> list[tuple[RunDirectory, str]]:
    plans = [make_plan(cluster={"nodes": 2, "gpus_per_node": 8, **cluster}, seed=seed) for seed in range(count)]
    return [(plan.run, render_script(plan, default_python="/usr/bin/python3")) for plan in plans]


def cut(count: int, *, max_size: int = 1001, max_parallel: int | None = None) -> list[ArrayPlan]:
    return cut_arrays(scripts(count), max_size=max_size, max_parallel=max_parallel)


def render(plan: ArrayPlan) -> str:
    return render_array(plan, SWEEP, 0)


def test_the_script_of_an_array_is_the_golden_file() -> None:
    (plan,) = cut_arrays(scripts(16, time_limit_min=90, partition="gpu"), max_size=1001, max_parallel=4)
    # After a wanted change: print the new text, read the difference, and put it there.
    assert render(plan) == GOLDEN.read_text(encoding="utf-8")


def test_an_array_has_the_prefix_of_its_runs_names() -> None:
    plans = cut_arrays(scripts(2, job_name_prefix="proj-sub:") + scripts(1), max_size=9, max_parallel=None)
    names = [line for plan in plans for line in render(plan).splitlines() if "--job-name" in line]
    assert names == ["#SBATCH --job-name=proj-sub:sweep-9b1c44e0-0", "#SBATCH --job-name=sweep-9b1c44e0-0"]


def test_an_array_that_waits_keeps_the_dependency_of_its_runs(tmp_path: Path) -> None:
    programs = SlurmPrograms(tmp_path / "bin")
    runs = scripts(2, sbatch={"dependency": "afterok:7"})
    plans = cut_arrays(runs, max_size=1, max_parallel=1)
    sweep = SweepDirectory(tmp_path / "runs" / "sweeps" / "9b1c44e0")
    env = {"PATH": programs.path, "HOME": str(tmp_path)}
    assert len(list(submit_arrays(sweep, plans, env=env, depends="afterok:5"))) == 2
    words = [line.split() for line in (tmp_path / "bin" / "sbatch_words").read_text().splitlines()]
    waits = [word for line in words for word in line if word.startswith("--dependency=")]
    assert waits[0] == "--dependency=afterok:5,afterok:7"
    assert waits[1].startswith("--dependency=afterok:5,afterany:") and waits[1].endswith(",afterok:7")


def element(
    folder: Path, *runs: RunDirectory, task: str | None = "0", is_alone: bool = False
) -> subprocess.CompletedProcess[str]:
    """Carries out the script of an array of these runs as an element of it would, in the folder above."""
    sweep = SweepDirectory(folder)
    sweep.array(0).path.mkdir(parents=True, exist_ok=True)
    sweep.array(0).runs.write_text("".join(f"{run.path}\n" for run in runs))
    env = {"PATH": os.environ["PATH"]} | ({} if task is None else {"SLURM_ARRAY_TASK_ID": task})
    script = render_array(ArrayPlan(runs=runs, directives=(), is_alone=is_alone), sweep, 0)
    return subprocess.run(["bash"], input=script, env=env, cwd=folder.parent, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["plain", "it's $HOME; `id` & more"])
def test_each_element_runs_its_own_runs_script_where_it_was_submitted(name: str, tmp_path: Path) -> None:
    runs = [RunDirectory(tmp_path / name / f"run {index}") for index in range(3)]
    for run in runs:
        run.logs.mkdir(parents=True)
        run.submit_script.write_text('pwd; echo "$0"; echo also >&2\n')
    for index, run in enumerate(runs):
        done = element(tmp_path / name, *runs, task=str(index))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (run.logs / "batch.log").read_text() == f"{tmp_path}\n{run.submit_script}\nalso\n"


@pytest.mark.parametrize("name", ["submit.sh", "."])
def test_an_elements_script_that_others_may_write_is_not_run(name: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.submit_script.write_text(f"touch {tmp_path}/canary\n")
    (run.path / name).chmod(0o777)
    done = element(tmp_path, run)
    assert done.returncode == 2 and "somebody else owns it or may write it" in done.stderr
    assert not (tmp_path / "canary").exists()


def test_runs_of_another_shape_go_into_another_array() -> None:
    small, large = scripts(3), scripts(2, nodes=4, gpus_per_node=4)
    arrays = cut_arrays([small[0], large[0], small[1], large[1], small[2]], max_size=1001, max_parallel=None)
    assert [array.runs for array in arrays] == [tuple(run for run, _ in small), tuple(run for run, _ in large)]
    assert "#SBATCH --nodes=2" in arrays[0].directives and "#SBATCH --nodes=4" in arrays[1].directives
    assert not any(run.run_id in line for run, _ in small for line in arrays[0].directives), "no name or log of a run"


CHUNKS = [
    # runs, largest array, limit -> sizes, throttles, waits for
    (5, 1001, 9, [5], [5], [None]),
    (7, 3, 6, [3, 3, 1], [3, 2, 1], [None, None, None]),
    (7, 3, 2, [3, 3, 1], [1, 1, 1], [None, None, 0]),
    (7, 2, 1, [2, 2, 2, 1], [1, 1, 1, 1], [None, 0, 1, 2]),
]


@pytest.mark.parametrize(("count", "size", "limit", "sizes", "throttles", "after"), CHUNKS)
def test_a_sweep_is_cut_at_the_largest_array_and_shares_its_limit(
    count: int, size: int, limit: int | None, sizes: list[int], throttles: list[int | None], after: list[int | None]
) -> None:
    arrays = cut(count, max_size=size, max_parallel=limit)
    assert [len(array.runs) for array in arrays] == sizes
    assert [array.throttle for array in arrays] == throttles
    assert [array.after for array in arrays] == after
    # Arrays that wait for nothing may run at once; each other one takes the place of one that is over.
    if limit is not None:
        assert sum(array.throttle or 0 for array in arrays if array.after is None) <= limit


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 1001),
        ({"MaxArraySize": "1001", "SchedulerParameters": "bf_interval=1,max_array_tasks=200,x"}, 200),
        ({"MaxArraySize": "0"}, 0),
    ],
)
def test_the_largest_array_is_the_sites(settings: dict[str, str], size: int) -> None:
    assert max_array_size(settings) == size


def test_where_there_are_no_arrays_each_run_is_a_job_of_its_own_and_the_limit_holds(tmp_path: Path) -> None:
    arrays = cut(5, max_size=0, max_parallel=2)
    assert [(len(array.runs), array.is_alone, array.after) for array in arrays] == [
        (1, True, None),
        (1, True, None),
        (1, True, 0),
        (1, True, 1),
        (1, True, 2),
    ]
    assert "#SBATCH --array" not in render(arrays[0]) and "logs/0.log" in render(arrays[0])
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.submit_script.write_text("echo here\n")
    done = element(tmp_path, run, task=None, is_alone=True)
    assert (done.returncode, (run.logs / "batch.log").read_text()) == (0, "here\n")
