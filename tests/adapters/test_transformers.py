"""What a run of a `transformers.Trainer` does at a stop and at a resume, with the real library in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.metrics import read_metrics
from slurm_train.rundir.heartbeat import NOT_WATCHED
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.session.signals import StopFlag
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.joined_runs import evaluated_steps, joined, new_run

# What the library itself warns of when it is imported is not ours.
pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.filterwarnings("ignore"), pytest.mark.full]

STEPS_PER_EPOCH = 4
PATIENCE = 3


def stopping(stop: StopFlag, stop_at: int | None) -> Any:
    """Returns a callback that asks the ranks to stop in a step."""
    from transformers import TrainerCallback

    class Stopping(TrainerCallback):  # type: ignore[misc]  # Any: of an extra
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step + 1 == stop_at:
                stop.request("TERM")

    return Stopping()


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
            TrainingArguments,
            set_seed,
        )

        from slurm_train.adapters.transformers import SessionCallback

        stop = StopFlag()

        set_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, attention_dropout=0.5, **sizes))
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
        others = [stopping(stop, stop_at), EarlyStoppingCallback(PATIENCE)]
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
        pytest.param(8, [4, 8, 12, 16], id="where one is due"),
    ],
)
def test_patience_is_not_renewed_by_a_resume(start: Program, stop_at: int | None, evaluated: list[int]) -> None:
    if stop_at is not None:
        assert start(stop_at=stop_at) == 75
        assert start.evaluated == [step for step in evaluated if step < stop_at]
    assert start() == 0
    assert start.evaluated == evaluated


def test_what_early_stopping_has_ended_is_trained_no_further(start: Program) -> None:
    saves = {"save_strategy": "steps", "save_steps": 4}
    assert start(**saves) == 0
    # What came after the training went wrong, say, and the ranks are started again.
    assert start(**saves) == 0
    assert start.evaluated == [4, 8, 12, 16]


@pytest.mark.parametrize(
    ("stop_at", "evaluated"),
    [
        pytest.param(6, [4, 8, 12, 16], id="within an epoch"),
        pytest.param(8, [4, 8, 12, 16], id="at the end of one"),
    ],
)
def test_a_stop_begins_no_evaluation(start: Program, stop_at: int, evaluated: list[int]) -> None:
    by_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    assert start(stop_at=stop_at, **by_epoch) == 75
    assert start.evaluated == [4]
    assert start(**by_epoch) == 0
    assert start.evaluated == evaluated


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_an_evaluation_that_a_stop_has_left_out_changes_nothing(tmp_path: Path, strategy: str) -> None:
    # Each evaluation is one in which nothing became better, so the rate falls at each.
    settings = {
        "max_steps": 10,
        "eval_strategy": strategy,
        "learning_rate": 0.05,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "greater_is_better": True,
        "logging_strategy": "steps",
        "logging_steps": 1,
        # Each line has the time so far, as else the last one of the training.
        "include_num_input_tokens_seen": "all",
    }
    whole, parts = Program(tmp_path / "whole"), Program(tmp_path / "parts")
    assert whole(**settings) == 0
    assert parts(stop_at=4, **settings) == 75
    assert parts(**settings) == 0
    told = [
        [(line["step"], line.get("loss"), line.get("lr"), line.get("eval_loss")) for line in read_metrics(run.metrics)]
        for run in (whole.run, parts.run)
    ]
    assert told[0] == told[1] and {line[0] for line in told[0]} == set(range(1, 11))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda start: start(save_only_model=True), "save_only_model=True: a run that is requeued"),
        (lambda start: start(adds_callback=True), "would not restore the states of its callbacks"),
        (lambda start: start(load_best_model_at_end=True, save_strategy="steps", save_steps=4), "load_best_model"),
        (lambda start: start(save_strategy="best"), "save_strategy='best' needs checkpoints"),
        (lambda start: start(enable_jit_checkpoint=True), "saves into the output directory at SIGTERM and ends"),
    ],
)
def test_what_would_be_another_run_after_a_resume_is_refused(
    start: Program, act: Callable[[Program], int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        act(start)


def test_checkpoints_that_would_be_pushed_are_refused(tmp_path: Path) -> None:
    from slurm_train.adapters.transformers import SessionCallback

    facts = {"load_best_model_at_end": False, "save_strategy": "steps", "eval_strategy": "no", "push_to_hub": True}
    with joined(new_run(tmp_path)):
        arguments: Any = SimpleNamespace(**facts, hub_strategy="every_save")
        state: Any = SimpleNamespace(global_step=0, max_steps=10, log_history=[])
        with pytest.raises(ConfigError, match="push_to_hub=True pushes the output directory at each save"):
            SessionCallback().on_train_begin(arguments, state, None)


class Numbers:
    """Twenty samples; each is a number, and as long as its last digit."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError
        return {"input_ids": [index] * (index % 10 + 1), "number": index}


def asking_at(step: int, wish: str) -> Any:
    """Returns a callback that sets a wish of the control after a step, e.g. "should_save"."""
    from transformers import TrainerCallback

    class Asking(TrainerCallback):  # type: ignore[misc]  # Any: of an extra
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step == step:
                setattr(control, wish, True)

    return Asking()


def train(
    run: RunDirectory,
    *,
    stop_at: int = 0,
    weighted: bool = False,
    data: Any = None,
    num_trainings: int = 1,
    before: tuple[Any, ...] = (),
    after: tuple[Any, ...] = (),
    **settings: Any,
) -> Any:
    """Returns the Trainer of one attempt; ten steps are an epoch. `seen` of its model has the samples of each step."""
    import torch
    from transformers import Trainer, TrainingArguments

    from slurm_train.adapters.transformers import SessionCallback

    stop = StopFlag()

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Other starts have drawn other numbers before.
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(1, 1)
            torch.manual_seed(random.randrange(2**31))
            self.seen: list[list[int]] = []

        def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.training:
                self.seen.append(number.flatten().int().tolist())
            return {"loss": self.layer(number).mean()}

    class Weighted(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0 + index for index in range(20)], 20)

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor([[float(sample["number"])] for sample in samples])}

    arguments: dict[str, Any] = {
        "max_steps": 23,
        "save_steps": 100,
        "logging_strategy": "no",
        "remove_unused_columns": False,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **settings,
    }
    with joined(run, stop) as session:
        callback = SessionCallback()
        trainer = (Weighted if weighted else Trainer)(
            model=Network(),
            args=TrainingArguments(str(run.path / "output"), **arguments),
            train_dataset=Numbers() if data is None else data,
            eval_dataset=Numbers(),
            data_collator=collate,
            callbacks=[stopping(stop, stop_at), *before, callback, *after],
        )
        trainer.evaluate()
        try:
            for _ in range(num_trainings):
                trainer.train(resume_from_checkpoint=callback.newest())
        except SystemExit as ended:
            assert ended.code == 75 and stop_at
            return trainer
        # Whatever follows the training may take longer than a step.
        assert session._progress.heartbeat.phase in NOT_WATCHED
        trainer.evaluate()
        assert session._progress.heartbeat.phase in NOT_WATCHED
    return trainer


def test_a_training_that_has_reached_its_end_is_trained_no_further(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    first = train(run, max_steps=13)
    # What came after the training went wrong, say, and the ranks are started again.
    second = train(run, max_steps=13)
    assert first.model.layer.weight.equal(second.model.layer.weight)
    (saved,) = list_checkpoints(run.checkpoints)
    assert second.state.global_step == name_of(saved).step == 13


@pytest.mark.parametrize("stop_at", [4, 16])
@pytest.mark.parametrize(
    "settings", [{"train_sampling_strategy": "group_by_length"}, {"weighted": True}], ids=["by length", "by weights"]
)
def test_an_order_that_is_drawn_is_the_same_after_a_resume(
    settings: dict[str, Any], stop_at: int, tmp_path: Path
) -> None:
    whole = train(new_run(tmp_path / "whole"), **settings).model.seen
    run = new_run(tmp_path / "stopped")
    before = train(run, stop_at=stop_at, **settings).model.seen
    assert len(before) == stop_at and before + train(run, **settings).model.seen == whole
    assert whole[:10] != whole[10:20]


def test_another_global_batch_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    train(run, stop_at=4, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"trained with a global batch of 4, this start has 2 = 2 per device x 1 x 1"):
        train(run)
    assert train(run, max_steps=7, per_device_train_batch_size=4).state.global_step == 7


def test_batches_that_are_divided_otherwise_are_refused_where_the_order_follows_from_them(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    by_length = {"train_sampling_strategy": "group_by_length"}
    train(run, stop_at=4, gradient_accumulation_steps=2, **by_length)
    with pytest.raises(ConfigError, match="of 2 per device x 2 x 1 ranks, this start has 4 per device x 1 x 1"):
        train(run, per_device_train_batch_size=4, **by_length)


def test_another_number_of_steps_in_an_epoch_is_refused(tmp_path: Path) -> None:
    """The global batch is the same, and what is left over is not."""
    run = new_run(tmp_path)
    leaves_out = {"dataloader_drop_last": True, "gradient_accumulation_steps": 3}
    train(run, stop_at=4, **leaves_out)
    with pytest.raises(ConfigError, match="an epoch had 4 steps when step 4 was saved, and has 3 now"):
        train(run, per_device_train_batch_size=6, dataloader_drop_last=True)


def test_epochs_of_other_lengths_on_other_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `even_batches=False` makes them."""
    from slurm_train.adapters import transformers as adapter

    monkeypatch.setattr(adapter, "gather_object", lambda steps: [*steps, 9])
    with pytest.raises(
        ConfigError, match="an epoch has 10, 9 steps on the ranks: they would train in different epochs"
    ):
        train(new_run(tmp_path))


@pytest.mark.parametrize("is_at_end", [False, True], ids=["at the first start", "after a resume"])
def test_a_second_training_is_refused(is_at_end: bool, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    if is_at_end:
        train(run)
    with pytest.raises(ConfigError, match="a training of this program is over, at step 23, and another begins"):
        train(run, num_trainings=2)
    assert [name_of(path).step for path in list_checkpoints(run.checkpoints)] == [23]


@pytest.mark.parametrize("stop_at", [8, 12, 16])
def test_what_the_training_has_frozen_stays_so(stop_at: int, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Freezing(TrainerCallback):  # type: ignore[misc]  # Any: of an extra
        def on_step_end(self, _: Any, state: Any, *__: Any, model: Any = None, **___: Any) -> None:
            if state.global_step == 11:
                model.layer.bias.requires_grad_(False)

    whole = train(new_run(tmp_path / "whole"), before=(Freezing(),)).model
    run = new_run(tmp_path / "stopped")
    train(run, stop_at=stop_at, before=(Freezing(),))
    resumed = train(run, before=(Freezing(),)).model
    assert not resumed.layer.bias.requires_grad
    assert resumed.layer.bias.equal(whole.layer.bias) and resumed.layer.weight.equal(whole.layer.weight)


def test_an_epoch_that_a_callback_ends_is_refused_unless_the_training_ends(tmp_path: Path) -> None:
    cut = asking_at(13, "should_epoch_stop")
    with pytest.raises(ConfigError, match=r"ended an epoch of 10 steps after step 13 \(should_epoch_stop\)"):
        train(new_run(tmp_path / "cut"), after=(cut,))
    ended = (cut, asking_at(13, "should_training_stop"))
    assert train(new_run(tmp_path / "ended"), before=ended).state.global_step == 13


def test_a_save_that_a_callback_asks_for_is_the_runs_or_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path / "first")
    train(run, max_steps=5, save_strategy="no", before=(asking_at(4, "should_save"),))
    assert [name_of(path).step for path in list_checkpoints(run.checkpoints)] == [4]
    with pytest.raises(ConfigError, match="comes after the SessionCallback has asked for it"):
        train(new_run(tmp_path / "last"), after=(asking_at(4, "should_save"),))


def test_a_stream_that_ends_is_not_begun_again(tmp_path: Path) -> None:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([{"number": index} for index in range(20)])

    # What has been trained on is enough.
    assert train(new_run(tmp_path / "enough"), data=Stream(), max_steps=10).state.global_step == 10
    with pytest.raises(ConfigError, match="has no length and has ended before step 23, at 10: the Trainer begins it"):
        train(new_run(tmp_path / "too short"), data=Stream())
