"""Layouts that are suggested: all legal, all fit, and typed they are what was meant."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import Any

import pytest
import yaml

from slurm_train.assets import read_asset
from slurm_train.config.batch import solve_batch
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import (
    BatchSection,
    ClusterSection,
    ParallelSection,
    RunConfig,
    TrainSection,
    build_config,
)
from slurm_train.errors import ConfigError
from slurm_train.estimate.layouts import Suggestion, suggest_layouts, tokens_per_s, traffic
from slurm_train.estimate.memory import facts_of
from slurm_train.launch.placement import World, plan_layout

GPT = "slurm_train.models.gpt.GPT"
GIB = 1 << 30


def config_of(model: dict[str, object], **batch: int) -> RunConfig:
    return RunConfig(model=model, cluster=ClusterSection(), train=TrainSection(), batch=BatchSection(**batch))


def published(name: str, **others: object) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(read_asset("conf/model", f"{name}.yaml"))
    return {**found, **others}


def typed(config: RunConfig, one: Suggestion) -> RunConfig:
    """Returns the configuration that the suggestion's words give."""
    parallel, *others = shlex.split(one.words)
    section = yaml.safe_load(parallel.partition("=")[2].replace(":", ": "))
    batch = {key.removeprefix("batch."): int(value) for key, _, value in (other.partition("=") for other in others)}
    return replace(config, parallel=build_config(ParallelSection, section), batch=build_config(BatchSection, batch))


def test_layouts_fit_and_typed_are_what_was_meant() -> None:
    config, world = config_of(published("llama3-8b")), World((8,) * 8)
    num_legal, found = suggest_layouts(config, world, memory_bytes=80 * GIB)
    assert num_legal > 100 and len(found) == 6
    assert (found[-1].label, found[-1].world.num_nodes) == ("smallest", 1)
    for one in found:
        assert one.memory_bytes < 0.9 * 80 * GIB and one.facts.layout.shard_size * one.facts.layout.tp > 1
        again = typed(config, one)
        layout = plan_layout(again, one.world)
        assert layout == one.facts.layout
        assert solve_batch(again.batch, ranks=layout.data_parallel_size, stages=layout.pp) == one.facts.batch
        assert one.facts.batch.global_size == 256 and one.facts.half


def test_traffic_is_counted_along_each_axis() -> None:
    config = config_of({"_target_": GPT, "context": 64, "width": 64, "tied": False}, local_size=3, accumulation=4)
    layout = ParallelLayout(dp_shard=2, tp=2, pp=2)
    facts = facts_of(config, layout, solve_batch(config.batch, ranks=2, stages=2), half=False)
    assert set(traffic(facts)) == {"pp", "dp_shard", "tp"}
    # Four micro-batches of 3 x 64 positions of 64 float32, there and back.
    assert traffic(facts)["pp"] == 2 * 4 * 3 * 64 * 64 * 4


# What people train these with on nodes of eight GPUs of 80 GiB.
EXPECTED = [
    ("gpt2-124m", "auto", ParallelLayout(dp_replicate=64)),
    ("llama3-8b", "auto", ParallelLayout(dp_shard=64)),
    ("llama3-70b", "float32", ParallelLayout(dp_shard=16, tp=4)),
    ("llama3-70b", "auto", ParallelLayout(dp_shard=16, tp=4)),
]


@pytest.mark.parametrize(("name", "gather_dtype", "layout"), EXPECTED)
def test_the_best_for_published_shapes_is_what_is_in_use(name: str, gather_dtype: Any, layout: ParallelLayout) -> None:
    config = replace(config_of(published(name)), parallel=ParallelSection(gather_dtype=gather_dtype))
    _, found = suggest_layouts(config, World((8,) * 8), memory_bytes=80 * GIB)
    assert (found[0].facts.layout, found[0].label) == (layout, "best")
    assert found[0].tokens_per_s > 0.9 * max(one.tokens_per_s for one in found)


def test_less_memory_makes_blocks_compute_again_before_it_fits_nowhere() -> None:
    config, world = config_of(published("llama3-8b"), global_size=32), World((8,) * 4)
    ways = []
    for memory in (1000, 20, 4):
        _, found = suggest_layouts(config, world, memory_bytes=memory * GIB)
        ways.append(found[0].facts.settings.activation_checkpointing if found else "nothing fits")
    assert ways[0] == "none" and ways[1] in ("selective", "full") and ways[-1] == "nothing fits"


def test_links_bubbles_and_short_micro_batches_slow_a_layout_down() -> None:
    model = published("llama3-8b")
    asked, both = config_of(model, global_size=64), World((8,) * 2)
    _, found = suggest_layouts(asked, both, memory_bytes=10_000 * GIB, count=999)
    by_layout = {str(one.facts.layout): one for one in found if one.world == both}
    cut, alone = by_layout["dp_replicate 8 x tp 2"], by_layout["dp_replicate 16"]
    # With one rank on a node its neighbours are behind the network.
    assert tokens_per_s(cut.facts, World((1,) * 16)) < cut.tokens_per_s < alone.tokens_per_s
    assert by_layout["pp 2 x dp_replicate 8"].tokens_per_s < alone.tokens_per_s
    short = replace(alone.facts, positions=128)
    assert tokens_per_s(short, alone.world) < alone.tokens_per_s / 2


def test_sixteen_thousand_ranks_are_looked_through_in_seconds() -> None:
    start = time.process_time()
    world = World((8,) * 2048)
    num_legal, found = suggest_layouts(config_of(published("llama3-70b")), world, memory_bytes=80 * GIB)
    assert num_legal > 1000 and time.process_time() - start < 10
    # No more than sixteen million tokens in a step, however many ranks there are.
    assert {one.facts.batch.global_size for one in found} == {2048}


def test_other_models_and_uneven_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no estimate for this model"):
        suggest_layouts(config_of({"_target_": "my.Model"}), World((4,)), memory_bytes=GIB)
    with pytest.raises(ConfigError, match=r"layouts are suggested for equal nodes, not for \[4, 2\]"):
        suggest_layouts(config_of({"_target_": GPT}), World((4, 2)), memory_bytes=GIB)
