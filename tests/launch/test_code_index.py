from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.launch.code_index import compare_code, index_code, matters, read_index, require_sealed, seal_code
from slurm_train.launch.snapshot import write_snapshot
from slurm_train.rundir.layout import RunDirectory

NAMES = ["pkg/model.py", "train.py", "README.md"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(f"{name}\none\ntwo\n")
    return folder


@pytest.fixture
def run(tmp_path: Path, project: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    write_snapshot(project, NAMES, run.code)
    seal_code(run.code, NAMES, record=run.code_index, facts={})
    return run


def test_a_snapshot_cannot_be_written_by_mistake_and_can_be_removed(run: RunDirectory) -> None:
    modes = {path.stat().st_mode & 0o222 for path in run.code.rglob("*") if path.is_file()}
    assert modes == {0}
    (run.code / "__pycache__").mkdir()
    (run.code / "__pycache__" / "train.cpython-311.pyc").write_bytes(b"")
    require_sealed(run)
    shutil.rmtree(run.code)


def edit(run: RunDirectory) -> None:
    path = run.code / "train.py"
    path.chmod(0o600)
    path.write_text("other")


TOUCHED = {
    "train.py: changed": edit,
    "pkg/model.py: gone, changed": lambda run: (run.code / "pkg" / "model.py").unlink(),
    "pkg/json.py: new, changed": lambda run: (run.code / "pkg" / "json.py").write_text("shadows another module"),
    "yaml: new, changed": lambda run: (run.code / "yaml").symlink_to(run.path.parent / "project" / "pkg"),
}


@pytest.mark.parametrize("text", TOUCHED)
def test_whatever_touches_it_is_found_and_named(text: str, run: RunDirectory) -> None:
    TOUCHED[text](run)
    with pytest.raises(RunError, match=f"is not what was submitted: {text}") as caught:
        require_sealed(run)
    assert f"`resume {run.run_id} --accept code`" in caught.value.hint


def test_a_run_of_an_older_version_has_no_hashes_and_is_let_pass(run: RunDirectory) -> None:
    run.code_index.unlink()
    edit(run)
    require_sealed(run)


def test_changes_are_counted_in_lines(run: RunDirectory, project: Path) -> None:
    (project / "train.py").write_text("train.py\nONE\ntwo\nthree\n--x\n")
    (project / "pkg" / "model.py").unlink()
    (project / "new.bin").write_bytes(b"\xff\xfe")
    old = read_index(run)
    assert old is not None
    new = index_code(project.joinpath, [*NAMES, "new.bin"])
    changes = compare_code(old, new, old_file=run.code.joinpath, new_file=project.joinpath)
    assert [str(change) for change in changes] == [
        "new.bin: new, changed",
        "pkg/model.py: gone, +0 -3",
        "train.py: +3 -1",
    ]


def test_papers_do_not_matter_and_without_own_code_only_this_package_does(run: RunDirectory, project: Path) -> None:
    assert not matters("README.md", is_own_code=True) and matters("pkg/model.py", is_own_code=True)
    assert matters("slurm_train/data/order.py", is_own_code=False) and not matters("mine.py", is_own_code=False)
    index = read_index(run)
    (project / "README.md").write_text("other words")
    assert index is not None
    assert index_code(project.joinpath, NAMES).digest(is_own_code=True) == index.digest(is_own_code=True)
    (project / "train.py").write_text("other code")
    assert index_code(project.joinpath, NAMES).digest(is_own_code=True) != index.digest(is_own_code=True)


def test_names_that_are_not_text_are_hashed(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (tmp_path / name).write_text("x")
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    write_snapshot(tmp_path, [name], run.code)
    seal_code(run.code, [name], record=run.code_index, facts={})
    require_sealed(run)
