"""Some of the faults of the campaign `full-disk`, each in a second, and its checker on a supervisor that gives up."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.campaigns import full_disk
from tests.campaigns.full_disk import one_trial

pytestmark = [pytest.mark.faults, pytest.mark.full]


@pytest.mark.parametrize(("at", "onward"), [(0, False), (1, True), (12, True), (20, True), (25, False), (30, True)])
def test_a_preempted_run_comes_back_from_a_full_disk(at: int, onward: bool, tmp_path: Path) -> None:
    problems, calls = one_trial(tmp_path, at=at, number=errno.ENOSPC, onward=onward)
    assert problems == [] and calls >= max(at, 1)


def test_a_run_that_does_not_come_back_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_disk, "_SCONTROL", "exit 1\n")
    monkeypatch.setattr(full_disk, "_LIMIT_S", 2.0)
    problems, _ = one_trial(tmp_path, at=0, number=0, onward=False)
    assert problems == ["the requeue was not asked for"]
