from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from slurm_train.config.schema import RunConfig
from slurm_train.config.structure import all_keys, build_config, to_mapping
from slurm_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    x: int = 1


@dataclass(frozen=True, kw_only=True)
class Sample:
    number: int = 0
    real: float = 0.0
    text: str = ""
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    maybe: int | None = None
    counts: int | list[int] = 1
    words: list[str] = field(default_factory=list)
    open: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    inner_or_none: Inner | None = None


ACCEPTED = [
    ("number", 3, 3),
    ("real", 3, 3.0),
    ("real", "3e-4", 3e-4),
    ("real", 0.5, 0.5),
    ("text", "abc", "abc"),
    ("text", 12, "12"),
    ("flag", True, True),
    ("choice", "b", "b"),
    ("maybe", None, None),
    ("maybe", 4, 4),
    ("counts", 4, 4),
    ("counts", [4, 2], [4, 2]),
    ("words", ["a", "b"], ["a", "b"]),
    ("words", ("a",), ["a"]),
    ("open", {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    ("inner", {"x": 5}, Inner(x=5)),
    ("inner", {}, Inner()),
    ("inner_or_none", None, None),
    ("inner_or_none", {"x": 2}, Inner(x=2)),
]


@pytest.mark.parametrize(("key", "value", "expected"), ACCEPTED)
def test_values_that_fit_are_taken(key: str, value: object, expected: object) -> None:
    result = getattr(build_config(Sample, {key: value}), key)
    assert result == expected and type(result) is type(expected)


REFUSED = [
    ("number", 3.0, "number asks for a whole number, found 3.0 (float)"),
    ("number", "3", "number asks for a whole number, found '3' (str)"),
    ("number", True, "number asks for a whole number, found True (bool)"),
    ("number", None, "number asks for a whole number, found None (NoneType)"),
    ("real", "fast", "real asks for a number, found 'fast' (str)"),
    ("real", True, "real asks for a number, found True (bool)"),
    ("text", True, "text asks for a text, found True (bool)"),
    ("text", ["a"], "text asks for a text, found ['a'] (list)"),
    ("flag", 1, "flag asks for true or false, found 1 (int)"),
    ("flag", "yes", "flag asks for true or false, found 'yes' (str)"),
    ("choice", "c", "choice='c' is not one of its values"),
    ("maybe", "x", "maybe asks for a whole number, found 'x' (str)"),
    ("counts", "x", "counts asks for a whole number or a list, found 'x' (str)"),
    ("words", "a", "words asks for a list, found 'a' (str)"),
    ("words", ["a", None], "words[1] asks for a text, found None (NoneType)"),
    ("open", [1], "open asks for a mapping, found [1] (list)"),
    ("inner", 3, "inner asks for a mapping, found 3 (int)"),
    ("inner", {"x": "1"}, "inner.x asks for a whole number, found '1' (str)"),
    ("inner", {"y": 1}, "there is no configuration key 'inner.y'"),
    ("inner_or_none", {"x": "1"}, "inner_or_none.x asks for a whole number, found '1' (str)"),
    ("nubmer", 3, "there is no configuration key 'nubmer'"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_values_that_do_not_fit_are_refused_by_name(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Sample, {key: value})
    assert caught.value.message == message


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Sample, {"nubmer": 3})
    assert caught.value.hint == "did you mean number or inner?"


def test_to_mapping_and_back_is_the_same_value() -> None:
    sample = Sample(number=3, words=["a"], open={"k": {"z": 1}}, inner_or_none=Inner(x=9))
    assert build_config(Sample, to_mapping(sample)) == sample


def test_all_keys_reach_into_sections_also_optional_ones() -> None:
    keys = all_keys(RunConfig)
    assert {"seed", "optim", "optim.lr", "cluster", "cluster.nodes", "cluster.sbatch", "model"} <= set(keys)
    assert keys["optim.lr"] is float
