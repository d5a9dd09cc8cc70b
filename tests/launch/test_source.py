from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.launch.code_index import index_code
from slurm_train.launch.snapshot import SourceState, write_snapshot
from slurm_train.launch.source import Source, read_source, uses_own_code
from tests.support.plans import make_plan

NO_GIT = SourceState(None, None, "")

OWN_CODE: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"script": ["train.sh"]}, True),
    ({"task": {"_target_": "my.main"}}, True),
    ({"model": {"_target_": "my.Model"}}, True),
    ({"data": {"_target_": "my.Data"}}, True),
]


@pytest.mark.parametrize(("sections", "own"), OWN_CODE)
def test_own_code_is_told_from_ours(sections: dict[str, Any], own: bool, tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text("")
    plan = make_plan(tmp_path, **sections)
    assert uses_own_code(plan) is own
    files = list(read_source(plan, tmp_path, NO_GIT, env=os.environ).files)
    assert files == (["any.py"] if own else []), "outside git nothing is copied that no job would need"


def test_inside_git_the_code_is_always_kept_and_the_runs_never(tmp_path: Path) -> None:
    for name in ("any.py", "runs/gpt-stdlib/x/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    state = SourceState(("any.py", "runs/gpt-stdlib/x/config.yaml"), None, "")
    assert list(read_source(make_plan(tmp_path), tmp_path, state, env=os.environ).files) == ["any.py"]


@pytest.mark.parametrize("root", [".", ".."])
def test_a_root_that_holds_the_code_leaves_only_the_run_out(root: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    plan = make_plan(project, run={"root": root})
    inside = plan.run.config
    for path in (project / "any.py", inside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    names = ("any.py", os.path.relpath(inside, project))
    assert list(read_source(plan, project, SourceState(names, None, ""), env=os.environ).files) == ["any.py"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A project, and a folder with code beside it."""
    for name in ("project/train.py", "library/src/lib/__init__.py", "more/library/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path / "library"


def planned(project: Path, *folders: str) -> Source:
    plan = make_plan(project, script=["train.py"], run={"snapshot_folders": list(folders)})
    return read_source(plan, project, NO_GIT, env=os.environ)


def test_further_folders_have_a_place_of_their_own(library: Path) -> None:
    project = library.parent / "project"
    source = planned(project, "../library", str(library.parent / "more" / "library"))
    assert source.names == [
        "train.py",
        ".folders/library/src/lib/__init__.py",
        ".folders/library-2/other.py",
    ]
    assert [source.file(name).read_text() for name in source.names] == [
        "project/train.py",
        "library/src/lib/__init__.py",
        "more/library/other.py",
    ]
    target = library.parent / "code"
    write_snapshot(source.directory, source.files, target, others=source.others)
    assert index_code(target.joinpath, source.names) == source.index()


def test_packages_of_further_folders_are_imported_from_the_copy(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(library / "src"))
    monkeypatch.syspath_prepend("")
    project = library.parent / "project"
    assert (planned(project).roots, list(planned(project).elsewhere)) == ([], [str(library / "src")])
    asked = planned(project, "../library")
    assert (asked.roots, list(asked.elsewhere)) == ([".folders/library/src"], [])


NO_FURTHER_ONES = [("../none", "is not a folder"), ("../project/inner", "which is copied anyway")]


@pytest.mark.parametrize(("folder", "text"), NO_FURTHER_ONES)
def test_a_folder_that_cannot_be_a_further_one_is_refused(folder: str, text: str, library: Path) -> None:
    (library.parent / "project" / "inner").mkdir()
    with pytest.raises(ConfigError, match=f"run.snapshot_folders: {folder} .*{text}"):
        planned(library.parent / "project", folder)


def test_code_elsewhere_is_nothing_to_a_run_of_shipped_code(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(library / "src"))
    monkeypatch.syspath_prepend("")
    project = library.parent / "project"
    source = read_source(make_plan(project), project, SourceState(("train.py",), None, ""), env=os.environ)
    assert list(source.elsewhere) == []
