"""`transformers.Trainer` on two ranks: a stop that reaches one of them changes no sample, loss or evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.stopped_ranks import require_undisturbed
from tests.support.warm_ranks import run_pair

pytestmark = [
    NEEDS_TRANSFORMERS,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.full,
]
PROGRAM = "from tests.adapters.transformers_ranks import main\n\nmain()\n"
ONCE = ["in an order of its own", "by a generator of its own", "read by rank 0", "counted"]
"""Trainings with an order in which each sample comes once."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns what each rank has left, by the name of the training."""
    folder: Path = tmp_path_factory.mktemp("transformers")
    return run_pair(folder, PROGRAM, str(folder))


@pytest.mark.parametrize("name", [*ONCE, "rebalanced", "split by rank 0", "accumulated", "evaluated at the start"])
def test_a_stop_of_one_rank_changes_nothing(name: str, trained: list[dict[str, Any]]) -> None:
    require_undisturbed(trained, name)


@pytest.mark.parametrize("name", ONCE)
def test_each_sample_is_seen_once_in_an_epoch(name: str, trained: list[dict[str, Any]]) -> None:
    for first_step in (0, 10):
        seen: list[int] = []
        for of_rank in trained:
            for samples, _ in of_rank[name]["steps"][first_step : first_step + 10]:
                seen += samples
        assert sorted(seen) == list(range(40))
