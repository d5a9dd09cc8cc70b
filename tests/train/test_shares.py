"""Shares of the batch by weights, on real gloo ranks: they train what equal shares train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from slurm_train.checkpoint.load import load_rank_state
from slurm_train.checkpoint.verify import read_manifest
from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.train.samples import note_of_batch_norms, note_of_few
from tests.support.small_checkpoints import steps_in
from tests.train.small_runs import (
    PADDED,
    assert_same_steps,
    config_of,
    finish,
    result_of,
    run_to_end,
    start,
    steps_of,
    weights_of,
)


def test_data_that_are_fewer_than_a_step_takes_are_named() -> None:
    assert [note_of_few(size, global_size=32) for size in (32, 33)] == ["", ""]
    assert note_of_few(10, global_size=32).startswith("the training data have 10 samples and a step takes 32, so some")


@pytest.mark.parametrize(
    ("layers", "local_size", "global_size", "is_said"),
    [
        ([nn.BatchNorm1d(4)], 2, 64, True),
        ([nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4))], 7, 8, True),
        ([nn.BatchNorm1d(4)], 8, 64, False),
        ([nn.BatchNorm1d(4)], 2, 2, False),
        ([nn.BatchNorm1d(4).eval()], 2, 64, False),
        ([nn.SyncBatchNorm(4)], 2, 64, False),
        ([nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4)], 2, 64, False),
    ],
    ids=["few", "fewer than a step", "enough", "the whole step", "in evaluation mode", "synchronised", "other norms"],
)
def test_batch_norms_that_see_few_samples_of_a_step_are_named(
    layers: list[nn.Module], local_size: int, global_size: int, is_said: bool
) -> None:
    note = note_of_batch_norms(nn.Sequential(*layers), local_size=local_size, global_size=global_size)
    assert (note is not None) == is_said
    assert note is None or (f"the {local_size} samples" in note and f"the {global_size} of a step" in note)


def sequences(shares: Any = "even", **model: Any) -> dict[str, Any]:
    """Sequences of 1 to 39 tokens: ranks have unequal numbers of samples, and other numbers of tokens at every step."""
    batch = {"global_size": 36, "accumulation": 2, "shares": shares}
    return config_of(batch=batch, model=model, data=PADDED)


@pytest.mark.distributed
def test_streams_pass_over_unequal_shares_of_what_a_rollback_has_left_out(tmp_path: Path) -> None:
    """Killed between a rollback over one step and the next checkpoint: of 12 samples 8 were rank 0's."""
    run, shares = RunDirectory(tmp_path / "run"), {"global_size": 12, "shares": [2, 1]}
    config = config_of(batch=shares, train={"max_steps": 3}, checkpoint={"every_steps": 2, "background": False})
    config["model"] = {"_target_": "small_training.DoubleGPT"}
    heldout = {"_target_": "small_training.Tokens", "split": "heldout"}
    config["data"] = {"_target_": "small_training.TokenStream", "gives_all": True, "heldout": heldout}
    codes, text = finish(start(run.path, config, fault={"kill_rank": 1, "kill_step": 3}))
    assert codes[1] == -9 and steps_in(run.checkpoints) == [2], text
    append_event(run, "rollback", attempt=0, step=3, to_step=2, checkpoint_samples=24, resume_samples=36)
    assert "(step 2)" in run_to_end(run.path, config, attempt=1)
    (newest, *_) = list_checkpoints(run.checkpoints)
    states = [load_rank_state(newest, rank) for rank in range(2)]
    assert read_manifest(newest).samples == 48
    assert [state and state["data"]["stream"]["place"] for state in states] == [4 * 8, 4 * 4]


def of_seventeen(**parallel: Any) -> dict[str, Any]:
    """A global batch of 17 samples is a multiple of no number of ranks."""
    batch = {"global_size": 17, "accumulation": 2}
    return config_of(batch=batch, data=PADDED, parallel=parallel)


def assert_like_one_process(run: Path, alone: Path) -> None:
    """Checks steps, weights and evaluation: the same samples, and numbers that differ by rounding alone."""
    assert_same_steps(run, alone, rel=1e-8)
    assert result_of(run)["eval_accuracy"] == result_of(alone)["eval_accuracy"]
    expected = weights_of(alone)
    for name, tensor in weights_of(run).items():
        assert tensor.numpy() == pytest.approx(expected[name].numpy(), rel=1e-7, abs=1e-9), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(3, {}, id="DDP"),
        pytest.param(4, {"dp_shard": 4}, id="FSDP2", marks=pytest.mark.full),
        pytest.param(4, {"dp_replicate": 2, "dp_shard": 2}, id="HSDP", marks=pytest.mark.full),
    ],
)
def test_a_global_batch_that_is_no_multiple_of_the_ranks_trains_what_one_process_trains(
    ranks: int, parallel: dict[str, int], tmp_path: Path
) -> None:
    run_to_end(tmp_path / "alone", of_seventeen(), ranks=1)
    run_to_end(tmp_path / "run", of_seventeen(**parallel), ranks=ranks)
    assert_like_one_process(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
@pytest.mark.distributed
def test_a_run_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Saved by one number of ranks, resumed by another, with replicas and with shards."""
    run_to_end(tmp_path / "alone", of_seventeen(), ranks=1)
    attempts: list[tuple[int, dict[str, int]]] = [(4, {}), (3, {"dp_shard": 3}), (2, {}), (4, {"dp_shard": 4}), (3, {})]
    sent = tmp_path / "sent"
    for attempt, (ranks, parallel) in enumerate(attempts):
        config = of_seventeen(**parallel)
        config["model"] = {**config["model"], "signal_at": 7, "signal_rank": 0, "only_in": str(sent)}
        is_last = attempt == len(attempts) - 1
        if not is_last:
            sent.unlink(missing_ok=True)
        run_to_end(tmp_path / "run", config, ranks=ranks, attempt=attempt, code=0 if is_last else 75)
    assert_like_one_process(tmp_path / "run", tmp_path / "alone")


@pytest.mark.distributed
def test_unequal_shares_train_what_one_process_trains(tmp_path: Path) -> None:
    run_to_end(tmp_path / "alone", sequences(), ranks=1)
    run_to_end(tmp_path / "weights", sequences([2, 1, 3]), ranks=3)
    # Stopped and continued with other weights.
    stopped = {"signal_at": 7, "signal_rank": 1, "only_in": str(tmp_path / "sent")}
    text = run_to_end(tmp_path / "changed", sequences([1, 2, 3], **stopped), ranks=3, code=75)
    assert "stopped at step" in text and "shares: " in text
    run_to_end(tmp_path / "changed", sequences([1, 4, 1], **stopped), ranks=3, attempt=1)
    expected = steps_of(tmp_path / "alone")
    by_weights = steps_of(tmp_path / "weights")
    for name in ("weights", "changed"):
        steps = steps_of(tmp_path / name)
        for key in ("loss", "grad_norm"):
            values = [step[key] for step in steps]
            # The first gradient shows the weights of the items. Later ones have gone through a divisor in float32,
            # which one rank and three round differently, but not two ways of sharing among three.
            assert values[0] == pytest.approx(expected[0][key], rel=1e-13)
            assert values == pytest.approx([step[key] for step in expected], rel=1e-8)
            assert values == pytest.approx([step[key] for step in by_weights], rel=1e-12)
        for key in ("samples_digest", "samples", "lr"):
            assert [step[key] for step in steps] == [step[key] for step in expected]
        assert result_of(tmp_path / name)["eval_accuracy"] == result_of(tmp_path / "alone")["eval_accuracy"]
    events = read_events(RunDirectory(tmp_path / "weights"), "shares")
    assert [event["sizes"] for event in events] == [[12, 6, 18]]
    events = read_events(RunDirectory(tmp_path / "changed"), "shares")
    assert [(event["attempt"], event["sizes"]) for event in events] == [(0, [6, 12, 18]), (1, [6, 24, 6])]
