"""The trainer on real gloo ranks: exactness over splits and numbers of ranks, stopping at one boundary, resuming."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from slurm_train.checkpoint.verify import read_manifest
from slurm_train.config.schema import RunConfig, TrainSection
from slurm_train.models.build import load_start_weights
from slurm_train.rundir.events import AcceptedChange, record_change
from slurm_train.rundir.paths import CheckpointName, RunDirectory, list_checkpoints
from slurm_train.train.start_up import collect_garbage
from tests.train.small_runs import (
    PADDED,
    assert_resumes_bit_for_bit,
    assert_same_steps,
    config_of,
    digest_of,
    result_of,
    run_to_end,
    steps_of,
    weights_of,
)

distributed = pytest.mark.distributed
BY_LENGTH = {"batch": {"global_size": 16, "by_length": True, "pool": 4}, "data": PADDED}
GROWTH = {"growth": {"4": 2, "9": 3}}
# Ranks, sections of the configuration, and how much the order of additions, in float32, may matter.
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "plain, two ranks": (2, {}),
    "plain, two ranks, three micro-batches": (2, {"batch": {"accumulation": 3}}),
    "plain, one rank, four micro-batches": (1, {"batch": {"accumulation": 4}}),
    "lengths": (1, BY_LENGTH),
    "lengths, two ranks, two micro-batches": (2, {**BY_LENGTH, "batch": {**BY_LENGTH["batch"], "accumulation": 2}}),
    "lengths, sharded over two ranks": (2, {**BY_LENGTH, "parallel": {"dp_shard": 2}}),
    "growth": (1, {"batch": GROWTH}),
    "growth, two ranks, three micro-batches": (2, {"batch": {**GROWTH, "accumulation": 3}}),
    "growth, sharded over two ranks": (2, {"batch": GROWTH, "parallel": {"dp_shard": 2}}),
    "growth of lengths": (1, {**BY_LENGTH, "batch": {**BY_LENGTH["batch"], **GROWTH}}),
    "growth of lengths, two ranks": (2, {**BY_LENGTH, "batch": {**BY_LENGTH["batch"], **GROWTH}}),
}


@pytest.fixture(scope="module")
def split_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {name: tmp_path_factory.mktemp("split") / "run" for name in SPLITS}
    for name, (ranks, sections) in SPLITS.items():
        run_to_end(runs[name], config_of(**sections), ranks=ranks)
    return runs


@distributed
@pytest.mark.parametrize("name", [name for name in SPLITS if "," in name])
def test_losses_and_measures_do_not_depend_on_the_split_of_the_batch(split_runs: dict[str, Path], name: str) -> None:
    whole = split_runs[name.partition(",")[0]]
    assert_same_steps(split_runs[name], whole, rel=1e-6)
    one, other = result_of(whole), result_of(split_runs[name])
    # An accuracy over any other number of samples would be another fraction.
    assert other["eval_accuracy"] == one["eval_accuracy"]
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)


@distributed
def test_batches_by_length_differ_in_size_and_pools_end_where_plain_batches_would(split_runs: dict[str, Path]) -> None:
    lines = steps_of(split_runs["lengths"])
    assert len({late["samples"] - early["samples"] for early, late in itertools.pairwise(lines)}) > 3
    assert (lines[3]["samples"], lines[19]["samples"]) == (64, 320)


# With three ranks or more the order of additions depends on where a value lies in DDP's buckets.
@distributed
@pytest.mark.parametrize(
    ("rank", "ranks", "sections"),
    [
        (0, 2, {}),
        (2, 4, {}),
        (1, 2, {**BY_LENGTH, "data": {**PADDED, "prefetch": 3}}),
        (1, 3, {"model": {"_target_": "small_training.Branches"}, "ddp": {"find_unused_parameters": True}}),
        (2, 4, {"ddp": {"static_graph": True}}),
    ],
    ids=["first of two", "third of four", "by length, read ahead", "unused parameters", "static graph"],
)
def test_term_on_one_rank_stops_all_and_resuming_is_bitwise_exact(
    tmp_path: Path, rank: int, ranks: int, sections: dict[str, Any]
) -> None:
    sections = {**sections, "train": {"eval_every_steps": 5}}
    model = {**sections.pop("model", {}), "dropout": 0.2}
    text = assert_resumes_bit_for_bit(tmp_path, config_of(**sections, model=model), ranks=ranks, signal_rank=rank)
    assert "stopped at step 7" in text and re.search(r"resuming from checkpoint_0000007_\w+ \(step 7\)", text)


@distributed
def test_a_stop_requested_on_one_rank_after_the_exchange_of_a_step_ends_all_ranks_at_the_next_step(
    tmp_path: Path,
) -> None:
    stopping = {"_target_": "small_training.Stopper", "steps": [5], "in_update": True}
    config = {**config_of(), "callbacks": [stopping]}
    assert "stopped at step 5" in run_to_end(tmp_path / "run", config, code=75)


@distributed
def test_each_step_draws_random_numbers_of_its_own(tmp_path: Path) -> None:
    # Of the same samples and the same weights only the dropout can make another loss.
    sections = {"data": {"_target_": "small_training.SameData"}, "optim": {"lr": 1e-30}, "train": {"max_steps": 4}}
    run_to_end(tmp_path / "run", config_of(model={"dropout": 0.2}, **sections), ranks=1)
    losses = [line["loss"] for line in steps_of(tmp_path / "run")]
    assert len(set(losses)) == len(losses) == 4


@distributed
def test_a_run_killed_before_its_result_is_finished_by_the_next_attempt(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run", config_of())
    expected = result_of(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    run_to_end(tmp_path / "run", config_of(), attempt=1)
    found = result_of(tmp_path / "run")
    assert {**found, "attempt": 0, "time_unix_s": expected["time_unix_s"]} == expected


@distributed
def test_steps_that_grow_are_counted_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    sections = {"batch": GROWTH, "ddp": {"static_graph": True}, "health": {"on_spike": "log", "spike_factor": 1.01}}
    assert_resumes_bit_for_bit(tmp_path, config_of(**sections), signal_at=10)
    size = config_of()["batch"]["global_size"]
    batches = [min(step, 4) + 2 * min(max(step - 4, 0), 5) + 3 * max(step - 9, 0) for step in range(1, 21)]
    assert [line["samples"] for line in steps_of(tmp_path / "whole")] == [size * number for number in batches]


# Ranks and micro-batches per step; all but the last attempt are stopped in their fifth forward pass.
ATTEMPTS = ((8, 1), (4, 1), (3, 2), (1, 1))


@distributed
def test_a_run_on_other_numbers_of_ranks_trains_as_one_that_never_changed(tmp_path: Path) -> None:
    def config(accumulation: int) -> dict[str, Any]:
        return config_of(
            batch={"global_size": 24, "accumulation": accumulation},
            model={"signal_at": 5, "only_in": str(tmp_path / "sent")},
            checkpoint={"keep": 9},
        )

    one, many = tmp_path / "one", tmp_path / "many"
    (tmp_path / "sent").touch()
    run_to_end(one, config(1), ranks=1)
    for attempt, (ranks, accumulation) in enumerate(ATTEMPTS):
        is_last = attempt == len(ATTEMPTS) - 1
        if not is_last:
            (tmp_path / "sent").unlink()
        run_to_end(many, config(accumulation), ranks=ranks, attempt=attempt, code=0 if is_last else 75)
    assert_same_steps(many, one, rel=1e-6)
    expected, found = weights_of(one), weights_of(many)
    assert expected.keys() == found.keys() and len(expected) == 4
    for name, tensor in expected.items():  # double precision all the way
        assert found[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-10, abs=1e-12), name
    manifests = [read_manifest(path) for path in reversed(list_checkpoints(many / "checkpoints"))]
    assert [(manifest.world_size, manifest.batch_plan["accumulation"]) for manifest in manifests] == list(ATTEMPTS)
    assert [manifest.samples for manifest in manifests] == [manifest.step * 24 for manifest in manifests]


@distributed
def test_a_run_of_epochs_ends_with_their_last_sample_and_an_evaluation_may_be_capped(tmp_path: Path) -> None:
    def config(epochs: float) -> dict[str, Any]:
        return config_of(train={"max_steps": 1000, "max_epochs": epochs, "eval_max_batches": 2})

    # 97 samples in batches of 12: two epochs are 17 steps, three 25, the last of which begin the next epoch.
    for ranks in (1, 2):
        run_to_end(tmp_path / str(ranks), config(2), ranks=ranks)
        steps = steps_of(tmp_path / str(ranks))
        assert [len(steps), steps[-1]["samples"], steps[-1]["max_steps"]] == [17, 204, 17]
    one, two = (result_of(tmp_path / name)["eval_loss"] for name in ("1", "2"))
    assert one == pytest.approx(two, rel=1e-12)
    run_to_end(tmp_path / "whole", config_of(train={"max_steps": 17}))
    assert digest_of(tmp_path / "whole") == digest_of(tmp_path / "2")
    assert result_of(tmp_path / "whole")["eval_loss"] != pytest.approx(two, rel=1e-3)


@distributed
def test_a_larger_global_batch_is_taken_over_with_the_learning_rate_of_its_rule(tmp_path: Path) -> None:
    run, optim = tmp_path / "run", {"lr_retune": "linear", "lr_global_size": 24}
    model = {"signal_at": 5, "only_in": str(tmp_path / "sent")}
    facts = {"optim": optim, "model": model, "checkpoint": {"keep": 9}}
    run_to_end(run, config_of(batch={"global_size": 24}, **facts), code=75)
    record_change(RunDirectory(run), AcceptedChange(number=1, step=5, config={"batch.global_size": [24, 48]}))
    run_to_end(run, config_of(batch={"global_size": 48}, **facts), ranks=1, attempt=1)
    before, after = ([line for line in steps_of(run) if line["attempt"] == attempt] for attempt in (0, 1))
    assert before[-1]["step"] + 1 == after[0]["step"] and after[-1]["step"] == 20
    assert before[-1]["samples"] == before[-1]["step"] * 24 == after[0]["samples"] - 48
    manifests = [read_manifest(path) for path in reversed(list_checkpoints(run / "checkpoints"))]
    assert [manifest.extra["lr"]["peak"] for manifest in manifests] == [0.01, 0.02]


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_that_has_lived_through_a_collection_is_freed_within_a_thousand_steps() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        cycle: Cycle | None = Cycle()
        is_alive = weakref.ref(cycle)
        for step in range(1, 301):
            collect_garbage(step)
        cycle = None
        for step in range(301, 1001):
            assert is_alive() is not None
            collect_garbage(step)
        assert is_alive() is None
    finally:
        gc.unfreeze()
        gc.enable()


def test_a_run_starts_from_weights_until_it_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    run, trained = RunDirectory(tmp_path / "run"), nn.Linear(3, 2)
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    config = RunConfig(model={}, train=TrainSection(init_from=str(tmp_path / "model.safetensors")))

    def started(config: RunConfig) -> bool:
        model = nn.Linear(3, 2)
        load_start_weights(model, config, run=run, buffers={})
        return bool(torch.equal(model.weight, trained.weight) and torch.equal(model.bias, trained.bias))

    assert started(config) and not started(replace(config, train=TrainSection()))
    saved = run.checkpoints / str(CheckpointName(5, 0, "00000000"))
    (saved.with_name(f"{saved.name}.tmp")).mkdir(parents=True)
    assert started(config)  # it was not saved to the end
    saved.mkdir()
    assert not started(config)
