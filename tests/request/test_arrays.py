from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_train.request.arrays import ArrayPlan, array_request, cut_arrays, max_array_size, submit_arrays
from slurm_train.request.batch_script import job_request
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory
from slurm_train.slurm.job_request import JobRequest
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.plans import make_plan

GOLDEN = Path(__file__).parent / "golden" / "array_16.sh"
GOLDEN_PACK = GOLDEN.with_name("pack_10.sh")
SWEEP = SweepDirectory(Path("/home/user/it's mine/runs/sweeps/9b1c44e0"))


def requests(count: int, **cluster: object) -> list[tuple[RunDirectory, JobRequest]]:
    plans = [make_plan(cluster={"nodes": 2, "gpus_per_node": 8, **cluster}, seed=seed) for seed in range(count)]
    return [(plan.run, job_request(plan, default_python="/usr/bin/python3")) for plan in plans]


def cut(count: int, *, max_size: int = 1001, max_parallel: int | None = None) -> list[ArrayPlan]:
    return cut_arrays(requests(count), max_size=max_size, max_parallel=max_parallel)


def render(plan: ArrayPlan) -> str:
    return array_request(plan, SWEEP, 0).text()


def test_the_script_of_an_array_is_the_golden_file() -> None:
    (plan,) = cut_arrays(requests(16, time_limit_min=90, partition="gpu"), max_size=1001, max_parallel=4)
    # After a wanted change: print the new text, read the difference, and put it there.
    assert render(plan) == GOLDEN.read_text(encoding="utf-8")


def test_an_array_has_the_prefix_of_its_runs_names() -> None:
    plans = cut_arrays(requests(2, job_name_prefix="proj-sub:") + requests(1), max_size=9, max_parallel=None)
    names = [line for plan in plans for line in render(plan).splitlines() if "--job-name" in line]
    assert names == ["#SBATCH --job-name=proj-sub:sweep-9b1c44e0-0", "#SBATCH --job-name=sweep-9b1c44e0-0"]


def test_an_array_that_waits_keeps_the_dependency_of_its_runs(tmp_path: Path) -> None:
    programs = SlurmPrograms(tmp_path / "bin")
    runs = requests(2, sbatch={"dependency": "afterok:7"})
    plans = cut_arrays(runs, max_size=1, max_parallel=1)
    sweep = SweepDirectory(tmp_path / "runs" / "sweeps" / "9b1c44e0")
    env = {"PATH": programs.path, "HOME": str(tmp_path)}
    for run, _ in runs:
        (tmp_path / "runs" / run.name / run.run_id).mkdir(parents=True)
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
    script = array_request(ArrayPlan(runs=runs, components=({},), is_alone=is_alone), sweep, 0).text()
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
    small, large = requests(3), requests(2, nodes=4, gpus_per_node=4)
    arrays = cut_arrays([small[0], large[0], small[1], large[1], small[2]], max_size=1001, max_parallel=None)
    assert [array.runs for array in arrays] == [tuple(run for run, _ in small), tuple(run for run, _ in large)]
    assert [array.components[0]["nodes"] for array in arrays] == ["2", "4"]
    shared = str(arrays[0].components)
    assert not any(run.run_id in shared for run, _ in small), "no name or log of a run"


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
    assert [array.predecessor for array in arrays] == after
    # Arrays that wait for nothing may run at once; each other one takes the place of one that is over.
    if limit is not None:
        assert sum(array.throttle or 0 for array in arrays if array.predecessor is None) <= limit


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
    assert [(len(array.runs), array.is_alone, array.predecessor) for array in arrays] == [
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


# --- packs ---


def test_the_script_of_packs_is_the_golden_file() -> None:
    one_node = {"nodes": 1, "gpus_per_node": 2, "gpu_flag": "gres", "gpu_type": "a100", "memory_gb_per_gpu": 16}
    (plan,) = cut_arrays(requests(10, **one_node), max_size=1001, max_parallel=9, pack=4)
    assert render(plan) == GOLDEN_PACK.read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["gres", "gpus-per-node", "gpus-per-task"])
def test_runs_that_share_gpus_ask_for_fewer_of_them(flag: str) -> None:
    asked = {"gpu_flag": flag, "gpu_type": "a100", "memory_gb_per_gpu": 16, "cpus_per_gpu": 3}
    runs = requests(10, **{"nodes": 1, "gpus_per_node": 1, **asked})
    (plan,) = cut_arrays(runs, max_size=1001, max_parallel=None, pack=5, runs_per_gpu=2)
    text = render(plan)
    gpus = "--gres=gpu:a100:3" if flag == "gres" else "--gpus-per-node=a100:3"
    for directive in (gpus, "--ntasks=5", "--ntasks-per-node=5", "--mem=80G", "--cpus-per-task=3"):
        assert f"#SBATCH {directive}\n" in text
    assert "gpus-per-task" not in text
    assert 'call "${runs[slot]}" "$slot/$pack/3" &' in text


PACKS = [
    # runs, largest array, limit, pack -> sizes, elements, throttles, runs of an element
    (16, 1001, None, 8, [16], [2], [None], [8]),
    (10, 2, 8, 4, [8, 2], [2, 1], [1, 1], [4, 4]),
    (10, 0, None, 4, [4, 4, 2], [1, 1, 1], [None] * 3, [4] * 3),
    (3, 1001, None, 8, [3], [1], [None], [3]),
]


@pytest.mark.parametrize(("count", "size", "limit", "pack", "sizes", "elements", "throttles", "packs"), PACKS)
def test_packs_are_the_elements_of_arrays(
    count: int,
    size: int,
    limit: int | None,
    pack: int,
    sizes: list[int],
    elements: list[int],
    throttles: list[int | None],
    packs: list[int],
) -> None:
    arrays = cut_arrays(requests(count, nodes=1), max_size=size, max_parallel=limit, pack=pack)
    assert [len(array.runs) for array in arrays] == sizes
    assert [array.num_elements for array in arrays] == elements
    assert [array.throttle for array in arrays] == throttles
    assert [array.pack for array in arrays] == packs, "fewer runs than a pack ask for no more than they need"


def pack_element(folder: Path, bodies: Sequence[str], *, pack: int, task: str) -> subprocess.CompletedProcess[str]:
    """Carries out an element of an array of packs; each run's script has a line, and notes how it was called."""
    runs = [RunDirectory(folder / f"run {index}") for index in range(len(bodies))]
    for run, body in zip(runs, bodies, strict=True):
        run.logs.mkdir(parents=True)
        run.submit_script.write_text(f'echo "$SLURM_TRAIN_PACK" >> "{run.path}/calls"\n{body}\n')
    sweep = SweepDirectory(folder / "sweep")
    sweep.array(0).path.mkdir(parents=True)
    sweep.array(0).runs.write_text("".join(f"{run.path}\n" for run in runs))
    script = array_request(ArrayPlan(runs=tuple(runs), components=({},), pack=pack), sweep, 0).text()
    env = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": task}
    return subprocess.run(["bash"], input=script, env=env, cwd=folder, capture_output=True, text=True)


def calls(folder: Path) -> list[list[str]]:
    """Returns how the script of each run was called."""
    paths = [folder / f"run {index}" / "calls" for index in range(len(list(folder.glob("run *"))))]
    return [path.read_text().split() if path.exists() else [] for path in paths]


ENDS = [
    # what each run's script does -> code of the job, calls of each
    (["exit 0", "exit 0"], 0, [["0/2"], ["1/2"]]),
    (["exit 3", "exit 0"], 3, [["0/2"], ["1/2"]]),
    (["exit 3", "exit 75"], 75, [["0/2"], ["1/2", "back"]]),
    (["[ $SLURM_TRAIN_PACK = back ] || exit 75", "exit 1"], 0, [["0/2", "back"], ["1/2"]]),
]


@pytest.mark.parametrize(("bodies", "code", "expected"), ENDS)
def test_a_pack_comes_back_once_all_have_ended(
    bodies: list[str], code: int, expected: list[list[str]], tmp_path: Path
) -> None:
    assert pack_element(tmp_path, bodies, pack=2, task="0").returncode == code
    assert calls(tmp_path) == expected


def test_an_element_carries_its_own_runs_out_side_by_side(tmp_path: Path) -> None:
    # Each waits for the other, so they end only if both run.
    meets = 'touch "{own}"; while [ ! -e "{other}" ]; do sleep 0.05; done'
    files = [tmp_path / name for name in ("a", "b")]
    bodies = ["exit 9"] * 2 + [meets.format(own=files[at], other=files[1 - at]) for at in range(2)] + ["exit 9"]
    assert pack_element(tmp_path, bodies, pack=2, task="1").returncode == 0
    assert calls(tmp_path) == [[], [], ["0/2"], ["1/2"], []]


def test_a_pack_outlives_the_signals_that_are_for_the_ranks(tmp_path: Path) -> None:
    bodies = ["kill -TERM $PPID; kill -USR2 $PPID; sleep 0.2; exit 75", "sleep 0.5; touch ../ended; exit 0"]
    (tmp_path / "work").mkdir()
    assert pack_element(tmp_path / "work", bodies, pack=2, task="0").returncode == 75
    assert (tmp_path / "ended").exists(), "the other one was waited for"
    assert calls(tmp_path / "work") == [["0/2", "back"], ["1/2"]]


def test_a_run_of_a_pack_that_others_may_write_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run 0").mkdir()
    (tmp_path / "run 0").chmod(0o777)
    done = pack_element(tmp_path, ["exit 0", "exit 0"], pack=2, task="0")
    assert done.returncode == 2 and "somebody else owns it or may write it" in done.stderr
    assert calls(tmp_path) == [[], ["1/2"]]


def test_a_pack_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = pack_element(tmp_path, ["exit 0"], pack=2, task="7")
    assert (done.returncode, done.stderr) == (2, "error: there is no such line in runs.txt\n")
