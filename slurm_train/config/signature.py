"""Which keywords a class or function takes, read from its source: on the login node it is not imported.

Only what the source says plainly counts. A class without an `__init__` of its own, `**kwargs`, a decorator, a
metaclass or a name that is bound twice are left to the rank.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_train.errors import ConfigError

# What the toolkit takes out of the mapping before the call, or puts into it.
_TAKEN = {"data": frozenset({"heldout", "num_workers", "collate", "keyed_randomness"})}
_GIVEN = {"data": frozenset({"split"}), "task": frozenset({"context"})}


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters that may be given by name."""

    names: tuple[str, ...]
    required: frozenset[str]


def read_signature(tree: ast.Module, name: str) -> Signature | None:
    """Returns what the class or function of that name takes, None where its source does not say."""
    found = [node for node in tree.body if getattr(node, "name", None) == name]
    if len(found) != 1 or any(name in _names_bound(node) for node in tree.body if node is not found[0]):
        return None
    node = found[0]
    if isinstance(node, ast.ClassDef):
        if node.decorator_list or node.keywords:
            return None
        made = [one for one in node.body if getattr(one, "name", None) in ("__init__", "__new__")]
        return _parameters(made[0], skipped=1) if len(made) == 1 else None
    return _parameters(node, skipped=0)


def require_keywords(key: str, mapping: Mapping[str, Any], signature: Signature) -> None:
    """Does nothing where a call would take the mapping's keywords.

    Args:
        key: where the mapping stands, e.g. "model".
        mapping: has `_target_`.
        signature: what that takes.

    Raises:
        ConfigError: a keyword is unknown, or one is missing.
    """
    target, taken = mapping["_target_"], _TAKEN.get(key, frozenset())
    words = [str(word) for word in mapping if word not in taken and not str(word).startswith("_")]
    names = [name for name in signature.names if name not in _GIVEN.get(key, ())]
    unknown = [word for word in words if word not in signature.names]
    if unknown:
        takes = f"it takes {', '.join(names)}" if names else "it takes no keywords"
        raise ConfigError(f"{target} does not take {unknown[0]!r}; {takes}", hint=_hint(key, unknown[0], names))
    missing = [name for name in names if name in signature.required and name not in words]
    if missing and not mapping.get("_args_") and not mapping.get("_partial_"):
        raise ConfigError(f"{target} needs {', '.join(missing)}", hint=f"set {key}.{missing[0]}=<value>")


def _hint(key: str, word: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {key}.{near[0]}?" if near else f"leave {key}.{word} out"


def _parameters(node: ast.AST, *, skipped: int) -> Signature | None:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.decorator_list or node.args.kwarg:
        return None
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    num_plain = len(positional) - len(given.defaults)
    required = {one.arg for one in positional[skipped:num_plain]}
    required |= {one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None}
    names = tuple(one.arg for one in [*given.args[max(0, skipped - len(given.posonlyargs)) :], *given.kwonlyargs])
    return Signature(names, frozenset(required & set(names)))


def _names_bound(node: ast.stmt) -> set[str]:
    """Returns the names that a statement at the top of a module may bind."""
    inner = list(ast.walk(node))
    names = {one.id for one in inner if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return names | {str(one.name) for one in inner if isinstance(one, (ast.ClassDef, ast.FunctionDef))}
