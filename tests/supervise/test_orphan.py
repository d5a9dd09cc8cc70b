from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_train.supervise.signals import FENCE_EVERY_S, Ties, orphan_watchdog
from tests.support.command_line import REPOSITORY
from tests.support.process_faults import wait_until_gone
from tests.support.waiting import wait_for


def told(overtaken_at: int | None, orphaned_at: int | None) -> list[str]:
    events: list[str] = []
    looks, parents = itertools.count(), itertools.count()

    def is_overtaken() -> bool:
        return overtaken_at is not None and next(looks) >= overtaken_at

    def parent_now() -> int:
        return 1 if orphaned_at is not None and next(parents) >= orphaned_at else 7

    def note(word: str) -> Callable[[], None]:
        return lambda: events.append(word)

    ties = Ties(parent=7, is_overtaken=is_overtaken, on_orphaned=note("orphaned"), on_overtaken=note("overtaken"))
    # Every look finds the clock as far on as after a stop.
    clock = itertools.count(step=FENCE_EVERY_S)
    orphan_watchdog(ties, every_s=0.001, parent_now=parent_now, clock=lambda: next(clock)).join(timeout=10)
    return events


@pytest.mark.parametrize(
    ("overtaken_at", "orphaned_at", "event"), [(None, 3, "orphaned"), (2, None, "overtaken"), (0, 0, "orphaned")]
)
def test_a_lost_tie_is_told_once(overtaken_at: int | None, orphaned_at: int | None, event: str) -> None:
    assert told(overtaken_at, orphaned_at) == [event]


def test_the_fence_is_not_asked_at_every_look() -> None:
    looks, parents = itertools.count(), itertools.count()
    ties = Ties(parent=7, is_overtaken=lambda: next(looks) > 1_000, on_orphaned=lambda: None, on_overtaken=lambda: None)
    orphan_watchdog(ties, every_s=0.0001, parent_now=lambda: 7 if next(parents) < 20 else 1, clock=lambda: 0.0).join(
        timeout=10
    )
    assert next(looks) == 1


CHILD = """
import os, signal, sys
from pathlib import Path
from slurm_train.supervise.signals import Ties, orphan_watchdog
def leave():
    os._exit(71)
ties = Ties(parent=os.getppid(), is_overtaken=lambda: False, on_orphaned=leave, on_overtaken=leave)
orphan_watchdog(ties, every_s=0.05)
Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def test_a_process_whose_parent_is_killed_ends(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(file)], env=env)
    wait_for(lambda: file.exists() and file.read_text(), within_s=30, what="the child", poll_s=0.02)
    parent.kill()
    parent.wait()
    wait_until_gone(int(file.read_text()), within_s=10)
