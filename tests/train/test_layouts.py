"""The same training under every layout, on gloo ranks: equal losses and weights, resume from one into another."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slurm_train.checkpoint.directory import newest_verified, read_manifest
from slurm_train.checkpoint.export import weights_digest
from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.tensors import tensor_shapes
from slurm_train.metrics.writer import read_metrics
from tests.support.small_checkpoints import checkpoint_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

# Double precision all the way; what is left is the order of additions, which AdamW's square root makes larger where a
# gradient is near nothing.
LOSSES = {"rel": 1e-9}
WEIGHTS = {"rel": 1e-6, "abs": 1e-9}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_for_layouts", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trainer = _load("test_trainer")


def config_of(parallel: dict[str, Any], *, batch: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    found: dict[str, Any] = trainer.config_of(batch=batch or {"global_size": 16}, eval_every_steps=10)
    found["model"] = {"_target_": "small_training.DoubleGPT", **model}
    found["data"] = {"_target_": "small_training.Tokens"}
    found["checkpoint"] = {"every_steps": None, "keep": 9}
    found["parallel"] = parallel
    return found


def ranks_of(parallel: dict[str, Any]) -> int:
    size = 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        size *= int(parallel.get(axis, 1))
    return size


# DP2 x TP2 is where a shard is damaged, below; CP2 x TP2 by positions is in test_model_forms.py.
LAYOUTS = {
    "FSDP2 over 2": {"dp_replicate": 1, "dp_shard": 2},
    "FSDP2 over 4": {"dp_replicate": 1, "dp_shard": 4},
    "HSDP 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "TP2": {"dp_replicate": 1, "tp": 2},
    "replicas 2 x TP2": {"dp_replicate": 2, "tp": 2},
    "TP2 by positions": {"dp_replicate": 1, "tp": 2, "sequence_parallel": True},
    "DP2 x TP2 by positions": {
        "dp_replicate": 1,
        "dp_shard": 2,
        "tp": 2,
        "sequence_parallel": True,
        "activation_checkpointing": "selective",
    },
    "CP2": {"dp_replicate": 1, "cp": 2},
    "DP2 x CP2": {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "activation_checkpointing": "full"},
    "HSDP over CP2": {"dp_replicate": 2, "cp": 2},
    "FSDP2 over 2 from the host": {"dp_replicate": 1, "dp_shard": 2, "cpu_offload": True},
    "DDP over 4": {"dp_replicate": 4},
    "FSDP2 over 2, two micro-batches": {"dp_replicate": 1, "dp_shard": 2},
    "HSDP 2x2, two micro-batches": {"dp_replicate": 2, "dp_shard": 2},
}

# The embedding of the first stage cannot be the head of the last.
PIPELINES = {
    "PP2": {"dp_replicate": 1, "pp": 2},
    "PP2 x DP2": {"dp_replicate": 1, "dp_shard": 2, "pp": 2},
    "PP4, GPipe": {"dp_replicate": 1, "pp": 4, "pipeline_schedule": "gpipe"},
    "PP2, two stages each": {"dp_replicate": 1, "pp": 2, "stages_per_rank": 2},
    "PP2 x DP2, two stages each": {"dp_replicate": 1, "dp_shard": 2, "pp": 2, "stages_per_rank": 2},
    "PP2 x DP2 x TP2": {"dp_replicate": 1, "dp_shard": 2, "tp": 2, "pp": 2},
    "PP2 x TP2 by positions, two stages each": {
        "dp_replicate": 1,
        "tp": 2,
        "pp": 2,
        "stages_per_rank": 2,
        "sequence_parallel": True,
    },
    "PP2 x CP2": {"dp_replicate": 1, "cp": 2, "pp": 2},
}


def batch_of(name: str) -> dict[str, Any]:
    return {"global_size": 16, **({"accumulation": 2} if "micro" in name else {})}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    trainer.run_to_end(run, config_of({}), ranks=1)
    return run


@pytest.fixture(scope="module")
def alone_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    trainer.run_to_end(run, config_of({}, tied=False), ranks=1)
    return run


def weights_of(run: Path) -> dict[str, Any]:
    found = newest_verified(run / "checkpoints").found
    assert found is not None and found[1].step == 20
    empty = {name.removeprefix("model."): t for name, t in tensor_shapes(found[0]).items() if name.startswith("model.")}
    load_tensors(found[0], {"model": empty})
    return empty


def assert_same_training(found: Path, expected: Path) -> None:
    one, many = trainer.steps_of(expected), trainer.steps_of(found)
    assert [line["step"] for line in many] == list(range(1, 21))
    for key in ("samples_digest", "samples", "lr", "epoch"):
        assert [line[key] for line in many] == [line[key] for line in one]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in many] == pytest.approx([line[key] for line in one], **LOSSES), key
    for key in ("eval_loss", "eval_accuracy"):
        theirs, ours = (
            [line[key] for line in read_metrics(run / "metrics.jsonl") if key in line] for run in (expected, found)
        )
        assert ours == pytest.approx(theirs, **LOSSES) and len(ours) == 2
    weights, reference = weights_of(found), weights_of(expected)
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        assert weights[name].numpy() == pytest.approx(tensor.numpy(), **WEIGHTS), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_weights_are_those_of_one_process(tmp_path: Path, alone: Path, name: str) -> None:
    parallel = LAYOUTS[name]
    trainer.run_to_end(tmp_path / "run", config_of(parallel, batch=batch_of(name)), ranks=ranks_of(parallel))
    assert_same_training(tmp_path / "run", alone)


# Each of what it puts together is in another one.
LONGEST = "PP2 x TP2 by positions, two stages each"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign] if name == LONGEST else []) for name in PIPELINES]
)
def test_a_pipeline_trains_as_one_process(tmp_path: Path, alone_untied: Path, name: str) -> None:
    parallel = PIPELINES[name]
    trainer.run_to_end(tmp_path / "run", config_of(parallel, tied=False), ranks=ranks_of(parallel))
    assert_same_training(tmp_path / "run", alone_untied)
    saved = trainer.result_of(tmp_path / "run")["weights_digest"]
    assert saved == weights_digest(weights_of(tmp_path / "run").items())


# Stopped in its fourth forward pass each, but for the last; the global batch stays 16.
CHAIN = [
    {"dp_replicate": 1, "dp_shard": 2, "tp": 2},
    {"dp_replicate": 4},
    {"dp_replicate": 1, "dp_shard": 2, "pp": 2},
    {"dp_replicate": 1, "cp": 2},
    {"dp_replicate": 1},
    {"dp_replicate": 1, "dp_shard": 2, "tp": 2},
]


def test_a_run_goes_on_under_another_layout_and_back(tmp_path: Path, alone_untied: Path) -> None:
    sent = tmp_path / "sent"
    for attempt, parallel in enumerate(CHAIN):
        is_last = attempt == len(CHAIN) - 1
        if is_last:
            sent.touch()
        else:
            sent.unlink(missing_ok=True)
        config = config_of(parallel, tied=False, signal_at=4, only_in=str(sent))
        trainer.run_to_end(
            tmp_path / "run", config, ranks=ranks_of(parallel), attempt=attempt, code=0 if is_last else 75
        )
    # DDP on more than two ranks makes one pass before the first step; through a pipeline flow eight in one step.
    steps = trainer.steps_of(tmp_path / "run")
    assert [line["world_size"] for line in steps] == [4] * (4 + 3 + 1) + [2] * 4 + [1] * 4 + [4] * 4
    assert_same_training(tmp_path / "run", alone_untied)
    manifest = read_manifest(checkpoint_of(tmp_path / "run" / "checkpoints", 20))
    assert manifest.mesh == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}


def test_resuming_under_the_same_layout_is_exact_bit_for_bit(tmp_path: Path) -> None:
    parallel = {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    trainer.run_to_end(tmp_path / "whole", config_of(parallel, dropout=0.2), ranks=4)
    cut = config_of(parallel, dropout=0.2, signal_at=7, only_in=str(tmp_path / "sent"))
    text = trainer.run_to_end(tmp_path / "cut", cut, ranks=4, code=75)
    assert "stopped at step 7" in text
    trainer.run_to_end(tmp_path / "cut", cut, ranks=4, attempt=1)
    whole, resumed = (trainer.result_of(tmp_path / name) for name in ("whole", "cut"))
    assert resumed["weights_digest"] == whole["weights_digest"]
    # The tied head is in a checkpoint under both its names, among the parameters under one.
    saved = weights_of(tmp_path / "cut")
    assert resumed["weights_digest"] == weights_digest(item for item in saved.items() if item[0] != "head.weight")
    for key in ("loss", "grad_norm", "samples_digest"):
        lines = ([line[key] for line in trainer.steps_of(tmp_path / name)] for name in ("whole", "cut"))
        assert next(lines) == next(lines)


def test_dropout_belongs_to_the_samples_not_to_the_ranks(tmp_path: Path) -> None:
    for name, parallel in (("replicas", {"dp_replicate": 2}), ("shards", {"dp_replicate": 1, "dp_shard": 2})):
        trainer.run_to_end(tmp_path / name, config_of(parallel, dropout=0.2), ranks=2)
    assert_same_training(tmp_path / "shards", tmp_path / "replicas")


@pytest.mark.parametrize(("policy", "parts"), [("skip", {"dp_shard": 2, "tp": 2}), ("rollback", {"cp": 2})])
def test_a_step_that_is_not_finite_is_treated_as_with_replicas(
    tmp_path: Path, policy: str, parts: dict[str, int]
) -> None:
    found = {}
    for name, parallel in (("replicas", {"dp_replicate": 2}), ("parts", {"dp_replicate": 1, **parts})):
        config = config_of(parallel, bad_at=7)
        config["health"] = {"on_non_finite": policy, "check_replicas_every_steps": 5}
        config["checkpoint"]["every_steps"] = 4
        trainer.run_to_end(tmp_path / name, config, ranks=ranks_of(parallel))
        found[name] = trainer.steps_of(tmp_path / name)
        assert len([line for line in found[name] if line["loss"] is None]) == (1 if policy == "skip" else 0)
    # The step that was not applied has no loss.
    ours, theirs = ([line for line in found[name] if line["loss"] is not None] for name in ("parts", "replicas"))
    for key in ("step", "loss", "samples"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-9)


@pytest.mark.parametrize("parallel", [{"dp_replicate": 1, "dp_shard": 2}, {"dp_replicate": 1, "pp": 2}])
def test_a_stop_during_evaluation_is_agreed_upon(tmp_path: Path, parallel: dict[str, Any]) -> None:
    config = config_of(parallel, tied=False, in_evaluation=True, only_in=str(tmp_path / "sent"))
    text = trainer.run_to_end(tmp_path / "run", config, ranks=2, code=75)
    assert "stopped at step 10" in text
    trainer.run_to_end(tmp_path / "run", config, ranks=2, attempt=1)
    evaluations = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line]
    assert evaluations == [10, 20] and len(trainer.steps_of(tmp_path / "run")) == 20


def test_parameters_are_gathered_in_bfloat16_where_asked(tmp_path: Path, alone: Path) -> None:
    parallel = {"dp_replicate": 1, "dp_shard": 2, "gather_dtype": "bfloat16"}
    trainer.run_to_end(tmp_path / "run", config_of(parallel), ranks=2)
    found, expected = ([line["loss"] for line in trainer.steps_of(run)] for run in (tmp_path / "run", alone))
    assert found == pytest.approx(expected, rel=5e-2) and found != pytest.approx(expected, rel=1e-6)


def test_a_damaged_shard_makes_the_checkpoint_before_it_count(tmp_path: Path, alone: Path) -> None:
    parallel = {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    config = config_of(parallel)
    config["checkpoint"]["every_steps"] = 10
    trainer.run_to_end(tmp_path / "run", config, ranks=4)
    newest = checkpoint_of(tmp_path / "run" / "checkpoints", 20)
    shards = {f"__{rank}_0.distcp" for rank in range(4)} | {f"rank_{rank:05d}.pt" for rank in range(4)}
    assert set(read_manifest(newest).files) == {*shards, ".metadata"}
    data = bytearray((newest / "__3_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "__3_0.distcp").write_bytes(data)
    (tmp_path / "run" / "result.json").unlink()
    text = trainer.run_to_end(tmp_path / "run", config, ranks=4, attempt=1)
    assert re.search(r"passed over checkpoint_0000020_\w+: .*__3_0\.distcp", text), text
    assert re.search(r"resuming from checkpoint_0000010_\w+ \(step 10\)", text)
    assert_same_training(tmp_path / "run", alone)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activation_checkpointing_changes_no_number(tmp_path: Path, alone: Path, kind: str) -> None:
    parallel = {"dp_replicate": 1, "dp_shard": 2, "activation_checkpointing": kind, "reshard_after_forward": False}
    trainer.run_to_end(tmp_path / "run", config_of(parallel), ranks=2)
    assert_same_training(tmp_path / "run", alone)


def test_a_model_without_a_plan_is_refused_for_tensor_parallelism(tmp_path: Path) -> None:
    config = trainer.config_of()
    config["parallel"] = {"dp_replicate": 1, "tp": 2}
    text = trainer.run_to_end(tmp_path / "run", config, ranks=2, code=1)
    assert "parallel.tp was asked, but Net does not say how it can be cut" in text
