"""Where Python finds packages that a user edits: editable installs, and folders on PYTHONPATH.

Python knows such a place as an entry of `sys.path` (a .pth file, PYTHONPATH) or by setuptools' finder, a table of
packages and folders. Both are read from the running interpreter: that costs nothing, and holds for every build backend.
Standard library alone, strings throughout: a user's script begins with this.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
# What builds write beside the sources and git is told to ignore, though the package does not import without it.
_BUILT_NAMES = ("_version.py", "version.py", "__version__.py")
_BUILT_SUFFIXES = (*EXTENSION_SUFFIXES, ".so")


def own_paths() -> list[str]:
    """Returns `sys.path` without the folder that the way of starting Python has put in front."""
    return sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]


def is_below(path: str, folder: str) -> bool:
    """Returns whether a resolved path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_installed(path: str) -> bool:
    """Returns whether a folder is Python's own or one that packages are installed to, as in a project's .venv."""
    return any(part in _INSTALLED for part in path.split("/")) or is_below(path, _STANDARD_LIBRARY)


def editable_tables(finders: Iterable[Any]) -> list[dict[str, str]]:
    """Returns the tables of setuptools' finders: package and its folder, or module and its file."""
    modules = (sys.modules.get(getattr(finder, "__module__", "")) for finder in finders)
    found = [getattr(module, "MAPPING", None) for module in modules if module is not None]
    return [table for table in found if isinstance(table, dict)]


def import_roots(folder: str, paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns the places in a folder that packages are imported from, relative to it: "" for itself, or "src".

    Args:
        folder: a folder with code of the user's.
        paths: `sys.path`, see `own_paths`.
        finders: `sys.meta_path`.
    """
    live, tables = os.path.realpath(folder), editable_tables(finders)
    mapped = [os.path.dirname(place) for table in tables for name, place in table.items() if _is_called(name, place)]
    return _inside(live, (*paths, *mapped))


def package_folders(folder: str, paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns `import_roots`, and the folders of packages that are called otherwise than these."""
    tables = editable_tables(finders)
    mapped = (place for table in tables for place in table.values())
    return _inside(os.path.realpath(folder), (*paths, *mapped))


def _inside(live: str, places: Iterable[str]) -> list[str]:
    real = [os.path.realpath(place) for place in places if place and os.path.isdir(place)]
    inside = [place for place in real if is_below(place, live) and not is_installed(place)]
    return list(dict.fromkeys("" if place == live else os.path.relpath(place, live) for place in inside))


def _is_called(name: str, place: str) -> bool:
    """Returns whether a package's folder has the package's name, so that the folder above it can be imported from."""
    return os.path.splitext(os.path.basename(place))[0] == name


def code_elsewhere(folders: Sequence[str], paths: Iterable[str], finders: Iterable[Any]) -> list[str]:
    """Returns the folders that packages are imported from, that the user may edit, and that lie outside some folders.

    This package's own is left out: who edits it knows.

    Args:
        folders: what is copied.
        paths: `sys.path`, see `own_paths`.
        finders: `sys.meta_path`.
    """
    mapped = (os.path.dirname(place) for table in editable_tables(finders) for place in table.values())
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
    """Returns files that a package does not import without, though git was told to ignore them.

    Looked at are the folders with Python files below the places that packages are imported from.

    Args:
        folder: the folder that `names` are relative to.
        names: the files that belong to the code anyway.
        roots: see `package_folders`.
    """
    known = set(names)
    holders = {name.rpartition("/")[0] for name in known if name.endswith(".py")}
    chosen = [holder for holder in holders if any(not root or is_below(holder, root) for root in roots)]
    found = []
    for holder in sorted(chosen):
        with contextlib.suppress(FileNotFoundError):  # git lists what was deleted as well
            for entry in os.scandir(os.path.join(folder, holder)):
                name = f"{holder}/{entry.name}" if holder else entry.name
                is_built = entry.name in _BUILT_NAMES or entry.name.endswith(_BUILT_SUFFIXES)
                if is_built and name not in known and entry.is_file():
                    found.append(name)
    return sorted(found)
