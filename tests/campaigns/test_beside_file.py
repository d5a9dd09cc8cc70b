"""The checker of the campaign `beside-file` can fail."""

from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.beside_file import STEPS, problems_of


def test_a_lost_checkpoint_and_a_step_that_was_done_twice_are_problems(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.code.mkdir()
    steps = [*range(1, 11), *range(10, STEPS + 1)]
    (run.code / "train.log").write_text("".join(f"1 {step}\n" for step in steps))
    named = [problem.partition(" is not")[0] for problem in problems_of(run, seed="1")]
    assert named == ["train.log", "out/last.pth", "latest/last.pth", "out/sources/train.py"]
