"""Fixtures for the whole suite."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.cluster import bring_up, cluster_status, missing_here, require_free_place, tear_down
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan

pytest_plugins = ("tests.homes", "tests.skips")

REPOSITORY = Path(__file__).resolve().parents[1]
_WANTED = ClusterPlan(nodes=4, gpus=8)


_NICE = 10
_AFTER_TIMEOUT_S = 30.0
"""As in pyproject.toml: a test is ended by its time-out, and pytest so long after it where that cannot be."""

# Files whose tests take minutes: begun last, one of them would keep one process busy while the others have ended.
_LONG = (
    "tests/train/test_layouts.py",
    "tests/train/test_compilation.py",
    "tests/worker/test_torchrun.py",
    "tests/worker/test_watcher.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the tests of the cluster, which take longest, and with long files, which run beside them."""
    items.sort(key=lambda item: (not _needs_cluster(item.nodeid), _file_of(item.nodeid) not in _LONG))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets tests of the cluster go first: all of them are in one process, which takes longest, beside the others'."""
    if os.environ.get("PYTEST_XDIST_WORKER") and not _needs_cluster(item.nodeid):
        present = os.getpriority(os.PRIO_PROCESS, 0)
        if present < _NICE:
            os.nice(_NICE - present)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Gives a test with a longer time-out of its own as much before the whole of pytest is ended for it."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(item.config.getini("faulthandler_timeout") or 0.0)
    longer_s = float(marker.args[0]) + _AFTER_TIMEOUT_S if marker is not None else 0.0
    if 0 < limit_s < longer_s:
        # pytest has begun to count for the test, and ends that after it.
        faulthandler.dump_traceback_later(longer_s, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Adds the seconds of the slowest files where the slowest tests are asked for: one process has all of a file."""
    if config.option.durations is None:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                scope = "tests of the cluster" if _needs_cluster(report.nodeid) else _file_of(report.nodeid)
                seconds[scope] += report.duration
    terminalreporter.section(f"{sum(seconds.values()):.0f} s in all; slowest files")
    for scope, duration_s in seconds.most_common(25):
        terminalreporter.write_line(f"{duration_s:7.1f}s {scope}")


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
            return "cluster" if _needs_cluster(nodeid) else _file_of(nodeid)

    # Else the scopes with the most tests come first.
    config.option.loadscopereorder = False
    return ByFile(config, log)


@cache
def _has_cluster_tests(path: str) -> bool:
    return "mark.slurm" in (REPOSITORY / path).read_text(encoding="utf-8")


def _needs_cluster(nodeid: str) -> bool:
    return _has_cluster_tests(_file_of(nodeid))


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


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


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group of one rank inside the test process."""
    import torch.distributed as dist

    from tests.support.ranks import leave_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave_group()
