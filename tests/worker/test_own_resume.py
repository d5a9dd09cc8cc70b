"""A script's own resume is that of the run: the newest checkpoint is named to it, and seen to be opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RunError
from slurm_train.rundir.files import make_folder
from slurm_train.rundir.own_resume import OwnResume, record_own_resume, was_taken
from slurm_train.rundir.paths import RunDirectory
from slurm_train.worker.own_resume import choose_checkpoint, own_resume_words


def place(rank: int) -> RankPlace:
    return RankPlace(rank=rank, local_rank=rank, node_rank=0, world_size=2, local_world_size=2, host="here")


def save(folder: Path, *names: str) -> list[str]:
    """Makes files, the last one the newest."""
    for age, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weights")
        os.utime(path, (1000 + age, 1000 + age))
    return [str(folder / name) for name in names]


@pytest.mark.parametrize(
    ("names", "pattern", "words", "filled"),
    [
        (["ckpt_20.pt", "ckpt_5.pt"], "ckpt_*.pt", ["--step={step}"], ["--step=5"]),
        (["model_000040.pt"], "model_*.pt", ["--resume-from-step", "{step}"], ["--resume-from-step", "40"]),
        (
            ["a/checkpoint-40/state.json"],
            "**/checkpoint-*/state.json",
            ["{folder}", "{step}"],
            ["a/checkpoint-40", "40"],
        ),
        (["out/ckpt.pt"], "out/ckpt.pt", ["--init_from=resume"], ["--init_from=resume"]),
        ([], "*.pt", ["--resume", "latest"], []),
    ],
)
def test_the_newest_checkpoint_is_put_into_the_words(
    tmp_path: Path, names: list[str], pattern: str, words: list[str], filled: list[str]
) -> None:
    save(tmp_path, *names)
    resume = choose_checkpoint(words, str(tmp_path / pattern))
    assert [word.replace(f"{tmp_path}/", "") for word in resume.words] == filled


def test_a_name_without_a_number_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "ckpt.pt")
    # The folder of a test has a number.
    monkeypatch.setattr(os.path, "realpath", lambda _path: "/data/out/ckpt.pt")
    with pytest.raises(RunError, match="no number"):
        choose_checkpoint(["{step}"], str(tmp_path / "ckpt.pt"))


def test_all_ranks_get_what_rank_0_has_chosen_from_the_second_start_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    make_folder(run.attempt_logs(1), within=tmp_path)
    save(tmp_path, "1.pt")
    words = ["--resume", "{checkpoint}"]
    pattern = str(tmp_path / "*.pt")
    assert own_resume_words(words, pattern, place=place(0), run=run, attempt=0) == ()
    chosen = own_resume_words(words, pattern, place=place(0), run=run, attempt=1)
    save(tmp_path, "1.pt", "2.pt")
    assert chosen == ["--resume", str(tmp_path / "1.pt")]
    assert own_resume_words(words, pattern, place=place(1), run=run, attempt=1) == chosen


READS = """
import json, sys
from slurm_train.worker.own_resume import note_opened_checkpoints
note_opened_checkpoints(sys.argv[1], {"SLURM_TRAIN_ATTEMPT": "1"})
for mode, path in json.loads(sys.argv[2]):
    open(path, mode).close()
"""


@pytest.mark.parametrize(
    ("opened", "is_taken"),
    [
        ([("rb", "old/state")], True),
        ([("rb", "newest/deep/state")], True),
        ([("rb", "link/deep/state")], True),
        ([("wb", "newest/deep/state"), ("rb", "other/state"), ("r", "newest-not/state")], False),
        ([], False),
    ],
)
def test_a_checkpoint_that_the_script_reads_was_taken(
    tmp_path: Path, opened: list[tuple[str, str]], *, is_taken: bool
) -> None:
    run = RunDirectory(tmp_path / "run")
    make_folder(run.attempt_logs(1), within=tmp_path)
    save(tmp_path, "old/state", "newest/deep/state", "other/state", "newest-not/state")
    (tmp_path / "link").symlink_to(tmp_path / "newest")
    checkpoints = [os.path.realpath(tmp_path / name) for name in ("old", "newest")]
    record_own_resume(run, 1, OwnResume(words=["--resume"], checkpoint=checkpoints[-1], checkpoints=checkpoints))
    files = json.dumps([(mode, str(tmp_path / name)) for mode, name in opened])
    subprocess.run([sys.executable, "-c", READS, str(run.path), files], check=True)
    assert was_taken(run, 1) == is_taken
