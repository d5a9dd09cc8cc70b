"""A training on 8, then 4, then 3 ranks with two micro-batches each, then 1: the batches of one that never changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slurm_train.checkpoint.directory import newest_verified, read_manifest
from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.tensors import tensor_shapes
from slurm_train.rundir.events import AcceptedChange, record_change
from slurm_train.rundir.layout import RunDirectory, list_checkpoints

pytestmark = pytest.mark.distributed

# Ranks and micro-batches per step; all but the last are stopped in their fifth forward pass.
STAGES = ((8, 1), (4, 1), (3, 2), (1, 1))
GLOBAL_SIZE = 24


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_for_world_sizes", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trainer = _load("test_trainer")


def config_of(folder: Path, *, accumulation: int) -> dict[str, Any]:
    found: dict[str, Any] = trainer.config_of(batch={"global_size": GLOBAL_SIZE, "accumulation": accumulation})
    found["model"] |= {"signal_at": 5, "only_in": str(folder / "sent")}
    found["checkpoint"] = {"every_steps": None, "keep": 9}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sizes")
    (folder / "sent").touch()
    trainer.run_to_end(folder / "one", config_of(folder, accumulation=1), ranks=1)
    for attempt, (ranks, accumulation) in enumerate(STAGES):
        is_last = attempt == len(STAGES) - 1
        if not is_last:
            (folder / "sent").unlink()
        config = config_of(folder, accumulation=accumulation)
        trainer.run_to_end(folder / "many", config, ranks=ranks, attempt=attempt, code=0 if is_last else 75)
    return folder


def test_each_step_has_the_same_samples_whatever_the_number_of_ranks(folder: Path) -> None:
    expected, found = trainer.steps_of(folder / "one"), trainer.steps_of(folder / "many")
    assert [line["step"] for line in found] == list(range(1, 21))
    for key in ("samples_digest", "samples", "lr", "epoch"):
        assert [line[key] for line in found] == [line[key] for line in expected]
    assert len({line["world_size"] for line in found}) == len(STAGES)


def test_losses_and_weights_differ_by_no_more_than_the_order_of_additions(folder: Path) -> None:
    expected, found = trainer.steps_of(folder / "one"), trainer.steps_of(folder / "many")
    for key in ("loss", "grad_norm"):  # summed over the ranks in float32
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-6)
    one, many = weights_of(folder / "one"), weights_of(folder / "many")
    assert one.keys() == many.keys() and len(one) == 4
    for name, tensor in one.items():  # double precision all the way
        assert many[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-10, abs=1e-12), name


def weights_of(run: Path) -> dict[str, Any]:
    found = newest_verified(run / "checkpoints").found
    assert found is not None and found[1].step == 20
    empty = {name.removeprefix("model."): t for name, t in tensor_shapes(found[0]).items() if name.startswith("model.")}
    load_tensors(found[0], {"model": empty})
    return empty


def test_every_manifest_says_on_how_many_ranks_it_was_trained(folder: Path) -> None:
    manifests = [read_manifest(path) for path in reversed(list_checkpoints(folder / "many" / "checkpoints"))]
    assert [manifest.world_size for manifest in manifests] == [ranks for ranks, _ in STAGES]
    assert [manifest.batch_plan["accumulation"] for manifest in manifests] == [
        accumulation for _, accumulation in STAGES
    ]
    assert {manifest.batch_plan["global_size"] for manifest in manifests} == {GLOBAL_SIZE}
    assert [manifest.samples for manifest in manifests] == [manifest.step * GLOBAL_SIZE for manifest in manifests]


def test_a_larger_global_batch_is_taken_over_with_the_learning_rate_of_its_rule(tmp_path: Path) -> None:
    config = config_of(tmp_path, accumulation=1)
    config["optim"] |= {"lr_retune": "linear", "lr_global_size": GLOBAL_SIZE}
    trainer.run_to_end(tmp_path / "run", config, ranks=2, code=75)
    config["batch"] = {"global_size": 2 * GLOBAL_SIZE}
    accepted = AcceptedChange(number=1, step=5, config={"batch.global_size": [GLOBAL_SIZE, 2 * GLOBAL_SIZE]})
    record_change(RunDirectory(tmp_path / "run"), accepted)
    trainer.run_to_end(tmp_path / "run", config, ranks=1, attempt=1)
    before, after = (
        [line for line in trainer.steps_of(tmp_path / "run") if line["attempt"] == attempt] for attempt in (0, 1)
    )
    assert before[-1]["step"] + 1 == after[0]["step"] and after[-1]["step"] == 20
    assert before[-1]["samples"] == before[-1]["step"] * GLOBAL_SIZE
    assert after[0]["samples"] == before[-1]["samples"] + 2 * GLOBAL_SIZE
    manifests = [read_manifest(path) for path in reversed(list_checkpoints(tmp_path / "run" / "checkpoints"))]
    assert [manifest.extra["lr"]["peak"] for manifest in manifests] == [0.01, 0.02]
