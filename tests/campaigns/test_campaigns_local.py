"""Short versions of the campaigns that need no cluster, and proof that they can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import kills_local
from tests.campaigns.record import Tally
from tests.campaigns.victims import COUNTED_MODULE

pytestmark = [pytest.mark.faults, pytest.mark.distributed]


def test_ranks_killed_at_random_moments_cost_no_committed_step(tmp_path: Path) -> None:
    tally = Tally()
    kills_local.run(tally, seed=11, trials=5, folder=tmp_path, steps=40)
    assert tally.problems == []
    assert tally.trials == tally.held == 5


def test_a_resume_that_forgets_a_batch_is_found(tmp_path: Path) -> None:
    tally, modules = Tally(), (COUNTED_MODULE, Path(__file__).with_name("forgetful.py"))
    kills_local.run(tally, seed=12, trials=5, folder=tmp_path, steps=40, modules=modules)
    assert not tally.is_kept
    assert any(" samples: " in problem for problem in tally.problems)
