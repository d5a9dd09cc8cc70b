"""Facts of this very machine and of small files: what is read, and what happens where there is nothing to read."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import CheckpointSection, RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.launch.placement import visible_gpus
from slurm_train.launch.snapshot import index_code
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.doctor import gather
from slurm_train.tools.doctor.gather import logged_errors, read_gpus

PLACE = RankPlace(rank=1, local_rank=1, node_rank=0, world_size=2, local_world_size=2, host="here")


@pytest.mark.parametrize(
    ("setting", "on_node", "names", "count"),
    [
        (None, "2", None, None),
        ("", "2", [], 0),
        ("0,1", "2", ["0", "1"], 2),
        ("0", "2", ["0"], 2),
        ("0", "", ["0"], 1),
        ("GPU-ab,GPU-cd", "", ["GPU-ab", "GPU-cd"], 2),
        ("2,-1,3", "", ["2"], 1),
        ("NoDevFiles", "", [], 0),
    ],
)
def test_gpus_are_counted_as_cuda_does_and_those_of_the_step_where_a_rank_is_bound_to_one(
    setting: str | None, on_node: str, names: list[str] | None, count: int | None
) -> None:
    env = {"SLURM_GPUS_ON_NODE": on_node} | ({} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert (visible_gpus(setting), gather.read_rank(PLACE, env).visible_gpus) == (names, count)


def test_a_rank_knows_its_cpus_limits_and_slurms_number() -> None:
    facts = gather.read_rank(PLACE, {"SLURM_PROCID": "7", "SLURM_STEP_ID": "0"})
    assert (facts.rank, facts.slurm_rank, facts.node) == (1, 7, "here")
    assert facts.cpus == sorted(os.sched_getaffinity(0))
    assert facts.max_open_files is None or facts.max_open_files > 0
    assert gather.read_rank(PLACE, {"SLURM_PROCID": "7"}).slurm_rank is None, "a batch script is no task"


def test_the_network_of_this_machine() -> None:
    assert gather.read_network(PLACE, {}, peer="nowhere.invalid") == {"address": "127.0.0.1"}, "it is one node"
    assert "lo" not in gather.interface_addresses()
    assert gather.route_to("127.0.0.1", {"lo": "127.0.0.1"}) == ("lo", "127.0.0.1")
    assert gather.link_speed_mbit("no-such-interface") is None
    addresses, error = gather.resolve("no-such-name.invalid")
    assert addresses == [] and error
    assert gather.resolve("localhost")[0][0] == "127.0.0.1"


def test_versions_are_read_without_an_import() -> None:
    found = gather.read_versions(driver="570.1")
    assert found["driver"] == "570.1" and found["torch"] and found["python"].count(".") == 2


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
    assert before["code_changes"] == [] and {"code", "config"} <= before["hashes"].keys()
    run.config.write_text("seed: 1\n")
    assert read(run)["hashes"]["config"] != before["hashes"]["config"]
    (run.code / "train.py").chmod(0o644)
    (run.code / "train.py").write_text("other")
    (run.code / "readme.md").unlink()
    after = read(run)
    assert after["code_changes"] == ["train.py", "readme.md (gone)"] and "code" not in after["hashes"]
    assert gather.read_files(run, RunConfig(), directory=run.path, hashing_s=-1.0)["code_changes"] == []


def test_data_that_are_not_there_or_empty_are_named(run: RunDirectory, tmp_path: Path) -> None:
    folder, found = tmp_path / "images", []
    for make in (lambda: None, folder.mkdir, (folder / "a").touch):
        make()
        facts = read(run, _target_="mine.Data", root=str(folder))
        found.append((facts["data_missing"], facts["data_empty"]))
    assert found == [([f"{folder} is not there"], []), ([], [str(folder)]), ([], [])]


@pytest.mark.parametrize("values", [{"split": "/train"}, {"root": "relative"}, {"path": "openwebtext"}, {"root": 7}])
def test_what_is_no_path_for_certain_is_not_looked_for(run: RunDirectory, values: dict[str, Any]) -> None:
    assert read(run, _target_="mine.Data", **values)["data_missing"] == []


def test_prepared_text_that_is_not_whole_is_named(run: RunDirectory, tmp_path: Path) -> None:
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
    [(errno.ENOSPC, True, False), (errno.EDQUOT, True, False), (errno.EROFS, False, True), (errno.EACCES, False, True),
     (errno.ENOENT, False, False)],
)  # fmt: skip
def test_a_place_that_cannot_be_written_has_the_reason(
    number: int, is_full: bool, is_readonly: bool, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(gather.os, "open", refuse)
    disk = gather.read_disks(run, RunConfig(), {})[0]
    assert (disk.is_full, disk.is_readonly, disk.error) == (is_full, is_readonly, os.strerror(number))


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


def test_without_nvml_nothing_is_known_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus(["0"]) == (None, None, "")


def test_healthy_gpus_have_no_errors(nvml: Nvml) -> None:
    found, count, driver = read_gpus(["0", "GPU-1"])
    assert (count, driver) == (2, "570.1")
    assert [(gpu.name, gpu.total_mb, gpu.used_mb, gpu.errors, gpu.warnings) for gpu in found] == [
        ("0", 81920, 0, [], []),
        ("GPU-1", 81920, 0, [], []),
    ]
    assert [gpu.name for gpu in read_gpus(None)[0] or []] == ["0", "1"]


def test_errors_and_slowdowns_are_read_and_a_lost_gpu_is_an_error(nvml: Nvml) -> None:
    nvml.facts |= {"ecc": 3, "rows": (0, 0, 1, 1), "throttle": 0x48, "lost": [1]}
    first, second = read_gpus(["0", "1"])[0] or []
    assert first.errors == ["3 uncorrected memory errors since it was started", "its memory has no spare rows left"]
    assert first.warnings == [
        "slowed down by its hardware (power or heat)",
        "slowed down by heat",
        "faulty memory waits for a reset to be taken out of use",
    ]
    assert second.errors == ["NVML cannot read it: GPU is lost"]


def test_memory_that_is_being_freed_is_waited_for(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.facts["used"] = [lambda asked: 60 << 30 if asked < 3 else 0, 0]
    assert [gpu.used_mb for gpu in read_gpus(["0"])[0] or []] == [0]
    monkeypatch.setattr(gather, "_LEFTOVER_WAIT_S", 0.1)
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
