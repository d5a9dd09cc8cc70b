"""The formulas against torch: parameters exactly, kept tensors of float32 to the byte in a replica."""

from __future__ import annotations

import copy
import inspect
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from slurm_train.assets import read_asset
from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import OptimSection, ParallelSection, build_config
from slurm_train.distributed.parallelize import prepare_blocks
from slurm_train.distributed.pipeline import keep_stages
from slurm_train.estimate import memory
from slurm_train.estimate.layouts import traffic
from slurm_train.estimate.memory import (
    GptShape,
    LayoutFacts,
    fullest_rank,
    kept_by_forward,
    rank_memory,
    replica_memory,
)
from slurm_train.models import blocks, head
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective
from slurm_train.train.optimizer import build_optimizer

GPT_TARGET = "slurm_train.models.gpt.GPT"
SHAPE = {"vocab_size": 300, "context": 64, "num_layers": 3, "num_heads": 4, "width": 64, "hidden": 96, "tied": False}
FORMS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "llama": {"num_kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu"},
    "gpt2": {"positions": "learned", "activation": "gelu_tanh", "bias": True, "tied": True},
    "small": {"context": 32, "num_layers": 1, "num_heads": 2, "width": 32, "hidden": 0, "vocab_size": 1000},
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def facts_of(layout: ParallelLayout, *, half: bool = False, form: dict[str, Any] | None = None, **options: Any) -> Any:
    shape = GptShape.of({"_target_": GPT_TARGET, **SHAPE, **(form or {})})
    batch = BatchPlan(local_size=3, ranks=layout.data_parallel_size, accumulation=4)
    settings = ParallelSection(**options)
    return LayoutFacts(shape=shape, layout=layout, batch=batch, settings=settings, half=half, positions=shape.context)


def build(form: dict[str, Any]) -> GPT:
    return GPT(**{**SHAPE, **form})


def kept_bytes(model: nn.Module, *batch: torch.Tensor, half: bool = False) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, parameters, buffers and the loss aside."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        Objective(model)(batch)
    return sum(seen.values()) - 4


@forms
def test_a_gpt_keeps_what_the_formula_says(form: dict[str, Any]) -> None:
    model, facts = build(form), facts_of(ParallelLayout(), form=form)
    tokens = torch.randint(0, facts.shape.vocab_size, (3, facts.positions))
    assert kept_bytes(model, tokens, tokens.clone()) == kept_by_forward(facts, stage=0)
    assert facts.shape.buffer_bytes == sum(one.nbytes for one in model.buffers())


class FusedRMSNorm(torch.autograd.Function):
    """Keeps what torch's kernel for GPUs keeps (`_fused_rms_norm` in derivatives.yaml); the gradients are not right."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x[..., :1].float(), weight)
        return x * weight

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.sum((0, 1))


@forms
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp_shard=2)], ids=["autocast", "gathered"])
def test_in_bfloat16_it_keeps_the_formulas_half(
    monkeypatch: pytest.MonkeyPatch, layout: ParallelLayout, form: dict[str, Any]
) -> None:
    monkeypatch.setattr(blocks.functional, "rms_norm", lambda x, _shape, weight, _eps: FusedRMSNorm.apply(x, weight))
    model, facts = build(form), facts_of(layout, half=True, form=form)
    if layout.shard_size > 1:
        # As FSDP computes: gathered parameters are in bfloat16, and autocast is off.
        model.to(torch.bfloat16)
    tokens = torch.randint(0, facts.shape.vocab_size, (3, facts.positions))
    kept = kept_bytes(model, tokens, tokens.clone(), half=layout.shard_size == 1)
    # On the CPU, LayerNorm keeps its two numbers per position in bfloat16; autocast copies vectors, too.
    assert kept == pytest.approx(kept_by_forward(facts, stage=0), rel=0.006)
    whole = facts_of(layout, form=form, gather_dtype="float32")
    assert kept < kept_by_forward(whole, stage=0)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_scores_in_chunks_keep_two_gradients(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    assert (memory.PLAIN_SCORES, memory.CHUNK_SCORES) == (head._PLAIN_SCORES, head._CHUNK_SCORES)
    monkeypatch.setattr(head, "_PLAIN_SCORES", 0)
    monkeypatch.setattr(memory, "PLAIN_SCORES", 0)
    model, facts = build({}), facts_of(ParallelLayout(), half=half)
    tokens = torch.randint(0, facts.shape.vocab_size, (3, facts.positions))
    assert kept_bytes(model, tokens, tokens.clone(), half=half) == pytest.approx(
        kept_by_forward(facts, stage=0), rel=0.006
    )


def test_the_defaults_are_those_of_the_constructor() -> None:
    parameters, shape = inspect.signature(GPT.__init__).parameters, GptShape()
    assert {one.name: parameters[one.name].default for one in fields(shape)} == asdict(shape)
    assert {*parameters} - {one.name for one in fields(shape)} == {"self"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2-124m", 124_439_808), ("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496)],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    mapping = yaml.safe_load(read_asset("conf/model", f"{name}.yaml"))
    shape = GptShape.of(mapping)
    assert shape.parameters == parameters
    with torch.device("meta"):
        model = GPT(**{key: value for key, value in mapping.items() if key != "_target_"})
    assert sum(one.numel() for one in model.parameters()) == parameters


def test_full_checkpointing_keeps_what_enters_each_block() -> None:
    model, tokens = build({}), torch.randint(0, 300, (3, 64))
    plain = kept_bytes(model, tokens, tokens.clone())
    prepare_blocks(model, settings=ParallelSection(activation_checkpointing="full"), compiles=False)
    expected = kept_by_forward(facts_of(ParallelLayout(), activation_checkpointing="full"), stage=0)
    assert kept_bytes(model, tokens, tokens.clone()) == pytest.approx(expected, rel=0.01) and expected < plain / 2


@forms
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_stages_hold_the_parameters_that_the_formula_says(pp: int, form: dict[str, Any]) -> None:
    if pp > 1:
        form = {**form, "tied": False, "num_layers": 3}
    whole = build(form)
    for stage in range(pp):
        model = copy.deepcopy(whole)
        if pp > 1:
            keep_stages(model, stages=[stage], num_stages=pp)
        facts = facts_of(ParallelLayout(pp=pp), form=form)
        found, trained = rank_memory(facts, stage=stage), 4 * sum(one.numel() for one in model.parameters())
        assert found.weight_bytes == trained + (facts.shape.buffer_bytes if pp == 1 else 0)
        assert found.optimizer_bytes == 2 * trained


OPTIMS: dict[str, dict[str, Any]] = {
    **{name: yaml.safe_load(read_asset("conf/optim", f"{name}.yaml")) for name in ("adamw", "sgd", "muon")},
    "plain sgd": {"_target_": "torch.optim.SGD"},
    "rules": {"groups": [{"match": "*attention*", "dims": 2, "_target_": "torch.optim.Muon"}, {"match": "*head*"}]},
}


@forms
@pytest.mark.parametrize("name", OPTIMS)
def test_the_optimizer_keeps_what_the_formula_says(name: str, form: dict[str, Any]) -> None:
    model, optim = build(form), build_config(OptimSection, OPTIMS[name], path="optim.")
    optimizer = build_optimizer(model, optim=optim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [one for state in optimizer.state.values() for one in state.values() if one is not None and one.dim() > 0]
    facts = replace(facts_of(ParallelLayout(), form=form), optim=optim)
    assert facts.kept_by_optimizer(0) == sum(one.numel() for one in kept)
    assert rank_memory(facts, stage=0).optimizer_bytes == sum(one.nbytes for one in kept)


def test_averages_are_divided_as_the_parameters_are() -> None:
    for layout in (ParallelLayout(), ParallelLayout(dp_shard=4), ParallelLayout(tp=2, dp_shard=2)):
        memory = rank_memory(replace(facts_of(layout), num_averages=2), stage=0)
        assert memory.average_bytes == memory.optimizer_bytes
        assert memory.total_bytes == rank_memory(facts_of(layout), stage=0).total_bytes + memory.average_bytes


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp_shard=4), ParallelLayout(tp=2, dp_shard=2)])
def test_parameters_of_two_bytes_halve_what_is_held_of_them_but_averages(layout: ParallelLayout) -> None:
    four = replace(facts_of(layout), num_averages=1)
    one, two = (rank_memory(facts, stage=0) for facts in (four, replace(four, param_size=2)))
    buffers = four.shape.buffer_bytes if layout.is_replicated else 0
    assert 2 * (two.weight_bytes - buffers) == one.weight_bytes - buffers
    assert 2 * two.optimizer_bytes == one.optimizer_bytes and two.average_bytes == one.average_bytes


def test_a_whole_model_holds_gradients_twice_where_micro_batches_add_up() -> None:
    one, four = (
        replica_memory(trained=10, other=1, activations=50, accumulation=count, optimizer=20) for count in (1, 4)
    )
    assert (one.weight_bytes, one.gradient_bytes, one.optimizer_bytes, one.total_bytes) == (11, 10, 20, 91)
    assert four.gradient_bytes == 20


def test_shards_and_parts_divide_what_a_rank_holds() -> None:
    whole, sharded, cut, offloaded = (
        rank_memory(facts_of(layout, **options), stage=0)
        for layout, options in (
            (ParallelLayout(), {}),
            (ParallelLayout(dp_shard=4), {}),
            (ParallelLayout(tp=2), {}),
            (ParallelLayout(dp_shard=4), {"cpu_offload": True}),
        )
    )
    assert sharded.optimizer_bytes == whole.optimizer_bytes / 4 and sharded.gathered_bytes > 0 == whole.gathered_bytes
    assert whole.optimizer_bytes / 2 < cut.optimizer_bytes < whole.optimizer_bytes
    assert cut.activation_bytes < whole.activation_bytes
    assert offloaded.offloaded_bytes == sharded.weight_bytes + sharded.gradient_bytes + sharded.optimizer_bytes
    assert offloaded.total_bytes == sharded.gathered_bytes + sharded.activation_bytes


def test_a_pipeline_keeps_as_many_micro_batches_as_its_schedule() -> None:
    ordered, filled = (facts_of(ParallelLayout(pp=3), pipeline_schedule=name) for name in ("1f1b", "gpipe"))
    # Each stage has one block: the first keeps three micro-batches of it, or all four.
    assert [kept_by_forward(one, stage=0) for one in (ordered, filled)] == [
        count * ordered.tokens * ordered.kept_in_block("none") for count in (3, 4)
    ]
    assert fullest_rank(filled)[0] in range(3)


def test_a_rank_keeps_less_of_a_sequence_that_it_shares() -> None:
    whole, dealt = (facts_of(ParallelLayout(tp=2), sequence_parallel=splits) for splits in (False, True))
    shared, sharded = facts_of(ParallelLayout(tp=2, cp=2)), facts_of(ParallelLayout(tp=2, dp_shard=2))
    assert kept_by_forward(dealt, stage=0) < kept_by_forward(whole, stage=0)
    assert shared.tokens == whole.tokens / 2 and kept_by_forward(shared, stage=0) < kept_by_forward(whole, stage=0)
    # They share the parameters as ranks of dp_shard do, and gather keys and values besides.
    one, two, alone = (rank_memory(one, stage=0) for one in (whole, shared, sharded))
    assert two.optimizer_bytes == alone.optimizer_bytes < one.optimizer_bytes
    keys = 4 * 3 * 2 * (2 * shared.tokens * 64 // 2 * 4)
    assert traffic(shared)["cp"] == keys + traffic(sharded)["dp_shard"]
