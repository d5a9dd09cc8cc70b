"""Fixtures for the whole suite."""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from slurm_train.tools.devcluster.cluster import bring_up
from slurm_train.tools.devcluster.plan import ClusterPlan
from tests.support.session_environment import enter_session_environment
from tests.support.session_namespaces import enter_session_namespaces, namespaces_obstacle

pytest_plugins = ("tests.deadline", "tests.homes", "tests.skips")

_NO_CLUSTER = "PYTEST_NO_CLUSTER"
"""Variable that tells the processes of pytest-xdist why this session has no real Slurm."""
_LEFT_OUT = "no real Slurm: "
"""Begins the reason of a test that is skipped for that."""
_PLACE = "PYTEST_SESSION_PLACE"
"""Variable with the folder of the session."""
_CLUSTER_TESTS = "cluster_tests"
"""Begins the name of a file there, in which each process writes the ids of the tests that use the cluster."""
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


def _begin_session() -> None:
    """Leaves the person's environment and, where that is possible, the person's machine."""
    place = Path(tempfile.mkdtemp(prefix="slurm-train-tests-"))
    obstacle = namespaces_obstacle()
    if obstacle:
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    else:
        enter_session_namespaces(place)
    enter_session_environment(place / "home")
    os.environ[_NO_CLUSTER] = obstacle
    os.environ[_PLACE] = str(place)


# Before a module of tests or another conftest.py is imported; the processes of pytest-xdist inherit all of it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _begin_session()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with the tests of the cluster, which take longest, and with long files, which run beside them.

    Where the clock ends the tests, they run in the order in which they were asked for.

    Their ids are written down: the process that divides the tests among those of pytest-xdist knows a test by its id
    alone.
    """
    if config.getoption("--until") is None:
        items.sort(key=lambda item: (not _needs_cluster(item), _file_of(item.nodeid) not in _LONG))
    ids = [item.nodeid for item in items if _needs_cluster(item)]
    path = Path(os.environ[_PLACE], f"{_CLUSTER_TESTS}_{os.environ.get('PYTEST_XDIST_WORKER', '')}")
    path.write_text("\n".join(ids), encoding="utf-8")


def _cluster_tests() -> frozenset[str]:
    """Returns the ids of the tests that use the cluster, once tests are collected."""
    path = next(Path(os.environ[_PLACE]).glob(f"{_CLUSTER_TESTS}_*"), None)
    return frozenset(path.read_text(encoding="utf-8").splitlines() if path is not None else ())


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Counts the tests that had no real Slurm apart, so that the last line says how many they are, and why."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return None
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not reason.startswith(_LEFT_OUT):
        return None
    return f"left out, {reason}", "s", "LEFT OUT"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets tests of the cluster go first: all of them are in one process, which takes longest, beside the others'."""
    if os.environ.get("PYTEST_XDIST_WORKER") and not _needs_cluster(item):
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
    cluster_tests = _cluster_tests()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                scope = "tests of the cluster" if report.nodeid in cluster_tests else _file_of(report.nodeid)
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
        @cached_property
        def _cluster_tests(self) -> frozenset[str]:
            return _cluster_tests()

        def _split_scope(self, nodeid: str) -> str:
            return "cluster" if nodeid in self._cluster_tests else _file_of(nodeid)

    # Else the scopes with the most tests come first.
    config.option.loadscopereorder = False
    return ByFile(config, log)


def _needs_cluster(item: pytest.Item) -> bool:
    return "slurm_cluster" in getattr(item, "fixturenames", ())


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def slurm_room() -> None:
    """A machine on which a real Slurm can be built without a trace."""
    obstacle = os.environ[_NO_CLUSTER]
    if obstacle:
        pytest.skip(f"{_LEFT_OUT}{obstacle}")


@pytest.fixture(scope="session")
def slurm_cluster(slurm_room: None) -> ClusterPlan:
    """A real Slurm with 4 nodes x 8 GPUs, which ends with the namespaces of the session."""
    plan = ClusterPlan(nodes=4, gpus=8)
    bring_up(plan)
    return plan


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group of one rank inside the test process."""
    import torch.distributed as dist

    from tests.support.ranks import leave_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave_group()
