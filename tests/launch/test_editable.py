"""Where Python looks for a user's packages, told from plain values; really installed ones: test_editable_installs."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from slurm_train.launch.editable import (
    built_modules,
    code_elsewhere,
    import_roots,
    is_installed,
    package_folders,
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


def test_a_link_to_the_folder_is_the_folder(tmp_path: Path) -> None:
    folders(tmp_path, "project/src")
    (tmp_path / "home").symlink_to(tmp_path / "project")
    assert import_roots(str(tmp_path / "project"), [str(tmp_path / "home" / "src")], []) == ["src"]
    assert import_roots(str(tmp_path / "home"), [str(tmp_path / "project" / "src")], []) == ["src"]


def test_setuptools_table_names_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "python/mine", "lib", "more/extra")
    table = {name: str(tmp_path / place) for name, place in (("mine", "python/mine"), ("called", "lib"))}
    table |= {"mine.extra": str(tmp_path / "more" / "extra")}
    finders = [finder(monkeypatch, table)]
    assert import_roots(str(tmp_path), [], finders) == ["python"]
    assert package_folders(str(tmp_path), [], finders) == ["python/mine", "lib", "more/extra"]


@pytest.mark.parametrize(
    ("path", "installed"),
    [
        (sysconfig.get_path("purelib"), True),
        (sysconfig.get_path("stdlib"), True),
        ("/home/ada/project/.venv/lib/python3.11/site-packages", True),
        ("/usr/lib/python3/dist-packages", True),
        ("/home/ada/project/src", False),
    ],
)
def test_what_is_installed_is_nobodys_to_edit(path: str, installed: bool) -> None:
    assert is_installed(path) is installed


def test_code_elsewhere_is_what_the_user_may_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "project/src", "library", "toolkit/slurm_train", "copied/src")
    (tmp_path / "toolkit" / "slurm_train" / "__init__.py").touch()
    paths = [str(tmp_path / name) for name in ("project/src", "library", "toolkit", "copied/src", "gone")]
    paths += [sysconfig.get_path("purelib"), "/usr/share" if not Path("/usr/share").stat().st_mode & 0o002 else "/gone"]
    copied = [str(tmp_path / "project"), str(tmp_path / "copied")]
    monkeypatch.setattr("os.access", lambda path, _mode: not str(path).startswith("/usr"))
    assert code_elsewhere(copied, paths, []) == [str(tmp_path / "library")]
    assert code_elsewhere(copied, [], [finder(monkeypatch, {"x": str(tmp_path / "library" / "x")})]) == [
        str(tmp_path / "library")
    ]


def test_built_modules_lie_beside_sources_that_are_imported(tmp_path: Path) -> None:
    for name in ("src/mine/a.py", "src/mine/_version.py", "src/mine/ext.cpython-311-x86_64-linux-gnu.so", "tools/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tools" / "_version.py").touch()
    (tmp_path / "src" / "mine" / "keys.py").touch()
    known = ["src/mine/a.py", "tools/b.py", "src/gone/c.py"]
    built = ["src/mine/_version.py", "src/mine/ext.cpython-311-x86_64-linux-gnu.so"]
    assert built_modules(str(tmp_path), known, ["src"]) == built
    assert built_modules(str(tmp_path), known, [""]) == [*built, "tools/_version.py"]
    assert built_modules(str(tmp_path), [*known, *built], ["src"]) == []
    assert built_modules(str(tmp_path), known, []) == []
