from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.code.by_file import missing_beside
from slurm_train.code.git import SourceState
from slurm_train.code.program_source import read_program
from slurm_train.code.snapshot import plan_files, read_source, source_notes
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.rundir.paths import RunDirectory
from tests.support.plans import make_plan

BEGIN = """import os, sys
from os import path
from pathlib import Path
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT: Path = Path(__file__).resolve().parents[0]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in ("data/x.bin", "conf/a.yaml", "pkg/__init__.py", "pkg/vocab.bpe", "../Datasets/y"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def found(folder: Path, *, start: str = "train.py") -> list[str]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.suffix in (".py", ".yaml")}
    program = read_program(build_config(RunConfig, {"script": [start]}), folder, paths=[])
    return [str(beside) for beside in missing_beside(program, files=files, folder=folder)]


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ('os.path.join(HERE, "data", "x.bin")', "data/x.bin"),
        ('open(HERE + "/data/x.bin")', "data/x.bin"),
        ('str(ROOT / "data")', "data"),
        ('ROOT.joinpath("data")', "data"),
        ('f"{HERE}/data"', "data"),
        ('Path(__file__).with_name("data")', "data"),
        ('Path(os.path.realpath(__file__)).parent / "data"', "data"),
        ('path.join(path.dirname(__file__), "..", "Datasets")', "{above}/Datasets"),
        # What is in the copy, what is nowhere, and folders above that others are made from.
        ('ROOT / "conf" / "a.yaml"', ""),
        ('ROOT / "conf"', ""),
        ('ROOT / "out"', ""),
        ('sys.path.append(os.path.join(os.path.dirname(__file__), ".."))', ""),
        ("HERE, ROOT, Path(__file__).name", ""),
        # What is relative to the folder, or known only when it runs.
        ('open("data/x.bin")', ""),
        ('os.path.join(HERE, os.environ["DATA"])', ""),
    ],
)
def test_what_is_looked_for_by_file_and_not_copied_is_found(folder: Path, line: str, path: str) -> None:
    (folder / "train.py").write_text(f"{BEGIN}{line}\n")
    wanted = f"{path.format(above=os.path.realpath(folder.parent))} (train.py, line 6)"
    assert found(folder) == ([wanted] if path else [])


def test_only_what_the_program_imports_is_looked_at(folder: Path) -> None:
    looks = 'from pathlib import Path\nV = Path(__file__).with_name("vocab.bpe")\n'
    (folder / "train.py").write_text("def main():\n    from pkg import tokens\n")
    (folder / "pkg" / "tokens.py").write_text("from .inner.deep import x\n")
    (folder / "pkg" / "inner").mkdir()
    (folder / "pkg" / "inner" / "deep.py").write_text("from .. import words\nx = 1\n")
    (folder / "pkg" / "words.py").write_text(looks)
    (folder / "setup.py").write_text('from pathlib import Path\nPath(__file__).with_name("data")\n')
    (folder / "broken.py").write_text("not python")
    assert found(folder) == ["pkg/vocab.bpe (pkg/words.py, line 2)"]
    assert found(folder, start="broken.py") == [] and found(folder, start="nowhere.py") == []


def test_the_submission_names_it(folder: Path, tmp_path: Path) -> None:
    (folder / "train.py").write_text(f'{BEGIN}os.path.join(HERE, "data", "x.bin")\n')
    plan = make_plan(folder, script=["train.py"])
    source = read_source(RunDirectory(tmp_path / "runs/a/1"), plan.config, folder, SourceState(), env={})
    (note,) = source_notes(source)
    assert "data/x.bin (train.py, line 6)" in note and "absolute path" in note


def test_outside_of_git_small_files_of_packages_are_copied_and_data_sets_are_not(folder: Path, tmp_path: Path) -> None:
    (folder / "pkg" / "assets").mkdir()
    (folder / "pkg" / "assets" / "prompt.jinja").touch()
    (folder / "pkg" / "weights.bin").write_bytes(bytes((1 << 20) + 1))
    (folder / "pkg" / "images").mkdir()
    for number in range(101):
        (folder / "pkg" / "images" / f"{number}.png").touch()
    names, left_out = plan_files(folder, SourceState(), limit_mb=1, exclude=tmp_path / "runs")
    assert sorted(names) == ["conf/a.yaml", "pkg/__init__.py", "pkg/assets/prompt.jinja", "pkg/vocab.bpe"]
    assert left_out == []
