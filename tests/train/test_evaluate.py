"""Evaluations of models and collate functions that draw random numbers: the same weights give the same numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from slurm_train.config.batch import BatchPlan
from slurm_train.config.schema import RunConfig, TrainSection
from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.errors import ConfigError
from slurm_train.models.objective import Objective
from slurm_train.train import evaluate
from slurm_train.train.context import Rank
from slurm_train.train.evaluate import Evaluator, measures
from slurm_train.train.held import hold
from tests.support.ranks import make_parts, make_rank

pytestmark = pytest.mark.usefixtures("group_of_one")
SAMPLES = 70
WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "torch": lambda _model, inputs: torch.randn_like(inputs),
    "numpy": lambda _model, inputs: torch.from_numpy(np.random.standard_normal(tuple(inputs.shape))).float(),
    "python": lambda _model, inputs: torch.full_like(inputs, random.gauss(0.0, 1.0)),
    "own": lambda model, inputs: torch.randn(inputs.shape, generator=model.generator),
}
"""How a model draws its noise."""


class Inputs(Dataset[tuple[Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor]:
        return (torch.full((3,), float(number)),)


class Denoiser(nn.Module):
    """Predicts the noise that it adds; remembers the noise and the sizes of its batches."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.net = nn.Linear(3, 3)
        nn.init.constant_(self.net.weight, 0.01)
        nn.init.constant_(self.net.bias, 0.1)
        self.generator = torch.Generator()
        SEEN.clear()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs

    def training_loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        (inputs,) = batch
        noise = WAYS[self.way](self, inputs) if self.way else torch.zeros_like(inputs)
        SEEN.append(noise)
        return (self(inputs + noise) - noise).square().sum(), inputs.numel()


SEEN: list[Tensor] = []


def evaluator_of(rank: Rank, model: nn.Module, source: MapStyleSource) -> Evaluator:
    held = hold(make_parts(rank, model, None), Objective(model))
    return Evaluator(rank=rank, held=held, source=source)


class Masks:
    """A collate function that masks at random, by the global generator or by one of its own."""

    def __init__(self, *, owns: bool) -> None:
        self.generator = np.random.default_rng(1) if owns else None

    def __call__(self, items: list[tuple[Tensor]]) -> tuple[Tensor]:
        inputs = torch.stack([item for (item,) in items])
        chances = torch.rand(inputs.shape) if self.generator is None else self.generator.random(tuple(inputs.shape))
        return (inputs.masked_fill(torch.as_tensor(chances) < 0.3, 0.0),)


def evaluated(
    model: Denoiser,
    *,
    ranks: int,
    local_size: int,
    monkeypatch: pytest.MonkeyPatch,
    collate: Any = None,
    num_workers: int = 0,
    most: int | None = None,
) -> dict[str, float]:
    """Returns what so many ranks measure, one after the other, whatever was drawn before."""
    sums: list[dict[str, float]] = []
    for rank_number in range(ranks):
        given: list[Any] = []
        monkeypatch.setattr(evaluate, "gather", lambda value, given=given: [given.append(value), value][1:])
        plan = BatchPlan.equal(local_size=local_size, ranks=ranks, accumulation=1)
        config = RunConfig(train=TrainSection(eval_max_batches=most))
        rank = make_rank(config=config, plan=plan, rank=rank_number, ranks=ranks)
        source = MapStyleSource(Inputs(), collate=collate, num_workers=num_workers, seed=config.seed)
        torch.manual_seed(random.randrange(2**32))
        model.generator.seed()
        evaluator_of(rank, model, source).evaluate()
        sums.append(given[-1])
    return measures(sums, bytes_per_item=None)


class Classes(Dataset[tuple[Tensor, int]]):
    """Samples of three classes."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.eye(6)[number], number % 3


class Head(nn.Linear):
    """Gives probabilities when it does not train."""

    def forward(self, inputs: Tensor) -> Tensor:
        scores = super().forward(inputs)
        return scores if self.training else scores.softmax(-1)


def test_what_is_odd_about_held_out_scores_is_said_once_and_a_label_without_a_score_is_refused() -> None:
    said: list[str] = []
    display = SimpleNamespace(say=said.append, show_evaluation=lambda *_, **__: None)
    rank = make_rank(plan=BatchPlan.equal(local_size=6, ranks=1, accumulation=1), display=display)
    for num_scores in (3, 2):
        source = MapStyleSource(Classes())
        model = Head(6, num_scores)
        evaluator = evaluator_of(rank, model, source)
        if num_scores == 2:
            with pytest.raises(ConfigError, match="labels are 0 to 2, and the model gives 2 scores"):
                evaluator.evaluate()
            continue
        assert evaluator.evaluate() == evaluator.evaluate()
        assert ["in evaluation mode the scores are probabilities" in line for line in said] == [True]


CUTS = [(1, 32), (2, 16), (4, 8), (3, 20)]


@pytest.mark.parametrize("way", WAYS)
def test_noise_of_a_model_depends_on_the_samples_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the step and what was drawn before it, nor on ranks; and each sample has noise of its own."""
    found = []
    for ranks, local_size in CUTS:
        found += [
            evaluated(Denoiser(way), ranks=ranks, local_size=local_size, monkeypatch=monkeypatch) for _ in range(2)
        ]
    assert found == [pytest.approx(found[0], rel=1e-6)] * len(found)
    noise = torch.cat([block for block in SEEN if len(block) != CUTS[-1][1]])
    assert len(noise) == SAMPLES
    assert len(noise.unique(dim=0)) == (SAMPLES if way != "python" else len(SEEN) - CUTS[-1][0])
    assert evaluated(Denoiser(way), ranks=2, local_size=16, most=1, monkeypatch=monkeypatch) == pytest.approx(
        evaluated(Denoiser(way), ranks=1, local_size=32, most=1, monkeypatch=monkeypatch), rel=1e-6
    )


@pytest.mark.parametrize("owns", [False, True])
def test_masks_of_a_collate_function_depend_on_the_samples_alone(owns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        evaluated(
            Denoiser(),
            ranks=ranks,
            local_size=local_size,
            collate=Masks(owns=owns),
            num_workers=num_workers,
            monkeypatch=monkeypatch,
        )
        for ranks, local_size, num_workers in ((1, 32, 0), (1, 32, 0), (2, 16, 0), (1, 32, 2))
    ]
    assert found == [pytest.approx(found[0], rel=1e-6)] * len(found)
    plain = evaluated(Denoiser(), ranks=1, local_size=32, monkeypatch=monkeypatch)
    assert plain["eval_loss"] != pytest.approx(found[0]["eval_loss"], rel=1e-3)


class Counting(Denoiser):
    """Its loss depends on how many batches it has seen since the evaluation began."""

    num_seen = 0

    def training_loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        self.num_seen += 1
        return torch.tensor(float(self.num_seen)), 1


def test_a_model_that_counts_its_batches_counts_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluated(Counting(), ranks=1, local_size=32, monkeypatch=monkeypatch)
    assert found["eval_loss"] == (1 + 2 + 3) / 3


def test_what_draws_nothing_is_evaluated_in_whole_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the mean that a plain loop gives."""
    model = Denoiser()
    found = evaluated(model, ranks=1, local_size=32, monkeypatch=monkeypatch)
    # The first micro-batch is tried once, to see whether anything is drawn.
    assert [len(noise) for noise in SEEN] == [32, 32, 32, 6]
    with torch.no_grad():
        inputs = torch.stack([Inputs()[number][0] for number in range(SAMPLES)])
        assert found["eval_loss"] == pytest.approx(float(model(inputs).square().mean()), rel=1e-6)
