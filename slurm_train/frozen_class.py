"""Immutable value classes that are made quickly.

`dataclasses` compiles six functions per frozen class, which takes 0.4 ms; with a hundred classes on the way from Enter
to job id that is a tenth of the time. Here nothing is compiled: the methods are shared.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_words: Any) -> Any:
        """Tells type checkers what `frozen` does; nothing at run time."""
        return lambda function: function


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Makes a dataclass with slots and keyword arguments, whose fields are set once; it is compared by them."""
    return _with_shared_methods(cls, kw_only=True)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen_positional(cls: type[T]) -> type[T]:
    """Makes the same with arguments that may be positional."""
    return _with_shared_methods(cls, kw_only=False)


def _with_shared_methods(cls: type[T], *, kw_only: bool) -> type[T]:
    # Without a docstring `dataclass` would look at the signature to write one.
    cls.__doc__ = cls.__doc__ or cls.__name__
    made = dataclass(slots=True, kw_only=kw_only, init=False, repr=False, eq=False)(cls)
    for name, method in _SHARED.items():
        if name not in vars(cls):
            setattr(made, name, method)
    return made


_fields = functools.cache(fields)


def _initialize(self: Any, *values: Any, **named: Any) -> None:
    name, known = type(self).__qualname__, _fields(self.__class__)
    if values:
        names = [each.name for each in known if not each.kw_only]
        if len(values) > len(names):
            raise TypeError(f"{name}() takes {len(names)} positional arguments, got {len(values)}")
        given = dict(zip(names, values, strict=False))
        if twice := given.keys() & named:
            raise TypeError(f"{name}() got {', '.join(twice)} twice")
        named |= given
    for each in known:
        if each.name in named:
            value = named.pop(each.name)
        elif each.default is not MISSING:
            value = each.default
        elif each.default_factory is not MISSING:
            value = each.default_factory()
        else:
            raise TypeError(f"{name}() misses the argument {each.name!r}")
        object.__setattr__(self, each.name, value)
    if named:
        raise TypeError(f"{name}() got unexpected arguments: {', '.join(named)}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


@functools.cache
def _getter(kind: type) -> Any:
    names = [each.name for each in _fields(kind) if each.compare]
    return operator.attrgetter(*names) if names else lambda _: ()


def _values(one: Any) -> Any:
    """Returns what it is compared by; of a single field the value itself."""
    return _getter(one.__class__)(one)


def _is_equal(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _text(self: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in _fields(self.__class__) if each.repr)
    return f"{type(self).__qualname__}({shown})"


def _set_once(self: Any, name: str, given: object) -> None:
    if hasattr(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, given)


def _refuse_deletion(_self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_SHARED = {
    "__init__": _initialize,
    "__eq__": _is_equal,
    "__hash__": _hash,
    "__repr__": _text,
    "__setattr__": _set_once,
    "__delattr__": _refuse_deletion,
}
