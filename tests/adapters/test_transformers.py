"""What a run of a `transformers.Trainer` does at a stop and at a resume, with the real library in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.session.signals import StopFlag
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.joined_runs import evaluated_steps, joined, new_run

# What the library itself warns of when it is imported is not ours.
pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.filterwarnings("ignore")]

STEPS_PER_EPOCH = 4
PATIENCE = 3


class Program:
    """A program that a person might have; each call is a start of it in the same run.

    Args:
        folder: where its run is.
    """

    def __init__(self, folder: Path) -> None:
        self.run = new_run(folder)
        self._folder = folder

    def __call__(self, *, stop_at: int | None = None, adds_callback: bool = False, **settings: Any) -> int:
        """Trains with a rate of 0, so that no evaluation is better than the first; returns the exit code."""
        import torch
        from transformers import (
            EarlyStoppingCallback,
            LlamaConfig,
            LlamaForCausalLM,
            Trainer,
            TrainerCallback,
            TrainingArguments,
            set_seed,
        )

        from slurm_train.adapters.transformers import SessionCallback

        stop = StopFlag()

        class Stops(TrainerCallback):  # type: ignore[misc]
            """Asks the ranks to stop in a step."""

            def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
                if state.global_step + 1 == stop_at:
                    stop.request("TERM")

        set_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
        tokens = torch.arange(8) % 8
        samples = [{"input_ids": tokens, "labels": tokens}] * (2 * STEPS_PER_EPOCH)
        arguments: dict[str, Any] = {
            "max_steps": 60,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "no",
            "logging_strategy": "no",
            "metric_for_best_model": "loss",
            "learning_rate": 0.0,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **settings,
        }
        others = [Stops(), EarlyStoppingCallback(PATIENCE)]
        try:
            with joined(self.run, stop):
                callback = SessionCallback()
                trainer = Trainer(
                    model=model,
                    args=TrainingArguments(str(self._folder / "output"), **arguments),
                    train_dataset=samples,
                    eval_dataset=samples[:2],
                    callbacks=others if adds_callback else [*others, callback],
                )
                if adds_callback:
                    trainer.add_callback(callback)
                trainer.train(resume_from_checkpoint=callback.newest())
        except SystemExit as ended:
            return int(str(ended.code))
        return 0

    @property
    def evaluated(self) -> list[int]:
        """The steps that were evaluated."""
        return evaluated_steps(self.run)


@pytest.fixture
def start(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.mark.parametrize(
    ("stop_at", "evaluated"),
    [
        pytest.param(None, [4, 8, 12, 16], id="undisturbed"),
        pytest.param(10, [4, 8, 12, 16], id="between evaluations"),
        # The evaluation that the stop has left out is made after the next step.
        pytest.param(8, [4, 9, 12, 16], id="where one is due"),
    ],
)
def test_patience_is_not_renewed_by_a_resume(start: Program, stop_at: int | None, evaluated: list[int]) -> None:
    if stop_at is not None:
        assert start(stop_at=stop_at) == 75
        assert start.evaluated == [step for step in evaluated if step < stop_at]
    assert start() == 0
    assert start.evaluated == evaluated


@pytest.mark.parametrize(
    ("stop_at", "evaluated"),
    [
        pytest.param(6, [4, 8, 12, 16], id="within an epoch"),
        pytest.param(8, [4, 9, 12, 16], id="at the end of one"),
    ],
)
def test_a_stop_begins_no_evaluation(start: Program, stop_at: int, evaluated: list[int]) -> None:
    by_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    assert start(stop_at=stop_at, **by_epoch) == 75
    assert start.evaluated == [4]
    assert start(**by_epoch) == 0
    assert start.evaluated == evaluated


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda start: start(save_only_model=True), "save_only_model=True: a run that is requeued"),
        (lambda start: start(adds_callback=True), "would not restore the states of its callbacks"),
        (lambda start: start(load_best_model_at_end=True, save_strategy="steps", save_steps=4), "load_best_model"),
        (lambda start: start(save_strategy="best"), "save_strategy='best' needs checkpoints"),
    ],
)
def test_what_would_be_another_run_after_a_resume_is_refused(
    start: Program, act: Callable[[Program], int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        act(start)
