"""Paths that a program makes from the place of its own file: what it looks for beside its source. Pure but for reading.

A run starts the copy of a file, so `Path(__file__).parent / "data"` is a path in the copy. Where the submission can see
that something is there now that the copy will not have, it says so. The expressions are evaluated, not run: `__file__`,
the usual functions of `os.path` and `pathlib`, constants, and names that are assigned such values.
"""

from __future__ import annotations

import ast
import posixpath
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

from slurm_train.code.program_source import SourceFile

_UNCHANGED = (
    "abspath",
    "realpath",
    "normpath",
    "fspath",
    "str",
    "Path",
    "PosixPath",
    "resolve",
    "absolute",
    "as_posix",
)


class BesideFile(NamedTuple):
    """A path that a file of the code makes from its own place."""

    path: str
    """Where it is now, relative to the folder that is copied where it is inside."""
    file: str
    """The file that makes it, by its name in the copy."""
    line: int

    def __str__(self) -> str:
        return f"{self.path} ({self.file}, line {self.line})"


def missing_beside(program: Iterable[SourceFile], *, files: Mapping[str, Path], folder: Path) -> list[BesideFile]:
    """Returns what a program looks for by `__file__` that is there now and that the copy will not have; each path once.

    Args:
        program: its files.
        files: path of each copied file by its name.
        folder: the folder that is copied.
    """
    real = posixpath.realpath(folder)
    name_of = {posixpath.realpath(path): name for name, path in files.items()}
    # The folders in the copy: everything above a copied file.
    folders = {str(parent) for path in name_of for parent in PurePath(path).parents}
    found: dict[str, BesideFile] = {}
    for source in program:
        name = name_of.get(posixpath.realpath(source.path))
        if name is None or source.tree is None:
            continue
        for line, text in _paths_in(source.tree, str(source.path)):
            path = posixpath.realpath(text)
            is_copied = path in name_of or path in folders
            if not is_copied and path not in found and posixpath.exists(path):
                shown = posixpath.relpath(path, real) if path.startswith(f"{real}/") else path
                found[path] = BesideFile(shown, name, line)
    return list(found.values())


def _paths_in(tree: ast.Module, file: str) -> Iterator[tuple[int, str]]:
    """Yields the longest paths that are made from `__file__`, each with its line."""
    names: dict[str, str] = {"__file__": file}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = _value(node.value, names)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and value is not None:
                    names.setdefault(target.id, value)
    awaited: deque[ast.AST] = deque([tree])
    while awaited:
        node = awaited.popleft()
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
            value = _value(node, names)
            if value is not None and posixpath.isabs(value):
                yield node.lineno, value
                continue
        awaited.extend(ast.iter_child_nodes(node))


def _value(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """Returns the path or text that an expression is, None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and node.attr == "parent":
        inner = _value(node.value, names)
        return None if inner is None else posixpath.dirname(inner)
    if isinstance(node, ast.Subscript):
        return _of_parents(node, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Add)):
        left, right = _value(node.left, names), _value(node.right, names)
        if left is None or right is None:
            return None
        return posixpath.join(left, right) if isinstance(node.op, ast.Div) else left + right
    if isinstance(node, ast.JoinedStr):
        parts = [_value(part.value if isinstance(part, ast.FormattedValue) else part, names) for part in node.values]
        return None if None in parts else "".join(part for part in parts if part is not None)
    return _of_call(node, names) if isinstance(node, ast.Call) else None


def _of_parents(node: ast.Subscript, names: Mapping[str, str]) -> str | None:
    is_parents = isinstance(node.value, ast.Attribute) and node.value.attr == "parents"
    if not is_parents or not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, int):
        return None
    inner = _value(node.value.value, names) if isinstance(node.value, ast.Attribute) else None
    for _ in range(node.slice.value + 1):
        inner = None if inner is None else posixpath.dirname(inner)
    return inner


def _of_call(node: ast.Call, names: Mapping[str, str]) -> str | None:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    # A method of a path has it in front, a function as its first argument.
    of_path = _value(function.value, names) if isinstance(function, ast.Attribute) else None
    arguments = [_value(argument, names) for argument in node.args]
    parts = [*([of_path] if of_path is not None else []), *arguments]
    if node.keywords or not parts or None in parts:
        return None
    texts = [part for part in parts if part is not None]
    if name in ("join", "joinpath"):
        return posixpath.join(*texts)
    if name == "dirname" and len(texts) == 1:
        return posixpath.dirname(texts[0])
    if name == "with_name" and len(texts) == 2:
        return posixpath.join(posixpath.dirname(texts[0]), texts[1])
    return posixpath.normpath(texts[0]) if name in _UNCHANGED and len(texts) == 1 else None
