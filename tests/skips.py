"""Which tests may be skipped where everything is installed: with `--listed-skips` any other skip is a failure.

A skip hides a guarantee. `.ci/run` uses this option; elsewhere a missing program or right only leaves tests out.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import NamedTuple

import pytest


class Listed(NamedTuple):
    """Tests that may be skipped for a reason.

    Args:
        tests: pattern of their ids.
        reason: what the reason of the skip contains.
    """

    tests: str
    reason: str


LISTED = (
    Listed("tests/*", "no CUDA"),
    Listed("tests/*", "GPU"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--listed-skips`."""
    parser.addoption("--listed-skips", action="store_true", help="fail where a test is skipped that is not listed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Makes a run fail that has skipped other tests than those of the list."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--listed-skips") and reporter is not None:
        skipped = [(report.nodeid, _reason(report)) for report in _skipped(reporter)]
        session.config.stash[_UNLISTED] = unlisted(skipped, LISTED)
        if session.config.stash[_UNLISTED] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Names the tests whose skip is not listed."""
    names = config.stash.get(_UNLISTED, [])
    if names:
        terminalreporter.section(f"{len(names)} skipped tests are not listed in tests/skips.py", red=True)
        for name in names:
            terminalreporter.write_line(name)


_REPORTS = (pytest.CollectReport, pytest.TestReport)
_UNLISTED = pytest.StashKey[list[str]]()


def _skipped(reporter: pytest.TerminalReporter) -> list[pytest.CollectReport | pytest.TestReport]:
    """Returns the reports of skipped tests, also of those that the verdict counts apart."""
    reports = [report for counted in reporter.stats.values() for report in counted]
    return [report for report in reports if isinstance(report, _REPORTS) and _is_skip(report)]


def _is_skip(report: pytest.CollectReport | pytest.TestReport) -> bool:
    # A failure that was expected is reported as skipped, too.
    return report.skipped and not hasattr(report, "wasxfail")


def _reason(report: object) -> str:
    place = getattr(report, "longrepr", None)
    return place[2] if isinstance(place, tuple) else str(place)


def unlisted(skipped: Iterable[tuple[str, str]], listed: Iterable[Listed]) -> list[str]:
    """Returns those tests, with the reason, whose skip is not listed.

    Args:
        skipped: id of each test and reason of its skip.
        listed: what may be skipped.
    """
    return [
        f"{test}: {reason}"
        for test, reason in skipped
        if not any(fnmatch.fnmatch(test, entry.tests) and entry.reason in reason for entry in listed)
    ]
