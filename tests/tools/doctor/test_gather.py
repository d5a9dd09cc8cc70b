"""Facts of this very machine and of small files: what is read, and what happens where there is nothing to read."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.code.snapshot import index_code
from slurm_train.config.schema import CheckpointSection, RunConfig, build_config
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.doctor import gather
from slurm_train.tools.doctor.gather import logged_errors, read_gpus
from tests.support.devices import make_devices

PLACE = RankPlace(rank=1, local_rank=1, node_rank=0, world_size=2, local_world_size=2, host="here")


@pytest.mark.parametrize(
    ("setting", "on_node", "count"),
    [
        ("", "2", 0),
        ("0,1", "2", 2),
        ("0", "2", 2),
        ("0", "", 1),
        ("GPU-ab,GPU-cd", "", 2),
        ("2,-1,3", "", 1),
        ("NoDevFiles", "", 0),
    ],
)
def test_gpus_are_counted_as_cuda_does_and_those_of_the_step_where_a_rank_is_bound_to_one(
    setting: str, on_node: str, count: int
) -> None:
    env = {"SLURM_GPUS_ON_NODE": on_node, "CUDA_VISIBLE_DEVICES": setting}
    assert gather.read_rank(PLACE, env).visible_gpus == count


def test_gpus_of_other_vendors_are_counted_by_their_own_variables() -> None:
    assert gather.read_rank(PLACE, {"ROCR_VISIBLE_DEVICES": "0,1,2"}).visible_gpus == 3


@pytest.mark.parametrize(
    ("env", "is_unnamed"),
    [
        ({"SLURM_STEP_ID": "0"}, True),
        # What a batch script has of its job is not the step's.
        ({"SLURM_STEP_ID": "0", "SLURM_JOB_GPUS": "0,1"}, True),
        ({"SLURM_STEP_ID": "0", "CUDA_VISIBLE_DEVICES": ""}, False),
        ({"SLURM_STEP_ID": "0", "ROCR_VISIBLE_DEVICES": "0"}, False),
        # A task prolog has removed the vendor's variable.
        ({"SLURM_STEP_ID": "0", "SLURM_GPUS_ON_NODE": "2"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "0,1"}, False),
        ({}, False),
    ],
)
def test_a_task_knows_that_nothing_names_a_gpu_to_it(env: dict[str, str], is_unnamed: bool) -> None:
    assert (gather.read_rank(PLACE, env).unnamed_gpus is not None) == is_unnamed


@pytest.mark.parametrize(
    ("env", "compile_", "is_looked_for"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, "auto", True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, False, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, "auto", False),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, True),
    ],
)
def test_a_compiler_is_looked_for_where_the_run_compiles(
    env: dict[str, str], compile_: Any, is_looked_for: bool, tmp_path: Path
) -> None:
    config = build_config(RunConfig, {"train": {"compile": compile_}})
    devices, sys = make_devices(tmp_path, {"nvidia0": ""})
    # A folder without programs.
    found = gather.read_compile_obstacles(config, {**env, "PATH": str(tmp_path)}, devices=devices, sys=sys)
    assert any("compiler" in obstacle for obstacle in found) == is_looked_for


def test_a_rank_knows_its_cpus_and_slurms_number() -> None:
    facts = gather.read_rank(PLACE, {"SLURM_PROCID": "7", "SLURM_STEP_ID": "0"})
    assert (facts.rank, facts.slurm_rank, facts.visible_gpus) == (1, 7, None)
    assert facts.cpus == sorted(os.sched_getaffinity(0))
    assert gather.read_rank(PLACE, {"SLURM_PROCID": "7"}).slurm_rank is None, "a batch script is no task"


def test_the_network_of_this_machine() -> None:
    assert gather.read_network(PLACE, {}, peer="nowhere.invalid") == {"address": "127.0.0.1"}, "it is one node"
    assert "lo" not in gather.interface_addresses()
    assert gather.route_to("127.0.0.1", {"lo": "127.0.0.1"}) == ("lo", "127.0.0.1")
    assert gather.link_speed_mbit("no-such-interface") is None
    addresses, error = gather.resolve("no-such-name.invalid")
    assert addresses == [] and error


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.code.mkdir(parents=True)
    run.checkpoints.mkdir()
    for name in ("train.py", "readme.md"):
        (run.code / name).write_text(name)
    run.config.write_text("seed: 0\n")
    run.plan.write_text("{}")
    run.code_index.write_text(json.dumps({"files": index_code(run.code.joinpath, ["train.py", "readme.md"])}))
    return run


def read(run: RunDirectory, **data: Any) -> dict[str, Any]:
    return gather.read_files(run, RunConfig(data=data) if data else RunConfig(), directory=run.path.parent)


def test_changed_and_missing_code_is_named_within_its_time(run: RunDirectory) -> None:
    before = read(run)
    run.config.write_text("seed: 1\n")
    (run.code / "train.py").chmod(0o644)
    (run.code / "train.py").write_text("other")
    (run.code / "readme.md").unlink()
    after = read(run)
    assert (before["code_changes"], after["code_changes"]) == ([], ["train.py", "readme.md (gone)"])
    assert "code" in before["hashes"] and "code" not in after["hashes"]
    assert before["hashes"]["config"] != after["hashes"]["config"]
    assert gather.read_files(run, RunConfig(), directory=run.path, hashing_s=-1.0)["code_changes"] == []


def test_data_that_are_not_there_or_empty_or_not_whole_are_named(run: RunDirectory, tmp_path: Path) -> None:
    folder, found = tmp_path / "images", []
    for make in (lambda: None, folder.mkdir, (folder / "a").touch):
        make()
        facts = read(run, _target_="mine.Data", root=str(folder))
        found.append((facts["data_missing"], facts["data_empty"]))
    assert found == [([f"{folder} is not there"], []), ([], [str(folder)]), ([], [])]
    # What is no path for certain is not looked for.
    assert read(run, _target_="mine.Data", split="/train", root="relative", path=7)["data_missing"] == []
    (missing,) = read(run, _target_="slurm_train.data.text.build", path="tokens")["data_missing"]
    assert missing.startswith(f"{tmp_path / 'tokens'} holds no token shards")


def test_places_are_written_to_and_left_clean(run: RunDirectory, tmp_path: Path) -> None:
    wanted, scratch = RunConfig(checkpoint=CheckpointSection(local_dir="$SCRATCH")), tmp_path / "scratch"
    scratch.mkdir()
    disks = {disk.role: disk for disk in gather.read_disks(run, wanted, {"SCRATCH": str(scratch)})}
    assert set(disks) == {"run directory", "checkpoint.local_dir", "temporary files", "shared memory"}
    assert disks["checkpoint.local_dir"].path == str(scratch)
    assert all(disk.error == "" and disk.free_mb is not None for disk in disks.values())
    assert list(run.checkpoints.iterdir()) == list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "is_full", "is_readonly"),
    [(errno.EDQUOT, True, False), (errno.EROFS, False, True), (errno.ENOENT, False, False)],
)
def test_a_place_that_cannot_be_written_has_the_reason(
    number: int, is_full: bool, is_readonly: bool, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(gather.os, "open", refuse)
    disk = gather.read_disks(run, RunConfig(), {})[0]
    assert (disk.is_full, disk.is_readonly, disk.error) == (is_full, is_readonly, os.strerror(number))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML of two GPUs; a question that it does not know raises, as the real one does."""
    module = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlSystemGetDriverVersion=lambda: b"570.1",
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]),
        used=[0, 0],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 << 30, used=module.used[handle]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_without_nvml_nothing_is_known_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus(["0"]) == (None, None, "")


def test_errors_and_slowdowns_are_read_and_a_lost_gpu_is_an_error(nvml: SimpleNamespace) -> None:
    healthy, count, driver = read_gpus(["GPU-1"])
    assert (count, driver, healthy[0].total_mb, healthy[0].errors) == (2, "570.1", 81920, [])
    nvml.nvmlDeviceGetTotalEccErrors = lambda *_: 3
    nvml.nvmlDeviceGetRemappedRows = lambda _handle: (0, 0, 1, 1)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _handle: 0x48
    nvml.used.pop()
    first, lost = read_gpus(None)[0]
    assert first.errors == ["3 uncorrected memory errors since it was started", "its memory has no spare rows left"]
    assert first.warnings == [
        "slowed down by its hardware (power or heat)",
        "slowed down by heat",
        "faulty memory waits for a reset to be taken out of use",
    ]
    assert lost.errors == ["NVML cannot read it: list index out of range"]


def test_what_other_runs_hold_of_a_shared_gpu_is_nothing_left_over(nvml: SimpleNamespace) -> None:
    nvml.used = [60 << 30, 0]
    (shared,) = read_gpus(["0"], are_shared=True)[0] or []
    assert (shared.used_mb, shared.total_mb, shared.holders) == (0, 81920, [])
    (left_over,) = read_gpus(["0"])[0] or []
    assert left_over.used_mb == 61440


def test_hardware_errors_of_the_last_day_are_read_from_the_kernels_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = 200_000_000_000
    monkeypatch.setattr(time, "clock_gettime", lambda _clock: now_us / 1e6)
    log = tmp_path / "kmsg"
    log.write_text(
        f"6,1,{now_us - 10},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        f"6,2,{now_us - 10},-;NVRM: Xid (PCI:0000:3b:00): 31, pid=2, a program's own fault\n"
        f"6,3,{now_us - 90_000_000_000},-;NVRM: Xid (PCI:0000:af:00): 48, long ago\n"
        f"6,4,{now_us - 10},-;eth0: link is up\nnonsense\n"
    )
    assert logged_errors(log) == ["Xid 79 on 0000:3b:00"]
    assert logged_errors(tmp_path / "none") == []


def test_rank_0s_node_is_reached_where_its_address_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"eth0": "10.78.0.11", "ib0": "10.79.0.11"}
    monkeypatch.setattr(gather, "interface_addresses", lambda: addresses)
    names = {"node1": "10.78.0.11", "node2": "10.78.0.12", "node1i": "10.79.0.11"}
    monkeypatch.setattr(gather, "resolve", lambda name: ([names.get(name, name)], ""))
    monkeypatch.setattr(gather, "route_to", lambda *_: ("eth0", "10.78.0.11"))
    cases = [(0, "10.79.0.11", "ib0"), (0, "node1i", "ib0"), (0, "node1", "eth0"), (0, "10.1.1.1", "eth0")]
    for rank, master, interface in (*cases, (2, "10.79.0.11", "eth0")):
        place = replace(PLACE, rank=rank, local_rank=0, node_rank=rank // 2, world_size=4, local_world_size=2)
        found = gather.read_network(place, {"MASTER_ADDR": master}, peer="node2")
        assert (found["interface"], found["address"]) == (interface, addresses[interface])
