"""Facts of this very machine and of small files: what is read, and what happens where there is nothing to read."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import CheckpointSection, RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.launch.code_index import seal_code
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.doctor import gather, places
from slurm_train.tools.doctor.gpus import logged_errors, read_gpus, visible_gpus
from slurm_train.tools.doctor.interfaces import interface_addresses, link_speed_mbit, resolve, route_to
from slurm_train.tools.doctor.places import read_disks, read_files
from slurm_train.tools.doctor.port_holder import holder_of
from slurm_train.tools.doctor.versions import read_versions

PLACE = RankPlace(rank=1, local_rank=1, node_rank=0, world_size=2, local_world_size=2, host="here")


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (None, None),
        ("", []),
        ("0,1", ["0", "1"]),
        ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"]),
        ("2,-1,3", ["2"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus_are_counted_as_cuda_does(setting: str | None, names: list[str] | None) -> None:
    assert visible_gpus(setting) == names


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, 1),
    ],
)
def test_a_rank_that_is_bound_to_one_gpu_counts_those_of_its_step(env: dict[str, str], count: int | None) -> None:
    assert gather.read_rank(PLACE, env).visible_gpus == count


def test_a_rank_knows_its_cpus_limits_and_slurms_number() -> None:
    env = {"SLURM_PROCID": "7", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "node4"}
    facts = gather.read_rank(PLACE, env)
    assert (facts.rank, facts.slurm_rank, facts.node) == (1, 7, "here")
    assert facts.cpus == sorted(os.sched_getaffinity(0))
    assert facts.max_open_files is None or facts.max_open_files > 0
    assert gather.read_rank(PLACE, {"SLURM_PROCID": "7"}).slurm_rank is None, "a batch script is no task"


def test_on_one_node_there_is_no_network_to_look_at() -> None:
    facts = gather.read_network(PLACE, {}, master="nowhere.invalid", peer="nowhere.invalid", probe_port=5)
    assert (facts.address, facts.probe_port, facts.interface) == ("127.0.0.1", 5, "")


def test_the_loopback_is_no_interface() -> None:
    assert "lo" not in interface_addresses()
    assert route_to("127.0.0.1", {"lo": "127.0.0.1"}) == ("lo", "127.0.0.1")
    assert link_speed_mbit("no-such-interface") is None


def test_a_name_that_does_not_resolve_is_told_with_its_reason() -> None:
    addresses, error = resolve("no-such-name.invalid")
    assert addresses == [] and error
    assert resolve("localhost")[0][0] == "127.0.0.1"


def test_versions_are_told_without_an_import() -> None:
    found = read_versions(driver="570.1")
    assert found["driver"] == "570.1" and found["torch"] and found["python"].count(".") == 2


def run_with_code(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.code.mkdir(parents=True)
    run.checkpoints.mkdir()
    for name in ("train.py", "readme.md"):
        (run.code / name).write_text(name)
    run.config.write_text("seed: 0\n")
    run.plan.write_text("{}")
    seal_code(run.code, ["train.py", "readme.md"], record=run.code_index, facts={})
    return run


def test_a_snapshot_that_is_what_was_submitted_has_no_changes(tmp_path: Path) -> None:
    run = run_with_code(tmp_path)
    facts = read_files(run, RunConfig(), directory=tmp_path)
    assert facts.code_changes == [] and facts.code_index and facts.config
    run.config.write_text("seed: 1\n")
    assert read_files(run, RunConfig(), directory=tmp_path).config != facts.config


def test_changed_and_missing_code_is_named(tmp_path: Path) -> None:
    run = run_with_code(tmp_path)
    (run.code / "train.py").chmod(0o644)
    (run.code / "train.py").write_text("other")
    (run.code / "readme.md").unlink()
    assert read_files(run, RunConfig(), directory=tmp_path).code_changes == ["train.py", "readme.md (gone)"]


def test_hashing_code_has_a_limit_in_time(tmp_path: Path) -> None:
    run = run_with_code(tmp_path)
    (run.code / "train.py").unlink()
    assert read_files(run, RunConfig(), directory=tmp_path, hashing_s=-1.0).code_changes == []


def config(**data: Any) -> RunConfig:
    return RunConfig(data=data)


def test_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    run, folder = run_with_code(tmp_path), tmp_path / "images"
    facts = read_files(run, config(_target_="mine.Data", root=str(folder)), directory=tmp_path)
    assert (facts.data_missing, facts.data_empty) == ([str(folder)], [])
    folder.mkdir()
    facts = read_files(run, config(_target_="mine.Data", root=str(folder)), directory=tmp_path)
    assert (facts.data_missing, facts.data_empty) == ([], [str(folder)])
    (folder / "a").touch()
    facts = read_files(run, config(_target_="mine.Data", root=str(folder)), directory=tmp_path)
    assert (facts.data_missing, facts.data_empty) == ([], [])


@pytest.mark.parametrize("values", [{"split": "/train"}, {"root": "relative"}, {"path": "openwebtext"}, {"root": 7}])
def test_what_is_no_path_for_certain_is_not_looked_for(values: dict[str, Any], tmp_path: Path) -> None:
    facts = read_files(run_with_code(tmp_path), config(_target_="mine.Data", **values), directory=tmp_path)
    assert facts.data_missing == []


def test_shards_that_are_cut_short_are_named(tmp_path: Path) -> None:
    import json

    run, data = run_with_code(tmp_path), tmp_path / "tokens"
    wanted = config(_target_="slurm_train.data.text.build", path="tokens")
    assert read_files(run, wanted, directory=tmp_path).data_missing == [str(data / "index.json")]
    data.mkdir()
    shards = [{"file": name, "tokens": 4, "xxh3_128": "0" * 32} for name in ("a.bin", "b.bin", "c.bin")]
    (data / "index.json").write_text(json.dumps({"dtype": "<u2", "splits": {"train": {"shards": shards}}}))
    (data / "a.bin").write_bytes(bytes(8))
    (data / "b.bin").write_bytes(bytes(7))
    assert read_files(run, wanted, directory=tmp_path).data_missing == [
        f"{data / 'b.bin'} (another size)",
        f"{data / 'c.bin'} (gone)",
    ]


def test_places_are_written_to_and_left_clean(tmp_path: Path) -> None:
    run = run_with_code(tmp_path)
    wanted = RunConfig(checkpoint=CheckpointSection(local_dir="$SCRATCH"))
    (tmp_path / "scratch").mkdir()
    disks = {disk.role: disk for disk in read_disks(run, wanted, {"SCRATCH": str(tmp_path / "scratch")})}
    assert set(disks) == {"run directory", "checkpoint.local_dir", "temporary files", "shared memory"}
    assert disks["checkpoint.local_dir"].path == str(tmp_path / "scratch")
    assert all(disk.error == "" and disk.free_mb is not None for disk in disks.values())
    assert list(run.checkpoints.iterdir()) == list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "is_full", "is_readonly"),
    [(errno.ENOSPC, True, False), (errno.EDQUOT, True, False), (errno.EROFS, False, True), (errno.EACCES, False, True)],
)
def test_a_place_that_refuses_says_why(
    number: int, is_full: bool, is_readonly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse(path: Any, *words: Any, **more: Any) -> int:
        if ".preflight_" in str(path):
            raise OSError(number, os.strerror(number))
        return really_open(path, *words, **more)

    monkeypatch.setattr(places.os, "open", refuse)
    disk = read_disks(run_with_code(tmp_path), RunConfig(), {})[0]
    assert (disk.is_full, disk.is_readonly, disk.error) == (is_full, is_readonly, os.strerror(number))


def test_a_place_that_is_not_there_is_neither_full_nor_read_only(tmp_path: Path) -> None:
    disk = read_disks(RunDirectory(tmp_path / "gone"), RunConfig(), {})[0]
    assert (disk.is_full, disk.is_readonly, disk.free_mb) == (False, False, None)


class Nvml(types.ModuleType):
    """NVML of two GPUs; a question that it does not know raises, as the real one does."""

    def __init__(self, **facts: Any) -> None:
        super().__init__("pynvml")
        self.facts = {"used": [0, 0], "ecc": 0, "rows": (0, 0, 0, 0), "throttle": 0, "lost": []} | facts
        self.asked = 0

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.facts["lost"]:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid[-1])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.asked += 1
        used = self.facts["used"][handle]
        return types.SimpleNamespace(total=80 << 30, used=used(self.asked) if callable(used) else used)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return int(self.facts["ecc"])

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self.facts["rows"]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return int(self.facts["throttle"])


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_without_nvml_nothing_is_said_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus(["0"]) == (None, None, "")


def test_healthy_gpus_have_nothing_to_say(nvml: Nvml) -> None:
    gpus, count, driver = read_gpus(["0", "GPU-1"])
    assert (count, driver) == (2, "570.1") and gpus is not None
    assert [(gpu.name, gpu.total_mb, gpu.used_mb, gpu.errors, gpu.warnings) for gpu in gpus] == [
        ("0", 81920, 0, [], []),
        ("GPU-1", 81920, 0, [], []),
    ]


def test_all_gpus_are_looked_at_where_slurm_names_none(nvml: Nvml) -> None:
    assert [gpu.name for gpu in read_gpus(None)[0] or []] == ["0", "1"]


def test_errors_and_slowdowns_are_told(nvml: Nvml) -> None:
    nvml.facts |= {"ecc": 3, "rows": (0, 0, 1, 1), "throttle": 0x48}
    (gpu,) = read_gpus(["0"])[0] or []
    assert gpu.errors == ["3 uncorrected memory errors since it was started", "its memory has no spare rows left"]
    assert gpu.warnings == [
        "slowed down by its hardware (power or heat)",
        "slowed down by heat",
        "faulty memory waits for a reset to be taken out of use",
    ]


def test_a_lost_gpu_is_an_error_of_that_gpu(nvml: Nvml) -> None:
    nvml.facts["lost"] = [1]
    assert [gpu.errors for gpu in read_gpus(["0", "1"])[0] or []] == [[], ["NVML cannot read it: GPU is lost"]]


def test_memory_that_is_being_given_back_is_waited_for(nvml: Nvml) -> None:
    nvml.facts["used"] = [lambda asked: 60 << 30 if asked < 3 else 0, 0]
    assert [gpu.used_mb for gpu in read_gpus(["0"])[0] or []] == [0]


def test_memory_that_stays_taken_is_told(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_train.tools.doctor.gpus._LEFTOVER_WAIT_S", 0.1)
    nvml.facts["used"] = [60 << 30, 0]
    assert [gpu.used_mb for gpu in read_gpus(["0", "1"])[0] or []] == [61440, 0]


def test_hardware_errors_of_the_last_day_are_read_from_the_kernels_log(tmp_path: Path) -> None:
    now_us = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    log = tmp_path / "kmsg"
    log.write_text(
        f"6,1,{now_us - 10},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        f"6,2,{now_us - 10},-;NVRM: Xid (PCI:0000:3b:00): 31, pid=2, a program's own fault\n"
        f"6,3,{now_us - 90_000_000_000},-;NVRM: Xid (PCI:0000:af:00): 48, long ago\n"
        f"6,4,{now_us - 10},-;eth0: link is up\nnonsense\n"
    )
    assert logged_errors(log) == ["Xid 79 on 0000:3b:00"]
    assert logged_errors(tmp_path / "none") == []


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert holder_of(port).startswith(f"pid {os.getpid()} (")
    assert holder_of(port) == ""
