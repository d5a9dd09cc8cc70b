from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import AXES, ParallelLayout
from slurm_train.config.schema import BatchSection, ClusterSection, DdpSection, ParallelSection, RunConfig
from slurm_train.errors import BatchError, ConfigError
from slurm_train.launch.layout import (
    TABLE_HEADER,
    check_pipeline,
    layout_rows,
    pipeline_bubble,
    plan_layout,
    spans_nodes,
    table_rows,
)
from slurm_train.launch.world import World

GPT = {"_target_": "slurm_train.models.gpt.GPT", "num_layers": 4, "num_heads": 4, "width": 160, "tied": False}


def config_of(model: dict[str, Any], **parallel: Any) -> RunConfig:
    return RunConfig(model=model, cluster=ClusterSection(), parallel=ParallelSection(**parallel))


def test_the_layout_of_eight_ranks_on_two_nodes() -> None:
    layout = plan_layout(config_of(GPT, dp_shard=2, tp=2, pp=2), World((4, 4)))
    assert layout == ParallelLayout(dp_shard=2, tp=2, pp=2)
    rows = table_rows(layout, World((4, 4)))
    assert TABLE_HEADER == ("rank", "node", "local", "pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert rows[5] == ("5", "1", "1", "1", "0", "0", "0", "1")


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (GPT, {"tp": 8}, "parallel.tp=8 does not fit into nodes of 4 ranks"),
        ({**GPT, "num_heads": 5}, {"tp": 2}, "parallel.tp=2 cannot cut model.num_heads=5 into equal parts"),
        (
            {**GPT, "num_kv_heads": 2},
            {"tp": 4},
            "parallel.tp=4 cannot cut model.num_kv_heads=2 into equal parts",
        ),
        ({**GPT, "hidden": 33}, {"tp": 2}, "parallel.tp=2 cannot cut model.hidden=33 into equal parts"),
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
            "parallel.stages_per_rank=2 was asked with pipeline_schedule=gpipe",
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
            "parallel.sequence_parallel=true was asked of dp_replicate 4",
        ),
        (
            {"_target_": "slurm_train.models.causal_lm.causal_lm"},
            {"cp": 2},
            "parallel.cp=2 was asked, but model=hf cannot split sequences",
        ),
        (GPT, {"cpu_offload": True}, "parallel.cpu_offload=true was asked of dp_replicate 8, but only sharded"),
        (GPT, {"tp": 2, "cpu_offload": True}, "parallel.cpu_offload=true was asked of dp_replicate 4 x tp 2, but only"),
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
    with pytest.raises(ConfigError) as caught:
        plan_layout(config_of(model, **parallel), World((4, 4)))
    assert str(caught.value).startswith(message)


def test_interleaved_stages_need_equal_rounds() -> None:
    config, layout = config_of(GPT, pp=2, stages_per_rank=2), ParallelLayout(pp=2)
    for accumulation in (2, 3, 4):
        check_pipeline(config, layout, BatchPlan(local_size=1, ranks=1, accumulation=accumulation))
    with pytest.raises(BatchError, match=r"interleaved stages on 2 ranks need rounds of equally many micro-batches"):
        check_pipeline(config, layout, BatchPlan(local_size=1, ranks=1, accumulation=5))


def test_tensor_parallelism_spans_nodes_where_that_is_wanted() -> None:
    config = config_of({**GPT, "num_heads": 8}, tp=8, allow_tp_across_nodes=True)
    assert plan_layout(config, World((4, 4))).tp == 8


def test_a_task_makes_its_own_groups() -> None:
    config = RunConfig(task={"_target_": "x.main"}, parallel=ParallelSection(tp=2))
    with pytest.raises(ConfigError, match="has to make its own groups"):
        plan_layout(config, World((2,)))


def test_a_cut_model_does_not_send_less_of_whole_gradients() -> None:
    config = replace(config_of(GPT, dp_shard=4), ddp=DdpSection(comm="bf16"))
    with pytest.raises(ConfigError, match=r"sends less of whole gradients, which .* does not exchange"):
        plan_layout(config, World((4,)))
    assert plan_layout(replace(config, parallel=ParallelSection()), World((4,))).is_replicated


def test_sequences_of_many_lengths_are_not_cut() -> None:
    config = replace(config_of(GPT, cp=2), batch=BatchSection(by_length=True))
    with pytest.raises(ConfigError, match=r"parallel\.cp=2 was asked with batch\.by_length=true"):
        plan_layout(config, World((4,)))


def test_the_rows_name_groups_links_and_idle_time() -> None:
    layout, batch = ParallelLayout(dp_shard=8, tp=4, pp=2), BatchPlan(local_size=1, ranks=8, accumulation=8)
    assert layout_rows(layout, World((4,) * 16), batch, stages_per_rank=1) == [
        ("layout", "pp 2 x dp_shard 8 x tp 4; 8 read different samples"),
        ("", "tp: 16 groups of 4, on one node each; the first: ranks 0-3"),
        ("", "dp_shard: 8 groups of 8, over several nodes; the first: ranks 0, 4, .. 28"),
        ("", "pp: 32 groups of 2, over several nodes; the first: ranks 0, 32"),
        ("bubble", "11% of a step: 2 stages, 8 micro-batches"),
    ]
    assert pipeline_bubble(ParallelLayout(pp=3), BatchPlan(local_size=3, ranks=1, accumulation=4)) == 2 / 6
    assert layout_rows(ParallelLayout(dp_replicate=64), World((4,) * 16), batch, stages_per_rank=1) == []


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 6, 12, 24])
def test_links_of_equal_nodes_need_no_look_at_any_rank(ranks_per_node: int) -> None:
    world = World((ranks_per_node,) * (24 // ranks_per_node))
    for layout in (ParallelLayout(pp=2, dp_shard=3, tp=4), ParallelLayout(dp_replicate=4, cp=3, tp=2)):
        for axis in (axis for axis in AXES if getattr(layout, axis) > 1):
            nodes = [{rank // ranks_per_node for rank in group} for group in layout.groups((axis,))]
            assert spans_nodes(layout, world, axis) == any(len(one) > 1 for one in nodes), (layout, axis)
