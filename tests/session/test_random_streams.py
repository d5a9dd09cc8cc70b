"""Random generators of a program's ranks: kept with a checkpoint, put back, and watched for repeats."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.session.random_streams import RandomStreams, is_random_file


@pytest.fixture(autouse=True)
def _leave_generators() -> Iterator[None]:
    state = rng_state()
    yield
    set_rng_state(state)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def save(folder: Path, *seeds: int) -> list[list[float]]:
    """Saves ranks that are seeded so; returns what each draws next."""
    following = []
    for rank, number in enumerate(seeds):
        seed(number)
        RandomStreams(rank).write(folder)
        following.append(draw())
    assert all(is_random_file(path.name) for path in folder.iterdir())
    return following


def restored(folder: Path, rank: int, *, world_size: int) -> list[float]:
    seed(99)
    assert RandomStreams(rank).restore(folder, world_size=world_size) == ""
    return draw()


def test_each_rank_goes_on_with_its_own_numbers(tmp_path: Path) -> None:
    following = save(tmp_path, 1, 2)
    assert [restored(tmp_path, rank, world_size=2) for rank in range(2)] == following


def test_ranks_that_were_not_there_draw_numbers_of_their_own(tmp_path: Path) -> None:
    following = save(tmp_path, 1, 2)
    drawn = [restored(tmp_path, rank, world_size=2) for rank in range(4)]
    assert drawn[:2] == following and len({tuple(numbers) for numbers in drawn}) == 4
    # They follow from the checkpoint.
    assert restored(tmp_path, 3, world_size=2) == drawn[3]


def test_ranks_that_draw_alike_go_on_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    following = save(tmp_path, 7, 7)
    assert [restored(tmp_path, rank, world_size=2) for rank in (0, 3)] == [following[0]] * 2


def test_a_checkpoint_without_states_leaves_the_generators_and_says_so(tmp_path: Path) -> None:
    seed(3)
    before = draw()
    seed(3)
    assert "has no states of random generators" in RandomStreams(0).restore(tmp_path, world_size=1)
    assert draw() == before


@pytest.mark.parametrize(
    ("step", "said"),
    [
        pytest.param(lambda: torch.rand(3), ["torch"], id="dropout"),
        pytest.param(lambda: (random.random(), np.random.rand()), ["python", "numpy"], id="augmentation"),
        pytest.param(lambda: None, [], id="nothing is drawn"),
    ],
)
def test_a_program_that_draws_its_first_numbers_again_is_told(
    step: Callable[[], object], said: list[str], tmp_path: Path
) -> None:
    def train(streams: RandomStreams, checkpoint: Path | None, *, restores: bool) -> list[list[str]]:
        seed(5)
        torch.nn.Linear(2, 2)
        if restores and checkpoint is not None:
            streams.restore(checkpoint, world_size=1)
        looks = []
        for _ in range(3):
            step()
            looks.append(streams.find_repeats(checkpoint))
        return looks

    first = RandomStreams(0)
    assert train(first, None, restores=False) == [[], [], []]
    first.write(tmp_path)
    second = RandomStreams(0)
    assert train(second, tmp_path, restores=False) == [[], said, []]
    later = tmp_path / "later"
    later.mkdir()
    # What the training began with is known to its third attempt, too.
    second.write(later)
    assert train(RandomStreams(0), later, restores=False) == [[], said, []]
    assert train(RandomStreams(0), tmp_path, restores=True) == [[], [], []]
