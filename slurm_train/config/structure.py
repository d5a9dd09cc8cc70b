"""Turns a plain mapping into the frozen dataclasses of `schema`, strictly: no unknown key, no silent conversion.

An int is accepted where a float is asked (YAML writes `lr: 1`), and "3e-4" as well, which YAML 1.1 reads as a string.
Everything else that does not fit is a ConfigError that names the key, the value found and the type asked.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from slurm_train.errors import ConfigError

T = TypeVar("T")


def build_config(cls: type[T], values: Mapping[str, Any], *, path: str = "") -> T:
    """Returns an instance of a schema dataclass.

    Args:
        cls: the dataclass to build.
        values: its keys and values; missing keys take their defaults.
        path: dotted path of this mapping, for messages.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    hints = _hints(cls)
    for key in values:
        if key not in hints:
            raise unknown_key_error(f"{path}{key}", (f"{path}{name}" for name in hints))
    return cls(**{key: _convert(hints[key], value, f"{path}{key}") for key, value in values.items()})


def to_mapping(value: Any) -> Any:
    """Returns the plain mapping of a schema dataclass, for writing and hashing."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_mapping(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_mapping(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_mapping(item) for item in value]
    return value


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested mapping by dotted keys, e.g. {"optim.lr": 0.003}; an empty mapping stays a value."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mapping that `flat` was made of, e.g. {"optim": {"lr": 0.003}}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        holder = found
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[last] = value
    return found


def unknown_key_error(key: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for a key that does not exist, with the nearest ones that do."""
    nearest = difflib.get_close_matches(key, list(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "`--cfg job` prints every key"
    return ConfigError(f"there is no configuration key {key!r}", hint=hint)


@functools.cache
def all_keys(cls: type[Any], *, prefix: str = "") -> Mapping[str, Any]:
    """Returns the dotted names of all keys of a schema dataclass with their types, e.g. {"optim.lr": float}."""
    keys: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        keys[f"{prefix}{name}"] = hint
        for option in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(option) and isinstance(option, type):
                keys |= all_keys(option, prefix=f"{prefix}{name}.")
    return keys


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


# Resolving annotations costs a millisecond a class, and every word is checked against all of them.
_HINTS: dict[type[Any], dict[str, Any]] = {}


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, path)
    if origin is Literal:
        return _convert_literal(get_args(hint), value, path)
    if origin is dict:
        return _require_mapping(value, path)
    if origin is list:
        return _convert_list(get_args(hint)[0], value, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build_config(hint, _require_mapping(value, path), path=f"{path}.")
    return _convert_scalar(hint, value, path)


def _convert_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    candidates = [option for option in options if option is not type(None)]
    if len(candidates) == 1:
        return _convert(candidates[0], value, path)
    for option in candidates:
        try:
            return _convert(option, value, path)
        except ConfigError:
            continue
    raise _type_error(path, value, " or ".join(_word_of(option) for option in candidates))


def _convert_literal(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value not in options:
        raise ConfigError(
            f"{path}={value!r} is not one of its values", hint=f"use one of {', '.join(map(str, options))}"
        )
    return value


def _require_mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _type_error(path, value, "a mapping")
    return {str(key): item for key, item in value.items()}


def _convert_list(item: Any, value: Any, path: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _type_error(path, value, "a list")
    return [_convert(item, element, f"{path}[{index}]") for index, element in enumerate(value)]


def _convert_scalar(hint: type[Any], value: Any, path: str) -> Any:
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise _type_error(path, value, "a number") from None
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if type(value) is not hint:
        raise _type_error(path, value, _word_of(hint))
    return value


def _word_of(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    return "a list" if get_origin(hint) is list else _WORDS.get(hint, str(hint))


_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _type_error(path: str, value: Any, asked: str) -> ConfigError:
    return ConfigError(
        f"{path} asks for {asked}, found {value!r} ({type(value).__name__})", hint=_example(path, value, asked)
    )


def _example(path: str, value: Any, asked: str) -> str:
    """Returns how a value of that kind is typed."""
    if asked == "a list" and isinstance(value, str):
        # Who has a script types its command line, as a shell would take it.
        words = ",".join(value.split())
        return f'write "{path}=[{words}]", with the quotes, since the shell reads brackets'
    forms = {"a list": "[a,b]", "a mapping": "{name:value}", "a number": "0.5 or 1e-3", "a whole number": "8"}
    return f"set {path}=..., written like {forms[asked]}" if asked in forms else f"set {path}=..."
