"""Fixtures for the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.cluster import bring_up, cluster_status, missing_here, require_free_place, tear_down
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan

_WANTED = ClusterPlan(nodes=4, gpus=8)


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the runs of tests out of the person's own list of places with runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[ClusterPlan]:
    """A real Slurm with at least 4 nodes x 8 GPUs: the one that is up, or one for this session."""
    missing = missing_here()
    if missing:
        pytest.skip(f"a Slurm cluster on this machine needs {missing}")
    status = cluster_status(DEFAULT_STATE_DIR)
    if status is None or not any(status.daemons.values()):
        yield from _own_cluster()
        return
    assert status.is_healthy, f"the devcluster that is up is broken:\n{status.describe()}"
    if status.plan.nodes < _WANTED.nodes or status.plan.gpus < _WANTED.gpus:
        pytest.skip(f"the devcluster that is up has {status.plan.describe()}; wanted {_WANTED.describe()}")
    yield status.plan


def _own_cluster() -> Iterator[ClusterPlan]:
    if cluster_status(DEFAULT_STATE_DIR) is None:
        try:
            require_free_place(_WANTED)
        except ClusterError as err:
            pytest.skip(f"no room for a Slurm cluster on this machine: {err}")
    bring_up(_WANTED)
    try:
        yield _WANTED
    finally:
        tear_down(DEFAULT_STATE_DIR)
