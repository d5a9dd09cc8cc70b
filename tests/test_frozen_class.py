"""Value classes that are made quickly behave as frozen dataclasses do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace
from typing import Any

import pytest

from slurm_train.frozen_class import frozen, frozen_positional


@frozen
class Quick:
    number: int
    words: tuple[str, ...] = ()
    aside: int = field(default=0, compare=False, repr=False)


@frozen
class Named(Quick):
    name: str = "x"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    number: int
    words: tuple[str, ...] = ()
    aside: int = field(default=0, compare=False, repr=False)


@pytest.mark.parametrize("kind", [Quick, Slow])
def test_values_compare_copy_and_print_alike(kind: Any) -> None:
    one = kind(number=1, words=("a",), aside=5)
    assert one == kind(number=1, words=("a",)) and one != kind(number=2) and one != 1
    assert hash(one) == hash(kind(number=1, words=("a",), aside=7)) and len({one, copy.copy(one)}) == 1
    assert repr(one) == f"{kind.__name__}(number=1, words=('a',))"
    assert pickle.loads(pickle.dumps(one)) == one and replace(one, number=2).number == 2
    assert asdict(one) == {"number": 1, "words": ("a",), "aside": 5}
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises((AttributeError, TypeError)):
        one.other = 1
    with pytest.raises(FrozenInstanceError):
        one.number = 2
    with pytest.raises(FrozenInstanceError):
        del one.number
    assert one.number == 1


@frozen_positional
class Pair:
    left: int
    right: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.left < 0:
            raise ValueError(self.left)


def test_positional_arguments_defaults_and_checks() -> None:
    assert Pair(1, [2]) == Pair(1, right=[2]) == Pair(left=1, right=[2])
    assert Pair(1).right == [] and Pair(1).right is not Pair(1).right
    with pytest.raises(ValueError, match="-1"):
        Pair(-1)


@pytest.mark.parametrize(
    ("values", "named", "message"),
    [
        ((), {}, r"Pair\(\) misses the argument 'left'"),
        ((1, [], 2), {}, r"Pair\(\) takes 2 positional arguments, got 3"),
        ((1,), {"left": 1}, r"Pair\(\) got left twice"),
        ((1,), {"width": 1}, r"Pair\(\) got unexpected arguments: width"),
    ],
)
def test_wrong_arguments_are_named(values: Any, named: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Pair(*values, **named)


def test_a_class_keeps_its_own_methods_and_differs_from_its_base() -> None:
    assert repr(Named(number=1)) == "x" and Named(number=1) != Quick(number=1)
