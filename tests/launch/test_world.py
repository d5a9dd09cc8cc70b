from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import RunConfig, build_config
from slurm_train.errors import ConfigError
from slurm_train.launch import world
from slurm_train.launch.world import NodeGroup, World, count_local_gpus, plan_world
from tests.support.waiting import wait_for

WORLDS = [
    ({"cluster": {"nodes": 4, "gpus_per_node": 8}}, {}, (8, 8, 8, 8)),
    ({"cluster": {}}, {}, (1,)),
    ({"cluster": {"nodes": 2, "gpus_per_node": [3, 3]}}, {}, (3, 3)),
    ({"cluster": {"nodes": 2}, "run": {"processes": 9}}, {}, (1, 1)),
    ({}, {}, (2,)),
    ({"run": {"processes": 5}}, {}, (5,)),
    ({"run": {"processes": 5}}, {"CUDA_VISIBLE_DEVICES": "0,1"}, (5,)),
    ({}, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, (3,)),
    ({}, {"CUDA_VISIBLE_DEVICES": ""}, (2,)),
]


@pytest.mark.parametrize(("values", "env", "ranks"), WORLDS)
def test_the_world_that_was_asked_for(values: dict[str, Any], env: dict[str, str], ranks: tuple[int, ...]) -> None:
    world = plan_world(build_config(RunConfig, values), env)
    assert world == World(ranks)
    assert (world.num_nodes, world.size, world.is_even) == (len(ranks), sum(ranks), True)


def test_uneven_nodes_are_grouped_in_rank_order() -> None:
    config = build_config(RunConfig, {"cluster": {"nodes": 4, "gpus_per_node": [4, 4, 2, 4]}})
    world = plan_world(config, {})
    assert (world.size, world.is_even) == (14, False)
    assert world.groups == (NodeGroup(2, 4), NodeGroup(1, 2), NodeGroup(1, 4))
    assert world.nodes_in_words == "4 nodes of 4 + 4 + 2 + 4"


def test_a_range_of_nodes_is_every_world_that_slurm_may_grant() -> None:
    cluster = {"nodes": "2-4", "gpus_per_node": 8, "launcher": "torchrun"}
    world = plan_world(build_config(RunConfig, {"cluster": cluster}), {})
    assert [one.size for one in world.possible()] == [16, 24, 32]
    assert world.nodes_in_words == "2 to 4 nodes x 8"


REFUSED = [
    (
        {"cluster": {"nodes": 3, "gpus_per_node": [4, 2]}},
        "cluster.gpus_per_node=[4, 2] names 2 nodes, cluster.nodes=3",
        "set cluster.nodes=2, or give one number for all nodes",
    ),
    ({"cluster": {"nodes": "4-2"}}, "cluster.nodes='4-2' is neither a number nor a range", "write cluster.nodes=4"),
    ({"cluster": {"nodes": "many"}}, "cluster.nodes='many' is neither a number nor a range", "write cluster.nodes=4"),
    ({"cluster": {"nodes": "2-4"}}, "cluster.nodes=2-4 leaves the number of nodes open", "add cluster.launcher="),
    (
        {"cluster": {"nodes": "1-2", "gpus_per_node": [4, 2], "launcher": "torchrun"}},
        "cluster.nodes=1-2 leaves the number of nodes open, and cluster.gpus_per_node names them",
        "give one number of GPUs for all nodes, or one number of nodes",
    ),
    (
        {"cluster": {"nodes": 2, "gpus_per_node": [4, 2]}, "launch": "interactive"},
        "cluster.gpus_per_node=[4, 2] is a heterogeneous job, and launch=interactive runs in allocations of equal",
        "drop launch=interactive to submit a job",
    ),
    ({"cluster": {"nodes": 1, "gpus_per_node": []}}, "cluster.gpus_per_node=[] names 0 nodes", "set cluster.nodes=0"),
]


@pytest.mark.parametrize(("values", "message", "hint"), REFUSED)
def test_a_world_that_cannot_be_is_refused(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_world(build_config(RunConfig, values), {})
    assert caught.value.message.startswith(message)
    assert caught.value.hint.startswith(hint)


VISIBLE = [("0", 1), ("0,1,2,3", 4), ("", 0), ("-1", 0), (" ", 0), ("GPU-aaaa,GPU-bbbb", 2)]


@pytest.mark.parametrize(("visible", "count"), VISIBLE)
def test_visible_devices_are_counted(visible: str, count: int) -> None:
    assert count_local_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


@pytest.mark.parametrize(
    ("listing", "count"),
    [("GPU 0: NVIDIA H200 (UUID: GPU-1)\\nGPU 1: NVIDIA H200 (UUID: GPU-2)\\n", 2), ("No devices were found\\n", 0)],
)
def test_gpus_are_counted_without_torch(listing: str, count: int, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    command.chmod(0o755)
    assert count_local_gpus({"PATH": str(tmp_path)}) == count


def test_a_machine_without_the_command_has_no_gpus(tmp_path: Path) -> None:
    assert count_local_gpus({"PATH": str(tmp_path)}) == 0


def test_a_listing_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_LISTING_TIMEOUT_S", 0.5)
    command = tmp_path / "nvidia-smi"
    # The helper holds the pipe that is read.
    command.write_text(f"#!/bin/sh\n/bin/sleep 60 & echo $! > {tmp_path}/helper; wait\n")
    command.chmod(0o755)
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"cannot be counted: .* timed out after 0.5 seconds") as caught:
        count_local_gpus({"PATH": str(tmp_path)})
    assert time.monotonic() - began_s < 10 and "CUDA_VISIBLE_DEVICES" in caught.value.hint
    helper = Path("/proc", (tmp_path / "helper").read_text().strip(), "cmdline")
    wait_for(lambda: not helper.exists() or not helper.read_bytes(), within_s=5, what="the end of the helper")
