"""The same training under every layout, on gloo ranks: equal losses and weights, resume from one into another."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.directory import read_manifest
from slurm_train.checkpoint.load import weights_digest
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.small_checkpoints import checkpoint_of
from tests.train.small_runs import (
    assert_same_steps,
    config_of,
    digest_of,
    evaluations_of,
    run_to_end,
    steps_of,
    weights_of,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
Parallel = dict[str, Any]


def layout_config(parallel: Parallel, *, accumulation: int | None = None, **model: Any) -> dict[str, Any]:
    return config_of(
        model={"_target_": "small_training.DoubleGPT", **model},
        data={"_target_": "small_training.Tokens"},
        batch={"global_size": 16, "accumulation": accumulation},
        train={"eval_every_steps": 10},
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
    "PP2 x DP2 x TP2": {"dp_shard": 2, "tp": 2, "pp": 2},
    "PP2 x TP2 by positions, two stages each": {**BY_POSITIONS, "pp": 2, "stages_per_rank": 2},
    "PP2 x CP2": {"cp": 2, "pp": 2},
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def alone(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The same training in one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(run, {}, tied=request.param == "tied")
    return run


with_tied = pytest.mark.parametrize("alone", ["tied"], indirect=True)
with_untied = pytest.mark.parametrize("alone", ["untied"], indirect=True)


@with_tied
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_weights_are_those_of_one_process(tmp_path: Path, alone: Path, name: str) -> None:
    train(tmp_path / "run", LAYOUTS[name], accumulation=2 if "micro" in name else None)
    assert_same_training(tmp_path / "run", alone)


# Each of what the longest puts together is in another one.
@with_untied
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign] if "by positions" in name else []) for name in PIPELINES]
)
def test_a_pipeline_trains_as_one_process(tmp_path: Path, alone: Path, name: str) -> None:
    train(tmp_path / "run", PIPELINES[name], tied=False)
    assert_same_training(tmp_path / "run", alone)
    assert digest_of(tmp_path / "run") == weights_digest(weights_of(tmp_path / "run").items())


# Every form that differs from the shipped one, in one model: two runs instead of one for each.
FORM = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "num_kv_heads": 2,
    "positions": "learned",
    "bias": True,
    "tied": False,
}
STAGES = {"tp": 2, "pp": 2}
# Model, layouts, tolerance of losses and of weights. Llama's norms in transformers round to float32 on the way.
FORMS: dict[str, Any] = {
    "GPT": (FORM, [STAGES, {"cp": 2, **BY_POSITIONS}], {}),
    "transformers": (
        {"_target_": "small_training.double_llama"},
        [SHARDS_OF_MATRICES],
        {"loss": 1e-6, "weights": 1e-3},
    ),
}


@pytest.mark.parametrize("name", ["GPT", pytest.param("transformers", marks=NEEDS_TRANSFORMERS)])
def test_other_forms_of_models_train_in_parts_as_in_one_process(tmp_path: Path, name: str) -> None:
    model, layouts, tolerances = FORMS[name]
    for number, parallel in enumerate([{}, *layouts]):
        config = layout_config(parallel)
        config["model"] = {"_target_": "small_training.DoubleGPT", **model}
        run_to_end(tmp_path / str(number), config, ranks=ranks_of(parallel))
        assert_same_training(tmp_path / str(number), tmp_path / "0", **tolerances)


# Stopped in its fourth forward pass each, but for the last; the global batch stays 16.
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
        facts = {"tied": False, "signal_at": 4, "only_in": str(sent)}
        train(run, parallel, attempt=attempt, code=0 if is_last else 75, **facts)
    # DDP on more than two ranks makes one pass before the first step; through a pipeline flow eight in one step.
    assert [line["world_size"] for line in steps_of(run)] == [4] * (4 + 3 + 1) + [2] * 4 + [1] * 4 + [4] * 4
    assert_same_training(run, alone)
    assert read_manifest(checkpoint_of(run / "checkpoints", 20)).mesh == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}


def test_resuming_under_the_same_layout_is_exact_bit_for_bit(tmp_path: Path) -> None:
    train(tmp_path / "whole", SHARDS_OF_MATRICES, dropout=0.2)
    facts = {"dropout": 0.2, "signal_at": 7, "only_in": str(tmp_path / "sent")}
    assert "stopped at step 7" in train(tmp_path / "cut", SHARDS_OF_MATRICES, code=75, **facts)
    train(tmp_path / "cut", SHARDS_OF_MATRICES, attempt=1, **facts)
    assert digest_of(tmp_path / "cut") == digest_of(tmp_path / "whole")
    # The tied head is in a checkpoint under both its names, among the parameters under one.
    saved = weights_of(tmp_path / "cut")
    assert digest_of(tmp_path / "cut") == weights_digest(item for item in saved.items() if item[0] != "head.weight")
    assert_same_steps(tmp_path / "cut", tmp_path / "whole")


def test_dropout_belongs_to_the_samples_not_to_the_ranks(tmp_path: Path) -> None:
    for name, parallel in (("replicas", {"dp_replicate": 2}), ("shards", {"dp_shard": 2})):
        train(tmp_path / name, parallel, dropout=0.2)
    assert_same_training(tmp_path / "shards", tmp_path / "replicas")


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


@pytest.mark.parametrize("parallel", [{"dp_replicate": 2}, {"dp_shard": 2}, {"pp": 2}])
def test_a_stop_during_evaluation_is_agreed_upon(tmp_path: Path, parallel: Parallel) -> None:
    facts = {"tied": False, "in_evaluation": True, "only_in": str(tmp_path / "sent")}
    assert "stopped at step 10" in train(tmp_path / "run", parallel, code=75, **facts)
    train(tmp_path / "run", parallel, attempt=1, **facts)
    assert [line["step"] for line in evaluations_of(tmp_path / "run")] == [10, 20]
    assert len(steps_of(tmp_path / "run")) == 20


@with_tied
def test_parameters_are_gathered_in_bfloat16_where_asked(tmp_path: Path, alone: Path) -> None:
    train(tmp_path / "run", {"dp_shard": 2, "gather_dtype": "bfloat16"})
    found, expected = ([line["loss"] for line in steps_of(run)] for run in (tmp_path / "run", alone))
    assert found == pytest.approx(expected, rel=5e-2) and found != pytest.approx(expected, rel=1e-6)


@with_tied
def test_a_damaged_shard_makes_the_checkpoint_before_it_count(tmp_path: Path, alone: Path) -> None:
    run, config = tmp_path / "run", layout_config(SHARDS_OF_MATRICES)
    config["checkpoint"]["every_steps"] = 10
    run_to_end(run, config, ranks=4)
    newest = checkpoint_of(run / "checkpoints", 20)
    shards = {f"__{rank}_0.distcp" for rank in range(4)} | {f"rank_{rank:05d}.pt" for rank in range(4)}
    assert set(read_manifest(newest).files) == {*shards, ".metadata"}
    data = bytearray((newest / "__3_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "__3_0.distcp").write_bytes(data)
    (run / "result.json").unlink()
    text = run_to_end(run, config, ranks=4, attempt=1)
    assert re.search(r"passed over checkpoint_0000020_\w+: .*__3_0\.distcp", text), text
    assert re.search(r"resuming from checkpoint_0000010_\w+ \(step 10\)", text)
    assert_same_training(run, alone)


def test_a_model_without_a_plan_is_refused_for_tensor_parallelism(tmp_path: Path) -> None:
    text = run_to_end(tmp_path / "run", config_of(parallel={"dp_replicate": 1, "tp": 2}), code=1)
    assert "parallel.tp was asked, but Net has no tensor_parallel_plan()" in text
