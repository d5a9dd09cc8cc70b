"""The record of torch's own flight recorder: two real gloo ranks, one of which does not come."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurm_train.distributed import group
from slurm_train.distributed.group import (
    choose_device,
    init_group,
    newest_collectives,
    shorten_records,
    stay_near,
    use_timeout,
)
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import PreflightError, RendezvousError
from slurm_train.supervise.hang import read_flights
from tests.support.devices import make_devices
from tests.support.ranks import make_rank
from tests.support.refusals import refusal
from tests.support.waiting import wait_for
from tests.support.warm_ranks import run_pair

# Rank 1 stays away from the third all-reduce until rank 0 has told what it knows.
PROGRAM = """
import json, os, torch
import torch.distributed as dist
from slurm_train.distributed.group import newest_collectives
from slurm_train.supervise.hang import read_flights
from tests.support.waiting import wait_for
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()

def is_recorded(number):
    record = newest_collectives()
    flight = read_flights(record or b"").get("gloo 0")
    return record is None or (flight is not None and flight.last_ended == number)

# What is over is written down by two threads of gloo's, a little later, and the later one's number stays.
for number in (1, 2):
    dist.all_reduce(torch.ones(1000))
    wait_for(lambda: is_recorded(number), within_s=60, what="a record of what is over")
if rank == 0:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
record = newest_collectives()
with open(os.environ["OUT"], "w") as file:
    json.dump((record or b"").decode(), file)
store.set(f"told {rank}", "yes")
store.wait(["told 0", "told 1"])
if rank == 1:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
work.wait()
# Rank 0 has the store, and leaves last.
store.set(f"done {rank}", "yes")
if rank == 0:
    store.wait(["done 1"])
os._exit(0)
"""


@pytest.mark.distributed
def test_real_ranks_tell_who_has_not_come(tmp_path: Path) -> None:
    texts = run_pair(tmp_path, PROGRAM)
    if not any(text.strip() for text in texts):
        pytest.skip(f"torch {torch.__version__} records nothing between gloo ranks")
    flights = [read_flights(text)["gloo 0"] for text in texts]
    assert str(flights[0].waits_in).endswith(" of 1,000 elements") and flights[1].waits_in is None
    assert (flights[0].last_begun, flights[0].last_ended, flights[1].last_begun) == (
        flights[1].last_begun + 1,
        flights[1].last_begun,
        flights[1].last_ended,
    )


IN_JOB = {"SLURM_JOB_ID": "1"}


AMD = {"kfd": "", "dri/renderD128": "0x1002 0x120000"}
INTEL = {"dri/renderD128": "0x8086 0x038000"}
LAPTOP = {"dri/renderD128": "0x8086 0x030000"}


@pytest.mark.parametrize(
    ("env", "files", "refusal"),
    [
        ({}, {"nvidia0": "", "nvidia1": ""}, r"NVIDIA GPUs \(nvidia0, nvidia1\)"),
        ({}, {"nvidiactl": "", "nvidia-uvm": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"nvidia0": ""}, None),
        (IN_JOB, {"nvidia0": ""}, None),
        ({**IN_JOB, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {"nvidia0": ""}, None),
        ({**IN_JOB, "CUDA_VISIBLE_DEVICES": "0,1"}, {"nvidia0": ""}, r"NVIDIA GPUs \(nvidia0\)"),
        ({}, AMD, r"AMD GPUs \(renderD128\)"),
        ({**IN_JOB, "ROCR_VISIBLE_DEVICES": "0"}, AMD, r"AMD GPUs \(renderD128\)"),
        (IN_JOB, AMD, None),
        ({"ROCR_VISIBLE_DEVICES": ""}, AMD, None),
        ({**IN_JOB, "ZE_AFFINITY_MASK": "0.0"}, INTEL, r"Intel GPUs \(renderD128\)"),
        ({}, LAPTOP, None),
        # Pretended GPUs of a test cluster on a laptop.
        ({**IN_JOB, "CUDA_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "0"}, LAPTOP, None),
    ],
)
def test_no_rank_trains_on_the_cpu_of_a_node_whose_gpus_it_was_given(
    env: dict[str, str], files: dict[str, str], refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, sys = make_devices(tmp_path, files)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = contextlib.nullcontext() if refusal is None else pytest.raises(PreflightError, match=refusal)
    with refused:
        assert choose_device(make_rank().place, env, devices=devices, sys=sys) == torch.device("cpu")


@pytest.mark.parametrize(("kind", "is_refused"), [("xpu", True), ("mps", False)])
def test_devices_that_nothing_is_written_for_are_refused_unless_the_cpu_is_asked_for(
    kind: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    place = make_rank().place
    refused = pytest.raises(PreflightError, match=kind) if is_refused else contextlib.nullcontext()
    with refused:
        assert choose_device(place, {}, devices=tmp_path, sys=tmp_path) == torch.device("cpu")
    without = {"ZE_AFFINITY_MASK": ""}
    assert choose_device(place, without, devices=tmp_path, sys=tmp_path) == torch.device("cpu")


@pytest.mark.parametrize(
    ("own", "node", "env", "expected"),
    [
        (range(16), "1", {}, {4, 5, 6, 7, 12, 13, 14, 15}),
        (range(16), "1", {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, set()),
        ([4, 5, 0, 1], "1", {}, {4, 5}),
        ([4, 5, 12], "1", {}, set()),
        ([4, 0, 1, 2], "1", {}, set()),
        (range(16), "-1", {}, set()),
    ],
    ids=["free", "bound by Slurm", "half of its own", "on it already", "would get few", "the GPU is on no node"],
)
def test_a_rank_stays_near_its_gpu_unless_it_is_bound_or_would_get_few_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: range | list[int],
    node: str,
    env: dict[str, str],
    expected: set[int],
) -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    places = {"node0/cpulist": "0-3,8-11", "node1/cpulist": "4-7,12-15"}
    files = {f"devices/system/node/{name}": cpus for name, cpus in places.items()}
    for name, text in (files | {"bus/pci/devices/0000:dc:00.0/numa_node": node}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    bound: list[set[int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(own))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _process, cpus: bound.append(cpus))
    assert stay_near(torch.device("cuda", 0), env, sys=tmp_path) == expected
    assert bound == ([expected] if expected else [])


@pytest.mark.parametrize(("version", "is_bound"), [("2.7.1", False), ("2.9.0+cu128", False), ("2.10.0", True)])
def test_a_group_is_bound_to_its_gpu_where_torch_can_split_one_of_two_backends(
    version: str, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _backend, **how: given.update(how))
    place = RankPlace.from_env({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    store: Any = None
    for device, expected in ((torch.device("cuda", 0), is_bound), (torch.device("cpu"), False)):
        init_group(place, store, device=device, timeout_s=1.0)
        assert given["device_id"] == (device if expected else None)


PAIR = RankPlace.from_env({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(("kind", "library"), [("cuda", "NCCL"), ("cpu", "gloo")])
def test_ranks_that_a_network_keeps_apart_say_so_while_they_wait(
    kind: str, library: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said, ended = "", threading.Event()

    def connects_never(*_: Any, **__: Any) -> None:
        nonlocal said
        wait_for(ended.is_set, within_s=60, what="the end of the rank", poll_s=0.01)
        said = capfd.readouterr().err

    monkeypatch.setattr(torch.distributed, "init_process_group", connects_never)
    monkeypatch.setattr(group.os, "_exit", lambda _code: ended.set())
    store: Any = None
    init_group(PAIR, store, device=torch.device(kind), timeout_s=0.1, say_after_s=0.01)
    first, last = said.splitlines()
    opening = f"COLLECTIVE {PAIR.host}: opening {library} between 2 ranks"
    assert first.startswith(f"{opening} has taken 0 s so far; ") and "NCCL_DEBUG=INFO" in first
    assert last.startswith(f"{opening} took longer than 0 s: this rank ends; ")


def test_a_group_that_cannot_be_opened_has_the_code_of_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise torch.distributed.DistBackendError("NCCL error: remote process exited\nmore")

    monkeypatch.setattr(torch.distributed, "init_process_group", fails)
    store: Any = None
    error = refusal(RendezvousError, init_group, PAIR, store, device=torch.device("cuda"), timeout_s=9.0)
    assert error.message.startswith(
        f"COLLECTIVE {PAIR.host}: opening NCCL between 2 ranks failed after 0 s: NCCL error"
    )


def test_groups_of_a_mesh_get_the_same_time_out_and_those_of_saves_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [SimpleNamespace(group_desc=name) for name in ("default_pg", "mesh_tp", "undefined")]
    given: list[tuple[str, float]] = []
    core = torch.distributed.distributed_c10d
    monkeypatch.setattr(core, "_world", SimpleNamespace(pg_map=groups))
    monkeypatch.setattr(
        core, "_set_pg_timeout", lambda time_out, group: given.append((group.group_desc, time_out.total_seconds()))
    )
    use_timeout(60)
    assert given == [("default_pg", 60), ("mesh_tp", 60)]


def test_a_record_is_shortened_to_the_newest_of_each_group() -> None:
    entries = [
        {"pg_id": group, "process_group": [str(group), ""], "collective_seq_id": number, "is_p2p": number == 9}
        for group in (0, 1)
        for number in range(10)
    ]
    (kept,) = json.loads(shorten_records([json.dumps({"entries": entries, "pg_status": {"0": {}}})]) or b"")
    expected = [(group, number) for group in (0, 1) for number in (5, 6, 7, 8)]
    assert [(one["pg_id"], one["collective_seq_id"]) for one in kept["entries"]] == expected
    assert kept["pg_status"] == {"0": {}} and shorten_records(['{"entries": []}']) is None


def test_what_nccl_and_gloo_have_recorded_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUs torch has two recorders: the one for NCCL has the gradients' exchanges, the other is gloo's."""

    def dump(backend: str, begun: int) -> str:
        entry = {
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "input_sizes": [[5]],
            "input_dtypes": ["Float"],
            "collective_seq_id": begun,
            "profiling_name": f"{backend}:all_reduce",
        }
        status = {"last_enqueued_collective": begun, "last_completed_collective": begun - 1}
        return json.dumps({"entries": [entry], "pg_status": {"0": status}})

    core = torch._C._distributed_c10d
    monkeypatch.setattr(core, "_dump_nccl_trace_json", lambda: dump("nccl", 8), raising=False)
    monkeypatch.setattr(core, "_dump_fr_trace_json", lambda: dump("gloo", 3), raising=False)
    flights = read_flights(newest_collectives() or b"")
    assert {key: str(flight.waits_in) for key, flight in flights.items()} == {
        "nccl 0": "all_reduce #8 of 5 elements",
        "gloo 0": "all_reduce #3 of 5 elements",
    }
