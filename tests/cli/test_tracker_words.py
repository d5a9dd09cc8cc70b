"""Trackers on the command line: shown in the plan, refused where they are not installed, keys left behind named."""

from __future__ import annotations

import pytest

from slurm_train.tools import trackers
from tests.cli.conftest import Shell

WORDS = ("+cluster=2x4", "track.wandb.project=gpt")


@pytest.fixture(autouse=True)
def _all_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _name: object())


def test_one_that_is_not_installed_is_refused_before_anything_is_written(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _name: None)
    done = shell.types(*WORDS)
    assert done.code == 2 and shell.left() == []
    assert "error: track.wandb.project asks for wandb, which is not installed\n" in done.err
    assert "hint: pip install 'slurm-train[wandb]', or set track.wandb.project=null" in done.err
    assert shell.types(*WORDS, "cluster.python=/other/python").code == 0, "another interpreter may have it"


def test_a_key_that_stays_behind_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "WANDB_API_KEY is not exported to the job; to export it: cluster.export=[WANDB_API_KEY]\n"
    assert "is not exported to the job" not in shell.types(*WORDS, "run.name=a").err
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert said in shell.types(*WORDS, "run.name=b").err
    assert said not in shell.types(*WORDS, "run.name=c", "cluster.export=[WANDB_API_KEY]").err


def test_what_track_cannot_do_is_said(shell: Shell) -> None:
    run = shell.has_run()
    run.path.chmod(0o700)
    shell.refuses("has no tracker at all", f"track {run.run_id}")
    shell.refuses("optim.lr is not a setting of a tracker", f"track {run.run_id} optim.lr=1")
    shell.refuses("there is no configuration key 'track.wandb.projct'", f"track {run.run_id} track.wandb.projct=x")
