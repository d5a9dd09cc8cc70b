"""Shares of the batch by weights, on real gloo ranks: they train what equal shares train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.load import load_rank_state
from slurm_train.checkpoint.verify import read_manifest
from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from tests.support.small_checkpoints import steps_in
from tests.train.small_runs import PADDED, config_of, finish, result_of, run_to_end, start, steps_of


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
    assert [event["sizes"] for event in events] == [[6, 3, 9]]
    events = read_events(RunDirectory(tmp_path / "changed"), "shares")
    assert [(event["attempt"], event["sizes"]) for event in events] == [(0, [3, 6, 9]), (1, [3, 12, 3])]
