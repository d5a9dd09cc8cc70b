"""Immutable value classes that are made quickly.

`dataclasses` compiles six functions per frozen class; with eighty classes on the way from Enter to job id that took
27 ms of 290. Here only `__init__` is compiled, and the rest is shared.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field, fields
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
    made = dataclass(slots=True, kw_only=True, repr=False, eq=False)(cls)
    for name, method in _SHARED.items():
        if name not in vars(cls):
            setattr(made, name, method)
    return made


def _values(one: Any) -> tuple[Any, ...]:
    return tuple(getattr(one, each.name) for each in fields(one) if each.compare)


def _is_equal(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _text(self: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({shown})"


def _set_once(self: Any, name: str, given: object) -> None:
    if hasattr(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, given)


def _refuse_deletion(_self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_SHARED = {
    "__eq__": _is_equal,
    "__hash__": _hash,
    "__repr__": _text,
    "__setattr__": _set_once,
    "__delattr__": _refuse_deletion,
}
