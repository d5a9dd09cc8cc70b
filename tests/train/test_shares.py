"""Unequal shares of the batch on real gloo ranks: what equal ones train, and quicker where a rank is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_train.checkpoint.load import load_rank_state
from slurm_train.checkpoint.verify import read_manifest
from slurm_train.models.objective import Objective
from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.train.shares import time_passes
from slurm_train.train.signals import StopFlag
from slurm_train.train.step import TrainingModule
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
    # The last rank is so slow that it is seen on a busy machine. The run is stopped and goes on, measured anew.
    once = {"sample_s": 0.001, "slowness": 8.0, "signal_at": 7, "signal_rank": 1, "only_in": str(tmp_path / "sent")}
    measured = sequences("measured", **once)
    text = run_to_end(tmp_path / "measured", measured, ranks=3, code=75)
    assert "stopped at step" in text and "shares: " in text
    run_to_end(tmp_path / "measured", measured, ranks=3, attempt=1)
    expected = steps_of(tmp_path / "alone")
    for name in ("weights", "measured"):
        found = steps_of(tmp_path / name)
        for key in ("loss", "grad_norm"):
            # The first gradient shows the weights of the items; later ones have gone through a divisor in float32,
            # which one rank and three round differently, but not two ways of sharing among three.
            assert found[0][key] == pytest.approx(expected[0][key], rel=1e-13)
            assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-8)
            assert [line[key] for line in found] == pytest.approx(
                [line[key] for line in steps_of(tmp_path / "weights")], rel=1e-12
            )
        for key in ("samples_digest", "samples", "lr"):
            assert [line[key] for line in found] == [line[key] for line in expected]
        assert result_of(tmp_path / name)["eval_accuracy"] == result_of(tmp_path / "alone")["eval_accuracy"]
    (weights,) = read_events(RunDirectory(tmp_path / "weights"), "shares")
    assert weights["sizes"] == [6, 3, 9]
    for event, attempt in zip(read_events(RunDirectory(tmp_path / "measured"), "shares"), (0, 1), strict=True):
        first, second, slow = event["sizes"]
        assert event["attempt"] == attempt and first + second + slow == 18
        # Something else may slow one of the others down for a moment.
        assert slow < max(first, second) and event["expected_pass_s"] < event["equal_pass_s"], event


class Cramped(nn.Linear):
    """Finds no room for more than four samples."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > 4:
            raise torch.OutOfMemoryError("no room")
        return super().forward(inputs)


def test_measuring_survives_a_batch_without_room() -> None:
    met, now = [], iter(range(10_000))
    module = TrainingModule(Objective(Cramped()), stop=StopFlag(), device=torch.device("cpu"), autocast=None)
    samples = [(torch.randn(size, 3), torch.zeros(size, dtype=torch.long)) for size in (4, 8)]
    once_s, double_s = time_passes(module, samples, clock=lambda: float(next(now)), meet=lambda: met.append(True))
    assert (once_s, double_s, met) == (1.0, float("inf"), [True])
