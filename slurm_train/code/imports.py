"""Where Python finds a user's packages, and how a job imports them from the run's copy of the code.

A package that is installed in editable mode, or found through PYTHONPATH, is imported from where its files are edited,
so it could change while a job is queued. Python finds such a package by an entry of `sys.path` (a .pth file,
PYTHONPATH) or by setuptools' finder, which has a table of packages and folders. Both are read from the running
interpreter, which costs no time and works for every build backend. In the job the copies are put at the beginning of
`sys.path` and into the finders' tables. Then Python itself is asked where it would import each package from, and the
answer is printed.

Uses the standard library only, and strings for paths: a user's script begins with these imports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
# Files that builds write next to the sources; git ignores them, but a package cannot be imported without them.
_BUILT_NAMES = ("_version.py", "version.py", "__version__.py")
_BUILT_SUFFIXES = (*EXTENSION_SUFFIXES, ".so")
# Modules that exist in many projects and that no run imports.
_NOT_IMPORTED = ("setup", "conftest")


def own_paths() -> list[str]:
    """Returns `sys.path` without the folder of the script or of the shell that Python puts in front at its start."""
    return sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]


def is_below(path: str, folder: str) -> bool:
    """Returns whether a resolved path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_installed(path: str) -> bool:
    """Returns whether a folder belongs to Python or has installed packages, as in a project's .venv."""
    return any(part in _INSTALLED for part in path.split("/")) or is_below(path, _STANDARD_LIBRARY)


def _tables(finders: Iterable[Any]) -> list[dict[str, str]]:
    """Returns the tables of setuptools' finders: package and its folder, or module and its file."""
    tables = []
    for finder in finders:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        table = getattr(module, "MAPPING", None)
        if isinstance(table, dict):
            tables.append(table)
    return tables


# --- on the login node ---


def import_roots(folder: str, paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns the places in a folder that packages are imported from, relative to it: "" for itself, or "src".

    Args:
        folder: a folder with code of the user's.
        paths: `sys.path`, see `own_paths`.
        finders: `sys.meta_path`.
    """
    candidates = list(paths)
    for table in _tables(finders):
        for name, place in table.items():
            # The folder above is a place to import from only if the folder has the package's name.
            if os.path.splitext(os.path.basename(place))[0] == name:
                candidates.append(os.path.dirname(place))
    live = os.path.realpath(folder)
    roots: list[str] = []
    for candidate in candidates:
        if not candidate or not os.path.isdir(candidate):
            continue
        place = os.path.realpath(candidate)
        if not is_below(place, live) or is_installed(place):
            continue
        root = "" if place == live else os.path.relpath(place, live)
        if root not in roots:
            roots.append(root)
    return roots


def code_elsewhere(folders: Iterable[str], paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns the folders outside of some folders from which packages are imported and which the user may edit.

    The folder of this package is left out.

    Args:
        folders: the folders that are copied.
        paths: `sys.path`, see `own_paths`.
        finders: `sys.meta_path`.
    """
    candidates = list(paths)
    for table in _tables(finders):
        candidates += [os.path.dirname(place) for place in table.values()]
    copied = [os.path.realpath(folder) for folder in folders]
    places = dict.fromkeys(os.path.realpath(candidate) for candidate in candidates if candidate)
    elsewhere: list[str] = []
    for place in places:
        if is_installed(place) or any(is_below(place, folder) for folder in copied):
            continue
        is_editable = os.access(place, os.R_OK | os.W_OK | os.X_OK) and os.path.isdir(place)
        if is_editable and not os.path.exists(os.path.join(place, "slurm_train", "__init__.py")):
            elsewhere.append(place)
    return elsewhere


def built_modules(folder: str, names: Iterable[str]) -> list[str]:
    """Returns built files that git ignores but that a package needs for its import.

    Only folders with Python files are searched.

    Args:
        folder: the folder that `names` are relative to.
        names: the files that are part of the code anyway.
    """
    listed = set(names)
    packages = {name.rpartition("/")[0] for name in listed if name.endswith(".py")}
    built: list[str] = []
    for package in packages:
        with contextlib.suppress(FileNotFoundError):  # git lists deleted files as well
            for entry in os.scandir(os.path.join(folder, package)):
                name = os.path.join(package, entry.name)
                is_built = entry.name in _BUILT_NAMES or entry.name.endswith(_BUILT_SUFFIXES)
                if is_built and name not in listed and entry.is_file():
                    built.append(name)
    return sorted(built)


# --- in the job ---


def installed_paths() -> list[str]:
    """Returns the folders that installed packages are imported from, the standard library's among them."""
    return [path for path in own_paths() if is_installed(path) and os.path.isdir(path)]


def import_from_stage(stage: str) -> str:
    """Makes this process import installed packages from the copies on this node's own disk, if there are any.

    After each copy, the original folder stays in `sys.path`: cleaners of /tmp may remove files while a job runs. A
    variable such as PYTHONPATH is not used, since it would affect every other Python that a rank starts.

    Args:
        stage: folder of the copies, each at its path below it; the folder above it is this user's own.

    Returns:
        Why nothing is imported from there; "" if packages are, or if this node has no copies.
    """
    from slurm_train.rundir.node_disk import folder_without_names, is_private

    if not os.path.isdir(stage):
        return ""
    # Each rank checks this, since days may pass between the copy and an import.
    top = os.path.dirname(stage)
    if not (is_private(top) and is_private(stage)):
        return f"{stage} is not a folder that only you can enter"
    folder = folder_without_names(top)
    if folder is not None:
        return f"anybody may rename what lies in {folder}"
    paths = []
    for path in sys.path:
        if is_installed(path) and os.path.isdir(stage + path):
            paths.append(stage + path)
        paths.append(path)
    sys.path[:] = paths
    # These packages are imported already; their further modules come from the copy.
    for name in ("slurm_train", "slurm_train.code", "slurm_train.rundir"):
        folders = sys.modules[name].__path__
        folders[:0] = [stage + path for path in folders if os.path.isdir(stage + path)]
    sys.meta_path.append(_InstalledFallback(stage))
    importlib.invalidate_caches()
    return ""


class _InstalledFallback:
    """Finds a module that is missing in a copied package in the folder where the package is installed."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by Python after all other finders, with the folders of the package that the module belongs to."""
        installed = [place[len(self._stage) :] for place in path or () if place.startswith(f"{self._stage}/")]
        return PathFinder.find_spec(name, installed, target) if installed else None


def import_from_snapshot(run: str, *, python_path: str) -> tuple[str, list[str]]:
    """Makes this process import the user's packages from a run's snapshot.

    Args:
        run: the run directory.
        python_path: PYTHONPATH so far.

    Returns:
        PYTHONPATH for child processes, and lines for the person about the places that packages come from.
    """
    code = os.path.realpath(os.path.join(run, "code"))
    if not os.path.isdir(code):
        return python_path, []
    record = _read(os.path.join(run, "code.json"))
    copies = _copies_of(record, code, directory=_read(os.path.join(run, "plan.json")).get("directory"))
    recorded = [os.path.normpath(os.path.join(code, root)) for root in record.get("roots", [])]
    # Runs and a virtual environment may lie inside the project.
    places = [os.path.realpath(path) for path in sys.path if path]
    editable = [place for place in places if not is_installed(place) and not is_below(place, code)]
    copied = [copy_of(place, copies) for place in editable]
    copy_places = [place for place in dict.fromkeys([code, *recorded, *copied]) if place and os.path.isdir(place)]
    sys.path[:] = [*copy_places, *(path for path in sys.path if os.path.realpath(path) not in copy_places)]

    # A copied folder may contain any files, so it is searched only if packages are imported from it.
    searched = [place for place in copy_places if place != code or code in recorded]
    searched += [place for place in editable if place not in copies and copy_of(place, copies) and os.path.isdir(place)]
    names = _redirect(copies, sys.meta_path)
    for place in searched:
        names |= packages_in(place)
    importlib.invalidate_caches()
    from_copy: list[str] = []
    lines: list[str] = []
    for name in sorted(names):
        place = os.path.realpath(_place_of(name) or "/")
        if is_below(place, code):
            from_copy.append(name)
        elif copy_of(place, copies) is not None:
            lines.append(
                f"warning: {name} is imported from where it is edited, not from the run's copy of the code: {place}"
            )
    if from_copy:
        lines.insert(0, f"imported from the run's copy of the code: {', '.join(from_copy)}")
    search = [path for path in sys.path if is_below(path, code)]
    for folder in python_path.split(os.pathsep):
        if folder and folder not in search:
            search.append(folder)
    return os.pathsep.join(search), lines


def _copies_of(record: Mapping[str, Any], code: str, *, directory: str | None) -> dict[str, str]:
    """Returns the copy by copied folder, see `copy_of`.

    Args:
        record: `code.json` of the run.
        code: the snapshot.
        directory: where the run was typed; the record has priority over it.
    """
    folders = {"": directory, **record.get("folders", {})}
    copies: dict[str, str] = {}
    for place, folder in folders.items():
        if folder:
            copies[os.path.realpath(folder)] = os.path.normpath(os.path.join(code, place))
    return copies


def copy_of(path: str, copies: Mapping[str, str]) -> str | None:
    """Returns the place in a snapshot that replaces a path, None for a path in no copied folder; all resolved.

    Args:
        path: e.g. "/home/ada/project/src".
        copies: the copy by copied folder, e.g. {"/home/ada/project": "/runs/gpt/1/code"}.
    """
    for live, copy in copies.items():
        if is_below(path, live):
            return copy + path[len(live) :]
    return None


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _redirect(copies: Mapping[str, str], finders: Iterable[Any]) -> set[str]:
    """Puts the copies into the finders' tables; returns the top-level names of all packages in the copied folders."""
    names = set()
    for table in _tables(finders):
        for name, place in list(table.items()):
            copy = copy_of(os.path.realpath(place), copies)
            if copy is not None:
                names.add(name.partition(".")[0])
                table[name] = copy if os.path.exists(copy) else place
    return names


def packages_in(folder: str) -> set[str]:
    """Returns the names of the packages and modules in a folder."""
    names: set[str] = set()
    for entry in os.scandir(folder):
        if entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py")):
            names.add(entry.name)
        elif entry.name.endswith(".py"):
            names.add(entry.name[:-3])
    return {name for name in names if name.isidentifier() and name not in _NOT_IMPORTED}


def _place_of(name: str) -> str | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), None)
