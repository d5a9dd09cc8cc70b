"""Where Python finds a user's packages, and how a job is made to import them from the run's copy of the code.

A package that is installed in editable mode, or found through PYTHONPATH, is imported from where its files are edited,
and so would change under a queued job. Python knows such a place as an entry of `sys.path` (a .pth file, PYTHONPATH) or
by setuptools' finder, a table of packages and folders. Both are read from the running interpreter: that costs nothing,
and holds for every build backend. In the job the copies are put in front of `sys.path` and into the finders' tables;
then Python is asked where it would import each package from, so that what is printed is true.

Standard library alone, strings throughout: a user's script begins with this.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
# What builds write next to the sources and git is told to ignore, though the package does not import without it.
_BUILT_NAMES = ("_version.py", "version.py", "__version__.py")
_BUILT_SUFFIXES = (*EXTENSION_SUFFIXES, ".so")
# Modules that lie in many projects and that no run imports.
_NOT_IMPORTED = ("setup", "conftest")


def own_paths() -> list[str]:
    """Returns `sys.path` without the folder that the way of starting Python has put in front."""
    return sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]


def is_below(path: str, folder: str) -> bool:
    """Returns whether a resolved path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_installed(path: str) -> bool:
    """Returns whether a folder is Python's own or one that packages are installed to, as in a project's .venv."""
    return any(part in _INSTALLED for part in path.split("/")) or is_below(path, _STANDARD_LIBRARY)


def _tables(finders: Iterable[Any]) -> list[dict[str, str]]:
    """Returns the tables of setuptools' finders: package and its folder, or module and its file."""
    modules = (sys.modules.get(getattr(finder, "__module__", "")) for finder in finders)
    found = [getattr(module, "MAPPING", None) for module in modules if module is not None]
    return [table for table in found if isinstance(table, dict)]


# --- on the login node ---


def import_roots(folder: str, paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns the places in a folder that packages are imported from, relative to it: "" for itself, or "src".

    Args:
        folder: a folder with code of the user's.
        paths: `sys.path`, see `own_paths`.
        finders: `sys.meta_path`.
    """
    # Only a folder that has the package's name makes the folder above it a place to import from.
    mapped = [
        os.path.dirname(place)
        for table in _tables(finders)
        for name, place in table.items()
        if os.path.splitext(os.path.basename(place))[0] == name
    ]
    return _inside(folder, (*paths, *mapped))


def package_folders(folder: str, paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns `import_roots`, and the folders of packages that have other names than their folders."""
    return _inside(folder, (*paths, *(place for table in _tables(finders) for place in table.values())))


def _inside(folder: str, places: Iterable[str]) -> list[str]:
    live = os.path.realpath(folder)
    real = [os.path.realpath(place) for place in places if place and os.path.isdir(place)]
    inside = [place for place in real if is_below(place, live) and not is_installed(place)]
    return list(dict.fromkeys("" if place == live else os.path.relpath(place, live) for place in inside))


def code_elsewhere(folders: Sequence[str], paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns the folders that packages are imported from, that the user may edit, and that lie outside some folders.

    This package's own is left out: who edits it knows.

    Args:
        folders: what is copied.
        paths: `sys.path`, see `own_paths`.
        finders: `sys.meta_path`.
    """
    mapped = (os.path.dirname(place) for table in _tables(finders) for place in table.values())
    copied = [os.path.realpath(folder) for folder in folders]
    found = dict.fromkeys(os.path.realpath(place) for place in (*paths, *mapped) if place)
    return [
        place
        for place in found
        if not is_installed(place)
        and not any(is_below(place, folder) for folder in copied)
        and os.access(place, os.R_OK | os.W_OK | os.X_OK)
        and os.path.isdir(place)
        and not os.path.exists(os.path.join(place, "slurm_train", "__init__.py"))
    ]


def built_modules(folder: str, names: Iterable[str], roots: Sequence[str]) -> list[str]:
    """Returns files that a package does not import without, though git is told to ignore them.

    Looked at are the folders with Python files below the places that packages are imported from.

    Args:
        folder: the folder that `names` are relative to.
        names: the files that belong to the code anyway.
        roots: see `package_folders`.
    """
    known = set(names)
    holders = {name.rpartition("/")[0] for name in known if name.endswith(".py")}
    found = []
    for holder in holders if "" in roots else [one for one in holders if any(is_below(one, root) for root in roots)]:
        with contextlib.suppress(FileNotFoundError):  # git lists what was deleted as well
            for entry in os.scandir(os.path.join(folder, holder)):
                name = os.path.join(holder, entry.name)
                is_built = entry.name in _BUILT_NAMES or entry.name.endswith(_BUILT_SUFFIXES)
                if is_built and name not in known and entry.is_file():
                    found.append(name)
    return sorted(found)


# --- in the job ---


@dataclass(frozen=True, slots=True)
class CopiedFolder:
    """A folder with code of the user's, and its copy in the snapshot; both resolved."""

    live: str
    copy: str

    def copy_of(self, path: str) -> str | None:
        """Returns the place in the copy that replaces a resolved path, None for one outside the folder."""
        return self.copy + path[len(self.live) :] if is_below(path, self.live) else None


@dataclass(slots=True)
class Imports:
    """How a process imports from a run's snapshot; top-level names of packages with their places."""

    child_path: str
    """PYTHONPATH for the processes that it starts."""
    copied: dict[str, str] = field(default_factory=dict)
    """Imported from the snapshot."""
    live: dict[str, str] = field(default_factory=dict)
    """Imported from where they are edited."""

    def lines(self) -> list[str]:
        """Returns what a person should know of where packages come from."""
        copied = [f"imported from the run's copy of the code: {', '.join(self.copied)}"] if self.copied else []
        live = (
            f"warning: {name} is imported from where it is edited, not from the run's copy of the code: {place}"
            for name, place in self.live.items()
        )
        return [*copied, *live]


def import_from_snapshot(run: str, *, python_path: str) -> Imports:
    """Makes this process import the user's packages from a run's snapshot.

    Args:
        run: the run directory.
        python_path: PYTHONPATH so far.
    """
    code = os.path.realpath(os.path.join(run, "code"))
    if not os.path.isdir(code):
        return Imports(python_path)
    record = _read(os.path.join(run, "code.json"))
    copies = read_copies(code, record, folder=str(_read(os.path.join(run, "plan.json")).get("directory", "")))
    recorded = [os.path.normpath(os.path.join(code, str(root))) for root in record.get("roots", [])]
    found = [place for path in sys.path if (place := _copy_of(path, copies)) is not None]
    wanted = [place for place in dict.fromkeys([code, *recorded, *found]) if os.path.isdir(place)]
    sys.path[:] = [*wanted, *(path for path in sys.path if os.path.realpath(path) not in wanted)]
    looked_at = [place for place in wanted if place != code or code in recorded]
    names = {name for place in looked_at for name in _packages_in(place)}
    names |= _redirect(copies, sys.meta_path)
    names |= {name for path in sys.path if _is_live(path, copies) for name in _packages_in(path)}
    importlib.invalidate_caches()
    imports = Imports(child_path(sys.path, copies, python_path))
    for name in sorted(names):
        place = os.path.realpath(_place_of(name) or "/")
        if _is_copy(place, copies):
            imports.copied[name] = place
        elif any(is_below(place, folder.live) for folder in copies):
            imports.live[name] = place
    return imports


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_copies(code: str, record: dict[str, Any], *, folder: str) -> list[CopiedFolder]:
    """Returns the copied folders of a snapshot.

    Args:
        code: the snapshot, resolved.
        record: its `code.json`.
        folder: the submitting directory, where the record does not name it.
    """
    folders = {"": folder, **record.get("folders", {})}
    return [
        CopiedFolder(os.path.realpath(live), os.path.normpath(os.path.join(code, name)))
        for name, live in folders.items()
        if live
    ]


def child_path(paths: Sequence[str], copies: Sequence[CopiedFolder], before: str) -> str:
    """Returns the PYTHONPATH that makes a child process import from the snapshot as well.

    Args:
        paths: `sys.path`, the copies included.
        copies: the folders that are in the snapshot.
        before: PYTHONPATH so far.
    """
    ours = [path for path in paths if _is_copy(path, copies)]
    return os.pathsep.join([*ours, *(part for part in before.split(os.pathsep) if part and part not in ours)])


def _is_copy(path: str, copies: Sequence[CopiedFolder]) -> bool:
    return any(is_below(path, folder.copy) for folder in copies)


def _copy_of(path: str, copies: Sequence[CopiedFolder]) -> str | None:
    """Returns the copy of an import path of the user's; None for one that is no such path, or has no copy."""
    real = os.path.realpath(path)
    # Runs may lie in the project, and a virtual environment as well.
    if not path or is_installed(real) or _is_copy(real, copies):
        return None
    places = (folder.copy_of(real) for folder in copies)
    return next((place for place in places if place is not None and os.path.isdir(place)), None)


def _is_live(path: str, copies: Sequence[CopiedFolder]) -> bool:
    """Returns whether an import path lies in a copied folder; not the folder itself, which anything may be in."""
    real = os.path.realpath(path)
    if not path or is_installed(real) or _is_copy(real, copies) or not os.path.isdir(real):
        return False
    return any(is_below(real, folder.live) and real != folder.live for folder in copies)


def _redirect(copies: Sequence[CopiedFolder], finders: Iterable[Any]) -> set[str]:
    """Puts the copies into the finders' tables; returns the top-level names of all that lies in the copied folders."""
    names = set()
    for table in _tables(finders):
        for name, place in list(table.items()):
            real = os.path.realpath(place)
            copied = next((copy for folder in copies if (copy := folder.copy_of(real)) is not None), None)
            if copied is not None:
                names.add(name.partition(".")[0])
                table[name] = copied if os.path.exists(copied) else place
    return names


def _packages_in(folder: str) -> set[str]:
    found = set()
    for entry in os.scandir(folder):
        if entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py")):
            found.add(entry.name)
        elif entry.name.endswith(".py"):
            found.add(entry.name[:-3])
    return {name for name in found if name.isidentifier() and name not in _NOT_IMPORTED}


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
