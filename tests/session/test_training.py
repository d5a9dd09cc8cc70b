"""What a program hands over to `training`: restored bit for bit, on other ranks and in other forms; what is refused."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from slurm_train.checkpoint.replicas import _weighted_sum, digest, sketch
from slurm_train.checkpoint.verify import newest_verified
from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import CheckpointError, ConfigError, RunError
from slurm_train.metrics import read_metrics
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import read_saves
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.session.joined import JoinedSession
from slurm_train.session.signals import StopFlag
from tests.support.extras import NEEDS_LIGHTNING, NEEDS_TRANSFORMERS
from tests.support.ports import rank_environments
from tests.support.sessions import join_alone
from tests.support.warm_ranks import start_rank

_hearts: list[Heartbeat] = []


@pytest.fixture(autouse=True)
def _stop_hearts() -> Iterator[None]:
    yield
    while _hearts:
        _hearts.pop().stop()


def join(run: RunDirectory, *, config: RunConfig | None = None, stop: StopFlag | None = None) -> JoinedSession:
    _hearts.append(Heartbeat())
    return join_alone(run, heartbeat=_hearts[-1], config=config, stop=stop)


class Parts:
    """A model with dropout and running statistics, and what belongs to its training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.average = AveragedModel(self.model)
        self.generator = torch.Generator().manual_seed(1)

    @property
    def others(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "average": self.average, "generator": self.generator}

    def step(self) -> float:
        loss = self.model(torch.randn(16, 4, generator=self.generator)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step(loss.item())
        self.average.update_parameters(self.model)
        return loss.item()

    def states(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values()]
        values = {name: value for name, value in self.schedule.state_dict().items() if name != "mode_worse"}
        return [[tensor.tolist() for tensor in tensors], self.optimizer.state_dict()["param_groups"], values]


def test_everything_goes_on_bit_for_bit(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Parts()
    expected = [whole.step() for _ in range(9)]
    losses = []
    for last in (4, 9):
        parts = Parts()
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer, **parts.others)
        done = training.resume()
        for step in range(done + 1, last + 1):
            losses.append(parts.step())
            mine.report(step, loss=losses[-1])
            training.save(step)
        mine.close()
    assert losses == expected and parts.states() == whole.states()
    assert "resuming from checkpoint_0000004" in capsys.readouterr().err
    # The steps before a checkpoint are in metrics.jsonl, and each save is on record.
    assert [line["step"] for line in read_metrics(run.metrics)] == list(range(1, 10))
    assert [save["step"] for save in read_saves(run) if "bytes" in save] == list(range(1, 10))
    newest = newest_verified(run.checkpoints).newest
    assert newest is not None and newest[1].step == 9 and "0.weight" in newest[1].weights


class Memory:
    """Past inputs in numpy, with its own generator, and an average of weights in a list."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.inputs = np.zeros((3000, 4), np.float32)
        self.num_seen = 0
        self.random = np.random.default_rng(5)
        self.average = [parameter.detach().clone() for parameter in parameters]
        self.best = np.float32(np.inf)

    def step(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        self.inputs[self.num_seen : self.num_seen + 16] = self.random.normal(size=(16, 4))
        self.num_seen += 16
        for mean, parameter in zip(self.average, parameters, strict=True):
            mean.lerp_(parameter.detach(), 0.1)
        return torch.from_numpy(self.inputs[self.random.integers(0, self.num_seen, 8)])

    def state_dict(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "num_seen": self.num_seen,
            "random": self.random.bit_generator.state,
            "average": self.average,
            "more": ({"best": self.best},),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inputs, self.num_seen, self.average = state["inputs"], state["num_seen"], state["average"]
        self.random.bit_generator.state = state["random"]
        ((more),) = state["more"]
        self.best = more["best"]


def test_arrays_lists_of_tensors_and_layers_that_are_unfrozen_go_on_bit_for_bit(run: RunDirectory) -> None:
    rates = np.linspace(0.1, 0.001, 9)

    def train(mine: JoinedSession, last: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        parameters = list(model.parameters())
        memory = Memory(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        training = mine.training(model, optimizer, memory=memory)
        for step in range(training.resume(), last):
            if step == 2:
                model[0].requires_grad_(True)
            optimizer.param_groups[0]["lr"] = rates[step]
            loss = model(memory.step(parameters)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            memory.best = np.float32(min(memory.best, loss.item()))
            mine.report(step + 1, loss=loss.item())
        training.save(last)
        mine.close()
        assert isinstance(memory.best, np.float32) and optimizer.param_groups[0]["lr"] == rates[last - 1]
        return [[tensor.tolist() for tensor in (*parameters, *memory.average)], memory.inputs.tolist(), memory.best]

    whole = RunDirectory(run.path.parent / "whole")
    whole.path.mkdir()
    expected = train(join(whole), 9)
    train(join(run), 4)
    assert train(join(run), 9) == expected
    assert losses_of(run) == losses_of(whole)


def test_a_state_that_no_save_could_have_is_refused_after_the_first_step(run: RunDirectory) -> None:
    parts = Parts()
    mine = join(run)
    reader = SimpleNamespace(state_dict=lambda: {"file": Path("shard.tar")}, load_state_dict=lambda _: None)
    training = mine.training(parts.model, parts.optimizer, reader=reader)
    assert training.resume() == 0
    with pytest.raises(CheckpointError, match="the state of reader could not be loaded again"):
        mine.report(1, loss=parts.step())


class Stream(IterableDataset[int]):
    """Numbers, with a place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            yield self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def test_a_stream_that_workers_read_is_refused_after_the_first_step(run: RunDirectory) -> None:
    for place, workers in ((0, 0), (4, 0), (8, 1)):
        parts, stream = Parts(), Stream()
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer, schedule=parts.schedule, stream=stream)
        step = training.resume()
        loader = DataLoader(
            stream, batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        assert stream.place == place and next(iter(loader)).tolist()[0] == place + 1
        if workers:
            with pytest.raises(ConfigError, match="the state of stream is as it was before the first step"):
                mine.report(step + 1, loss=parts.step())
        else:
            mine.report(step + 1, loss=parts.step())
            training.save(step + 1)
        mine.close()


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_a_stream_of_datasets_goes_on_in_its_epoch_and_without_a_buffer_that_no_state_has(run: RunDirectory) -> None:
    datasets = pytest.importorskip("datasets")

    def stream(buffer_size: int) -> Any:
        numbers = datasets.Dataset.from_dict({"number": list(range(12))}).to_iterable_dataset(num_shards=4)
        return numbers.shuffle(seed=1, buffer_size=buffer_size).with_format("torch")

    whole, numbers = stream(1), []
    whole.set_epoch(1)
    expected = [item["number"].item() for item in whole]
    for _ in range(2):
        parts, data = Parts(), stream(1)
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer, schedule=parts.schedule, data=data)
        if training.resume() == 0:
            data.set_epoch(1)
        for item in data:
            numbers.append(item["number"].item())
            if len(numbers) == 5:
                break
        mine.report(1, loss=parts.step())
        training.save(1)
        mine.close()
    assert numbers == expected
    with pytest.raises(ConfigError, match="shuffles in a buffer of 7 samples"):
        join(run).training(parts.model, parts.optimizer, data=stream(7))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore::ResourceWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_was_saved_at_the_end_of_its_pass_is_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], num_workers: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def training() -> tuple[Any, Any, torch.optim.Optimizer]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = stateful(torch.arange(6.0).reshape(6, 1), batch_size=2, num_workers=num_workers)
        return join(run).training(model, optimizer, loader=loader), loader, optimizer

    def resumed(num_batches: int) -> str:
        """Saves after so many batches of three, and returns what the resume says."""
        before, loader, optimizer = training()
        for _ in itertools.islice(loader, num_batches):
            optimizer.step()
        before.save(num_batches)
        before.finish()
        training()[0].resume()
        return capsys.readouterr().err

    assert "loader had given the last batch" not in resumed(2)
    assert "loader had given the last batch of its pass at step 3" in resumed(3)


def test_a_schedule_that_is_forgotten_and_a_place_that_nobody_knows_are_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 1):
        parts = Parts()
        torch.optim.lr_scheduler.StepLR(parts.optimizer, 2)
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer, average=parts.average)
        assert training.resume() == step
        mine.report(step + 1, loss=parts.step())
        training.save(step + 1)
        mine.close()
        said = capsys.readouterr().err
        assert "the learning-rate schedule of AdamW is in no checkpoint" in said
        assert ("which samples of the present epoch were used" in said) == (step > 0)


@pytest.mark.parametrize("adds_again", [False, True], ids=["once", "again in the epoch that goes on"])
def test_groups_and_settings_that_training_adds_to_an_optimizer_go_on_bit_for_bit(
    adds_again: bool, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(mine: JoinedSession, last: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.1)
        training = mine.training(model, optimizer)
        done = training.resume()
        for step in range(done, last):
            if step == 2 or (adds_again and step == done == 5):
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
            if step == 3:
                optimizer.param_groups[1]["scale"] = 0.5
            loss = model(torch.randn(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.param_groups[-1]["lr"] *= optimizer.param_groups[-1].get("scale", 1.0)
            mine.report(step + 1, loss=loss.item())
        training.save(last)
        mine.close()
        kept = [optimizer.state[parameter] for parameter in model.parameters() if parameter in optimizer.state]
        states = [{name: tensor.tolist() for name, tensor in state.items()} for state in kept]
        return [[tensor.tolist() for tensor in model.parameters()], states, optimizer.param_groups[1]["lr"]]

    whole = RunDirectory(run.path.parent / "whole")
    whole.path.mkdir()
    expected = train(join(whole), 9)
    train(join(run), 5)
    assert train(join(run), 7) != expected
    assert train(join(run), 9) == expected
    assert losses_of(run) == losses_of(whole)
    assert "AdamW has its group of 0.weight, 0.bias again" in capsys.readouterr().err


def test_groups_that_are_missing_are_refused(run: RunDirectory) -> None:
    parts = Parts()
    first, *others = parts.model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    training = join(run).training(parts.model, optimizer)
    training.save(1)
    training.finish()
    with pytest.raises(RunError, match="has 2 groups of the optimizer, and the program has 1 now"):
        join(run).training(parts.model, torch.optim.AdamW([first])).resume()


def test_optimizers_that_were_not_handed_over_are_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    parts = Parts()
    agent = SimpleNamespace(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    agent.state_dict = agent.optimizer.state_dict
    agent.load_state_dict = agent.optimizer.load_state_dict
    mine = join(run)
    training = mine.training(parts.model, parts.optimizer, agent=agent)
    for optimizer in (parts.optimizer, agent.optimizer):
        optimizer.step()
    mine.report(1, loss=1.0)
    training.save(1)
    assert "took a step" not in capsys.readouterr().err
    probe = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    instead = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    for step in (2, 3):
        probe.step()
        instead.step()
        mine.report(step, loss=1.0)
        training.save(step)
    said = capsys.readouterr().err
    assert said.count("took a step, SGD of 0.weight: its state is in no checkpoint") == 1
    assert said.count("took a step, Adam of other parameters: its state and they are in no checkpoint") == 1


@pytest.mark.parametrize(
    "kind", ["after a step", "between batches", "zeroed", "of another model", "left out", "compiled"]
)
def test_gradients_that_no_checkpoint_has_are_named(
    kind: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    models = nn.ModuleDict({"maker": nn.Linear(3, 3), "critic": nn.Linear(3, 1)})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    training = join(run).training(models, optimizers)

    def add_up() -> None:
        models["critic"](models["maker"](torch.ones(2, 3))).sum().backward()

    for step in (1, 2):
        add_up()
        for optimizer in optimizers[::-1]:
            # Without hooks, as where the step is compiled.
            take_step: Any = type(optimizer).step.__wrapped__ if kind == "compiled" else type(optimizer).step
            take_step(optimizer)
        if kind == "between batches" and step == 2:
            add_up()
        if kind == "zeroed":
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
        if kind == "of another model":
            # As the generator's loss leaves some in the critic.
            optimizers[1].zero_grad()
            add_up()
            optimizers[0].step()
        if kind == "left out":
            # As by a GradScaler that has seen an overflow.
            for parameter in models.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(math.inf)
        training.save(step)
    training.finish()
    said = capsys.readouterr().err
    assert said.count("step 2 is saved while gradients are added up (critic.weight)") == (kind == "between batches")
    assert said.count("gradients are added up") == (kind == "between batches")


@pytest.mark.parametrize("first", [0, 1])
def test_steps_that_are_counted_from_zero_are_named(
    first: int, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        parts = Parts()
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer)
        done = training.resume()
        for step in range(done + first, done + first + 9):
            parts.step()
            mine.report(step, loss=1.0)
            if step % 8 == 0 and step:
                training.save(step)
        training.finish()
        said = capsys.readouterr().err
        assert ("a save says that 8 steps were taken since the start, and the optimizer has taken 9" in said) == (
            not first
        )


class Growing(nn.Module):
    """Keeps what it learns in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.depth = 1
        self.width = 7
        self.bank = np.zeros((3, 4), np.float32)
        self.queue = torch.zeros(3)
        self.mask = torch.ones(4)
        self.attention: Any = None
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.bank[0] = inputs[0].numpy()
        self.queue = self.queue.roll(1)
        self.seen += 1
        self.attention = self.head(inputs * self.mask)
        return self.attention


def test_what_training_changes_of_a_model_and_no_checkpoint_has_is_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = join(run)
    training = mine.training(model, optimizer)
    assert training.resume() == 0
    said = []
    for step in (1, 2, 3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.depth = 1 if step < 2 else 2
        mine.report(step, loss=1.0)
        training.save(step)
        said.append(capsys.readouterr().err)
    assert "training changes seen, bank, queue of the model, which no checkpoint has" in said[0]
    assert "training changes depth of the model" in said[1]
    assert "training changes" not in said[2]


class Counter:
    """Says that it has nothing to save; counts where `counts` is set."""

    def __init__(self, *, counts: bool) -> None:
        self.counts = counts
        self.shadow = {"weight": torch.zeros(4)}
        self.num_seen = 0

    def step(self) -> None:
        if self.counts:
            self.num_seen += 1
            self.shadow["weight"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


class Warmed(nn.Module):
    """An average whose count of updates is a plain number, which no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(4, 2)
        self.num_updates = 0


def _lacking(said: str) -> list[str]:
    return [line for line in said.splitlines() if "its state_dict lacks" in line]


def test_an_object_that_changes_with_an_empty_state_is_named_once(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is said of those that change nothing, or have what changes in their state."""
    parts = Parts()
    counter, warmed = Counter(counts=True), Warmed()
    healthy: dict[str, Any] = {
        "idle": Counter(counts=False),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "lambdas": torch.optim.lr_scheduler.LambdaLR(parts.optimizer, lambda _: 1.0),
        "unused": torch.optim.SGD(parts.model.parameters(), lr=0.1),
        **parts.others,
    }
    mine = join(run)
    training = mine.training(parts.model, parts.optimizer, counter=counter, warmed=warmed, **healthy)
    assert training.resume() == 0
    said = []
    for step in (1, 2):
        loss = parts.step()
        counter.step()
        warmed.num_updates += 1
        mine.report(step, loss=loss)
        training.save(step)
        said.append(_lacking(capsys.readouterr().err))
    of_counter, of_warmed = said[0]
    assert "num_seen" in of_counter and "shadow" in of_counter and "of counter" in of_counter
    assert "num_updates of warmed" in of_warmed
    assert not said[1]


def _tally(*, saves: bool) -> Any:
    return SimpleNamespace(state_dict=lambda: {"num": 1} if saves else {}, load_state_dict=lambda _: None)


def test_an_object_that_saves_its_state_only_since_the_checkpoint_is_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a metric of torchmetrics that is switched to save its states after the first attempt."""
    for saves in (False, True, True):
        parts = Parts()
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer, tally=_tally(saves=saves))
        step = training.resume() + 1
        mine.report(step, loss=parts.step())
        training.save(step)
        mine.close()
    said = re.findall(r"tally: begins at step \d", capsys.readouterr().err)
    assert said == ["tally: begins at step 1"]


def _metric(*, is_saved: bool) -> Any:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    metric = MetricCollection([MulticlassAccuracy(5), MulticlassF1Score(5)])
    metric.persistent(is_saved)
    return metric


@pytest.mark.full
@NEEDS_LIGHTNING
def test_metrics_that_are_not_saved_are_named_with_what_saves_them(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchmetrics import MeanMetric
    from torchmetrics.classification import BinaryAUROC
    from torchmetrics.wrappers import MetricTracker, MinMaxMetric

    parts = Parts()
    metrics = {name: _metric(is_saved=name == "kept") for name in ("metric", "kept", "reset")}
    best, curve, tracker = MinMaxMetric(MeanMetric()), BinaryAUROC(), MetricTracker(BinaryAUROC())
    tracker.increment()
    mine = join(run)
    training = mine.training(parts.model, parts.optimizer, best=best, curve=curve, tracker=tracker, **metrics)
    assert training.resume() == 0
    loss = parts.step()
    for metric in metrics.values():
        metric.update(torch.arange(4), torch.ones(4, dtype=torch.int64))
    metrics["reset"].reset()
    best.update(loss)
    best.compute()
    curve.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    tracker.increment()
    mine.report(1, loss=loss)
    said = capsys.readouterr().err
    assert re.search(r"training adds 2\b.* to tracker", said)
    notes = _lacking(said)
    of_best, max_of_best, of_curve, of_metric = notes
    assert "best._base_metric.persistent(True)" in of_best and "_base_metric.mean_value" in of_best
    assert "max_val" in max_of_best and "persistent" not in max_of_best
    assert "curve.persistent(True)" in of_curve and "metric.persistent(True)" in of_metric


@pytest.mark.full
@NEEDS_LIGHTNING
def test_metrics_that_are_saved_go_on_bit_for_bit(run: RunDirectory) -> None:
    samples = torch.randint(0, 5, (6, 2, 8), generator=torch.Generator().manual_seed(0))
    whole = _metric(is_saved=False)
    for scores, labels in samples:
        whole.update(scores, labels)
    for last in (3, 6):
        parts, metric = Parts(), _metric(is_saved=True)
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer, metric=metric)
        for step in range(training.resume(), last):
            metric.update(*samples[step])
            mine.report(step + 1, loss=parts.step())
        training.save(last)
        mine.close()
    assert metric.compute() == whole.compute()


def test_generators_of_python_and_numpy_go_on(run: RunDirectory) -> None:
    drawn = []
    for _ in range(2):
        parts = Parts()
        generators: dict[str, Any] = {
            "sampler": np.random.default_rng(1),
            "older": np.random.RandomState(2),
            "twister": np.random.Generator(np.random.MT19937(3)),
            "crops": random.Random(4),
        }
        mine = join(run)
        training = mine.training(parts.model, parts.optimizer, **generators)
        for step in range(training.resume(), training.resume() + 3):
            numbers = [generator.random() for generator in generators.values()]
            drawn.append([*numbers, generators["older"].normal(), generators["crops"].gauss(0.0, 1.0)])
            mine.report(step + 1, loss=parts.step())
        training.save(step + 1)
        mine.close()
    sampler, crops = np.random.default_rng(1), random.Random(4)
    assert [numbers[0] for numbers in drawn] == [sampler.random() for _ in range(6)]
    expected = []
    for _ in range(6):
        expected.append((crops.random(), crops.gauss(0.0, 1.0)))
    assert [(numbers[3], numbers[5]) for numbers in drawn] == expected


@pytest.mark.parametrize(("per_epoch", "workers"), [(None, 0), (4, 1)], ids=["one pass", "epochs"])
def test_random_numbers_go_on_where_a_loader_draws_some_itself(
    per_epoch: int | None, workers: int, run: RunDirectory
) -> None:
    def train(mine: JoinedSession, last: int) -> None:
        parts = Parts()
        training = mine.training(parts.model, parts.optimizer, **parts.others)
        step = training.resume()
        batches = mine.batches(40, global_size=10, steps=12, steps_per_epoch=per_epoch)
        loader = DataLoader(
            range(40),  # type: ignore[arg-type]  # it has what a data set has
            batch_sampler=batches,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        for epoch in range(batches.epoch, 3 if per_epoch else 1):
            if per_epoch:
                batches.set_epoch(epoch)
            for _ in loader:
                loss = parts.step()
                step += 1
                mine.report(step, loss=loss)
                if step == last:
                    training.save(step)
                    mine.close()
                    return

    whole = RunDirectory(run.path.parent / "whole")
    whole.path.mkdir()
    train(join(whole), 12)
    for last in (2, 6, 8, 12):
        train(join(run), last)
    assert len(losses_of(run)) == 12 and losses_of(run) == losses_of(whole)


def test_an_optimizer_that_takes_the_place_of_another_goes_on_bit_for_bit(run: RunDirectory) -> None:
    def train(mine: JoinedSession, last: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        first = torch.optim.Adam(model.parameters(), lr=0.1)
        second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(ConfigError, match="several optimizers have weight, bias"):
            mine.training(model, [first, second])
        training = mine.training(model, first, second=second)
        for step in range(training.resume(), last):
            optimizer = first if step < 3 else second
            loss = model(torch.randn(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mine.report(step + 1, loss=loss.item())
        training.save(last)
        mine.close()
        return [tensor.tolist() for tensor in model.parameters()]

    whole = RunDirectory(run.path.parent / "whole")
    whole.path.mkdir()
    expected = train(join(whole), 9)
    for last in (2, 5, 9):
        result = train(join(run), last)
    assert result == expected and losses_of(run) == losses_of(whole)


def test_what_is_no_optimizer_is_refused(run: RunDirectory) -> None:
    parts = Parts()
    cases: list[tuple[Any, str]] = [
        ({"model": parts.optimizer}, "was given a dict as optimizer"),
        ([parts.optimizer, parts.schedule], "was given a ReduceLROnPlateau among the optimizers"),
    ]
    for optimizer, words in cases:
        with pytest.raises(ConfigError, match=words):
            join(run).training(parts.model, optimizer)


def test_another_model_or_optimizer_or_group_is_refused(run: RunDirectory) -> None:
    parts = Parts()
    training = join(run).training(parts.model, parts.optimizer)
    parts.step()
    training.save(1)
    training.finish()
    first, *others = nn.Linear(4, 9).parameters(), *parts.model.parameters()
    del first
    cases: list[tuple[nn.Module, torch.optim.Optimizer, str]] = [
        (parts.model, torch.optim.SGD(parts.model.parameters(), momentum=0.9), "AdamW"),
        (parts.model, torch.optim.AdamW([{"params": others[:2]}, {"params": others[2:]}]), "group 0"),
    ]
    wider = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 1))
    cases.append((wider, torch.optim.AdamW(wider.parameters()), "0.weight"))
    for model, optimizer, word in cases:
        with pytest.raises(RunError, match=word):
            join(run).training(model, optimizer).resume()


def _with_stranger(parts: Parts, mine: JoinedSession) -> object:
    stranger = nn.Parameter(torch.zeros(7))
    return mine.training(parts.model, torch.optim.SGD([*parts.model.parameters(), stranger]))


class Slow(torch.optim.SGD):
    """Keeps a copy of each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]


class Within(torch.optim.SGD):
    """Takes its steps by another optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base_optimizer = torch.optim.AdamW(self.param_groups)


def _with_copies(parts: Parts, mine: JoinedSession) -> object:
    return mine.training(parts.model, Slow(parts.model.parameters()))


def _within(parts: Parts, mine: JoinedSession) -> object:
    return mine.training(parts.model, Within(parts.model.parameters()))


def _unknown_state(parts: Parts, mine: JoinedSession) -> object:
    mine.training(parts.model, parts.optimizer)
    parts.optimizer.state["steps"] = {"done": 1}  # type: ignore[index]  # as some optimizers do
    mine.report(1, loss=1.0)
    return None


def _stateless(parts: Parts, mine: JoinedSession) -> object:
    return mine.training(parts.model, parts.optimizer, options={"lr": 1})


def _twice(parts: Parts, mine: JoinedSession) -> object:
    mine.training(parts.model, parts.optimizer)
    return mine.training(parts.model, parts.optimizer)


def _with_files(parts: Parts, mine: JoinedSession) -> object:
    mine.training(parts.model, parts.optimizer)
    with mine.save(1):
        return None


def _newest(parts: Parts, mine: JoinedSession) -> object:
    mine.training(parts.model, parts.optimizer)
    return mine.newest()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_with_stranger, r"1 parameters that are not the model's, of shapes \(7,\)"),
        (_with_copies, "Slow keeps what it knows of its parameters in .slow"),
        (_within, "Within keeps what it knows of its parameters in .base_optimizer"),
        (_unknown_state, "AdamW keeps state['steps']"),
        (_stateless, "options has no state_dict"),
        (_twice, "two trainings"),
        (_with_files, "checkpoints of this program are those of its `training`"),
        (_newest, "resume"),
    ],
)
def test_what_no_checkpoint_could_have_is_refused(
    call: Callable[[Parts, JoinedSession], object], words: str, run: RunDirectory
) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        call(Parts(), join(run))
    assert words.replace("\\", "") in f"{caught.value.message} {caught.value.hint}"


def test_checkpoints_of_files_and_of_a_training_are_told_apart(run: RunDirectory) -> None:
    parts = Parts()
    mine = join(run)
    with mine.save(1) as folder:
        (folder / "model").touch()
    with pytest.raises(CheckpointError, match="not saved by a `training`"):
        mine.training(parts.model, parts.optimizer).resume()
    training = join(run)
    for path in list_checkpoints(run.checkpoints):
        path.rename(run.path / path.name)
    training.training(parts.model, parts.optimizer).save(2)
    training.close()
    with pytest.raises(CheckpointError, match="a `training` of a session"):
        join(run).newest()


def test_a_newest_save_that_failed_is_raised_at_the_end(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    parts = Parts()
    training = join(run).training(parts.model, parts.optimizer)
    training.save(1)
    training.finish()
    run.checkpoints.rename(run.path / "aside")
    run.checkpoints.touch()
    training.save(2)
    with pytest.raises(CheckpointError):
        training.finish()
    assert "the checkpoint of step 2 failed" in capsys.readouterr().err
    run.checkpoints.unlink()
    (run.path / "aside").rename(run.checkpoints)
    training.save(3)
    training.finish()
    assert training.resume() == 3


def test_a_second_save_of_a_step_takes_the_place_of_the_first(run: RunDirectory) -> None:
    parts = Parts()
    mine = join(run)
    training = mine.training(parts.model, parts.optimizer, schedule=parts.schedule)
    parts.step()
    mine.report(1, loss=1.0)
    training.save(1)
    # The end of an epoch, while the first is written.
    parts.schedule.step(0.5)
    training.save(1)
    mine.close()
    others = Parts()
    again = join(run).training(others.model, others.optimizer, schedule=others.schedule)
    assert again.resume() == 1
    assert others.schedule.state_dict() == parts.schedule.state_dict()
    assert len(list_checkpoints(run.checkpoints)) == 1
    # And after a resume.
    others.schedule.step(0.25)
    again.save(1)
    again.finish()
    last = Parts()
    join(run).training(last.model, last.optimizer, schedule=last.schedule).resume()
    assert last.schedule.state_dict() == others.schedule.state_dict()


def test_the_save_of_a_stop_is_on_disk_when_it_returns(run: RunDirectory) -> None:
    parts = Parts()
    stop = StopFlag()
    mine = join(run, stop=stop)
    training = mine.training(parts.model, parts.optimizer)
    run.stop_file.touch()
    assert mine.should_stop() == "file"
    training.save(7)
    assert [save["step"] for save in read_saves(run) if "bytes" in save] == [7]


@pytest.mark.parametrize("end", ["saved", "not saved", "failed"])
def test_last_steps_that_no_checkpoint_has_are_named(
    end: str, run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts()
    mine = join(run)
    training = mine.training(parts.model, parts.optimizer)
    for step in (1, 2, 3):
        parts.step()
        mine.report(step, loss=1.0)
        if step == 2 or (step == 3 and end == "saved"):
            training.save(step)
    if end == "failed":
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    mine.close()
    line = "the program has ended at step 3, and its newest checkpoint is of step 2: training.save(step) after the loop"
    assert (line in capsys.readouterr().err) == (end == "not saved")


def test_saves_are_due_as_configured(run: RunDirectory) -> None:
    config = replace(RunConfig(), checkpoint=replace(RunConfig().checkpoint, every_steps=3))
    mine = join(run, config=config)
    parts = Parts()
    training = mine.training(parts.model, parts.optimizer)
    assert [step for step in range(10) if training.is_due(step)] == [3, 6, 9]
    training.save(3)
    mine.close()
    others = Parts()
    again = join(run, config=config).training(others.model, others.optimizer)
    assert [step for step in range(again.resume(), 10) if again.is_due(step)] == [6, 9]


def test_outside_of_a_run_a_training_begins_and_saves_nothing(tmp_path: Path) -> None:
    code = """
import torch
from slurm_train import session
run = session.join()
model = torch.nn.Linear(2, 2)
training = run.training(model, torch.optim.SGD(model.parameters()))
assert training.resume() == 0 and not training.is_due(200)
training.save(1)
training.finish()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 0 and list(tmp_path.iterdir()) == [], done.stderr


# --- several ranks ---

FORMS = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from slurm_train import session

form, last = sys.argv[1], int(sys.argv[2])
run = session.join()
dist.init_process_group("gloo")
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(8, 65), nn.Tanh(), nn.Linear(65, 3))
model = net
if form == "sharded":
    for part in (net[0], net[2], net):
        fully_shard(part)
elif form == "replicated":
    model = DistributedDataParallel(net)
weights = {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1}
optimizer = torch.optim.AdamW([weights, {"params": [net[0].bias, net[2].bias]}], lr=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)
training = run.training(model, optimizer, schedule=schedule)
step = training.resume()
data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
for ids in run.batches(96, global_size=12, steps=last, seed=1):
    # The mean over ranks of these is that of the step's samples.
    loss = model(data[ids]).square().sum() * run.world_size / 12
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step += 1
    total = loss.detach() / run.world_size
    dist.all_reduce(total)
    run.report(step, loss=total.item())
training.save(step)
dist.destroy_process_group()
"""
OF_RANKS = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from slurm_train import session

last = int(sys.argv[1])
run = session.join()
dist.init_process_group("gloo")
torch.manual_seed(3)
first = nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Dropout(0.2), nn.Linear(30, 4))
second = nn.Linear(4, 1)
one, two = DistributedDataParallel(first), DistributedDataParallel(second)
optimizers = [torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)]
average = AveragedModel(first)

class ByHand(torch.optim.Optimizer):
    "Keeps the moment of half of the rows on each rank, as ZeRO does."
    def __init__(self, params): super().__init__(params, {"lr": 0.05})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                half = p.shape[0] // 2
                mine = slice(run.rank * half, (run.rank + 1) * half)
                moment = self.state[p].setdefault("moment", torch.zeros_like(p[mine]))
                moment.mul_(0.9).add_(p.grad[mine])
                halves = [torch.empty_like(moment) for _ in range(2)]
                dist.all_gather(halves, p[mine] - group["lr"] * moment)
                p.copy_(torch.cat(halves))

third = nn.Linear(1, 4, bias=False)
optimizers.append(ByHand(third.parameters()))

class Reader:
    place = 100 * run.rank
    kept = None
    def state_dict(self): return {"place": self.place, "kept": torch.arange(3) + run.rank}
    def load_state_dict(self, state): self.place, self.kept = state["place"], state["kept"]

reader = Reader()
training = run.training({"first": one, "second": two, "third": third}, optimizers, average=average, reader=reader)
step = training.resume()
torch.manual_seed(run.rank) if step == 0 else None
while step < last:
    hidden = two(one(torch.randn(8, 4)))
    loss = (hidden.square().mean() + (third(hidden) - 1).square().mean()) / 2 + reader.place / 1e6
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    average.update_parameters(first)
    reader.place += 1
    step += 1
    total = loss.detach() + average.module[0].weight.detach().sum()
    dist.all_reduce(total)
    run.report(step, loss=total.item())
training.save(step)
if reader.kept is not None:
    assert reader.place == 100 * run.rank + step
    assert reader.kept.tolist() == [run.rank, run.rank + 1, run.rank + 2]
# As most programs call it.
destroy_process_group()
"""
OWN = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from slurm_train import session

last = int(sys.argv[1])
run = session.join()
dist.init_process_group("gloo")
torch.manual_seed(3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("queue", torch.zeros(8, 4))

    def forward(self, x):
        x = self.head(self.norm(self.inner(x)))
        loss = (x - self.queue.mean(0)).square().mean() + self.norm.running_mean.sum()
        self.queue[:] = torch.cat([self.queue[len(x):], x.detach()])
        return loss

class Average:
    def __init__(self, weights): self.weights = [weight.detach().clone() for weight in weights]
    def update(self, weights):
        for mean, weight in zip(self.weights, weights, strict=True):
            mean.mul_(0.9).add_(weight.detach() * 0.1)
    def state_dict(self): return {"weights": self.weights}
    def load_state_dict(self, state): self.weights = state["weights"]

net = Net()
for part in (net.inner, net.head, net):
    fully_shard(part)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
average = Average(net.parameters())
training = run.training(net, optimizer, average=average)
step = training.resume()
data = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
for ids in run.batches(96, global_size=12, steps=last, seed=1):
    loss = net(data[ids])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(net.parameters())
    step += 1
    total = torch.stack([loss.detach(), *(mean.full_tensor().sum() for mean in average.weights)]).sum()
    dist.all_reduce(total)
    run.report(step, loss=total.item())
training.save(step)
dist.destroy_process_group()
"""
UNLIKE = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from slurm_train import session

run = session.join()
if sys.argv[1] != "not open":
    dist.init_process_group("gloo")
torch.manual_seed(run.rank if sys.argv[1] == "weights" else 0)
model = torch.nn.Linear(4, 4)
if sys.argv[1] == "flat":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters())
if sys.argv[1] == "zero":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
training = run.training(model, optimizer)
training.save(1)
"""

# Frozen numbers as quantized models have them, and weights in double precision.
OF_MANY_TYPES = """
import sys
import torch
import torch.distributed as dist
from slurm_train import session

run = session.join()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4).double()
model.packed = torch.nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
model.phases = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
model.small = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(128, 128).double())
training = run.training(model, torch.optim.SGD(model.parameters()), average=average)
training.save(1)
with torch.no_grad():
    model.packed[3] += run.rank
training.save(2)
"""


def train(run: RunDirectory, program: str, *words: str, ranks: int) -> list[tuple[int | None, str]]:
    """Runs a program as the ranks of the run's next attempt; returns exit code and output of each."""
    if not run.config.exists():
        run.config.write_text(dump_config(RunConfig()))
    path = run.path / "program.py"
    path.write_text(program)
    attempt = open_attempt(run, Start(job_id=None, restart_count=0, nodes=("here",), world_size=ranks))
    base = {**os.environ, "SLURM_TRAIN_RUN_DIR": str(run.path), "SLURM_TRAIN_ATTEMPT": str(attempt)}
    started = [start_rank(path, *words, env=env) for env in rank_environments(ranks, base)]
    texts = [rank.communicate(timeout=240.0)[1] for rank in started]
    return [(rank.returncode, text) for rank, text in zip(started, texts, strict=True)]


def train_well(run: RunDirectory, program: str, *words: str, ranks: int) -> None:
    ended = train(run, program, *words, ranks=ranks)
    assert [code for code, _ in ended] == [0] * ranks, "\n".join(text for _, text in ended)


def losses_of(run: RunDirectory) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(run.metrics)}


def new_run(folder: Path) -> RunDirectory:
    run = RunDirectory(folder / "0123456789ab")
    run.path.mkdir(parents=True)
    return run


@pytest.mark.distributed
def test_a_training_goes_on_in_another_form_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole, parts = new_run(tmp_path / "whole"), new_run(tmp_path / "parts")
    train_well(whole, FORMS, "bare", "32", ranks=1)
    for form, last, ranks in (("sharded", "10", 2), ("replicated", "20", 3), ("sharded", "27", 4), ("bare", "32", 1)):
        train_well(parts, FORMS, form, last, ranks=ranks)
    expected = losses_of(whole)
    assert len(expected) == 32 and losses_of(parts) == pytest.approx(expected, rel=1e-5)


@pytest.mark.distributed
def test_what_differs_from_rank_to_rank_goes_on_on_as_many_ranks(tmp_path: Path) -> None:
    whole, parts = new_run(tmp_path / "whole"), new_run(tmp_path / "parts")
    train_well(whole, OF_RANKS, "8", ranks=2)
    train_well(parts, OF_RANKS, "4", ranks=2)
    train_well(parts, OF_RANKS, "8", ranks=2)
    assert losses_of(parts) == losses_of(whole)
    ((code, text),) = train(parts, OF_RANKS, "9", ranks=1)
    assert code == 1 and "each of the 2 ranks has saved its own state of reader, and there are 1 ranks now" in text


@pytest.mark.distributed
def test_buffers_of_a_rank_and_lists_of_shards_go_on(tmp_path: Path) -> None:
    whole, parts = new_run(tmp_path / "whole"), new_run(tmp_path / "parts")
    train_well(whole, OWN, "8", ranks=2)
    train_well(parts, OWN, "4", ranks=2)
    train_well(parts, OWN, "8", ranks=2)
    assert losses_of(parts) == losses_of(whole)
    (code, text), *_ = train(parts, OWN, "9", ranks=3)
    assert code == 0 and "each of the 2 ranks had its own norm.running_mean" in text


@pytest.mark.parametrize(
    ("one", "other"),
    [([1, 23], [12, 3]), ([[1], [2]], [[1, 2]]), ({"a": {}, "b": 1}, {"a": {"b": 1}}), (["a", "b"], ["a'b"])],
    ids=["numbers", "lists", "dictionaries", "texts"],
)
def test_states_with_the_same_characters_are_told_apart(one: Any, other: Any) -> None:
    assert digest({"state": one}) == digest({"state": one}) != digest({"state": other})


@pytest.mark.parametrize("columns", [8, 5000])
def test_parts_of_one_norm_are_told_apart(columns: int) -> None:
    signs = torch.ones(4, columns)
    others = signs.clone()
    others[:, 1::3] = -1
    assert signs.norm() == others.norm()
    assert (_weighted_sum(signs) - _weighted_sum(others)).abs() > 0.1 * signs.norm()


@pytest.mark.parametrize("change", ["order", "sign", "nan", "last"])
def test_large_tensors_that_differ_are_told_apart_without_a_copy(change: str) -> None:
    rows = nn.functional.normalize(torch.randn(300, 128, generator=torch.Generator().manual_seed(0)), dim=-1)
    other = rows.clone()
    if change == "order":
        other = other.roll(1, 0)
    elif change == "nan":
        rows[0, 0] = other[0, 1] = math.nan
    else:
        other[-1 if change == "last" else 5] *= -1
    sketches = [sketch([tensor]).numpy().tobytes() for tensor in (rows, rows.clone(), other)]
    assert sketches[0] == sketches[1] != sketches[2]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("weights", "holds other values of weight, bias than the other 1"),
        ("flat", "FullyShardedDataParallel keeps parts of other ranks' state"),
        ("zero", "ZeroRedundancyOptimizer keeps parts of other ranks' state"),
        ("not open", "`training` was called before torch.distributed was opened"),
    ],
)
def test_ranks_whose_states_one_checkpoint_cannot_have_are_refused(kind: str, words: str, run: RunDirectory) -> None:
    for code, text in train(run, UNLIKE, kind, ranks=2):
        assert code == 1 and words in text, text
    assert list_checkpoints(run.checkpoints) == []


@pytest.mark.distributed
def test_values_of_all_number_types_are_saved_and_compared(run: RunDirectory) -> None:
    for code, text in train(run, OF_MANY_TYPES, ranks=2):
        assert code == 1 and "holds other values of packed than the other 1" in text, text
    assert [path.name.split("_")[1] for path in list_checkpoints(run.checkpoints)] == ["0000001"]
