"""Who ends a process waits for a commit under way, and none begins after it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from slurm_train.rundir import attempts as publishing


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_under_way", threading.RLock())


def test_an_end_waits_for_what_is_under_way() -> None:
    began, may_end, done = threading.Event(), threading.Event(), []

    def publish() -> None:
        with publishing.publishing():
            began.set()
            may_end.wait(10)
            done.append("published")

    thread = threading.Thread(target=publish)
    thread.start()
    assert began.wait(10) and not publishing.end_publishing(within_s=0.01) and not done
    may_end.set()
    assert publishing.end_publishing(within_s=10) and done == ["published"]
    thread.join()


def test_nothing_is_published_after_it() -> None:
    assert publishing.end_publishing(within_s=0)
    thread = threading.Thread(target=lambda: publishing.publishing().__enter__(), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()


_WORKER = """
import os, threading
from slurm_train.cli.worker import _leave
from slurm_train.rundir.attempts import publishing

began = threading.Event()

def publish():
    with publishing():
        began.set()
        threading.Event().wait(0.3)  # as long as an fsync
        print("whole", flush=True)

threading.Thread(target=publish, daemon=True).start()
began.wait()
_leave(3)
"""


def test_a_worker_that_leaves_lets_a_commit_become_whole() -> None:
    done = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "whole\n"), done.stderr
