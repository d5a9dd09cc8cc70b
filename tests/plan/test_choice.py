"""What is chosen where whole replicas do not fit into a GPU, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from slurm_train.assets import read_asset
from slurm_train.config.parallel import ParallelLayout, solve_layout
from slurm_train.config.schema import BatchSection, ClusterSection, ParallelSection, RunConfig
from slurm_train.plan.cards import memory_gib_of
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.placement import World


def config_of(name: str, *, gpu_type: str | None = "h100", context: int = 8192, **parallel: Any) -> RunConfig:
    return RunConfig(
        model=yaml.safe_load(read_asset("conf/model", f"{name}.yaml")),
        data={"_target_": "slurm_train.data.text.build", "context": context},
        parallel=ParallelSection(**parallel),
        cluster=ClusterSection(gpu_type=gpu_type),
    )


def settled(config: RunConfig, nodes: int, *, sizes: tuple[int, ...] = ()) -> tuple[ParallelLayout, RunConfig, str]:
    world = World((8,) * nodes, node_counts=sizes)
    found, why = settle_parallel(config, world, {})
    return solve_layout(found.parallel, world_size=world.num_ranks), found, why


@pytest.mark.parametrize(
    ("config", "nodes", "layout", "recompute", "local_size"),
    [
        (config_of("llama3-8b"), 1, ParallelLayout(dp_shard=8), "none", 1),
        (config_of("llama3-8b"), 2, ParallelLayout(dp_replicate=2, dp_shard=8), "none", 1),
        (config_of("llama3-8b", gpu_type=None), 2, ParallelLayout(dp_replicate=2, dp_shard=8), "none", 1),
        (config_of("llama3-8b", context=256), 1, ParallelLayout(dp_shard=8), "none", None),
        (config_of("llama3-70b"), 8, ParallelLayout(dp_replicate=2, dp_shard=32), "full", None),
        (config_of("llama3-70b", tp=8), 8, ParallelLayout(dp_shard=8, tp=8), "alternate", 1),
        (config_of("gpt2-124m", context=1024), 8, ParallelLayout(dp_replicate=64), "none", None),
    ],
)
def test_what_does_not_fit_as_replicas_is_sharded_within_nodes_if_that_is_enough(
    config: RunConfig, nodes: int, layout: ParallelLayout, recompute: str, local_size: int | None
) -> None:
    found, chosen, why = settled(config, nodes)
    assert found == layout
    assert (chosen.parallel.activation_checkpointing, chosen.batch.local_size) == (recompute, local_size)
    assert ("dp_shard" in why) == (layout.dp_shard > 1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of("llama3-8b", dp_shard=1), "does not fit: a layout of dp_replicate 8 needs"),
        (config_of("llama3-8b", dp_replicate=8), "does not fit: a layout of dp_replicate 8 needs"),
        (config_of("llama3-70b", dp_shard=8), "does not fit: a layout of dp_shard 8 needs"),
        (config_of("llama3-8b", dp_shard=8, activation_checkpointing="full"), ""),
        (config_of("llama3-8b", gpu_type="card of tomorrow"), ""),
        (replace(config_of("llama3-8b"), cluster=ClusterSection(gpu_flag="none")), ""),
        (replace(config_of("llama3-8b"), model={"_target_": "my.Model"}), ""),
    ],
)
def test_what_is_typed_or_not_known_stays_and_is_only_judged(config: RunConfig, said: str) -> None:
    _, chosen, why = settled(config, 1)
    assert chosen == config
    assert why.startswith(said) if said else not why


def test_a_context_that_no_rank_has_room_for_is_cut() -> None:
    long = config_of("llama3-8b", context=131_072)
    long = replace(long, model={**(long.model or {}), "context": 131_072})
    layout, chosen, why = settled(long, 1)
    assert layout == ParallelLayout(dp_shard=4, cp=2) and why.startswith("parallel.cp=2, parallel.dp_shard=4")
    assert chosen.parallel.activation_checkpointing == "full" and chosen.batch.local_size == 1
    masked = replace(long, data={**(long.data or {}), "document_mask": True})
    assert settled(masked, 1)[2].startswith("does not fit: ")


def test_what_fits_in_no_way_is_tried_in_the_smallest_and_said() -> None:
    layout, chosen, why = settled(config_of("llama3-70b"), 1)
    assert layout == ParallelLayout(dp_shard=8) and chosen.parallel.activation_checkpointing == "full"
    assert why.startswith("does not fit: ") and "plan --suggest 80" in why


def test_the_global_batch_stays_and_a_typed_cut_is_kept() -> None:
    _, chosen, _ = settled(config_of("llama3-8b"), 1)
    assert (chosen.batch.global_size, chosen.batch.local_size) == (32, 1)
    typed = replace(config_of("llama3-8b"), batch=BatchSection(local_size=4))
    layout, kept, _ = settled(typed, 1)
    assert kept.batch == typed.batch and layout.dp_shard == 8
    assert kept.parallel.activation_checkpointing != "none", "larger micro-batches have to be computed again"


def test_a_choice_is_made_anew_on_other_nodes_and_holds_on_each_of_a_range() -> None:
    _, chosen, _ = settled(config_of("llama3-8b"), 1)
    assert solve_layout(chosen.parallel, world_size=4).dp_shard == 4, "ranks alone take what they have"
    again, _, _ = settled(chosen, 2)
    assert again == ParallelLayout(dp_replicate=2, dp_shard=8)
    layout, ranged, _ = settled(config_of("llama3-8b", context=256), 4, sizes=(2, 3, 4))
    assert layout == ParallelLayout(dp_replicate=4, dp_shard=8)
    assert solve_layout(ranged.parallel, world_size=24) == ParallelLayout(dp_replicate=3, dp_shard=8)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("h100", 80),
        ("nvidia_h100_80gb_hbm3", 80),
        ("a100", 40),
        ("a100-80gb", 80),
        ("A100_SXM4_80GB", 80),
        ("h200", 141),
        ("NVIDIA H100 NVL", 94),
        ("a100_3g.20gb", 20),
        ("rtx4090", 24),
        ("mi300x", 192),
        ("volta", None),
    ],
)
def test_the_memory_of_a_card_is_known_by_its_name(name: str, size: int | None) -> None:
    assert memory_gib_of(name) == size
