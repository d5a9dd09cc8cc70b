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
from slurm_train.config.schema import BatchSection, ParallelSection, RunConfig, build_config
from slurm_train.errors import ConfigError
from slurm_train.plan.layouts import Suggestion, suggest_layouts, tokens_per_s
from slurm_train.plan.placement import World, plan_layout

GIB = 1 << 30
SIXTY_FOUR = World((8,) * 8)


def published(name: str, **batch: int) -> RunConfig:
    return RunConfig(model=yaml.safe_load(read_asset("conf/model", f"{name}.yaml")), batch=BatchSection(**batch))


def typed(config: RunConfig, one: Suggestion) -> RunConfig:
    """Returns the configuration that the suggestion's words give."""
    parallel, *others = shlex.split(one.words)
    section = yaml.safe_load(parallel.partition("=")[2].replace(":", ": "))
    batch = {key.removeprefix("batch."): int(value) for key, _, value in (other.partition("=") for other in others)}
    return replace(config, parallel=build_config(ParallelSection, section), batch=build_config(BatchSection, batch))


def test_layouts_fit_and_typed_are_what_was_meant() -> None:
    config = published("llama3-8b")
    num_legal, found = suggest_layouts(config, SIXTY_FOUR, memory_bytes=80 * GIB)
    assert num_legal > 100 and len(found) == 6
    assert (found[-1].label, found[-1].world.num_nodes) == ("smallest", 1)
    for one in found:
        assert one.memory_bytes < 0.9 * 80 * GIB and one.facts.batch.global_size == 256
        again = typed(config, one)
        layout = plan_layout(again, one.world)
        assert layout == one.facts.layout
        assert solve_batch(again.batch, ranks=layout.data_parallel_size, stages=layout.pp) == one.facts.batch


# What people train these with on nodes of eight GPUs of 80 GiB.
@pytest.mark.parametrize(
    ("name", "gather_dtype", "layout"),
    [
        ("gpt2-124m", "auto", ParallelLayout(dp_replicate=64)),
        ("llama3-8b", "auto", ParallelLayout(dp_shard=64)),
        ("llama3-70b", "float32", ParallelLayout(dp_shard=16, tp=4)),
        ("llama3-70b", "auto", ParallelLayout(dp_shard=64)),
    ],
)
def test_the_best_for_published_shapes_is_what_is_in_use(name: str, gather_dtype: Any, layout: ParallelLayout) -> None:
    config = replace(published(name), parallel=ParallelSection(gather_dtype=gather_dtype))
    _, found = suggest_layouts(config, SIXTY_FOUR, memory_bytes=80 * GIB)
    assert (found[0].facts.layout, found[0].label) == (layout, "best")
    assert found[0].tokens_per_s > 0.9 * max(one.tokens_per_s for one in found)


def test_links_bubbles_and_short_micro_batches_slow_a_layout_down() -> None:
    both = World((8,) * 2)
    _, found = suggest_layouts(published("llama3-8b", global_size=64), both, memory_bytes=10_000 * GIB, count=999)
    by_layout = {str(one.facts.layout): one for one in found if one.world == both}
    cut, alone = by_layout["dp_replicate 8 x tp 2"], by_layout["dp_replicate 16"]
    # With one rank on a node its neighbours are behind the network.
    assert tokens_per_s(cut.facts, World((1,) * 16)) < cut.tokens_per_s < alone.tokens_per_s
    assert by_layout["pp 2 x dp_replicate 8"].tokens_per_s < alone.tokens_per_s
    assert tokens_per_s(replace(alone.facts, positions=128), alone.world) < alone.tokens_per_s / 2


def test_sixteen_thousand_ranks_are_looked_through_in_seconds() -> None:
    start = time.process_time()
    num_legal, found = suggest_layouts(published("llama3-70b"), World((8,) * 2048), memory_bytes=80 * GIB)
    assert num_legal > 1000 and time.process_time() - start < 10
    # No more than sixteen million tokens in a step, however many ranks there are.
    assert {one.facts.batch.global_size for one in found} == {2048}


def test_other_models_and_uneven_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no estimate for this model"):
        suggest_layouts(RunConfig(model={"_target_": "my.Model"}), World((4,)), memory_bytes=GIB)
    with pytest.raises(ConfigError, match=r"layouts are suggested for equal nodes, not for \[4, 2\]"):
        suggest_layouts(published("gpt"), World((4, 2)), memory_bytes=GIB)
