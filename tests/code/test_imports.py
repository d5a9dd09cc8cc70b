"""Where Python looks for a user's packages, and that the copies come first; real installs: test_editable_installs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from slurm_train.code.imports import (
    built_modules,
    import_roots,
)


def finder(monkeypatch: pytest.MonkeyPatch, table: dict[str, str]) -> type:
    """Returns a finder as setuptools writes it: a class in a module of its own, with a table beside it."""
    module = ModuleType("__editable___mine_finder")
    module.MAPPING = table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return type("_EditableFinder", (), {"__module__": module.__name__})


def folders(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)


def test_places_in_a_folder_are_told_relative_to_it(tmp_path: Path) -> None:
    folders(tmp_path, "project/src", "project/.hidden/src", "project/.venv/lib/python3.11/site-packages", "other")
    paths = ["src", ".hidden/src", ".venv/lib/python3.11/site-packages", "gone", "."]
    here = [str(tmp_path / "project" / path) for path in paths]
    outside = ["", str(tmp_path / "other"), sysconfig.get_path("stdlib")]
    assert import_roots(str(tmp_path / "project"), [*here, *outside], []) == ["src", ".hidden/src", ""]


def test_setuptools_table_names_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "python/mine", "lib", "more/extra")
    table = {name: str(tmp_path / place) for name, place in (("mine", "python/mine"), ("called", "lib"))}
    table |= {"mine.extra": str(tmp_path / "more" / "extra")}
    finders = [finder(monkeypatch, table)]
    assert import_roots(str(tmp_path), [], finders) == ["python"]


def test_built_modules_lie_beside_sources_that_are_imported(tmp_path: Path) -> None:
    built = ["src/mine/_version.py", "src/mine/ext.cpython-311-x86_64-linux-gnu.so"]
    for name in ("src/mine/a.py", "src/mine/keys.txt", "tools/_version.py", *built):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert built_modules(str(tmp_path), ["src/mine/a.py", "src/gone/c.py"]) == built
    assert built_modules(str(tmp_path), ["src/mine/a.py", *built]) == []


def test_the_copy_of_each_place_takes_its_place(tmp_path: Path) -> None:
    code = "import json, sys\nfrom slurm_train.code.imports import import_from_snapshot\n"
    code += "child, says = import_from_snapshot(sys.argv[1], python_path=sys.argv[2])\nimport packed, plain, near\n"
    code += "print(json.dumps([packed.__file__, plain.__file__, near.__file__, child, says]))"
    live, run = tmp_path / "live", tmp_path / "live" / "runs" / "a" / "1"
    for path in (live, run / "code"):
        for name in ("src/packed/__init__.py", "plain.py"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).touch()
    (live / "src" / "late.py").touch()
    neighbour = tmp_path / "live2"
    neighbour.mkdir()
    (neighbour / "near.py").touch()
    (run / "plan.json").write_text(json.dumps({"directory": str(live)}))
    toolkit = str(Path(__file__).resolve().parents[2])
    path = f"{live}/src:{live}:{neighbour}:{toolkit}"
    words = [sys.executable, "-c", code, str(run), f"{path}:{run}/code:"]
    done = subprocess.run(words, env={"PYTHONPATH": path}, cwd="/", capture_output=True, text=True, check=True)
    *files, child, says = json.loads(done.stdout)
    assert files == [f"{run}/code/src/packed/__init__.py", f"{run}/code/plain.py", f"{neighbour}/near.py"]
    assert child == f"{run}/code:{run}/code/src:{path}"
    assert says == [
        "imported from the run's copy of the code: packed",
        f"warning: late is imported from where it is edited, not from the run's copy of the code: {live}/src/late.py",
    ]


def test_installed_packages_come_from_the_stage_where_they_are_there(tmp_path: Path) -> None:
    installed, stage = tmp_path / "env" / "site-packages", tmp_path / "stage"
    copied = Path(f"{stage}{installed}")
    # A rank imports only from a folder that nobody else may enter.
    stage.mkdir(mode=0o700)
    for folder in (installed, copied):
        folder.mkdir(parents=True)
        (folder / "mine.py").touch()
        (folder / "slurm_train").symlink_to(Path(__file__).parents[2] / "slurm_train")
    code = "import json, sys\nfrom slurm_train.code.imports import import_from_stage\nimport_from_stage(sys.argv[1])\n"
    code += "import mine, json.tool, slurm_train.rundir.paths as paths\n"
    code += "print(json.dumps([mine.__file__, json.tool.__file__, paths.__file__]))"
    words = [sys.executable, "-S", "-c", code, str(stage)]
    env = {"PYTHONPATH": f"{installed}:{sysconfig.get_path('purelib')}"}
    done = subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, check=True)
    mine, tool, own = json.loads(done.stdout)
    assert mine == f"{copied}/mine.py" and own == f"{copied}/slurm_train/rundir/paths.py"
    assert tool.startswith(sysconfig.get_path("stdlib")), "what is not there comes from where it is installed"
