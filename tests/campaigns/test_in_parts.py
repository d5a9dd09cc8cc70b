"""What a part of a campaign has noted counts for the same revision and seed alone; the sum is that of all parts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.campaigns import in_parts, preflight
from tests.campaigns.trial import Trial, sum_up

HELD = Trial(what="PORT_BLOCKED: by nft, after 4 s", seconds={"PORT_BLOCKED": 4.2}, wall_s=9.0)
BROKEN = Trial(what="DISK_FULL: a tmpfs", problems=("said []",), seconds={}, wall_s=40.0)


def test_a_trial_is_made_again_for_another_revision_or_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = argparse.Namespace(name="preflight", seed=1, notes=tmp_path / "notes.jsonl")
    monkeypatch.setattr(in_parts, "revision", lambda: "abc1234")
    assert in_parts.made(asked) == {}
    in_parts.note(asked, 0, HELD)
    in_parts.note(asked, 7, BROKEN)
    assert in_parts.made(asked) == {0: HELD, 7: BROKEN}
    assert in_parts.made(argparse.Namespace(**{**vars(asked), "seed": 2})) == {}
    monkeypatch.setattr(in_parts, "revision", lambda: "def5678")
    assert in_parts.made(asked) == {}


def test_the_sum_says_what_did_not_hold_and_how_soon_faults_were_named() -> None:
    late = Trial(what="COLLECTIVE: by nft, after 19 s", seconds={"COLLECTIVE": 19.4})
    trials = [HELD, BROKEN, late]
    result = sum_up(trials, preflight.figures_of(trials))
    assert (result.trials, result.held, result.problems) == (3, 2, ("DISK_FULL: a tmpfs: said []",))
    assert result.figures == {
        "codes": "2",
        "job start to the line, median": "4 s",
        "at most": "4 s (PORT_BLOCKED)",
        "to COLLECTIVE, with a time-out of 8 s": "19 s",
    }
