"""Has a job import its user's packages from the snapshot, also those that are installed in editable mode.

Such a package is imported from where its files are edited, and so would change under a queued job. The copies are put
in front of `sys.path` and into the tables of setuptools' finders; then Python is asked where it would import each
package from, so that what is said is what is true. Standard library alone: a user's script begins with this.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from slurm_train.launch.editable import editable_tables, is_below, is_installed

# Modules that lie in many projects and that no run imports.
_NOT_IMPORTED = ("setup", "conftest")


@dataclass(frozen=True, slots=True)
class CopiedFolder:
    """A folder with code of the user's, and its copy in the snapshot; both resolved."""

    live: str
    copy: str

    def copy_of(self, path: str) -> str | None:
        """Returns the place in the copy that stands for a resolved path, None for one outside the folder."""
        return self.copy + path[len(self.live) :] if is_below(path, self.live) else None


@dataclass(frozen=True, slots=True)
class Taken:
    """Where Python imports the user's packages from; top-level names with their places."""

    copied: dict[str, str] = field(default_factory=dict)
    """From the snapshot."""
    live: dict[str, str] = field(default_factory=dict)
    """From where they are edited."""


@dataclass(frozen=True, slots=True)
class Imports:
    """How a process imports from a run's snapshot."""

    taken: Taken
    child_path: str
    """PYTHONPATH for the processes that it starts."""


def take_snapshot(run: str, *, python_path: str) -> Imports:
    """Has this process import the user's packages from a run's snapshot.

    Args:
        run: the run directory.
        python_path: PYTHONPATH so far.
    """
    code = os.path.join(run, "code")
    if not os.path.isdir(code):
        return Imports(Taken(), python_path)
    folder = str((_read(os.path.join(run, "plan.json")) or {}).get("directory", ""))
    copies, roots = read_copies(code, _read(os.path.join(run, "code.json")), folder=folder)
    taken = use_copies(code, copies, roots, paths=sys.path, finders=sys.meta_path)
    return Imports(taken, child_path(sys.path, copies, python_path))


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_copies(code: str, record: Mapping[str, Any] | None, *, folder: str) -> tuple[list[CopiedFolder], list[str]]:
    """Returns the copied folders and the import roots of a snapshot.

    Args:
        code: the snapshot.
        record: its `code.json`, None where there is none.
        folder: the submitting directory, for snapshots that do not record it.
    """
    record = record or {}
    folders = {"": folder} | {str(name): str(live) for name, live in record.get("folders", {}).items()}
    here = os.path.realpath(code)
    copies = [
        CopiedFolder(os.path.realpath(live), os.path.normpath(os.path.join(here, name)))
        for name, live in folders.items()
        if live
    ]
    return copies, [str(root) for root in record.get("roots", [])]


def use_copies(
    code: str, copies: Sequence[CopiedFolder], roots: Sequence[str], *, paths: MutableSequence[str], finders: list[Any]
) -> Taken:
    """Has this process import the user's packages from the snapshot; changes `paths` and the finders' tables.

    Args:
        code: the snapshot.
        copies: the folders that are in it.
        roots: where packages were imported from when the run was submitted, relative to the snapshot.
        paths: `sys.path`.
        finders: `sys.meta_path`.
    """
    code = os.path.realpath(code)
    recorded = [os.path.normpath(os.path.join(code, root)) for root in roots]
    found = [place for path in paths if (place := _copy_of(path, copies)) is not None]
    wanted = [place for place in dict.fromkeys([code, *recorded, *found]) if os.path.isdir(place)]
    paths[:] = [*wanted, *(path for path in paths if os.path.realpath(path) not in wanted)]
    looked_at = [place for place in wanted if place != code or code in recorded]
    names = {name for place in looked_at for name in _packages_in(place)}
    names |= _redirect(copies, finders)
    names |= {name for path in paths if _is_live(path, copies) for name in _packages_in(path)}
    importlib.invalidate_caches()
    return _look(sorted(names), copies)


def child_path(paths: Sequence[str], copies: Sequence[CopiedFolder], before: str) -> str:
    """Returns the PYTHONPATH that makes a child process import from the snapshot as well.

    Args:
        paths: `sys.path` after `use_copies`.
        copies: the folders that are in the snapshot.
        before: PYTHONPATH so far.
    """
    ours = [path for path in paths if _is_copy(path, copies)]
    return os.pathsep.join([*ours, *(part for part in before.split(os.pathsep) if part and part not in ours)])


def in_words(taken: Taken) -> list[str]:
    """Returns what a person should know of where packages come from, as lines."""
    copied = [f"imported from the run's copy of the code: {', '.join(taken.copied)}"] if taken.copied else []
    live = (
        f"warning: {name} is imported from where it is edited, not from the run's copy of the code: {place}"
        for name, place in taken.live.items()
    )
    return [*copied, *live]


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
    for table in editable_tables(finders):
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


def _look(names: Iterable[str], copies: Sequence[CopiedFolder]) -> Taken:
    """Asks Python where it would import each name from; those from other places are nobody's here."""
    taken = Taken()
    for name in names:
        place = _place_of(name)
        real = os.path.realpath(place) if place else ""
        if _is_copy(real, copies):
            taken.copied[name] = real
        elif any(is_below(real, folder.live) for folder in copies):
            taken.live[name] = real
    return taken


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
