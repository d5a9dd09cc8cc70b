"""Packages that are really installed in editable mode: a job imports the run's copy, whatever the layout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import REPOSITORY
from tests.support.installed_projects import LAYOUTS, Layout, install_editable, make_venv

pytestmark = pytest.mark.slow

SUBMIT = """
import json, os, sys
from pathlib import Path
from slurm_train.config.schema import RunConfig, RunSection
from slurm_train.code.provenance import read_environment
from slurm_train.code.snapshot import read_source, write_snapshot
from slurm_train.rundir.paths import RunDirectory

here, run, folders = Path.cwd(), RunDirectory(Path(sys.argv[1])), sys.argv[2:]
config = RunConfig(script=["train.py"], run=RunSection(snapshot_folders=folders))
source = read_source(run, config, here, env=os.environ)
run.path.mkdir(parents=True)
write_snapshot(source, run.code, index=run.code_index)
run.plan.write_text(json.dumps({"directory": str(here)}))
print(json.dumps({"roots": source.roots, "elsewhere": source.elsewhere, "names": list(source.files)}))
"""
JOB = """
import json, os, subprocess, sys
from importlib import import_module
from slurm_train.code.imports import import_from_snapshot

child_path, says = import_from_snapshot(sys.argv[1], python_path=os.environ["PYTHONPATH"])
module = import_module(sys.argv[2])
ask = f"import {sys.argv[2]} as m; print(m.VERSION)"
env = {**os.environ, "PYTHONPATH": child_path}
child = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, cwd="/").stdout.strip()
print(json.dumps({"version": module.VERSION, "file": module.__file__, "says": says, "child": child}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of a virtual environment of its own."""
    return make_venv(tmp_path_factory.mktemp("editable") / "venv")


@pytest.fixture(scope="module")
def projects(python: Path) -> dict[str, Path]:
    """The projects by name, all installed."""
    parent = python.parents[2]
    found = {layout.name: layout.write(parent) for layout in LAYOUTS}
    for options in {layout.options for layout in LAYOUTS}:
        install_editable(python, [found[one.name] for one in LAYOUTS if one.options == options], *options)
    return found


def runs(python: Path, code: str, *words: str, cwd: Path) -> dict[str, Any]:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([str(python), "-c", code, *words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def imported(python: Path, name: str) -> str:
    """Returns where a package comes from without any of this."""
    ask = f"import {name}, json; print(json.dumps({{'file': {name}.__file__}}))"
    return str(runs(python, ask, cwd=Path("/"))["file"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_job_imports_the_copy(layout: Layout, python: Path, projects: dict[str, Path], tmp_path: Path) -> None:
    project, run = projects[layout.name], tmp_path / "runs" / "a" / "1"
    submitted = runs(python, SUBMIT, str(run), cwd=project)
    assert imported(python, layout.name).startswith(str(project)), "it is installed in editable mode"
    layout.edit(project)
    answer = runs(python, JOB, str(run), layout.name, cwd=run / "code")
    assert answer["version"] == "old" and answer["file"] == f"{run}/code/{layout.folder}/__init__.py"
    assert any(layout.name in line and "run's copy" in line for line in answer["says"]), answer["says"]
    assert not [line for line in answer["says"] if "warning" in line]
    assert f"{layout.folder}/_version.py" in submitted["names"], "ignored by git, but not importable without it"
    if layout.name != "st_renamed":  # a child has setuptools' own finder, which nobody has told
        assert answer["child"] == "old"


def test_a_package_from_elsewhere_is_named_and_copied_if_asked(
    python: Path, projects: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    library, run = projects["flit_src"], tmp_path / "runs" / "a"
    alone = runs(python, SUBMIT, str(run / "1"), cwd=tmp_path / "project")
    assert f"{library}/src" in alone["elsewhere"]
    asked = runs(python, SUBMIT, str(run / "2"), str(library), cwd=tmp_path / "project")
    assert f"{library}/src" not in asked["elsewhere"]
    assert asked["roots"] == [".folders/flit_src/src"]
    version = runs(python, JOB, str(run / "2"), "flit_src", cwd=run / "2" / "code")
    assert version["file"] == f"{run}/2/code/.folders/flit_src/src/flit_src/__init__.py"
