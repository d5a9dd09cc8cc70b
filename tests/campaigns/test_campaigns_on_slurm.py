"""Campaigns on a real Slurm, in short; all of them in full: `make campaign`."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.tools.devcluster.plan import ClusterPlan
from tests.campaigns.catalogue import CAMPAIGNS


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.campaign
@pytest.mark.parametrize(("name", "trials"), [("kills", 1), ("script-hang", 2), ("cancel", 8)])
def test_a_short_campaign_breaks_no_promise(name: str, trials: int, slurm_cluster: ClusterPlan, tmp_path: Path) -> None:
    found = CAMPAIGNS[name].run(seed=7, trials=trials, folder=tmp_path)
    assert found.is_kept, found.problems
    assert found.trials >= trials
