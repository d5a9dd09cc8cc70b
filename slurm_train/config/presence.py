"""Looks for a `_target_` without importing it: on a login node there may be no time for torch, and no GPU.

Modules are found as Python would find them, but not run; whether one defines the name is read from its source. What
cannot be told that way (a star import, a compiled module, a name made at run time) counts as there: the rank will tell.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from slurm_train.config.signature import read_signature, require_keywords
from slurm_train.config.target_policy import refuse_path
from slurm_train.errors import ConfigError


def require_target(key: str, mapping: Mapping[str, Any] | None, *, search: Sequence[str]) -> None:
    """Does nothing where the mapping's `_target_` exists and takes its keywords, as far as its source tells.

    Args:
        key: where the mapping stands, e.g. "model".
        mapping: has `_target_`, or is None.
        search: directories in which Python would look, e.g. sys.path.

    Raises:
        ConfigError: there is no such module, it has no such name, or that takes other keywords.
    """
    for nested in targets_in(mapping or {}):
        refuse_path(nested)
    if not mapping or "_target_" not in mapping or str(mapping["_target_"]).startswith("slurm_train."):
        return
    target = str(mapping["_target_"])
    words = target.split(".")
    if len(words) < 2 or not all(word.isidentifier() for word in words):
        raise ConfigError(f"{key}._target_={target!r} is not a dotted path", hint="write it as package.module.name")
    spec, rest = _find_longest(words, search)
    if spec is None:
        raise ConfigError(
            f"{key}._target_={target}: there is no module {words[0]!r}",
            hint="start from the folder that holds it, or install it",
        )
    tree = _source_of(spec)
    names = _names_in(tree) if tree is not None else None
    if rest and names is not None and rest[0] not in names:
        near = difflib.get_close_matches(rest[0], names, n=1)
        module = ".".join(words[: len(words) - len(rest)])
        raise ConfigError(
            f"{key}._target_={target}: {module} has no {rest[0]!r}",
            hint=f"did you mean {module}.{near[0]}?" if near else f"it is looked for in {spec.origin}",
        )
    if tree is not None and len(rest) == 1 and (signature := read_signature(tree, rest[0])) is not None:
        require_keywords(key, mapping, signature)


def targets_in(value: Any) -> Iterator[str]:
    """Yields every `_target_` of a mapping, also inside lists and other mappings."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield str(value["_target_"])
        for inner in value.values():
            yield from targets_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from targets_in(inner)


def _find_longest(words: Sequence[str], search: Sequence[str]) -> tuple[ModuleSpec | None, list[str]]:
    """Returns the spec of the longest part of the path that is a module, and what remains of the path."""
    found: ModuleSpec | None = None
    places: Sequence[str] | None = search
    for index in range(len(words)):
        # By its last word: Python looks a folder without __init__.py up in its parent, which nobody has imported.
        spec = PathFinder.find_spec(words[index], places)
        if spec is None:
            return found, list(words[index:])
        found, folders = spec, spec.submodule_search_locations
        if folders is None:
            return found, list(words[index + 1 :])
        places = list(folders)
    return found, []


def _source_of(spec: ModuleSpec) -> ast.Module | None:
    """Returns a module's source, None where there is none to read."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _names_in(tree: ast.Module) -> set[str] | None:
    """Returns the names that a module's source binds at its top, None where that cannot be told."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "*" in names or "__getattr__" in names else names
