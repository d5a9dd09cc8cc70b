"""Where Python looks for a user's packages, and that the copies come first; real installs: test_editable_installs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from slurm_train.launch.imports import (
    CopiedFolder,
    Imports,
    built_modules,
    child_path,
    code_elsewhere,
    import_from_snapshot,
    import_roots,
    is_installed,
    package_folders,
    read_copies,
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


def test_the_copy_of_each_place_takes_its_place(tmp_path: Path) -> None:
    code = "import sys; from slurm_train.launch.imports import import_from_snapshot; import json;\n"
    code += "imports = import_from_snapshot(sys.argv[1], python_path=sys.argv[2])\n"
    code += "import packed, plain; print(json.dumps([packed.__file__, plain.__file__, imports.child_path]))"
    live, run = tmp_path / "live", tmp_path / "live" / "runs" / "a" / "1"
    for root in (live, run / "code"):
        for name in ("src/packed/__init__.py", "plain.py"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    (run / "plan.json").write_text(json.dumps({"directory": str(live)}))
    toolkit = str(Path(__file__).resolve().parents[2])
    path = f"{live}/src:{live}:{toolkit}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), path],
        env={"PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    packed, plain, child = json.loads(done.stdout)
    assert (packed, plain) == (f"{run}/code/src/packed/__init__.py", f"{run}/code/plain.py")
    assert child == f"{run}/code:{run}/code/src:{path}"


def test_without_a_copy_nothing_changes(tmp_path: Path) -> None:
    before = list(sys.path)
    assert import_from_snapshot(str(tmp_path), python_path="/a:/b").child_path == "/a:/b"
    assert sys.path == before


def test_a_record_says_which_folders_were_copied(tmp_path: Path) -> None:
    record = {"folders": {"": "/home/ada/project", ".folders/lib": "/home/ada/lib"}, "roots": ["src"], "files": {}}
    assert read_copies(str(tmp_path), record, folder="/elsewhere") == [
        CopiedFolder("/home/ada/project", str(tmp_path)),
        CopiedFolder("/home/ada/lib", f"{tmp_path}/.folders/lib"),
    ]


def test_a_neighbour_whose_name_begins_alike_is_not_the_folder() -> None:
    folder = CopiedFolder("/home/ada/project", "/run/code")
    assert folder.copy_of("/home/ada/project2/x.py") is None
    assert folder.copy_of("/home/ada/project/src/x.py") == "/run/code/src/x.py"


def test_children_get_the_copies_first_and_once() -> None:
    paths = ["/run/code", "/run/code/src", "/live", "/usr/lib"]
    copies = [CopiedFolder("/live", "/run/code")]
    assert child_path(paths, copies, "/run/code:/live:") == "/run/code:/run/code/src:/live"


def test_what_is_printed() -> None:
    copied = {"mine": "/run/code/mine/__init__.py", "more": "/run/code/more.py"}
    assert Imports("", copied, {"late": "/live/late.py"}).lines() == [
        "imported from the run's copy of the code: mine, more",
        "warning: late is imported from where it is edited, not from the run's copy of the code: /live/late.py",
    ]
