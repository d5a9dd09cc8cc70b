"""The formulas against torch: parameters exactly, kept tensors of float32 to the byte in a replica."""

from __future__ import annotations

import copy
import inspect
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
import yaml

from slurm_train.assets import read_asset
from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import OptimSection, ParallelSection, build_config
from slurm_train.distributed.parallelize import prepare_blocks
from slurm_train.distributed.pipeline import keep_stages
from slurm_train.models import blocks, head
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective
from slurm_train.plan import memory
from slurm_train.plan.layouts import traffic
from slurm_train.plan.memory import GptShape, LayoutFacts, kept_by_forward, measured_memory, rank_memory
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
    batch = BatchPlan.equal(local_size=3, ranks=layout.data_parallel_size, accumulation=4)
    settings = ParallelSection(**options)
    return LayoutFacts(shape=shape, layout=layout, batch=batch, settings=settings, half=half, positions=shape.context)


def build(form: dict[str, Any]) -> GPT:
    return GPT(**{**SHAPE, **form})


def kept_bytes(model: GPT, *, half: bool = False) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, parameters, buffers and the loss aside."""
    tokens = torch.randint(0, model.embedding.num_embeddings, (3, model.context))
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        Objective(model)((tokens, tokens.clone()))
    return sum(seen.values()) - 4


@forms
def test_a_gpt_keeps_what_the_formula_says(form: dict[str, Any]) -> None:
    model, facts = build(form), facts_of(ParallelLayout(), form=form)
    assert kept_bytes(model) == kept_by_forward(facts, stage=0)
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
    kept = kept_bytes(model, half=layout.shard_size == 1)
    # On the CPU, LayerNorm keeps its two numbers per position in bfloat16; autocast copies vectors, too.
    assert kept == pytest.approx(kept_by_forward(facts, stage=0), rel=0.006)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_scores_in_chunks_keep_two_gradients(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    assert (memory.PLAIN_SCORES, memory.CHUNK_SCORES) == (head._PLAIN_SCORES, head._CHUNK_SCORES)
    monkeypatch.setattr(head, "_PLAIN_SCORES", 0)
    monkeypatch.setattr(memory, "PLAIN_SCORES", 0)
    facts = facts_of(ParallelLayout(), half=half)
    assert kept_bytes(build({}), half=half) == pytest.approx(kept_by_forward(facts, stage=0), rel=0.006)


def test_the_defaults_are_those_of_the_constructor() -> None:
    parameters, shape = inspect.signature(GPT.__init__).parameters, GptShape()
    assert {one.name: parameters[one.name].default for one in fields(shape)} == asdict(shape)
    assert {*parameters} - {one.name for one in fields(shape)} == {"self"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2-124m", 124_439_808), ("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496)],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    shape = GptShape.of(yaml.safe_load(read_asset("conf/model", f"{name}.yaml")))
    assert shape is not None and shape.parameters == parameters


@forms
@pytest.mark.parametrize("kind", ["selective", "alternate", "full"])
def test_checkpointing_keeps_what_the_formula_says(
    monkeypatch: pytest.MonkeyPatch, kind: Any, form: dict[str, Any]
) -> None:
    # What is kept of operations lies in torch's own storage; hooks of autograd see the rest.
    kept: list[torch.Tensor] = []
    caching = torch.utils.checkpoint._CachingTorchDispatchMode
    begin = caching.__init__

    def remember(self: Any, policy: Any, *args: Any, **kwargs: Any) -> None:
        def ask(context: Any, operation: Any, *values: Any, **options: Any) -> Any:
            decision = policy(context, operation, *values, **options)
            if decision is torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE:
                results = context.op_output
                kept.extend(one for one in (results if isinstance(results, tuple) else [results]) if one.dim())
            return decision

        begin(self, ask, *args, **kwargs)

    monkeypatch.setattr(caching, "__init__", remember)
    model = build(form)
    prepare_blocks(model, settings=ParallelSection(activation_checkpointing=kind), compiles=False)
    facts = facts_of(ParallelLayout(), form=form, activation_checkpointing=kind)
    found = kept_bytes(model) + sum({one.untyped_storage().data_ptr(): one.nbytes for one in kept}.values())
    assert bool(kept) == (kind != "full")
    assert found == pytest.approx(kept_by_forward(facts, stage=0), rel=0.01)


@forms
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_stages_hold_the_parameters_that_the_formula_says(pp: int, form: dict[str, Any]) -> None:
    if pp > 1:
        form = {**form, "tied": False, "num_layers": 3}
    whole, facts = build(form), facts_of(ParallelLayout(pp=pp), form=form)
    for stage in range(pp):
        model = copy.deepcopy(whole)
        if pp > 1:
            keep_stages(model, stages=[stage], num_stages=pp)
        trained = 4 * sum(one.numel() for one in model.parameters())
        buffers = facts.shape.buffer_bytes if pp == 1 else 0
        found = rank_memory(facts, stage=stage)
        assert (found.weight_bytes, found.optimizer_bytes) == (trained + buffers, 2 * trained)


OPTIMS: dict[str, dict[str, Any]] = {
    **{
        name: yaml.safe_load(read_asset("conf/optim", f"{name}.yaml")) | {"lr": 0.01}
        for name in ("adamw", "sgd", "muon")
    },
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
    assert rank_memory(facts, stage=0).optimizer_bytes == sum(one.nbytes for one in kept)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp_shard=4), ParallelLayout(tp=2, dp_shard=2)])
def test_averages_stay_float32_where_parameters_of_two_bytes_halve_the_rest(layout: ParallelLayout) -> None:
    facts = facts_of(layout)
    buffers = facts.shape.buffer_bytes if layout.is_replicated else 0
    plain, four, two = (
        rank_memory(replace(facts, num_averages=count, param_size=size), stage=0)
        for count, size in ((0, 4), (2, 4), (2, 2))
    )
    assert four.average_bytes == two.average_bytes == four.optimizer_bytes == four.total_bytes - plain.total_bytes
    assert 2 * two.optimizer_bytes == four.optimizer_bytes
    assert 2 * (two.weight_bytes - buffers) == four.weight_bytes - buffers


def test_a_replica_holds_gradients_twice_where_micro_batches_add_up() -> None:
    measured = {"trained_bytes": 10, "other_bytes": 1, "optimizer_bytes": 20, "activation_bytes": 50}
    for accumulation, gradients in ((1, 10), (4, 20)):
        replica = measured_memory(measured, accumulation=accumulation, averages=2)
        assert (replica.gradient_bytes, replica.average_bytes) == (gradients, 20)
        assert replica.total_bytes == 101 + gradients


def test_measured_and_computed_numbers_are_added_up_alike() -> None:
    facts = replace(facts_of(ParallelLayout(dp_replicate=2)), num_averages=1)
    computed = rank_memory(facts, stage=0)
    measured = {
        "trained_bytes": 4 * facts.shape.parameters,
        "other_bytes": facts.shape.buffer_bytes,
        "optimizer_bytes": computed.optimizer_bytes,
        "activation_bytes": computed.activation_bytes,
    }
    assert measured_memory(measured, accumulation=facts.batch.accumulation, averages=1) == computed


def test_shards_divide_what_a_rank_holds_and_offloaded_ones_are_on_the_host() -> None:
    whole, sharded, offloaded = (
        rank_memory(facts_of(ParallelLayout(dp_shard=shards), cpu_offload=offloads), stage=0)
        for shards, offloads in ((1, False), (4, False), (4, True))
    )
    assert sharded.optimizer_bytes == whole.optimizer_bytes / 4 and sharded.gathered_bytes > 0 == whole.gathered_bytes
    assert offloaded.offloaded_bytes == sharded.weight_bytes + sharded.gradient_bytes + sharded.optimizer_bytes
    assert offloaded.total_bytes == sharded.gathered_bytes + sharded.activation_bytes


def test_matrices_that_travel_in_float8_take_a_byte_a_number() -> None:
    lowered = replace(facts_of(ParallelLayout(dp_shard=4), half=True), gathers_float8=True)
    plain = replace(lowered, gathers_float8=False)
    matrices = lowered.shape.matrices_in_block(tp=1)
    assert plain.gathered_block - lowered.gathered_block == matrices
    # Two of the whole blocks at the fullest moment are parameters, the others gradients.
    saved = [rank_memory(facts, stage=0).gathered_bytes for facts in (plain, lowered)]
    assert saved[0] - saved[1] == 2 * matrices
    # They are gathered twice in each of four micro-batches, and a rank sends three parts of four.
    sent = [traffic(facts)["dp_shard"] for facts in (plain, lowered)]
    assert sent[0] - sent[1] == 4 * 2 * lowered.blocks(0) * matrices * 3 // 4
    # 96 rows do not make 64 equal parts.
    uneven = replace(lowered, layout=ParallelLayout(dp_shard=64))
    assert plain.gathered_block - uneven.gathered_block == matrices - 96 * 64


def test_a_pipeline_keeps_as_many_micro_batches_as_its_schedule_and_sends_each_on() -> None:
    # Each stage has one block: the first keeps three micro-batches of it, or all four.
    for schedule, count in (("1f1b", 3), ("gpipe", 4)):
        facts = facts_of(ParallelLayout(pp=3), pipeline_schedule=schedule)
        assert kept_by_forward(facts, stage=0) == count * facts.tokens * facts.kept_in_block("none")
        # Four micro-batches of 3 x 64 positions of 64 float32, there and back.
        assert traffic(facts) == {"pp": 2 * 4 * 3 * 64 * 64 * 4}


def test_ranks_that_share_a_sequence_share_parameters_and_send_keys_and_values_besides() -> None:
    shared, sharded = (facts_of(ParallelLayout(tp=2, **{axis: 2})) for axis in ("cp", "dp_shard"))
    assert rank_memory(shared, stage=0).optimizer_bytes == rank_memory(sharded, stage=0).optimizer_bytes
    keys = 4 * 3 * 2 * (2 * shared.tokens * 64 // 2 * 4)
    assert traffic(shared)["cp"] == keys + traffic(sharded)["dp_shard"]
