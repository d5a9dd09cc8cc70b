"""Generators that a data set owns are keyed as the global ones are."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slurm_train.data.generators import OwnedGenerators, open_handle
from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.data.source import Draw


class Transform:
    """Draws from a generator of its own; `replaces` makes a new one each time, as libraries do in workers."""

    def __init__(self, generator: Any, *, replaces: bool = False) -> None:
        self.generator, self.replaces = generator, replaces

    def __call__(self, row: int) -> float:
        if self.replaces:
            self.generator = pickle.loads(pickle.dumps(self.generator))
        if isinstance(self.generator, torch.Generator):
            return row + torch.rand((), generator=self.generator).item()
        return float(row + self.generator.random())


class Rows:
    def __init__(self, transform: Callable[[int], float]) -> None:
        self.transforms = [{"of": transform}]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.transforms[0]["of"](index), dtype=torch.float64)


class Together(Rows):
    """Reads many at once, as a Hugging Face data set does, with the global generator."""

    def __init__(self) -> None:
        super().__init__(lambda row: row + torch.rand(()).item())

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class OnlyTogether:
    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(index + torch.rand(()).item(), dtype=torch.float64) for index in indices]


def in_closure() -> Callable[[int], float]:
    generator = np.random.default_rng(1)
    return lambda row: row + generator.random()


DATASETS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: Rows(Transform(np.random.default_rng(1))),
    "numpy's older one": lambda: Rows(Transform(np.random.RandomState(1))),
    "Python": lambda: Rows(Transform(random.Random(1))),
    "torch": lambda: Rows(Transform(torch.Generator().manual_seed(1))),
    "replaced": lambda: Rows(Transform(np.random.default_rng(1), replaces=True)),
    "closure": lambda: Rows(in_closure()),
    "method": lambda: Rows(Transform(random.Random(1)).__call__),
    "partial": lambda: Rows(functools.partial(Transform.__call__, Transform(random.Random(1)))),
    "read together": Together,
    "only together": OnlyTogether,
}


def read(dataset: Any, sizes: list[int], *, first: int = 0, workers: int = 0) -> list[float]:
    """Reads samples in micro-batches of these sizes."""

    def draws() -> Iterator[Draw]:
        start = first
        for size in sizes:
            numbers = np.arange(start, start + size)
            yield Draw(numbers % 12, numbers)
            start += size

    source = MapStyleSource(dataset, seed=5, num_workers=workers)
    batches: Any = source.stream(draws())
    return [value for batch in batches for value in batch[0].tolist()]


@pytest.mark.parametrize("name", DATASETS)
def test_a_sample_depends_on_neither_the_split_nor_what_was_read_before(name: str) -> None:
    whole = read(DATASETS[name](), [6, 6, 6])
    assert read(DATASETS[name](), [2] * 9) == whole
    assert read(DATASETS[name](), [3, 3], first=6) == whole[6:12]
    # The same sample in the next epoch.
    assert len(set(whole)) == 18 and whole[0] != whole[12] and int(whole[0]) == int(whole[12])


def test_workers_draw_the_same() -> None:
    make = DATASETS["numpy"]
    assert read(make(), [6, 6], workers=2) == read(make(), [6, 6])


def test_generators_have_numbers_of_their_own() -> None:
    first, second = random.Random(1), random.Random(1)
    owned = OwnedGenerators(Rows(lambda _: first.random() - second.random()))
    owned.seed(7)
    assert len(owned) == 2 and first.random() != second.random()


def test_a_data_set_without_generators_has_none() -> None:
    assert len(OwnedGenerators(Rows(float))) == 0


def test_a_closure_whose_variable_has_no_value_yet_is_looked_at() -> None:
    def transform(row: int) -> float:
        return row + later

    rows = Rows(transform)
    assert len(OwnedGenerators(rows)) == 0 and open_handle(rows) is None
    later = 1.0
    assert rows[0] == later


def test_a_random_state_over_another_bit_generator_is_seeded() -> None:
    generator = np.random.RandomState(np.random.PCG64(1))
    owned = OwnedGenerators(Rows(Transform(generator)))
    drawn = []
    for key in (3, 4, 3):
        owned.seed(key)
        drawn.append(generator.random())
    assert drawn[0] == drawn[2] != drawn[1]
