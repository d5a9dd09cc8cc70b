"""An end to a run of tests by the clock: `--until` seconds of `time.monotonic`, in each process of pytest-xdist.

pytest-xdist listens to its own processes alone, so a plugin of the first process cannot end them.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

IS_OVER = "the time is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--until`."""
    parser.addoption("--until", type=float, help="begin no further test after these seconds of time.monotonic")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the tests of this process after one that has ended too late."""
    result = yield
    until_s = item.config.getoption("--until")
    if until_s is not None and time.monotonic() > until_s:
        item.session.shouldstop = IS_OVER
    return result
