"""A run's share of a node: the words of its step, and which GPU and CPUs it takes where runs share GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.slurm.pack_slot import PACK, PackSlot, enter_slot

SRUN = ("srun", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2")

STEPS = [
    # environment, words after --ntasks-per-node -> what a step asks for in addition
    ({}, (), []),
    ({"SLURM_MEM_PER_NODE": "65536"}, (), ["--mem=16384"]),
    ({"SLURM_MEM_PER_NODE": "0"}, (), ["--mem=0"]),
    ({"SLURM_MEM_PER_CPU": "2048"}, (), []),
    ({"SLURM_JOB_CPUS_PER_NODE": "64"}, (), ["--cpus-per-task=8"]),
    ({"SLURM_JOB_CPUS_PER_NODE": "4"}, (), ["--cpus-per-task=1"]),
    ({"SLURM_JOB_CPUS_PER_NODE": "64"}, ("--cpus-per-task=6",), []),
]


@pytest.mark.parametrize(("env", "words", "expected"), STEPS)
def test_a_step_takes_no_more_than_its_share(env: dict[str, str], words: tuple[str, ...], expected: list[str]) -> None:
    slot = PackSlot.from_env({PACK: "2/4"})
    assert slot is not None
    argv = slot.step_words([*SRUN, *words, "python"], env, {"gres": "gpu:a100:2"})
    assert argv == ["srun", "--exact", "--gres=gpu:a100:2", *expected, *SRUN[1:], *words, "python"]


@pytest.mark.parametrize("env", [{}, {PACK: "back"}])
def test_a_run_that_has_the_whole_job_has_no_share(env: dict[str, str]) -> None:
    assert PackSlot.from_env(env) is None


SHARED_STEPS = [
    # the run's flag for GPUs, words after --ntasks-per-node -> what the step asks for in addition
    ({"gres": "gpu:1"}, (), ["--gres=gpu:4"]),
    ({"gres": "gpu:a100:1"}, ("--cpus-per-task=2",), ["--gres=gpu:a100:4"]),
    ({"gpus-per-node": "1"}, (), ["--gpus-per-node=4"]),
    ({"gpus-per-task": "h100:1"}, ("--cpus-per-task=2",), ["--gpus-per-node=h100:4"]),
]


@pytest.mark.parametrize(("gpus", "words", "expected"), SHARED_STEPS)
def test_the_step_of_a_run_that_shares_a_gpu_overlaps_with_the_others(
    gpus: dict[str, str], words: tuple[str, ...], expected: list[str]
) -> None:
    slot = PackSlot.from_env({PACK: "2/8/4"})
    assert slot is not None
    env = {"SLURM_MEM_PER_NODE": "65536", "SLURM_JOB_CPUS_PER_NODE": "16"}
    argv = slot.step_words([*SRUN, *words, "python"], env, gpus)
    everything = ["--overlap", "--exact", *expected, "--mem=8192", "--cpus-per-task=16"]
    assert argv == ["srun", *everything, *SRUN[1:], "python"]


def slots(num_runs: int, num_gpus: int) -> list[PackSlot]:
    return [PackSlot(slot, num_runs, num_gpus) for slot in range(num_runs)]


def test_runs_are_spread_over_the_gpus() -> None:
    assert [slot.gpu for slot in slots(5, 3)] == [0, 1, 2, 0, 1]
    env = {
        "CUDA_VISIBLE_DEVICES": "4,MIG-7,6",
        "ROCR_VISIBLE_DEVICES": "0",
        "SLURM_GPUS_ON_NODE": "3",
        "SLURM_CPUS_ON_NODE": "16",
        "SLURM_CPUS_PER_TASK": "16",
    }
    assert PackSlot(4, 5, 3).variables(env) == {
        "CUDA_VISIBLE_DEVICES": "MIG-7",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "3",
    }
    assert PackSlot(4, 5, 3).variables({}) == {}


CORES = [
    # runs, GPUs, cores of two threads -> cores of each run
    (4, 2, 8, [{0, 1}, {4, 5}, {2, 3}, {6, 7}]),
    (5, 3, 7, [{0}, {2}, {4}, {1}, {3}]),
    (4, 2, 2, [{0}, {0}, {1}, {1}]),
    (2, 1, 1, [{0}, {0}]),
]


@pytest.mark.parametrize(("num_runs", "num_gpus", "num_cores", "expected"), CORES)
def test_runs_of_a_gpu_have_cores_of_their_own(
    num_runs: int, num_gpus: int, num_cores: int, expected: list[set[int]]
) -> None:
    cores = [(core, core + 100) for core in range(num_cores)]
    cpus = [slot.cpus(cores) for slot in slots(num_runs, num_gpus)]
    assert cpus == [{cpu for core in own for cpu in cores[core]} for own in expected]


def test_a_rank_keeps_to_whole_cores_of_those_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {1, 2, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _process, cpus: bound.append(set(cpus)))
    for cpu, threads in {1: "1,5", 5: "1,5", 2: "2,6", 6: "2,6"}.items():
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{threads}\n")
    assert enter_slot({PACK: "1/2/1", "CUDA_VISIBLE_DEVICES": "3"}, sys=tmp_path) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert enter_slot({PACK: "0/2/1"}, sys=tmp_path / "of a container") == {}
    assert bound == [{2, 6}, {1, 2}]


@pytest.mark.parametrize("env", [{}, {PACK: "1/8", "CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}])
def test_a_rank_with_gpus_of_its_own_leaves_what_slurm_gave(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("it was bound"))
    assert enter_slot(env) == {}
