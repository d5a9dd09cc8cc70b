"""The same training under every layout, on gloo ranks: equal losses and weights, resume from one into another."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from slurm_train.assets import read_asset
from slurm_train.checkpoint.load import weights_digest
from slurm_train.checkpoint.tensors import tensor_shapes
from slurm_train.checkpoint.verify import read_manifest
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.small_checkpoints import checkpoint_of
from tests.support.warm_ranks import LLAMA
from tests.train.small_runs import (
    assert_resumes_bit_for_bit,
    assert_same_steps,
    config_of,
    digest_of,
    evaluations_of,
    run_to_end,
    steps_of,
    weights_of,
)
from tests.train.small_training import Scaled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
Parallel = dict[str, Any]

STEPS = 12


def layout_config(
    parallel: Parallel,
    *,
    accumulation: int | None = None,
    precision: str = "auto",
    max_steps: int = STEPS,
    document: int = 0,
    **model: Any,
) -> dict[str, Any]:
    return config_of(
        model={"_target_": "small_training.DoubleGPT", **model},
        data={"_target_": "small_training.Tokens", "document": document},
        batch={"global_size": 16, "accumulation": accumulation},
        train={"max_steps": max_steps, "eval_every_steps": STEPS // 2, "precision": precision},
        checkpoint={"keep": 9},
        parallel={"dp_replicate": 1, **parallel},
    )


def ranks_of(parallel: Parallel) -> int:
    return math.prod(int(parallel.get(axis, 1)) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))


def train(run: Path, parallel: Parallel, *, code: int = 0, attempt: int = 0, **facts: Any) -> str:
    config = layout_config(parallel, **facts)
    return run_to_end(run, config, ranks=ranks_of(parallel), code=code, attempt=attempt)


def assert_same_training(found: Path, expected: Path, *, loss: float = 1e-9, weights: float = 1e-6) -> None:
    """Double precision all the way; what is left is the order of additions, which AdamW's square root makes larger."""
    assert_same_steps(found, expected, rel=loss)
    for key in ("eval_loss", "eval_accuracy"):
        ours, theirs = ([line[key] for line in evaluations_of(run)] for run in (found, expected))
        assert ours == pytest.approx(theirs, rel=loss) and len(ours) == 2
    of_found, of_expected = weights_of(found), weights_of(expected)
    assert of_found.keys() == of_expected.keys()
    for name, tensor in of_expected.items():
        assert of_found[name].numpy() == pytest.approx(tensor.numpy(), rel=weights, abs=1e-3 * weights), name


SHARDS_OF_MATRICES = {"dp_shard": 2, "tp": 2}
BY_POSITIONS = {"tp": 2, "sequence_parallel": True}
# DP2 x TP2 is where a shard is damaged, below; CP2 x TP2 by positions is among the forms.
LAYOUTS: dict[str, Parallel] = {
    "FSDP2 over 2": {"dp_shard": 2},
    "FSDP2 over 2, two micro-batches": {"dp_shard": 2},
    "FSDP2 over 2 from the host": {"dp_shard": 2, "cpu_offload": True},
    "FSDP2 over 2, recomputed": {"dp_shard": 2, "activation_checkpointing": "full", "reshard_after_forward": False},
    "FSDP2 over 4": {"dp_shard": 4},
    "HSDP 2x2, two micro-batches": {"dp_replicate": 2, "dp_shard": 2},
    "replicas 2 x TP2": {"dp_replicate": 2, "tp": 2},
    "DP2 x TP2 by positions": {"dp_shard": 2, **BY_POSITIONS, "activation_checkpointing": "selective"},
    "CP2": {"cp": 2},
    "DP2 x CP2": {"dp_shard": 2, "cp": 2, "activation_checkpointing": "full"},
    "HSDP over CP2": {"dp_replicate": 2, "cp": 2},
    "DDP over 4": {"dp_replicate": 4},
}
# The embedding of the first stage cannot be the head of the last.
PIPELINES: dict[str, Parallel] = {
    "PP2": {"pp": 2},
    "PP2 x DP2": {"dp_shard": 2, "pp": 2},
    "PP4, GPipe": {"pp": 4, "pipeline_schedule": "gpipe"},
    "PP2 x DP2, two stages each": {"dp_shard": 2, "pp": 2, "stages_per_rank": 2},
    "PP2 x DP2, zero bubble": {
        "dp_shard": 2,
        "pp": 2,
        "pipeline_schedule": "zero_bubble",
        "reshard_after_forward": False,
    },
    "PP2, two stages each, zero bubble": {"pp": 2, "stages_per_rank": 2, "pipeline_schedule": "zero_bubble"},
    "PP2 x TP2 by positions, zero bubble": {**BY_POSITIONS, "pp": 2, "pipeline_schedule": "zero_bubble"},
    "PP2 x DP2 x TP2": {"dp_shard": 2, "tp": 2, "pp": 2},
    "PP2 x TP2 by positions, two stages each": {**BY_POSITIONS, "pp": 2, "stages_per_rank": 2},
    "PP2 x CP2": {"cp": 2, "pp": 2},
}


# One of each kind is quick; the chain below goes through replicas, shards, columns and stages.
QUICK = {"DP2 x TP2 by positions", "PP2 x DP2"}
# Others have each of their parts; these take five minutes.
TAKE_LONG = {
    "FSDP2 over 2, two micro-batches",
    "FSDP2 over 2, recomputed",
    "FSDP2 over 4",
    "replicas 2 x TP2",
    "CP2",
    "HSDP over CP2",
    "DDP over 4",
    "PP2",
    "PP2 x DP2, two stages each",
    "PP2 x DP2, zero bubble",
    "PP2 x TP2 by positions, zero bubble",
    "PP2 x TP2 by positions, two stages each",
    "PP2 x CP2",
    # With the loss in chunks.
    "TP2 by positions, recomputed in part",
}


def each_of(layouts: dict[str, Parallel]) -> list[Any]:
    rows = []
    for name in layouts:
        home: Any = pytest.mark.campaign if name in TAKE_LONG else pytest.mark.full
        rows.append(pytest.param(name, id=name, marks=() if name in QUICK else home))
    return rows


@pytest.fixture(scope="module", params=["tied", "untied"])
def alone(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The same training in one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(run, {}, tied=request.param == "tied")
    return run


with_tied = pytest.mark.parametrize("alone", ["tied"], indirect=True)
with_untied = pytest.mark.parametrize("alone", ["untied"], indirect=True)


@with_tied
@pytest.mark.parametrize("name", each_of(LAYOUTS))
def test_losses_and_weights_are_those_of_one_process(tmp_path: Path, alone: Path, name: str) -> None:
    train(tmp_path / "run", LAYOUTS[name], accumulation=2 if "micro" in name else None)
    assert_same_training(tmp_path / "run", alone)


@with_untied
@pytest.mark.parametrize("name", each_of(PIPELINES))
def test_a_pipeline_trains_as_one_process(tmp_path: Path, alone: Path, name: str) -> None:
    # Eight ranks share few cores: there half as many micro-batches take half the time.
    accumulation = 4 if ranks_of(PIPELINES[name]) == 8 else None
    train(tmp_path / "run", PIPELINES[name], tied=False, accumulation=accumulation)
    assert_same_training(tmp_path / "run", alone)
    assert digest_of(tmp_path / "run") == weights_digest(weights_of(tmp_path / "run").items())


DOCUMENTS: dict[str, Parallel] = {
    "PP2": {"pp": 2},
    "PP2 x DP2, two stages each": {"dp_shard": 2, "pp": 2, "stages_per_rank": 2},
    "DP2 x TP2 by positions": {"dp_shard": 2, **BY_POSITIONS, "activation_checkpointing": "selective"},
    "DDP over 4": {"dp_replicate": 4},
}


@pytest.mark.parametrize("name", each_of(DOCUMENTS))
def test_documents_stay_apart_in_every_layout(tmp_path: Path, name: str) -> None:
    train(tmp_path / "alone", {}, tied=False, document=3)
    train(tmp_path / "run", DOCUMENTS[name], tied=False, document=3)
    assert_same_training(tmp_path / "run", tmp_path / "alone")


def test_context_parallelism_has_no_document_mask(tmp_path: Path) -> None:
    said = train(tmp_path / "run", {"cp": 2}, code=1, tied=False, document=3)
    assert "data.document_mask=false" in said and "parallel.cp=2" in said


# Of a padded vocabulary, for a few tokens at a time.
IN_CHUNKS: dict[str, Parallel] = {
    "FSDP2 over 2, two micro-batches": {"dp_shard": 2},
    "CP2": {"cp": 2},
    "PP2": {"pp": 2},
    "PP2 x DP2, two stages each": {"dp_shard": 2, "pp": 2, "stages_per_rank": 2},
    "TP2 by positions, recomputed in part": {**BY_POSITIONS, "activation_checkpointing": "selective"},
    "FSDP2 x TP2": SHARDS_OF_MATRICES,
}


@with_untied
@pytest.mark.parametrize("name", each_of(IN_CHUNKS))
def test_a_loss_in_chunks_trains_as_the_plain_one(tmp_path: Path, alone: Path, name: str) -> None:
    accumulation = 2 if "micro" in name else None
    train(tmp_path / "run", IN_CHUNKS[name], tied=False, in_chunks=True, accumulation=accumulation)
    assert_same_training(tmp_path / "run", alone)


SCALED: dict[str, Parallel] = {
    "DDP": {"dp_replicate": 2},
    "FSDP2 x TP2": {"dp_shard": 2, "tp": 2},
    "PP2": {"pp": 2},
    "PP2 x CP2": {"cp": 2, "pp": 2},
}


@with_untied
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "DDP" else pytest.mark.campaign) for name in SCALED]
)
def test_the_loss_scale_of_float16_changes_no_bit_and_is_restored(tmp_path: Path, alone: Path, name: str) -> None:
    """Autocast leaves double precision alone, and only the scale is left; in float32 it does overflow."""
    parallel = SCALED[name]
    half: dict[str, Any] = {"precision": "float16", "tied": False}
    train(tmp_path / "exact", parallel, **half)
    assert_same_training(tmp_path / "exact", alone)
    # The scale grows step by step until gradients overflow.
    half |= {"dtype": "float32", "max_steps": 20}
    text = train(tmp_path / "whole", parallel, **half)
    assert "is not applied: its float16 gradients overflow" in text
    losses = [line["loss"] for line in steps_of(tmp_path / "whole")]
    assert 1 <= losses.count(None) <= 3
    assert any(losses[losses.index(None) :]), "training goes on with a smaller scale"
    half |= {"signal_at": 7, "only_in": str(tmp_path / "sent")}
    train(tmp_path / "cut", parallel, code=75, **half)
    train(tmp_path / "cut", parallel, attempt=1, **half)
    assert digest_of(tmp_path / "cut") == digest_of(tmp_path / "whole")
    assert_same_steps(tmp_path / "cut", tmp_path / "whole")


# Every form that differs from the shipped one, in one model: two runs instead of one for each.
FORM = {
    # Of so many ids ranks have no equal parts.
    "vocab_size": 13,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "num_kv_heads": 2,
    "positions": "learned",
    "bias": True,
    "tied": False,
}
STAGES = {"tp": 2, "pp": 2}
# The kernel of AdamW is not called for this one.
AMSGRAD = {"lr": 0.01, "amsgrad": True}
# Model, layouts, optimizer, tolerance of losses and of weights. Llama's norms in transformers round to float32.
FORMS: dict[str, Any] = {
    "GPT": (FORM, [STAGES, {"cp": 2, **BY_POSITIONS}], {"optim": AMSGRAD}, {}),
    "transformers": (
        {"_target_": "small_training.double_llama"},
        [SHARDS_OF_MATRICES],
        {},
        {"loss": 1e-6, "weights": 1e-3},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["GPT", pytest.param("transformers", marks=NEEDS_TRANSFORMERS)])
def test_other_forms_of_models_train_in_parts_as_in_one_process(tmp_path: Path, name: str) -> None:
    model, layouts, sections, tolerances = FORMS[name]
    for number, parallel in enumerate([{}, *layouts]):
        config = layout_config(parallel) | sections
        config["model"] = {"_target_": "small_training.DoubleGPT", **model}
        imports = LLAMA if name == "transformers" else ()
        run_to_end(tmp_path / str(number), config, ranks=ranks_of(parallel), imports=imports)
        assert_same_training(tmp_path / str(number), tmp_path / "0", **tolerances)


# Stopped in its second forward pass each, but for the last; the global batch stays 16.
CHAIN: list[Parallel] = [
    SHARDS_OF_MATRICES,
    {"dp_replicate": 4},
    {"dp_shard": 2, "pp": 2},
    {"cp": 2},
    {"dp_replicate": 1},
    SHARDS_OF_MATRICES,
]


@with_untied
def test_a_run_goes_on_under_another_layout_and_back(tmp_path: Path, alone: Path) -> None:
    sent, run = tmp_path / "sent", tmp_path / "run"
    for attempt, parallel in enumerate(CHAIN):
        sent.unlink(missing_ok=True)
        if is_last := attempt == len(CHAIN) - 1:
            sent.touch()
        facts = {"tied": False, "signal_at": 2, "only_in": str(sent)}
        train(run, parallel, attempt=attempt, code=0 if is_last else 75, **facts)
    # Each is stopped in its second step, but through a pipeline flow eight micro-batches in one step.
    assert [line["world_size"] for line in steps_of(run)] == [4] * (2 + 2 + 1) + [2] * 2 + [1] * 2 + [4] * 3
    assert_same_training(run, alone)
    assert read_manifest(checkpoint_of(run / "checkpoints", STEPS)).mesh == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}


# Stopped in its fourth forward pass each, but for the last.
SCALAR_CHAIN: list[Parallel] = [
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 1},
    {"dp_shard": 4},
    {"dp_shard": 2},
]
SGD_FOR_SOME = {"match": ["layers.*", "*.gate"], "_target_": "torch.optim.SGD", "momentum": 0.9, "lr": 0.1}
SCALARS = ["blocks.0.gate", "blocks.1.gate", "scale"]


def scaled_config(parallel: Parallel, *, optim: dict[str, Any], **model: Any) -> dict[str, Any]:
    return config_of(
        model={"_target_": "small_training.Scaled", **model},
        batch={"global_size": 16, "accumulation": 2},
        train={"eval_every_steps": 10},
        optim={"grad_clip_norm": 0.05, **optim},
        checkpoint={"keep": 9},
        health={"check_replicas_every_steps": 4},
        parallel={"dp_replicate": 1, **parallel},
    )


@pytest.mark.parametrize(
    "optim",
    [
        pytest.param({}, id="AdamW", marks=pytest.mark.full),
        pytest.param({"_target_": "torch.optim.Adam", "amsgrad": True}, id="AMSGrad", marks=pytest.mark.campaign),
        pytest.param({"groups": [SGD_FOR_SOME]}, id="SGD for some", marks=pytest.mark.full),
    ],
)
def test_scalar_parameters_train_beside_shards_as_in_one_process(tmp_path: Path, optim: dict[str, Any]) -> None:
    """A vector of one number, fewer than there are ranks, is sharded all the same."""
    sent, run, alone = tmp_path / "sent", tmp_path / "run", tmp_path / "alone"
    run_to_end(alone, scaled_config({}, optim=optim), ranks=1)
    for attempt, parallel in enumerate(SCALAR_CHAIN):
        sent.unlink(missing_ok=True)
        if is_last := attempt == len(SCALAR_CHAIN) - 1:
            sent.touch()
        config = scaled_config(parallel, optim=optim, signal_at=8, only_in=str(sent))
        run_to_end(run, config, ranks=ranks_of(parallel), attempt=attempt, code=0 if is_last else 75)
    assert_same_training(run, alone)
    before = Scaled().state_dict()
    trained = weights_of(run)
    assert [name for name in SCALARS if trained[name].shape == () and trained[name] != before[name]] == SCALARS


@pytest.mark.full
def test_scalar_parameters_see_all_parts_of_a_sequence(tmp_path: Path) -> None:
    for number, parallel in enumerate([{}, {"dp_shard": 2, "cp": 2}]):
        config = layout_config(parallel)
        config["model"] = {"_target_": "small_training.ScaledGPT"}
        run_to_end(tmp_path / str(number), config, ranks=ranks_of(parallel))
        assert_same_training(tmp_path / str(number), tmp_path / "0")


@pytest.mark.full
@pytest.mark.parametrize(("name", "loss"), [("sgd", 1e-9), ("muon", 1e-2)])
def test_shipped_optimizers_train_in_parts_and_go_on_in_others(tmp_path: Path, name: str, loss: float) -> None:
    """Muon multiplies in bfloat16. Of four stages two have no embedding and no head, and so not all of its groups."""
    optim = yaml.safe_load(read_asset("conf/optim", f"{name}.yaml")) | {"lr": 0.01, "schedule": "wsd"}
    sent, chain = tmp_path / "sent", [SHARDS_OF_MATRICES, {"pp": 4}, {"dp_replicate": 2}, {"pp": 4}]
    for attempt, parallel in enumerate([{}, *chain]):
        sent.unlink(missing_ok=True)
        is_whole, is_last = attempt == 0, attempt == len(chain)
        if is_whole or is_last:
            sent.touch()
        config = layout_config(parallel, tied=False, signal_at=4, only_in=str(sent)) | {"optim": optim}
        run, code = tmp_path / ("whole" if is_whole else "parts"), 0 if is_whole or is_last else 75
        run_to_end(run, config, ranks=ranks_of(parallel), code=code, attempt=max(attempt - 1, 0))
    assert_same_steps(tmp_path / "parts", tmp_path / "whole", rel=loss)


def test_resuming_under_the_same_layout_is_exact_bit_for_bit(tmp_path: Path) -> None:
    # An epoch ends in the seventh step.
    config = layout_config(SHARDS_OF_MATRICES, dropout=0.2, max_steps=8)
    assert "stopped at step 5" in assert_resumes_bit_for_bit(tmp_path, config, ranks=4, signal_at=5)
    # The tied head is in a checkpoint under both its names, among the parameters under one.
    saved = weights_of(tmp_path / "cut")
    assert digest_of(tmp_path / "cut") == weights_digest(item for item in saved.items() if item[0] != "head.weight")


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_replicate": 2}, id="DDP", marks=pytest.mark.campaign),
        pytest.param({"dp_shard": 2}, id="FSDP2", marks=pytest.mark.full),
    ],
)
def test_dicts_train_and_resume_bit_for_bit_as_tuples_do(tmp_path: Path, parallel: Parallel) -> None:
    train(tmp_path / "tuples", parallel, accumulation=2, dropout=0.2)
    facts = {"dropout": 0.2, "signal_at": 7, "only_in": str(tmp_path / "sent")}
    config = layout_config(parallel, accumulation=2, **facts)
    config["data"] = {"_target_": "small_training.NamedTokens"}
    run_to_end(tmp_path / "dicts", config, ranks=ranks_of(parallel), code=75)
    run_to_end(tmp_path / "dicts", config, ranks=ranks_of(parallel), attempt=1)
    assert digest_of(tmp_path / "dicts") == digest_of(tmp_path / "tuples")
    assert_same_steps(tmp_path / "dicts", tmp_path / "tuples")
    ours, theirs = ([line["eval_loss"] for line in evaluations_of(tmp_path / name)] for name in ("dicts", "tuples"))
    assert ours == theirs and len(ours) == 2


def boxes_config(parallel: Parallel, *, model: str, **sections: Any) -> dict[str, Any]:
    return config_of(
        model={"_target_": f"small_training.{model}"},
        data={"_target_": "small_training.Boxes", "collate": "small_training.as_lists", "num_workers": 1},
        batch={"global_size": 16, "accumulation": 2},
        train={"eval_every_steps": 10},
        parallel={"dp_replicate": 1, **parallel},
        **sections,
    )


@pytest.mark.full
def test_lists_of_images_and_of_dicts_train_a_detector_alike_in_all_layouts(tmp_path: Path) -> None:
    """Its losses are the mean over the images, so their parts of a step add up to those of one process."""
    shards = {"dp_shard": 2}
    text = run_to_end(tmp_path / "plain", boxes_config(shards, model="Detector"), ranks=2)
    assert text.count("Detector gives predictions and no loss in evaluation mode") == 1
    assert "finished step 20: nothing was evaluated\n" in text and not evaluations_of(tmp_path / "plain")
    for number, parallel in enumerate([{}, {"dp_replicate": 2}, shards]):
        run = tmp_path / str(number)
        run_to_end(run, boxes_config(parallel, model="MeasuredDetector"), ranks=ranks_of(parallel))
        assert_same_steps(run, tmp_path / "plain", rel=1e-9)
        ours, theirs = ([line["eval_loss"] for line in evaluations_of(at)] for at in (run, tmp_path / "0"))
        assert ours == pytest.approx(theirs, rel=1e-9) and len(ours) == 2
    losses = [line["loss"] for line in steps_of(tmp_path / "plain")]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"callbacks": [{"_target_": "slurm_train.train.callbacks.EarlyStopping"}]}, "no loss of held-out samples"),
        (
            {"model": {"_target_": "small_training.DoubleGPT"}, "parallel": {"dp_replicate": 1, "cp": 2}},
            "a batch has lists of tensors, which a layout of",
        ),
        ({"model": {"_target_": "small_training.Net"}}, "with which Net cannot be scored"),
        (
            {"parallel": {"dp_replicate": 1, "dp_shard": 2, "gather_dtype": "bfloat16"}},
            "gathered in bfloat16 round all inputs, targets too",
        ),
    ],
    ids=["callback", "cut", "model", "rounded"],
)
def test_lists_are_refused_where_they_cannot_be_used(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    config = {**boxes_config({}, model="Detector"), **sections}
    text = run_to_end(tmp_path / "run", config, ranks=ranks_of(config["parallel"]), code=1)
    assert said in text and not steps_of(tmp_path / "run")


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_dicts_are_refused_where_they_cannot_be_cut(tmp_path: Path, axis: str) -> None:
    config = layout_config({axis: 2}, tied=False)
    config["data"] = {"_target_": "small_training.NamedTokens"}
    text = run_to_end(tmp_path / "run", config, ranks=2, code=1)
    assert f"batches are dicts (tokens_BT, labels), which a layout of {axis} 2 cannot cut" in text


def test_a_pipeline_with_a_rank_that_has_nothing_to_train_is_refused(tmp_path: Path) -> None:
    facts = {"tied": False, "frozen": ["embedding", "blocks.0.", "blocks.1."]}
    text = train(tmp_path / "run", {"pp": 2}, code=1, **facts)
    assert "parallel.pp=2 was asked, and DoubleGPT has nothing to train on rank 0 of the pipeline" in text


def stream_config(parallel: Parallel, only_in: Path, **data: Any) -> dict[str, Any]:
    config = layout_config(parallel, accumulation=2, dropout=0.2, signal_at=7, only_in=str(only_in))
    heldout = {"_target_": "small_training.Tokens", "split": "heldout"}
    config["data"] = {"_target_": "small_training.TokenStream", "heldout": heldout, **data}
    config["checkpoint"]["every_steps"] = 5
    return config


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_replicate": 2}, id="DDP", marks=pytest.mark.full),
        pytest.param(SHARDS_OF_MATRICES, id="shards", marks=pytest.mark.campaign),
    ],
)
def test_a_stream_goes_on_bit_for_bit_on_as_many_ranks(tmp_path: Path, parallel: Parallel) -> None:
    ranks, whole, cut = ranks_of(parallel), tmp_path / "whole", tmp_path / "cut"
    config = stream_config(parallel, tmp_path / "sent")
    run_to_end(cut, config, ranks=ranks, code=75)
    run_to_end(cut, config, ranks=ranks, attempt=1)
    run_to_end(whole, config, ranks=ranks)
    # What was saved while training went on is as exact as what was saved at a stop.
    expected = digest_of(whole)
    shutil.rmtree(checkpoint_of(whole / "checkpoints", STEPS))
    (whole / "result.json").unlink()
    assert "(step 10)" in run_to_end(whole, config, ranks=ranks, attempt=1)
    assert digest_of(whole) == digest_of(cut) == expected
    assert_same_steps(cut, whole)
    assert len(evaluations_of(cut)) == 2


def test_a_stream_on_another_number_of_ranks_is_refused_or_begins_anew(tmp_path: Path) -> None:
    run, one = tmp_path / "run", {"dp_replicate": 1}
    run_to_end(run, stream_config({"dp_replicate": 2}, tmp_path / "sent"), ranks=2, code=75)
    text = run_to_end(run, stream_config(one, tmp_path / "sent"), ranks=1, attempt=1, code=1)
    assert "step 4 was saved with streams of 2 data-parallel ranks, and there are 1\nhint: resume on 2; or" in text
    text = run_to_end(run, stream_config(one, tmp_path / "sent", allow_world_change=True), ranks=1, attempt=2)
    assert "stream state of 2 ranks cannot resume on 1: resetting it, samples of the present pass come again" in text


@pytest.mark.parametrize("sections", [{"train": {"max_epochs": 2}}, {"batch": {"by_length": True}}], ids=str)
def test_what_needs_numbered_samples_is_refused_for_a_stream(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = stream_config({"dp_replicate": 1}, tmp_path / "sent")
    for name, section in sections.items():
        config[name] = {**config[name], **section}
    ((name, section),) = sections.items()
    text = run_to_end(tmp_path / "run", config, ranks=1, code=1)
    assert f"{name}.{next(iter(section))} was asked, and the data are a stream" in text


# "float32": the type of which the parameters are made.
IN_TWO_BYTES: dict[str, Parallel] = {
    "one rank": {},
    "DDP": {"dp_replicate": 2},
    "FSDP2 x TP2 by positions": {"dp_shard": 2, **BY_POSITIONS},
    "FSDP2 from the host": {"dp_shard": 2, "cpu_offload": True},
}


@pytest.mark.full
def test_parameters_of_two_bytes_train_alike_and_resume_bit_for_bit(tmp_path: Path) -> None:
    def two_bytes(name: str, parallel: Parallel, **facts: Any) -> str:
        config = layout_config(parallel, tied=False, dtype="float32", **{"signal_at": 0, **facts.pop("model", {})})
        config["train"]["param_dtype"] = "bfloat16"
        return run_to_end(tmp_path / name, config, ranks=ranks_of(parallel), **facts)

    train(tmp_path / "precise", {}, tied=False, dtype="float32")
    expected = [line["loss"] for line in steps_of(tmp_path / "precise")]
    for name, parallel in IN_TWO_BYTES.items():
        two_bytes(name, parallel)
        assert [line["loss"] for line in steps_of(tmp_path / name)] == pytest.approx(expected, rel=0.02), name
        assert expected[-1] < expected[0] - 0.1
        found = tensor_shapes(checkpoint_of(tmp_path / name / "checkpoints", STEPS))
        kept = [one.dtype for key, one in found.items() if key.endswith(("exp_avg", "exp_avg_sq", "weight"))]
        assert len(kept) > 100 and set(kept) == {torch.bfloat16}, name
    name = "FSDP2 x TP2 by positions"
    model = {"signal_at": 7, "only_in": str(tmp_path / "sent")}
    two_bytes("cut", IN_TWO_BYTES[name], code=75, model=model)
    two_bytes("cut", IN_TWO_BYTES[name], attempt=1, model=model)
    assert digest_of(tmp_path / "cut") == digest_of(tmp_path / name)


@pytest.mark.full
def test_layouts_train_alike_where_products_and_residual_stream_are_bfloat16(tmp_path: Path) -> None:
    losses = {}
    for name, parallel in {"one": {}, "shards": {"dp_shard": 2}, "parts": BY_POSITIONS, "stages": {"pp": 2}}.items():
        config = layout_config(parallel, tied=False, dtype="float32")
        config["train"]["precision"] = "bfloat16"
        run_to_end(tmp_path / name, config, ranks=ranks_of(parallel))
        losses[name] = [line["loss"] for line in steps_of(tmp_path / name)]
        assert losses[name] == pytest.approx(losses["one"], rel=0.005), name
    assert losses["one"][-1] < losses["one"][0] - 0.1


def test_a_rank_without_a_card_for_float8_says_so_before_it_meets_others(tmp_path: Path) -> None:
    text = run_to_end(tmp_path / "run", layout_config({}, precision="fp8"), ranks=1, code=1)
    assert "train.precision=fp8 was asked, and this rank has a CPU\nhint: float8 needs compute capability 8.9" in text


def test_running_statistics_are_refused_with_parameters_of_two_bytes(tmp_path: Path) -> None:
    config = config_of(model={"_target_": "small_training.WithStatistics"}, train={"param_dtype": "bfloat16"})
    text = run_to_end(tmp_path / "run", config, ranks=1, code=1)
    assert "train.param_dtype=bfloat16 was asked, but layers.1 of WithStatistics keeps running statistics" in text


@pytest.mark.full
def test_dropout_belongs_to_the_samples_not_to_the_ranks(tmp_path: Path) -> None:
    for name, parallel in (("replicas", {"dp_replicate": 2}), ("shards", {"dp_shard": 2})):
        train(tmp_path / name, parallel, dropout=0.2)
    assert_same_training(tmp_path / "shards", tmp_path / "replicas")


@pytest.mark.full
@pytest.mark.parametrize(("policy", "parts"), [("skip", SHARDS_OF_MATRICES), ("rollback", {"cp": 2})])
def test_a_step_that_is_not_finite_is_treated_as_with_replicas(tmp_path: Path, policy: str, parts: Parallel) -> None:
    found = {}
    for name, parallel in (("replicas", {"dp_replicate": 2}), ("parts", parts)):
        config = layout_config(parallel, bad_at=7)
        config["health"] = {"on_non_finite": policy, "check_replicas_every_steps": 5}
        config["checkpoint"]["every_steps"] = 4
        run_to_end(tmp_path / name, config, ranks=ranks_of(parallel))
        found[name] = steps_of(tmp_path / name)
        assert len([line for line in found[name] if line["loss"] is None]) == (1 if policy == "skip" else 0)
    # The step that was not applied has no loss.
    ours, theirs = ([line for line in found[name] if line["loss"] is not None] for name in ("parts", "replicas"))
    for key in ("step", "loss", "samples"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-9)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_replicate": 2}, marks=pytest.mark.campaign),
        pytest.param({"dp_shard": 2}, marks=pytest.mark.full),
        pytest.param({"pp": 2}, marks=pytest.mark.campaign),
    ],
)
def test_a_stop_during_evaluation_is_agreed_upon(tmp_path: Path, parallel: Parallel) -> None:
    facts = {"tied": False, "in_evaluation": True, "only_in": str(tmp_path / "sent")}
    assert "stopped at step 6" in train(tmp_path / "run", parallel, code=75, **facts)
    train(tmp_path / "run", parallel, attempt=1, **facts)
    assert [line["step"] for line in evaluations_of(tmp_path / "run")] == [6, 12]
    assert len(steps_of(tmp_path / "run")) == STEPS


@pytest.mark.full
@with_tied
def test_parameters_are_gathered_in_bfloat16_where_asked(tmp_path: Path, alone: Path) -> None:
    train(tmp_path / "run", {"dp_shard": 2, "gather_dtype": "bfloat16"})
    found, expected = ([line["loss"] for line in steps_of(run)] for run in (tmp_path / "run", alone))
    assert found == pytest.approx(expected, rel=5e-2) and found != pytest.approx(expected, rel=1e-6)


@pytest.mark.full
@with_tied
def test_a_damaged_shard_makes_the_checkpoint_before_it_count(tmp_path: Path, alone: Path) -> None:
    run, config = tmp_path / "run", layout_config(SHARDS_OF_MATRICES)
    config["checkpoint"]["every_steps"] = 6
    run_to_end(run, config, ranks=4)
    newest = checkpoint_of(run / "checkpoints", STEPS)
    shards = {f"__{rank}_0.distcp" for rank in range(4)} | {f"rank_{rank:05d}.pt" for rank in range(4)}
    assert set(read_manifest(newest).files) == {*shards, ".metadata"}
    data = bytearray((newest / "__3_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "__3_0.distcp").write_bytes(data)
    (run / "result.json").unlink()
    text = run_to_end(run, config, ranks=4, attempt=1)
    assert re.search(r"passed over checkpoint_0000012_\w+: .*__3_0\.distcp", text), text
    assert re.search(r"resuming from checkpoint_0000006_\w+ \(step 6\)", text)
    assert_same_training(run, alone)


def test_a_model_without_a_plan_is_refused_for_tensor_parallelism(tmp_path: Path) -> None:
    text = run_to_end(tmp_path / "run", config_of(parallel={"dp_replicate": 1, "tp": 2}), code=1)
    assert "parallel.tp was asked, but Net has no tensor_parallel_plan()" in text
