"""Value classes that are made quickly behave as frozen dataclasses do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, field, replace
from typing import Any

import pytest

from slurm_train.frozen_class import frozen, frozen_positional


@frozen
class Quick:
    number: int
    words: tuple[str, ...] = ()
    aside: int = field(default=0, compare=False, repr=False)


def test_values_compare_copy_and_print_as_those_of_a_dataclass() -> None:
    one = Quick(number=1, words=("a",), aside=5)
    assert one == Quick(number=1, words=("a",)) and one != Quick(number=2) and one != 1
    assert hash(one) == hash(Quick(number=1, words=("a",), aside=7)) and len({one, copy.copy(one)}) == 1
    assert repr(one) == "Quick(number=1, words=('a',))"
    assert pickle.loads(pickle.dumps(one)) == one and replace(one, number=2).number == 2
    assert asdict(one) == {"number": 1, "words": ("a",), "aside": 5}
    with pytest.raises(TypeError):
        Quick(1)
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
        ((1,), {"width": 1}, r"Pair\(\) got unexpected arguments: width"),
    ],
)
def test_wrong_arguments_are_named(values: Any, named: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Pair(*values, **named)
