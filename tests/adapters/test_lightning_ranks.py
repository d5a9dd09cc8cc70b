"""Lightning on two ranks: a stop that reaches one of them changes no sample, loss, rate or validation of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.rundir.paths import RunDirectory
from tests.support.extras import NEEDS_LIGHTNING
from tests.support.joined_runs import joined
from tests.support.stopped_ranks import STOPPED, require_undisturbed
from tests.support.warm_ranks import run_pair

# What Lightning itself warns of is not ours.
pytestmark = [
    NEEDS_LIGHTNING,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.full,
]
PROGRAM = "from tests.adapters.lightning_ranks import main\n\nmain()\n"
OTHER = "for another number of ranks"
ONCE = ["shuffled", "shuffled by workers", "shuffled, with a state", "a stream"]
"""Trainings with an order in which each sample comes once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, Any]]:
    """Returns what each rank has left, by the name of the training."""
    pytest.importorskip("torchdata.stateful_dataloader")
    return run_pair(folder, PROGRAM, str(folder))


@pytest.mark.parametrize("name", [*ONCE, "by weights", "uneven", "in parts"])
def test_a_stop_of_one_rank_changes_nothing(name: str, trained: list[dict[str, Any]]) -> None:
    require_undisturbed(trained, name)


@pytest.mark.parametrize("name", ONCE)
def test_each_sample_is_seen_once_in_an_epoch(name: str, trained: list[dict[str, Any]]) -> None:
    seen: dict[int, list[int]] = {}
    for of_rank in trained:
        for epoch, samples, *_ in of_rank[name]["steps"]:
            seen.setdefault(epoch, []).extend(samples)
    assert sorted(seen) == [0, 1, 2]
    assert all(sorted(samples) == list(range(32)) for samples in seen.values())


def test_another_number_of_ranks_goes_on_with_the_same_batches_or_is_refused(
    folder: Path, trained: list[dict[str, Any]]
) -> None:
    from tests.adapters import lightning_ranks as scenes

    run = RunDirectory(folder / OTHER / STOPPED)

    def train(batch_size: int) -> Any:
        sampler = scenes.DistributedSampler(scenes.DATA, num_replicas=1, rank=0)
        loader = scenes.DataLoader(scenes.DATA, batch_size=batch_size, sampler=sampler)
        return scenes.train(lambda stop: joined(run, stop), loader, devices=1)[1].steps

    with pytest.raises(ConfigError, match=r"batches have \[8\] samples on 2 ranks, this start has \[4\] on 1"):
        train(4)
    first, second = (of_rank[OTHER]["whole"] for of_rank in trained)
    together = [sorted(one[1] + other[1]) for one, other in zip(first, second, strict=True)]
    assert [sorted(step[1]) for step in train(8)] == together[6:]
