"""The formulas against torch: parameters exactly, kept tensors within a hundredth."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from slurm_train.assets import read_asset
from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import AXES, ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.parallelize import prepare_blocks
from slurm_train.distributed.pipeline import keep_stages
from slurm_train.launch.gpt_shape import GptShape
from slurm_train.launch.layout_memory import (
    LayoutFacts,
    pipeline_bubble,
    spans_nodes,
    traffic,
)
from slurm_train.launch.layout_peak import fullest_stage, kept_by_forward, rank_memory
from slurm_train.launch.world import World
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective

SHAPE = {"vocab_size": 300, "context": 64, "num_layers": 3, "num_heads": 4, "width": 64, "hidden": 96, "tied": False}


# A form of each kind: Llama's, GPT-2's, and the one that ships.
LLAMA = {"num_kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu"}
GPT2 = {"positions": "learned", "activation": "gelu_tanh", "bias": True, "tied": True}
FORMS = {"shipped": {}, "llama": LLAMA, "gpt2": GPT2}


def facts_of(
    layout: ParallelLayout, *, half: bool = False, form: dict[str, Any] | None = None, **settings: Any
) -> LayoutFacts:
    shape = GptShape.of({"_target_": "slurm_train.models.gpt.GPT", **SHAPE, **(form or {})})
    assert shape is not None
    return LayoutFacts(
        shape=shape,
        layout=layout,
        batch=BatchPlan(local_size=3, ranks=layout.data_parallel_size, accumulation=4),
        settings=ParallelSection(**settings),
        half=half,
        positions=64,
    )


def kept_bytes(model: nn.Module, *, half: bool, local: int = 3) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, parameters, their casts and tables aside."""
    tokens = torch.randint(0, 300, (local, 64))
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    matrices = [one for one in model.parameters() if one.dim() == 2]
    casts = {tuple(one.shape) for matrix in matrices for one in (matrix, matrix.T)}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and not (tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in casts):
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        loss = Objective(model)(tokens, tokens.clone())
    del loss
    return sum(seen.values())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_a_micro_batch_keeps_what_the_formula_says(half: bool, form: dict[str, Any]) -> None:
    expected = kept_by_forward(facts_of(ParallelLayout(), half=half, form=form), stage=0)
    assert kept_bytes(GPT(**{**SHAPE, **form}), half=half) == pytest.approx(expected, rel=0.01)  # type: ignore[arg-type]


def test_full_checkpointing_keeps_what_enters_each_block() -> None:
    model = GPT(**SHAPE)  # type: ignore[arg-type]
    plain = kept_bytes(model, half=False)
    prepare_blocks(model, settings=ParallelSection(activation_checkpointing="full"), compiles=False)
    facts = facts_of(ParallelLayout(), activation_checkpointing="full")
    expected = kept_by_forward(facts, stage=0)
    assert kept_bytes(model, half=False) == pytest.approx(expected, rel=0.01) and expected < plain / 2


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_stages_hold_the_parameters_that_the_formula_says(pp: int, form: dict[str, Any]) -> None:
    form = form if pp == 1 else {**form, "tied": False}
    whole = GPT(**{**SHAPE, **form})  # type: ignore[arg-type]
    for stage in range(pp):
        model = copy.deepcopy(whole)
        if pp > 1:
            keep_stages(model, stages=[stage], num_stages=pp)
        memory = rank_memory(facts_of(ParallelLayout(pp=pp), form=form), stage=stage)
        assert memory.parameters == 4 * sum(one.numel() for one in model.parameters())
        assert memory.optimizer == 2 * memory.parameters


def test_shards_and_parts_divide_what_a_rank_holds() -> None:
    whole = rank_memory(facts_of(ParallelLayout()), stage=0)
    sharded = rank_memory(facts_of(ParallelLayout(dp_shard=4)), stage=0)
    cut = rank_memory(facts_of(ParallelLayout(tp=2)), stage=0)
    assert sharded.optimizer == whole.optimizer / 4 and sharded.gathered > 0 == whole.gathered
    assert whole.parameters / 2 < cut.parameters < whole.parameters
    assert cut.activations < whole.activations


def test_a_pipeline_keeps_as_many_micro_batches_as_its_schedule() -> None:
    layout = ParallelLayout(pp=3)
    ordered, filled = (facts_of(layout, pipeline_schedule=name) for name in ("1f1b", "gpipe"))
    # Each stage has one block: the first keeps three micro-batches of it, or all four.
    assert [kept_by_forward(one, stage=0) for one in (ordered, filled)] == [
        count * ordered.tokens * ordered.shape.kept_in_block(tp=1, half=False, recompute="none") for count in (3, 4)
    ]
    assert pipeline_bubble(layout, ordered.batch) == pytest.approx(2 / 6)
    assert fullest_stage(filled) in range(3)


def test_traffic_is_counted_along_each_axis_and_told_by_its_links() -> None:
    layout = ParallelLayout(dp_shard=2, tp=2, pp=2)
    world = World((4, 4))
    sent = {one.axis: one for one in traffic(facts_of(layout), world)}
    assert set(sent) == {"pp", "dp_shard", "tp"}
    assert sent["pp"].spans_nodes and not sent["tp"].spans_nodes and not sent["dp_shard"].spans_nodes
    # Four micro-batches of 3 x 64 positions of 64 float32, there and back.
    assert sent["pp"].num_bytes == 2 * 4 * 3 * 64 * 64 * 4
    assert spans_nodes(ParallelLayout(dp_shard=8), world, "dp_shard")


PUBLISHED = {"gpt2-124m": 124_439_808, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    mapping = yaml.safe_load(read_asset("conf/model", f"{name}.yaml"))
    shape = GptShape.of(mapping)
    assert shape is not None and shape.parameters == PUBLISHED[name]
    with torch.device("meta"):
        model = GPT(**{key: value for key, value in mapping.items() if key != "_target_"})
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]


def test_links_of_equal_nodes_are_told_without_looking_at_any_rank() -> None:
    for ranks_per_node in (1, 2, 3, 4, 6, 12, 24):
        world = World((ranks_per_node,) * (24 // ranks_per_node))
        for layout in (ParallelLayout(pp=2, dp_shard=3, tp=4), ParallelLayout(dp_replicate=4, cp=3, tp=2)):
            for axis in (axis for axis in AXES if getattr(layout, axis) > 1):
                nodes = [{rank // ranks_per_node for rank in group} for group in layout.groups((axis,))]
                assert spans_nodes(layout, world, axis) == any(len(one) > 1 for one in nodes), (world, layout, axis)


def test_a_rank_keeps_less_of_a_sequence_that_it_shares() -> None:
    whole = facts_of(ParallelLayout(tp=2))
    dealt = facts_of(ParallelLayout(tp=2), sequence_parallel=True)
    shared = facts_of(ParallelLayout(tp=2, cp=2))
    assert kept_by_forward(dealt, stage=0) < kept_by_forward(whole, stage=0)
    assert shared.tokens == whole.tokens / 2 and kept_by_forward(shared, stage=0) < kept_by_forward(whole, stage=0)
    sharded = facts_of(ParallelLayout(tp=2, dp_shard=2))
    one, two, alone = (rank_memory(one, stage=0) for one in (whole, shared, sharded))
    # They share the parameters as ranks of dp_shard do, and gather keys and values besides.
    assert two.optimizer == alone.optimizer < one.optimizer
    sent = {one.axis: one.num_bytes for one in traffic(shared, World((4,)))}
    keys = 4 * 3 * 2 * (2 * shared.tokens * 64 // 2 * 4)
    shards = {one.axis: one.num_bytes for one in traffic(sharded, World((4,)))}["dp_shard"]
    assert sent["cp"] == keys + shards


def test_what_is_kept_in_host_memory_is_no_part_of_the_device() -> None:
    held, away = (rank_memory(facts_of(ParallelLayout(dp_shard=2), cpu_offload=offload), stage=0) for offload in (0, 1))
    assert away.host == held.parameters + held.gradients + held.optimizer
    assert away.total == held.gathered + held.activations
