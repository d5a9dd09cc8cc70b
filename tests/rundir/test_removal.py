"""What is removed, and what a removal leaves: everything behind a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.rundir import removal
from slurm_train.rundir.removal import remove_tree


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a file, to which links lead."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "kept").touch()
    return folder


def test_a_folder_goes_with_all_in_it_and_links_lead_nowhere(tmp_path: Path, elsewhere: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").touch()
    os.mkfifo(tree / "pipe")
    for number in range(100):
        (tree / "a" / "b" / f"{number}").touch()
    for link in (tree / "folder", tree / "a" / "b" / "folder", tmp_path / "top"):
        link.symlink_to(elsewhere)
    (tree / "file").symlink_to(elsewhere / "kept")
    for path in (tree, tmp_path / "top", tmp_path / "absent"):
        remove_tree(path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "kept"]


def test_a_folder_that_is_exchanged_for_a_link_meanwhile_takes_nothing_with_it(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "kept").touch()
    listdir = os.listdir

    def exchange_then_list(folder: int) -> list[str]:
        names = listdir(folder)
        if names == ["kept"] and not (tree / "a").is_symlink():
            (tree / "a").rename(tmp_path / "moved")
            (tree / "a").symlink_to(elsewhere)
        return names

    monkeypatch.setattr(removal.os, "listdir", exchange_then_list)
    with pytest.raises(NotADirectoryError):
        remove_tree(tree)
    assert (elsewhere / "kept").exists() and not (tmp_path / "moved" / "kept").exists()


def test_what_resists_is_an_error_after_the_rest_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "resists", "third"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    rmdir = os.rmdir

    def refuse(name: str, *, dir_fd: int) -> None:
        if name == "resists":
            raise PermissionError(1, "refused", name)
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(removal.os, "rmdir", refuse)
    with pytest.raises(PermissionError, match="resists"):
        remove_tree(tmp_path / "tree")
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["resists"]
