"""Fixtures for the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.cluster import bring_up, cluster_status, missing_here, require_free_place, tear_down
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan

REPOSITORY = Path(__file__).resolve().parents[1]
_WANTED = ClusterPlan(nodes=4, gpus=8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the tests of the cluster: they take longest, and run beside the others."""
    items.sort(key=lambda item: not _needs_cluster(item.nodeid))


def pytest_collection_finish() -> None:
    """Gives torch one thread in this process, if a test has imported it.

    Tensors here are small and the cores are shared with other processes of tests and their ranks: a second thread takes
    40 % more processor time for the same tests.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keeps what shares something in one process: all tests of the cluster, and otherwise those of a file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "cluster" if _needs_cluster(nodeid) else nodeid.partition("::")[0]

    # Else the scopes with the most tests come first.
    config.option.loadscopereorder = False
    return ByFile(config, log)


@cache
def _has_cluster_tests(path: str) -> bool:
    return "mark.slurm" in (REPOSITORY / path).read_text(encoding="utf-8")


def _needs_cluster(nodeid: str) -> bool:
    return _has_cluster_tests(nodeid.partition("::")[0])


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
