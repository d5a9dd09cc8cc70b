from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from slurm_train.config.schema import Bound, Count, Degree, Positive, RunConfig, build_config
from slurm_train.errors import ConfigError
from tests.support.refusals import refusal


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
    ("text", 12, "12"),
    ("flag", True, True),
    ("maybe", 4, 4),
    ("counts", [4, 2], [4, 2]),
    ("every", "auto", "auto"),
    ("degree", -1, -1),
    ("time_s", 1, 1.0),
    ("factor", 0, 0.0),
    ("words", ("a",), ["a"]),
    ("open", {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    ("inner", {}, Inner()),
    ("inner_or_none", {"x": 2}, Inner(x=2)),
]


@pytest.mark.parametrize(("key", "value", "expected"), ACCEPTED)
def test_values_that_fit_are_taken(key: str, value: object, expected: object) -> None:
    result = getattr(build_config(Sample, {key: value}), key)
    assert result == expected and type(result) is type(expected)


REFUSED = [
    ("number", 3.0, "number must be a whole number, got 3.0"),
    ("number", "3", "number must be a whole number, got '3'"),
    ("number", True, "number must be a whole number, got True"),
    ("text", True, "text must be a text, got True"),
    ("flag", "yes", "flag must be true or false, got 'yes'"),
    ("choice", "c", "choice must be a or b, got 'c'"),
    ("counts", [2, 0], "counts must be a whole number, at least 1, or a list, got [2, 0]"),
    ("degree", -2, "degree must be a whole number, at least 1 (or -1), got -2"),
    ("time_s", 0, "time_s must be a number, above 0, or null, got 0"),
    ("time_s", float("nan"), "time_s must be a number, above 0, or null, got nan"),
    ("words", "a b", "words must be a list, got 'a b'"),
    ("words", ["a", None], "words[1] must be a text, got None"),
    ("open", [1], "open must be a mapping, got [1]"),
    ("inner", {"y": 1}, "there is no configuration key 'inner.y'"),
    ("inner_or_none", {"x": "1"}, "inner_or_none.x must be a whole number, got '1'"),
    ("nubmer", 3, "there is no configuration key 'nubmer'"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_values_that_do_not_fit_are_refused_by_name(key: str, value: object, message: str) -> None:
    assert refusal(ConfigError, build_config, Sample, {key: value}).message == message


def test_a_hint_has_an_example_or_the_nearest_names() -> None:
    for key, hint in (("words", 'for example "words=[x]"'), ("nubmer", "did you mean number or inner?")):
        assert refusal(ConfigError, build_config, Sample, {key: "x"}).hint == hint


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
        with pytest.raises(ConfigError, match=rf"{section}\.{key} must be .*(at least|above) \d"):
            build_config(RunConfig, {section: {key: value}})


@pytest.mark.parametrize(
    ("asked", "on_gpu", "expected"),
    [("auto", True, True), ("auto", False, False), (True, False, True), (False, True, False)],
)
def test_models_are_compiled_on_gpus_by_default(asked: bool | str, on_gpu: bool, expected: bool) -> None:
    assert RunConfig().train.compile == "auto"
    assert build_config(RunConfig, {"train": {"compile": asked}}).train.compiles(on_gpu=on_gpu) == expected
