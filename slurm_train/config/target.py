"""From a mapping with `_target_` to the object it names: the door for a user's own model and data.

`{_target_: "my_pkg.Model", width: 64}` becomes `my_pkg.Model(width=64)`. A name that cannot be found and a keyword that
is not accepted are the user's typing mistakes, and are answered with the nearest names. Imports nothing by itself.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurm_train.config.target_policy import refuse_found, refuse_path
from slurm_train.errors import ConfigError

TARGET = "_target_"
# What Hydra's instantiate takes beside the keywords. Values are plain Python here, as with `_convert_: all`.
_DIRECTIONS = (TARGET, "_partial_", "_args_", "_recursive_", "_convert_")


def resolve_target(path: str) -> Any:
    """Returns what a dotted path names, e.g. "my_pkg.models.Encoder".

    Raises:
        ConfigError: the path is not dotted, a module of it does not exist, or the module has no such name.
    """
    words = path.split(".")
    if len(words) < 2 or not all(word.isidentifier() for word in words):
        raise ConfigError(f"{TARGET}={path!r} is not a dotted path", hint="write it as package.module.name")
    refuse_path(path)
    module, rest = _import_longest(path, words)
    found: Any = module
    for index, word in enumerate(rest):
        if not hasattr(found, word):
            owner = ".".join(words[: len(words) - len(rest) + index])
            raise ConfigError(
                f"{TARGET}={path}: {owner} has no {word!r}", hint=_nearest(word, _names_in(found), owner=owner)
            )
        found = getattr(found, word)
    refuse_found(path, found)
    return found


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
    build = _build_nested if mapping.get("_recursive_", True) else _as_it_is
    words = {key: build(value) for key, value in mapping.items() if key not in _DIRECTIONS}
    words.update(extra)
    positional = [build(value) for value in mapping.get("_args_") or ()]
    is_partial = bool(mapping.get("_partial_"))
    _check_keywords(target, str(mapping[TARGET]), words, num_given=len(positional), is_partial=is_partial)
    return functools.partial(target, *positional, **words) if is_partial else target(*positional, **words)


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
    """Says whether a callable has a parameter of this very name."""
    parameters = _parameters(target)
    return parameters is not None and name in _keyword_names(parameters)


def _import_longest(path: str, words: list[str]) -> tuple[types.ModuleType, list[str]]:
    """Imports the longest leading part of the path that is a module; gives it and the words after it."""
    module = _import(path, words[0])
    if module is None:
        raise _absent(path, words[0])
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
        raise ConfigError(
            f"{TARGET}={path}: importing {name} failed: {err}", hint=f"try: python -c 'import {name}'"
        ) from err


def _absent(path: str, module: str) -> ConfigError:
    return ConfigError(
        f"{TARGET}={path}: there is no module {module!r} here",
        hint="install it, or start from the directory that holds it (the current directory is searched)",
    )


def _as_it_is(value: Any) -> Any:
    return value


def _build_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return instantiate(value)
        return {key: _build_nested(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_build_nested(item) for item in value]
    return value


def _check_keywords(
    target: Callable[..., Any], path: str, words: Mapping[str, Any], *, num_given: int, is_partial: bool
) -> None:
    """Refuses keywords that the call would refuse, in the user's terms; the rest is the callable's own affair."""
    parameters = _parameters(target)
    if parameters is None:
        return
    names = _keyword_names(parameters)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    unknown = [] if open_ended else [word for word in words if word not in names]
    if unknown:
        raise ConfigError(
            f"{path} does not take {unknown[0]!r}; it takes {', '.join(names) or 'no keywords'}",
            hint=_nearest(unknown[0], names, owner=path),
        )
    wanted = names[num_given:]
    missing = [name for name in wanted if _is_required(name, parameters) and name not in words]
    if missing and not is_partial:
        raise ConfigError(f"{path} needs {', '.join(missing)}", hint=f"set {missing[0]}=<value> beside its {TARGET}")


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # some built-in types do not tell
        return None


def _keyword_names(parameters: list[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _is_required(name: str, parameters: list[inspect.Parameter]) -> bool:
    return any(p.name == name and p.default is p.empty for p in parameters)


def _names_in(found: Any) -> list[str]:
    """Returns the names that a module or class has, modules of a package that nobody imported yet included."""
    inner = pkgutil.iter_modules(found.__path__) if hasattr(found, "__path__") else ()
    return sorted({*dir(found), *(module.name for module in inner)})


def _nearest(word: str, names: Iterable[str], *, owner: str) -> str:
    public = [name for name in names if not name.startswith("_")]
    close = difflib.get_close_matches(word, public, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"see python -c 'help(\"{owner}\")'"
