"""A rehearsed run works in a copy: what it writes leaves the person's files alone; and which names have a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.tools.rehearsal import folder
from slurm_train.tools.rehearsal.folder import (
    changed,
    copy_folder,
    files_in,
    in_folders,
    is_checkpoint,
    renamed_folder,
)


def test_checkpoints_and_code_are_copied_and_data_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_LARGE_BYTES", 10)
    monkeypatch.setattr(folder, "_MOST_IN_FOLDER", 3)
    source = tmp_path / "source"
    for name in ("train.py", "out/last.pt", "data.parquet", "runs/a/config.yaml", ".git/HEAD", "env/pyvenv.cfg"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("short" if name == "train.py" else f"content of {name}, which is long")
    for number in range(5):
        (source / "images").mkdir(exist_ok=True)
        (source / f"images/{number}.png").touch()
    target = tmp_path / "target"
    copy_folder(source, target, without=[source / "runs"])
    (target / "out/last.pt").write_text("other")
    assert (source / "out/last.pt").read_text().startswith("content")
    assert sorted(path.name for path in target.iterdir()) == ["data.parquet", "env", "images", "out", "train.py"]
    assert {path.name for path in target.iterdir() if path.is_symlink()} == {"data.parquet", "env", "images"}


def test_what_the_code_names_beside_its_folder_is_copied_beside_the_copy(tmp_path: Path) -> None:
    for name in ("source/train.py", "data/MNIST/raw", "other/file", "out/last.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("MNIST('../data', out='../out/', more='../source/x', none='../gone')")
    target = tmp_path / "copy/source"
    target.parent.mkdir()
    copy_folder(tmp_path / "source", target, without=[])
    assert sorted(path.name for path in target.parent.iterdir()) == ["data", "out", "source"]
    (target / "../out/last.pt").write_text("other")
    assert (tmp_path / "out/last.pt").read_text().startswith("MNIST")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("out/last.pt", True),
        ("ckpt/step_10/optim", True),
        ("state", True),
        ("checkpoints.txt", False),
        ("model.py", False),
        ("train.log", False),
    ],
)
def test_checkpoints_are_known_by_their_names(name: str, expected: bool) -> None:
    assert is_checkpoint(name) is expected


def test_what_a_run_has_written_is_known(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a")
    (tmp_path / "changed").write_text("a")
    before = files_in(tmp_path)
    (tmp_path / "changed").write_text("ab")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file").touch()
    assert changed(before, files_in(tmp_path, without=["nothing"])) == {"changed", "new/file"}


@pytest.mark.parametrize(
    ("first", "second", "is_found"),
    [
        ("out/20261129-003521/last.pt", "out/20261129-003611/last.pt", True),
        ("outputs/2026-11-29/00-35-21/a.log", "outputs/2026-11-29/00-36-11/a.log", True),
        ("exp_1795912781/x", "exp_1795912799/x", True),
        ("logs/version_0/a/metrics.csv", "logs/version_1/a/metrics.csv", True),
        ("results/000-DiT/log.txt", "results/001-DiT/log.txt", True),
        ("out/3f9a1c07/last.pt", "out/b2220de1/last.pt", True),
        ("out/a-6fa459ea-ee8a-3ca4-894e-db77e160355e.pt", "out/a-16fd2706-8baf-433b-82eb-8c7fada847da.pt", True),
        ("out/brave-fox/last.pt", "out/shy-owl/last.pt", True),
        ("ckpt_20261129-003521.pt", "ckpt_20261129-003611.pt", True),
        # A log by time keeps no program from going on.
        ("train_20261129-003521.log", "train_20261129-003611.log", False),
        ("out/deadbeef/last.pt", "out/log.txt", False),
        ("step_00000100.pt", "step_00000200.pt", False),
        ("out/checkpoint-10/model.pt", "out/checkpoint-20/model.pt", False),
        ("out/samples_1/a.png", "out/log.txt", False),
        ("out/20261129-003521/last.pt", "out/20261129-003521/last.pt", False),
    ],
)
def test_folders_that_differ_in_a_time_or_a_number_alone_are_found(first: str, second: str, is_found: bool) -> None:
    assert (renamed_folder([first], [second]) is not None) is is_found


def test_a_folder_by_time_without_the_checkpoints_is_not_why_they_were_not_loaded() -> None:
    first = ["out/last.pt", "logs/20261129-003521/events"]
    assert renamed_folder(first, ["out/last.pt", "logs/20261129-003611/events"]) is None
    assert renamed_folder(first[1:], ["logs/20261129-003611/events"]) == "logs/<time>/events"


def test_the_folder_of_the_checkpoints_counts_before_the_second_start_has_saved() -> None:
    first = ["out/20261129-003521/last.pt", "out/20261129-003521/log"]
    assert renamed_folder(first, ["out/20261129-003611/log"]) == "out/<time>/last.pt"


def test_a_checkpoint_of_many_files_has_one_name() -> None:
    names = ["out/checkpoint-10/config.json", "out/checkpoint-10/model.safetensors", "out/last.pt"]
    assert in_folders(names) == ["out/checkpoint-10/", "out/last.pt"]
