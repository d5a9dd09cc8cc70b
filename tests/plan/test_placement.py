from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import (
    BatchSection,
    ClusterSection,
    DdpSection,
    ParallelSection,
    RunConfig,
    build_config,
)
from slurm_train.errors import BatchError, ConfigError
from slurm_train.plan import placement
from slurm_train.plan.placement import (
    TABLE_HEADER,
    EqualNodes,
    World,
    check_pipeline,
    count_local_gpus,
    fitting_world,
    layout_rows,
    pipeline_bubble,
    plan_layout,
    plan_world,
    table_rows,
    topology_text,
)
from tests.support.devices import make_devices
from tests.support.process_faults import wait_until_gone
from tests.support.refusals import refusal

GPT = {"_target_": "slurm_train.models.gpt.GPT", "num_layers": 4, "num_heads": 4, "width": 160, "tied": False}


def config_of(model: dict[str, Any], **parallel: Any) -> RunConfig:
    return RunConfig(model=model, cluster=ClusterSection(), parallel=ParallelSection(**parallel))


def test_the_layout_of_eight_ranks_on_two_nodes() -> None:
    found = plan_layout(config_of(GPT, dp_shard=2, tp=2, pp=2), World((4, 4)))
    assert found == ParallelLayout(dp_shard=2, tp=2, pp=2)
    rows = table_rows(found, World((4, 4)))
    assert TABLE_HEADER == ("rank", "node", "local", "pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert rows[5] == ("5", "1", "1", "1", "0", "0", "0", "1")


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (GPT, {"tp": 8}, "parallel.tp=8 does not fit into nodes of 4 ranks"),
        (
            {**GPT, "num_kv_heads": 2},
            {"tp": 4},
            "parallel.tp=4 cannot cut model.num_kv_heads=2 into equal parts",
        ),
        ({**GPT, "num_layers": 3}, {"pp": 4}, "parallel asks for 4 stages, but model.num_layers=3 leaves some without"),
        ({**GPT, "tied": True}, {"pp": 2}, "parallel.pp was asked, but model.tied=true makes embedding and head one"),
        (
            GPT,
            {"pp": 4, "stages_per_rank": 2},
            "parallel asks for 8 stages, but model.num_layers=4 leaves some without",
        ),
        (
            GPT,
            {"pp": 2, "stages_per_rank": 2, "pipeline_schedule": "gpipe"},
            "parallel.stages_per_rank=2 needs the 1f1b order, got parallel.pipeline_schedule=gpipe",
        ),
        (
            GPT,
            {"tp": 2, "async_tp": True},
            "parallel.async_tp=true overlaps what compiled blocks exchange by positions, got "
            "parallel.sequence_parallel=false and train.compile=auto",
        ),
        (
            GPT,
            {"pp": 2, "tp": 4, "pipeline_schedule": "zero_bubble"},
            "parallel.pipeline_schedule=zero_bubble cuts the backward pass in two, got train.compile=auto",
        ),
        (
            GPT,
            {"pp": 2, "dp_shard": 2, "pipeline_schedule": "zero_bubble"},
            "parallel.pipeline_schedule=zero_bubble needs gathered weights in the backward pass, and pp 2 x dp_",
        ),
        (
            {**GPT, "context": 250},
            {"cp": 2},
            "parallel.cp=2 cannot cut model.context=250 into 4 equal chunks",
        ),
        (
            {**GPT, "context": 254},
            {"tp": 4, "sequence_parallel": True},
            "parallel.sequence_parallel cannot split 254 positions among tp 4 ranks",
        ),
        (
            GPT,
            {"dp_shard": 2, "sequence_parallel": True},
            "parallel.sequence_parallel=true splits positions among the ranks of tp, and the layout is dp_",
        ),
        (
            {"_target_": "slurm_train.models.causal_lm.causal_lm"},
            {"cp": 2},
            "parallel.cp=2 was asked, but model=hf cannot split sequences",
        ),
        (
            GPT,
            {"cpu_offload": True},
            "parallel.cpu_offload=true keeps sharded parameters in host memory, and the layout is dp_",
        ),
        (
            {"_target_": "slurm_train.models.cnn.CNN"},
            {"tp": 2},
            "parallel asks for dp_replicate 4 x tp 2, which the CNN does not support",
        ),
    ],
)
def test_what_the_nodes_or_the_model_cannot_do_is_refused(
    model: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    assert str(refusal(ConfigError, plan_layout, config_of(model, **parallel), World((4, 4)))).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": {"_target_": "x.main"}, "model": None}, "has to make its own groups"),
        (
            {"ddp": DdpSection(comm="bf16")},
            "sends less of whole gradients, which dp_replicate 2 x cp 2 does",
        ),
        ({"ddp": DdpSection(find_unused_parameters=True)}, "find_unused_parameters=true is a setting of DDP"),
        ({"batch": BatchSection(by_length=True)}, "parallel.cp=2 was asked with batch.by_length=true"),
    ],
)
def test_a_cut_run_cannot_do_everything(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_layout(replace(config_of(GPT, cp=2), **change), World((4,)))


def test_interleaved_stages_need_equal_rounds() -> None:
    config, layout = config_of(GPT, pp=2, stages_per_rank=2), ParallelLayout(pp=2)
    for accumulation in (2, 3, 4):
        check_pipeline(config, layout, BatchPlan.equal(local_size=1, ranks=1, accumulation=accumulation))
    with pytest.raises(BatchError, match=r"interleaved stages on 2 ranks need rounds of equally many micro-batches"):
        check_pipeline(config, layout, BatchPlan.equal(local_size=1, ranks=1, accumulation=5))


def test_the_rows_name_groups_links_and_idle_time() -> None:
    layout, batch = ParallelLayout(dp_shard=8, tp=4, pp=2), BatchPlan.equal(local_size=1, ranks=8, accumulation=8)
    rows = layout_rows(layout, World((4,) * 16), batch, stages_per_rank=1)
    assert rows[0] == ("layout", "pp 2 x dp_shard 8 x tp 4; 8 read different samples")
    assert rows[1] == ("", "tp: 16 groups of 4, on one node each; the first: ranks 0-3")
    assert rows[-1] == ("bubble", "11% of a step: 2 stages, 8 micro-batches")
    assert pipeline_bubble(ParallelLayout(pp=3), BatchPlan.equal(local_size=3, ranks=1, accumulation=4)) == 2 / 6
    assert layout_rows(ParallelLayout(dp_replicate=64), World((4,) * 16), batch, stages_per_rank=1) == []


# --- the world ---

WORLDS = [
    ({"cluster": {"nodes": 2, "gpus_per_node": [3, 3]}}, {}, (3, 3)),
    ({"cluster": {"nodes": 2}, "run": {"processes": 9}}, {}, (1, 1)),
    ({}, {}, (2,)),
    ({"run": {"processes": 5}}, {"CUDA_VISIBLE_DEVICES": "0,1"}, (5,)),
    ({}, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, (3,)),
    ({}, {"CUDA_VISIBLE_DEVICES": ""}, (2,)),
]


@pytest.mark.parametrize(("values", "env", "ranks"), WORLDS)
def test_the_world_that_was_asked_for(values: dict[str, Any], env: dict[str, str], ranks: tuple[int, ...]) -> None:
    world = plan_world(build_config(RunConfig, values), env)
    assert world == World(ranks) and world.is_even and world.num_ranks == sum(ranks)


def test_uneven_nodes_are_grouped_in_rank_order() -> None:
    config = build_config(RunConfig, {"cluster": {"nodes": 4, "gpus_per_node": [4, 4, 2, 4]}})
    world = plan_world(config, {})
    assert (world.num_ranks, world.is_even) == (14, False)
    assert world.groups == (EqualNodes(2, 4), EqualNodes(1, 2), EqualNodes(1, 4))
    assert world.nodes_in_words == "4 nodes of 4 + 4 + 2 + 4"


NO_WORLDS = [
    (
        {"cluster": {"nodes": 3, "gpus_per_node": [4, 2]}},
        "cluster.gpus_per_node=[4, 2] names 2 nodes, cluster.nodes=3",
        "set cluster.nodes=2, or give one number for all nodes",
    ),
    ({"cluster": {"nodes": "4-2"}}, "cluster.nodes must be a number or a range, got '4-2'", "write cluster.nodes=4"),
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
    (
        {"cluster": {"nodes": 2, "gpus_per_node": [4, 2], "spare_nodes": 1}},
        "cluster.spare_nodes=1 needs equal nodes and srun",
        "give one number of GPUs for all nodes",
    ),
    (
        {"cluster": {"nodes": 2, "spare_nodes": 1, "launcher": "torchrun"}},
        "cluster.spare_nodes=1 needs equal nodes and srun",
        "give one number of GPUs for all nodes and leave cluster.launcher at srun",
    ),
    (
        {"cluster": {"nodes": 2, "spare_nodes": 1, "srun": {"nodelist": "node[1-2]"}}},
        "each attempt chooses its nodes (cluster.spare_nodes, or a range of cluster.nodes), and cluster.srun names",
        "name nodes with cluster.nodelist",
    ),
    (
        {"cluster": {"nodes": "1-2", "gpu_flag": "gpus-per-task"}},
        "cluster.gpu_flag=gpus-per-task needs the number of tasks, which cluster.nodes=1-2 leaves open",
        "use another cluster.gpu_flag",
    ),
    ({"cluster": {"nodes": 1, "gpus_per_node": []}}, "cluster.gpus_per_node=[] names 0 nodes", "set cluster.nodes=0"),
]


@pytest.mark.parametrize(("values", "message", "hint"), NO_WORLDS)
def test_a_world_that_cannot_be_is_refused(values: dict[str, Any], message: str, hint: str) -> None:
    error = refusal(ConfigError, plan_world, build_config(RunConfig, values), {})
    assert error.message.startswith(message)
    assert error.hint.startswith(hint)


def ranged(nodes: str, *, launcher: str = "srun", **parallel: int) -> tuple[RunConfig, World]:
    cluster = {"nodes": nodes, "gpus_per_node": 2, "launcher": launcher}
    config = build_config(RunConfig, {"cluster": cluster, "parallel": parallel})
    return config, plan_world(config, {})


def test_of_a_range_of_nodes_the_numbers_that_the_layout_fits_are_used() -> None:
    config, world = ranged("2-5")
    assert (world.node_counts, world.nodes_in_words) == ((2, 3, 4, 5), "2 to 5 nodes x 2")
    assert fitting_world(config, world) == world
    two_or_four = fitting_world(*ranged("2-4", dp_shard=4))
    assert (two_or_four.node_counts, two_or_four.nodes_in_words) == ((2, 4), "2 or 4 nodes x 2")
    assert [part.num_ranks for part in two_or_four.possible()] == [4, 8]
    assert plan_world(build_config(RunConfig, {"cluster": {"nodes": "3-3"}}), {}).node_counts == ()


@pytest.mark.parametrize(
    ("nodes", "launcher", "shards", "fit", "hint"),
    [
        ("2-5", "srun", 4, "it fits 2, 4 of them", "set cluster.nodes=2-4"),
        ("3-4", "srun", 4, "it fits 4 of them", "set cluster.nodes=4"),
        ("3-5", "srun", 64, "it fits none of them", ""),
        # Its agents use what there is.
        ("2-4", "torchrun", 4, "it fits 2, 4 of them", "set cluster.nodes=2-4"),
    ],
)
def test_a_range_whose_ends_do_not_fit_is_refused(nodes: str, launcher: str, shards: int, fit: str, hint: str) -> None:
    error = refusal(ConfigError, fitting_world, *ranged(nodes, launcher=launcher, dp_shard=shards))
    words = f"the layout does not fit each number of nodes that cluster.nodes={nodes} may give: {fit}; parallel"
    assert error.message.startswith(words)
    assert error.hint.startswith(hint) and error.hint


@pytest.mark.parametrize(
    ("listing", "count"),
    [("GPU 0: NVIDIA H200 (UUID: GPU-1)\\nGPU 1: NVIDIA H200 (UUID: GPU-2)\\n", 2), ("No devices were found\\n", 0)],
)
def test_gpus_are_counted_without_torch(listing: str, count: int, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    command.chmod(0o755)
    assert count_local_gpus({"PATH": str(tmp_path)}) == count


def test_amd_gpus_are_counted_by_their_files_where_there_is_no_nvidia_smi(tmp_path: Path) -> None:
    card = "0x1002 0x120000"
    devices, sys = make_devices(tmp_path, {"kfd": "", "dri/renderD128": card, "dri/renderD129": card})
    env = {"PATH": str(tmp_path)}
    assert count_local_gpus(env, devices=devices, sys=sys) == 2
    assert count_local_gpus({**env, "ROCR_VISIBLE_DEVICES": "1"}, devices=devices, sys=sys) == 1


def test_a_listing_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_LISTING_TIMEOUT_S", 0.5)
    command = tmp_path / "nvidia-smi"
    # The helper holds the pipe that is read.
    command.write_text(f"#!/bin/sh\n/bin/sleep 60 & echo $! > {tmp_path}/helper; wait\n")
    command.chmod(0o755)
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"cannot be counted: .* timed out after 0.5 seconds") as caught:
        count_local_gpus({"PATH": str(tmp_path)})
    assert time.monotonic() - began_s < 10 and "CUDA_VISIBLE_DEVICES" in caught.value.hint
    wait_until_gone(int((tmp_path / "helper").read_text()), within_s=60)


LEAVES = {"node1": "switch a", "node2": "switch a", "node3": "switch b", "node4": "switch b"}


@pytest.mark.parametrize(
    ("nodes", "leaf_of", "text"),
    [
        (("node1", "node2"), LEAVES, "all nodes on switch a"),
        (
            ("node2", "node3"),
            LEAVES,
            "nodes on switch a: 1, switch b: 1; groups of ranks on several: tp 0 of 4, dp_shard 2 of 2; "
            "cluster.sbatch.switches=1 asks for nodes on one switch",
        ),
        # No switch has two nodes.
        (
            ("node1", "node2"),
            {"node1": "switch a", "node2": "switch b"},
            "nodes on switch a: 1, switch b: 1; groups of ranks on several: tp 0 of 4, dp_shard 2 of 2",
        ),
        (
            ("node1", "node2"),
            {"node1": "block a", "node2": "block b", "node3": "block b"},
            "nodes on block a: 1, block b: 1; groups of ranks on several: tp 0 of 4, dp_shard 2 of 2",
        ),
        (("node1", "node9"), LEAVES, ""),
        (("node1",), LEAVES, ""),
        (("node1", "node2"), {}, ""),
    ],
)
def test_groups_that_reach_over_switches_or_blocks_are_counted(
    nodes: tuple[str, ...], leaf_of: dict[str, str], text: str
) -> None:
    layout = ParallelLayout(dp_shard=4, tp=2)
    assert topology_text(layout, World((4, 4)), nodes=nodes, leaf_of=leaf_of, may_ask=True) == text


def test_a_setting_that_was_made_is_not_advised() -> None:
    text = topology_text(
        ParallelLayout(dp_replicate=4), World((2, 2)), nodes=("node2", "node3"), leaf_of=LEAVES, may_ask=False
    )
    assert text == "nodes on switch a: 1, switch b: 1; groups of ranks on several: dp_replicate 1 of 1"
