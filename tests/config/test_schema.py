from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from slurm_train.config.schema import Bound, Count, Degree, Positive, RunConfig, all_keys, build_config, to_mapping
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
    counts: Count | list[Count] = 1
    every: Count | Literal["auto"] | None = None
    degree: Degree = -1
    time_s: Positive | None = None
    factor: Annotated[float, Bound(0)] = 0.0
    words: list[str] = field(default_factory=list)
    open: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    inner_or_none: Inner | None = None


ACCEPTED = [
    ("number", 3, 3),
    ("real", 3, 3.0),
    ("real", "3e-4", 3e-4),
    ("real", 0.5, 0.5),
    ("text", 12, "12"),
    ("flag", True, True),
    ("choice", "b", "b"),
    ("maybe", None, None),
    ("maybe", 4, 4),
    ("counts", [4, 2], [4, 2]),
    ("every", "auto", "auto"),
    ("degree", -1, -1),
    ("time_s", 1, 1.0),
    ("factor", 0, 0.0),
    ("words", ("a",), ["a"]),
    ("open", {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    ("inner", {}, Inner()),
    ("inner_or_none", None, None),
    ("inner_or_none", {"x": 2}, Inner(x=2)),
]


@pytest.mark.parametrize(("key", "value", "expected"), ACCEPTED)
def test_values_that_fit_are_taken(key: str, value: object, expected: object) -> None:
    result = getattr(build_config(Sample, {key: value}), key)
    assert result == expected and type(result) is type(expected)


REFUSED = [
    ("number", 3.0, "number asks for a whole number, found 3.0 (float)", "set number=..., written like 8"),
    ("number", "3", "number asks for a whole number, found '3' (str)", ""),
    ("number", True, "number asks for a whole number, found True (bool)", ""),
    ("number", None, "number asks for a whole number, found None (NoneType)", ""),
    ("real", "fast", "real asks for a number, found 'fast' (str)", ""),
    ("text", True, "text asks for a text, found True (bool)", ""),
    ("flag", "yes", "flag asks for true or false, found 'yes' (str)", "set flag=..."),
    ("choice", "c", "choice='c' is not one of its values", "use one of a, b"),
    ("maybe", "x", "maybe asks for a whole number, found 'x' (str)", ""),
    ("counts", "x", "counts asks for a whole number or a list, found 'x' (str)", ""),
    ("counts", [2, 0], "counts[1] must be at least 1, got 0", "set counts[1] to 1 or more"),
    ("every", "b", "every asks for a whole number or auto, found 'b' (str)", ""),
    ("every", 0, "every must be at least 1, got 0", "set every to 1 or more, or to auto or to null"),
    ("degree", -2, "degree must be at least 1 (or -1), got -2", ""),
    ("time_s", 0, "time_s must be above 0, got 0", "set time_s above 0, or to null"),
    ("time_s", ".nan", "time_s must be above 0, got nan", ""),
    ("factor", -0.5, "factor must be at least 0, got -0.5", ""),
    ("words", "a b", "words asks for a list, found 'a b' (str)", 'write "words=[a,b]", with the quotes'),
    ("words", ["a", None], "words[1] asks for a text, found None (NoneType)", ""),
    ("open", [1], "open asks for a mapping, found [1] (list)", ""),
    ("inner", {"y": 1}, "there is no configuration key 'inner.y'", "did you mean"),
    ("inner_or_none", {"x": "1"}, "inner_or_none.x asks for a whole number, found '1' (str)", ""),
    ("nubmer", 3, "there is no configuration key 'nubmer'", "did you mean number or inner?"),
]


@pytest.mark.parametrize(("key", "value", "message", "hint"), REFUSED)
def test_values_that_do_not_fit_are_refused_by_name(key: str, value: object, message: str, hint: str) -> None:
    value = float("nan") if value == ".nan" else value
    with pytest.raises(ConfigError) as caught:
        build_config(Sample, {key: value})
    assert caught.value.message == message and caught.value.hint.startswith(hint)


def test_the_ranges_of_the_real_keys_are_checked() -> None:
    """One key of each kind; whatever is annotated is checked."""
    for section, key, value in (
        ("train", "max_steps", 0),
        ("parallel", "tp", 0),
        ("checkpoint", "save_timeout_s", 0),
        ("health", "spike_factor", 1),
        ("preflight", "exclude_bad_nodes_h", -1),
        ("ddp", "comm_start_step", -1),
        ("cluster", "nodes", 0),
    ):
        with pytest.raises(ConfigError, match=rf"{section}\.{key} must be (at least|above) \d"):
            build_config(RunConfig, {section: {key: value}})


def test_to_mapping_and_back_is_the_same_value() -> None:
    sample = Sample(number=3, words=["a"], open={"k": {"z": 1}}, inner_or_none=Inner(x=9))
    assert build_config(Sample, to_mapping(sample)) == sample


def test_all_keys_reach_into_sections_also_optional_ones() -> None:
    keys = all_keys(RunConfig)
    assert {"seed", "optim", "optim.lr", "cluster", "cluster.nodes", "cluster.sbatch", "model"} <= set(keys)
    assert keys["optim.lr"] is float
