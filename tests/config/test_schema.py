from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from slurm_train.config.schema import Count, Positive, PositiveOrAuto, RunConfig, build_config
from slurm_train.config.synonyms import EXPORT_WORDS
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
    counts: Count | list[Count] = 1
    every: Count | Literal["auto"] | None = None
    degree: PositiveOrAuto = -1
    time_s: Positive | None = None
    words: list[str] = field(default_factory=list)
    open: dict[str, Any] = field(default_factory=dict)
    inner_or_none: Inner | None = None


REFUSED = [
    ("number", True, "number must be a whole number, got True"),
    ("text", True, "text must be a text, got True"),
    ("flag", "yes", "flag must be true or false, got 'yes'"),
    ("choice", "c", "choice must be a or b, got 'c'"),
    ("counts", [2, 0], "counts must be a whole number, at least 1, or a list, got [2, 0]"),
    ("degree", -2, "degree must be a whole number, at least 1 (or -1), got -2"),
    ("time_s", float("nan"), "time_s must be a number, above 0, or null, got nan"),
    ("words", "a b", "words must be a list, got 'a b'"),
    ("words", ["a", None], "words[1] must be a text, got None"),
    ("open", [1], "open must be a mapping, got [1]"),
    ("inner_or_none", {"x": "1"}, "inner_or_none.x must be a whole number, got '1'"),
    ("real", 10**309, f"real must be a number, got {10**309}"),
    ("nubmer", 3, "there is no configuration key 'nubmer'"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_values_that_do_not_fit_are_refused_by_name(key: str, value: object, message: str) -> None:
    assert refusal(ConfigError, build_config, Sample, {key: value}).message == message


def test_a_section_without_a_key_that_it_needs_is_refused_by_name() -> None:
    error = refusal(ConfigError, build_config, RunConfig, {"container": {"image": "/apps/torch.sif"}})
    assert error.message == "container has no kind"
    assert "container.kind=" in error.hint


def test_numbers_texts_and_lists_are_read_as_their_kind() -> None:
    given = {"real": "3e-4", "text": 12, "counts": [4, 2], "every": "auto", "words": ("a",), "inner_or_none": {"x": 2}}
    expected = Sample(real=3e-4, text="12", counts=[4, 2], every="auto", words=["a"], inner_or_none=Inner(x=2))
    assert build_config(Sample, given) == expected
    assert type(build_config(Sample, {"real": 3}).real) is float


def test_the_ranges_of_the_real_keys_are_checked() -> None:
    """One key of each kind; whatever is annotated is checked."""
    for section, key, value in (
        ("train", "max_steps", 0),
        ("checkpoint", "save_timeout_s", 0),
        ("preflight", "exclude_bad_nodes_h", -1),
    ):
        with pytest.raises(ConfigError, match=rf"{section}\.{key} must be .*(at least|above) \d"):
            build_config(RunConfig, {section: {key: value}})


def test_words_of_sbatchs_export_are_answered() -> None:
    for word in ("ALL", "NONE"):
        error = refusal(ConfigError, build_config, RunConfig, {"cluster": {"export": word}})
        assert error.hint == EXPORT_WORDS[word]
