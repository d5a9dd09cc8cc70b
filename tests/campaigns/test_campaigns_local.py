"""Short versions of the campaigns that need no cluster, and proof that they can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import kills_local

pytestmark = [pytest.mark.faults, pytest.mark.distributed]


def test_ranks_killed_at_random_moments_cost_no_committed_step(tmp_path: Path) -> None:
    result = kills_local.run(seed=11, trials=5, folder=tmp_path, steps=40)
    assert result.problems == ()
    assert result.trials == result.held == 5


def test_a_resume_that_forgets_a_batch_is_found(tmp_path: Path) -> None:
    modules = (kills_local.COUNTED, Path(__file__).with_name("forgetful.py"))
    result = kills_local.run(seed=12, trials=5, folder=tmp_path, steps=40, modules=modules)
    assert not result.is_kept
    assert any(" samples: " in problem for problem in result.problems)
