"""`_target_`: from a mapping that names a class or function to what it builds; for a user's own model and data.

`{_target_: "my_pkg.Model", width: 64}` becomes `my_pkg.Model(width=64)` in the ranks (`instantiate`). On the login
node, where there may be no time for torch and no GPU, `require_target` finds modules as Python would, but reads their
source instead of running it. A name that cannot be found and a keyword that is not accepted are the user's typing
mistakes, and are answered with the names that there are. What a source does not say plainly (a star import, a compiled
module, a decorator, a name that is bound twice) is left to the ranks.

What acts on the machine instead of building a part of a run is refused. This catches a slip and the lazy attack, it is
no wall: a configuration names code, a script and lines of shell anyway, so one from another person deserves the look
that their program does. The wall is around the run directory (`rundir.private`), whose frozen configuration is the only
one that a job reads.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from slurm_train.errors import ConfigError, PreflightError

TARGET = "_target_"
# What Hydra's instantiate takes beside the keywords. Values are plain Python here, as with `_convert_: all`.
_DIRECTIONS = (TARGET, "_partial_", "_args_", "_recursive_", "_convert_")
# What the toolkit takes out of the mapping before the call, or puts into it.
_TAKEN = {"data": ("heldout", "num_workers", "collate", "keyed_randomness", "prefetch", "allow_world_change")}
_GIVEN = {"data": ("split", "rank", "num_ranks"), "task": ("context",)}

# Of the standard library, what computes; the rest reads, writes, starts or imports things.
# fmt: off
_HARMLESS = frozenset(
    {
        "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
        "functools", "graphlib", "heapq", "itertools", "math", "numbers", "operator", "pathlib", "random", "re",
        "statistics", "string", "textwrap", "types", "typing", "uuid", "zoneinfo",
    }
)
# fmt: on
_CALLERS = frozenset({"operator.methodcaller", "operator.attrgetter", "functools.reduce", "types.FunctionType"})
_PLAIN_TYPES = frozenset(
    ("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice", "str", "tuple")
)
# They run what a file, a package index or a text gives them.
_LOADERS = (
    *("torch.load", "torch.hub", "torch.serialization", "torch.utils.cpp_extension", "torch.package", "torch.jit.load"),
    *("numpy.load", "pandas.read_pickle", "joblib", "dill", "cloudpickle", "hydra", "omegaconf", "pip", "setuptools"),
    *("submitit", "IPython"),
)
# From one module to the next that a name is imported from.
_MOST_HOPS = 8
_OWN_ROOMS = ("slurm_train.models.", "slurm_train.data.", "slurm_train.train.callbacks.")


def resolve_target(path: str) -> Any:
    """Returns what a dotted path names, e.g. "my_pkg.models.Encoder".

    Raises:
        ConfigError: the path is not dotted, a module of it does not exist, the module has no such name, or it acts on
            the machine.
    """
    import difflib

    words = _split_path(path)
    module, attributes = _import_longest(path, words)
    target: Any = module
    for index, word in enumerate(attributes):
        if not hasattr(target, word):
            owner = ".".join(words[: len(words) - len(attributes) + index])
            close = difflib.get_close_matches(word, dir(target), n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(close)}?" if close else f"see python -c 'help(\"{owner}\")'"
            raise ConfigError(f"{TARGET}={path}: {owner} has no {word!r}", hint=hint)
        target = getattr(target, word)
    # The path may lead around: `my_package.os.system`, or a name that was imported there.
    name = f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', '')}"
    reason = _why_refused(name)
    if reason:
        raise ConfigError(f"{TARGET}={path} is {name}, which {reason}", hint="name a class or a function of your own")
    return target


def instantiate(mapping: Mapping[str, Any], **extra: Any) -> Any:
    """Returns the result of calling what `_target_` names with the other keys as keyword arguments.

    Args:
        mapping: has `_target_`; values that have one too are built first, also inside lists, unless it says
            `_recursive_: false`. `_args_` are positional; with `_partial_: true` nothing is called yet.
        **extra: further keyword arguments; they win over the mapping's.

    Raises:
        ConfigError: the target cannot be found or called, or a keyword is unknown or missing.
    """
    target = callable_target(mapping)
    is_partial = bool(mapping.get("_partial_"))
    keywords = {key: value for key, value in mapping.items() if key not in _DIRECTIONS}
    positional: list[Any] = list(mapping.get("_args_") or ())
    if mapping.get("_recursive_", True):
        keywords = _build_nested(keywords)
        positional = _build_nested(positional)
    keywords |= extra
    signature = _signature_of(target)
    if signature is not None:
        _check_call(mapping[TARGET], signature, positional, keywords, is_partial=is_partial)
    return functools.partial(target, *positional, **keywords) if is_partial else target(*positional, **keywords)


def callable_target(mapping: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the class or function that a mapping's `_target_` names.

    Raises:
        ConfigError: there is no `_target_`, or it names something that cannot be called.
    """
    path = mapping.get(TARGET)
    if not isinstance(path, str):
        raise ConfigError(
            f"a mapping with the keys {sorted(map(str, mapping))} has no {TARGET}",
            hint=f"add {TARGET}: package.module.name",
        )
    target = resolve_target(path)
    if not callable(target):
        raise ConfigError(
            f"{TARGET}={path} is a {type(target).__name__} and cannot be called", hint="name a class or a function"
        )
    called: Callable[..., Any] = target
    return called


def accepts_keyword(target: Callable[..., Any], name: str) -> bool:
    """Returns whether a callable has a parameter of this very name."""
    signature = _signature_of(target)
    return signature is not None and name in signature.parameters


def _build_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return instantiate(value)
        return {key: _build_nested(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_build_nested(item) for item in value]
    return value


def _import_longest(path: str, words: list[str]) -> tuple[types.ModuleType, list[str]]:
    """Imports the longest leading part of the path that is a module; returns it and the words after it."""
    module = _import(path, words[0])
    if module is None:
        raise ConfigError(
            f"{TARGET}={path}: there is no module {words[0]!r} here",
            hint="install it, or start from the directory that holds it (the current directory is searched)",
        )
    for count in range(1, len(words)):
        # A name that the package itself defines wins over a module of the same name in it.
        if not isinstance(getattr(module, words[count], module), types.ModuleType):
            return module, words[count:]
        inner = _import(path, ".".join(words[: count + 1])) if hasattr(module, "__path__") else None
        if inner is None:
            return module, words[count:]
        module = inner
    raise ConfigError(f"{TARGET}={path} is a module", hint=f"name a class or a function in it: {path}.<name>")


def _import(path: str, name: str) -> types.ModuleType | None:
    """Returns a module, None where there is none of this name."""
    try:
        return importlib.import_module(name)
    except ImportError as err:
        # Only the missing word itself is a wrong path; a missing import inside the module is the module's own.
        if isinstance(err, ModuleNotFoundError) and err.name == name:
            return None
        message = f"{TARGET}={path}: importing {name} failed: {err}"
        hint = f"try: python -c 'import {name}'"
        # Other nodes may have it.
        lacks_library = re.search(r"cannot open shared object file|GLIBC\S* not found", str(err))
        raise (PreflightError if lacks_library else ConfigError)(message, hint=hint) from err


def _signature_of(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):  # some built-in types have none
        return None


def _check_call(
    target: str,
    signature: inspect.Signature,
    positional: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    is_partial: bool,
) -> None:
    """Refuses a call that Python would refuse."""
    bind = signature.bind_partial if is_partial else signature.bind
    try:
        bind(*positional, **keywords)
    except TypeError as err:
        names = ", ".join(signature.parameters) or "nothing"
        raise ConfigError(f"{target} {err}", hint=f"it takes {names}") from err


def require_target(
    key: str, mapping: Mapping[str, Any] | None, *, search: Sequence[str], judges_syntax: bool = True
) -> None:
    """Checks that a mapping's `_target_` exists and takes its keywords, as far as its source tells; imports nothing.

    Args:
        key: where the mapping is in the configuration, e.g. "model".
        mapping: has `_target_`; None, no `_target_` and one of this package pass.
        search: directories in which Python would look, e.g. sys.path.
        judges_syntax: the ranks use this Python, so that what it cannot read fails on them.

    Raises:
        ConfigError: there is no such module, it is no Python, it has no such name, or that takes other keywords; or a
            model has a training step of its own, which nothing here calls.
    """
    import difflib

    for nested in targets_in(mapping):
        _refuse_path(nested)
    if not mapping or TARGET not in mapping or str(mapping[TARGET]).startswith("slurm_train."):
        return
    target = str(mapping[TARGET])
    words = _split_path(target, f"{key}.")
    spec, attributes = _find_longest(words, search)
    if spec is None:
        raise ConfigError(
            f"{key}.{TARGET}={target}: there is no module {words[0]!r}",
            hint="start from the folder that holds it, or install it",
        )
    tree = _source_of(spec, owner=f"{key}.{TARGET}={target}" if judges_syntax else "")
    if tree is None or not attributes:
        return
    names = _names_bound(tree)
    if attributes[0] not in names and not names & {"*", "__getattr__"}:
        near = difflib.get_close_matches(attributes[0], names, n=1)
        module = ".".join(words[: len(words) - len(attributes)])
        raise ConfigError(
            f"{key}.{TARGET}={target}: {module} has no {attributes[0]!r}",
            hint=f"did you mean {module}.{near[0]}?" if near else f"it is looked for in {spec.origin}",
        )
    for _ in range(_MOST_HOPS):
        if len(attributes) != 1:
            break
        origin = _imported_from(tree, words, is_package=bool(spec.submodule_search_locations))
        if not origin:
            break
        words = origin
        spec, attributes = _find_longest(words, search)
        tree = None if spec is None else _source_of(spec)
        if spec is None or tree is None:
            return
    if len(attributes) != 1:
        return
    methods = _methods_of(tree, attributes[0])
    if key == "model" and "training_step" in methods and "training_loss" not in methods:
        raise training_step_error(target)
    signature = _read_signature(tree, attributes[0])
    if signature is not None:
        keywords = {name: None for name in mapping if name not in (*_TAKEN.get(key, ()), *_DIRECTIONS)}
        keywords |= {name: None for name in signature.parameters if name in _GIVEN.get(key, ())}
        positional = mapping.get("_args_") or ()
        is_partial = bool(mapping.get("_partial_"))
        _check_call(f"{key}.{TARGET}={target}", signature, positional, keywords, is_partial=is_partial)


def training_step_error(name: str) -> ConfigError:
    """Returns the error for a model that is trained by its own step, as a LightningModule."""
    return ConfigError(
        f"{name} has a training_step, as a LightningModule, and nothing here calls it: the model would be trained with "
        "another loss",
        hint="run the program that trains it as script=[train.py], see docs/own-training-program.md; or define "
        "training_loss(batch) on the model",
    )


def keywords_in_source(target: str, *, search: Sequence[str]) -> set[str] | None:
    """Returns the parameters of a class or a function as its source says them; None where it does not say all of them.

    Imports nothing.
    """
    spec, attributes = _find_longest(_split_path(target), search)
    tree = None if spec is None else _source_of(spec)
    signature = None if tree is None or len(attributes) != 1 else _read_signature(tree, attributes[0])
    if signature is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return None
    return set(signature.parameters)


def targets_in(value: Any) -> Iterator[str]:
    """Yields every `_target_` that is set in a mapping, also inside lists and other mappings."""
    if isinstance(value, Mapping):
        if value.get(TARGET):
            yield str(value[TARGET])
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from targets_in(inner)


def _find_longest(words: Sequence[str], search: Sequence[str]) -> tuple[ModuleSpec | None, list[str]]:
    """Returns the spec of the longest part of the path that is a module, and what remains of the path."""
    longest: ModuleSpec | None = None
    places: Sequence[str] | None = search
    for index in range(len(words)):
        # By its last word: Python looks a folder without __init__.py up in its parent, which is not imported yet.
        spec = PathFinder.find_spec(words[index], places)
        if spec is None:
            return longest, list(words[index:])
        longest = spec
        folders = spec.submodule_search_locations
        if folders is None:
            return longest, list(words[index + 1 :])
        places = list(folders)
    return longest, []


def _source_of(spec: ModuleSpec, *, owner: str = "") -> ast.Module | None:
    """Returns a module's source, None where there is none to read.

    Args:
        spec: of the module.
        owner: what names it, e.g. "model._target_=mine.Model"; "" where another Python may know another syntax.

    Raises:
        ConfigError: it would fail at its first line, in a job that may have waited for hours.
    """
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except SyntaxError as err:
        if not owner:
            return None
        line = f": {err.text.strip()}" if err.text else ""
        raise ConfigError(
            f"{owner}: {type(err).__name__} in line {err.lineno} of {spec.origin}: {err.msg}{line}",
            hint="correct it there",
        ) from err
    except (OSError, ValueError):
        return None


def _names_bound(tree: ast.AST) -> set[str]:
    """Returns the names that a piece of source may bind."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _imported_from(tree: ast.Module, words: Sequence[str], *, is_package: bool) -> list[str]:
    """Returns where a module has a name from, e.g. torch.optim.sgd.SGD for torch.optim.SGD; [] where it is its own.

    Args:
        tree: source of the module.
        words: the path of the name.
        is_package: the module is one, so that `from .x` is below it.
    """
    name = words[-1]
    binding = [node for node in tree.body if name in _names_bound(node)]
    if len(binding) != 1:
        return []
    node = binding[0]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = len(words) - 1 - node.level + is_package
    package = list(words[:above]) if node.level else []
    (first, *_) = [statement.name for statement in node.names if (statement.asname or statement.name) == name]
    return [*package, *(node.module.split(".") if node.module else ()), first]


def _methods_of(tree: ast.Module, name: str) -> set[str]:
    """Returns the methods that a class of that name defines itself."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        statement.name
        for definition in classes
        for statement in definition.body
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def _read_signature(tree: ast.Module, name: str) -> inspect.Signature | None:
    """Returns what the class or function of that name takes, None where its source does not say plainly."""
    definitions = [node for node in tree.body if getattr(node, "name", None) == name]
    if len(definitions) != 1 or any(name in _names_bound(node) for node in tree.body if node is not definitions[0]):
        return None
    node: ast.AST = definitions[0]
    is_class = isinstance(node, ast.ClassDef)
    if isinstance(node, ast.ClassDef):
        made = [statement for statement in node.body if getattr(statement, "name", None) in ("__init__", "__new__")]
        if node.decorator_list or node.keywords or len(made) != 1:
            return None
        node = made[0]
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.decorator_list:
        return None
    # The names and which of them have a default: no expression of the source is evaluated.
    none = ast.Constant(None)
    given = node.args
    given.defaults = [none for _ in given.defaults]
    given.kw_defaults = [default and none for default in given.kw_defaults]
    header = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, none)))
    signature = inspect.signature(eval(compile(header, "<header>", "eval"), {}))
    return signature.replace(parameters=list(signature.parameters.values())[is_class:])


def _split_path(path: str, owner: str = "") -> list[str]:
    words = path.split(".")
    if len(words) < 2 or not all(word.isidentifier() for word in words):
        # As others write it: my_file.py:Model, src/my_file.py:Model.
        dotted = re.sub(r"(\.py)?[:/]+", ".", path.removeprefix("./"))
        is_meant = dotted != path and all(word.isidentifier() for word in dotted.split("."))
        hint = f"write {owner}{TARGET}={dotted}" if is_meant else "write it as package.module.name"
        raise ConfigError(f"{owner}{TARGET}={path!r} is not a dotted path", hint=hint)
    _refuse_path(path)
    return words


def _refuse_path(path: str) -> None:
    reason = _why_refused(path)
    if reason:
        head = path.partition(".")[0]
        renamed = f"; a file {head}.py of yours needs another name" if head in sys.stdlib_module_names else ""
        hint = f"name a class or a function of your own that does it{renamed}"
        raise ConfigError(f"{TARGET}={path} {reason}", hint=hint)


def _why_refused(path: str) -> str:
    """Returns why a dotted path is no part of a run, by its words alone; "" for one that may be."""
    head, _, member = path.partition(".")
    if head in ("builtins", "__main__"):
        return "" if member in _PLAIN_TYPES or head == "__main__" else "is not a part of a run"
    if head == "slurm_train":
        return "" if path.startswith(_OWN_ROOMS) else "is machinery of this package, not a part of a run"
    if head in sys.stdlib_module_names:
        is_harmless = head in _HARMLESS and path not in _CALLERS
        return (
            ""
            if is_harmless
            else f"is in Python's module {head}, which acts on the machine and builds no part of a run"
        )
    loads = any(path == loader or path.startswith(f"{loader}.") for loader in _LOADERS)
    return "runs what it is given and builds no part of a run" if loads else ""
