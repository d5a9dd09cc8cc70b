"""The points of a sweep: which values the words of `--multirun` give to which run, in Hydra's own grammar and order.

Hydra's parser reads the words, and they are multiplied out as its basic sweeper does: the last word varies fastest.
Nothing is composed here. A word whose comma belongs to a text for Slurm (cluster.exclude=node1,node2) gives one value,
as it does without `--multirun`; choice(...) sweeps it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, Transformer
from hydra.errors import HydraException

from slurm_train.config.lean import open_loader
from slurm_train.config.search_path import search_path
from slurm_train.config.words import Words, is_one_value, split_word
from slurm_train.errors import ConfigError

# Slurm's controllers hold 10,000 jobs by default; a slip of the pen asks for millions.
_MOST_POINTS = 100_000


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """All words of its command line, e.g. ("+cluster=1x8", "optim.lr=0.001", "seed=3")."""
    values: Mapping[str, str]
    """What the sweep gives to it, e.g. {"optim.lr": "0.001", "seed": "3"}."""


def read_points(words: Words) -> list[Point]:
    """Returns the points of a sweep in Hydra's order; one point where no word has several values.

    Raises:
        ConfigError: a word that Hydra cannot read, has no values or a continuum of them, or is given twice.
    """
    swept = _swept(words)
    _refuse_twice(list(swept.values()))
    choices = {word: _values(override) for word, override in swept.items()}
    count = math.prod(map(len, choices.values()))
    if count > _MOST_POINTS:
        counts = " x ".join(str(len(values)) for values in choices.values())
        raise ConfigError(f"{counts} = {count:,} runs in one sweep", hint=f"at most {_MOST_POINTS:,} are taken")
    rows = itertools.product(*choices.values())
    return [_point(words.overrides, dict(zip(swept, row, strict=True))) for row in rows]


def _point(overrides: Sequence[str], chosen: Mapping[str, str]) -> Point:
    values = {}
    for word in chosen.values():
        _, key, value = split_word(word)
        values[key] = unquoted(value or "")
    return Point(tuple(chosen.get(word, word) for word in overrides), values)


def unquoted(value: str) -> str:
    """Returns a value without the quotes of Hydra's spelling."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def _swept(words: Words) -> dict[str, Override]:
    """Returns the words that have several values, as Hydra reads them."""
    parser = OverridesParser.create(config_loader=open_loader(search_path(words)))
    swept: dict[str, Override] = {}
    for word in words.overrides:
        _, key, value = split_word(word)
        if value is None or is_one_value(key, value):
            continue
        try:
            (override,) = parser.parse_overrides([word])
        except HydraException as err:
            raise _unreadable(word, err) from err
        if override.is_sweep_override():
            swept[word] = override
    return swept


def _unreadable(word: str, err: HydraException) -> ConfigError:
    reason = " ".join(str(err).split("\n")[0].split())
    return ConfigError(
        f"{word!r} cannot be read in a sweep: {reason}",
        hint="a text with commas, brackets or blanks is quoted twice there: \"key='a,b'\"",
    )


def _refuse_twice(overrides: Sequence[Override]) -> None:
    keys = [override.key_or_group for override in overrides]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{key} is swept by two words", hint="put all its values into one")


def _values(override: Override) -> list[str]:
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: an interval names no points",
            hint="use range(start,stop,step) or choice(a,b,c), or a sweeper that chooses points: hydra/sweeper=...",
        )
    values = [f"{override.get_key_element()}={value}" for value in override.sweep_iterator(transformer=_spelled)]
    if not values:
        raise ConfigError(f"{override.input_line} gives no value: the sweep is empty", hint="widen it, or drop it")
    return values


def _spelled(value: Any) -> str:
    """Returns a value in Hydra's spelling; a text that needs escapes is quoted, which means the same everywhere."""
    escaped = Transformer.str(value)
    is_escaped = isinstance(value, str) and escaped != value
    return QuotedString(value, Quote.single).with_quotes() if is_escaped else str(escaped)
