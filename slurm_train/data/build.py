"""From the `data` part of a configuration to a sample source.

`data._target_` names a function of ours that gives a source, or a user's own map-style `Dataset`. Besides its keyword
arguments a user's data set may have

- `heldout`: what differs for the held-out samples, e.g. `{train: false}`; with a `_target_` it is used alone;
- `num_workers`: processes that read ahead (0);
- `collate`: dotted path of a function that makes a batch of a list of items;
- `keyed_randomness`: seed the random generators before each sample (true); false is faster where nothing is random.

Any source may have `prefetch`: micro-batches that a thread of the training process reads ahead (0).

A callable that takes `split` gets "train" or "heldout", unless the configuration sets `split` itself. One that does
not, and has no `heldout`, has no held-out samples, and evaluation is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_train.config.target import TARGET, accepts_keyword, callable_target, instantiate, resolve_target
from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.data.shards import Split
from slurm_train.data.source import SampleSource
from slurm_train.errors import ConfigError

_HELDOUT = "heldout"
_READING = ("num_workers", "collate", "keyed_randomness")
_PREFETCH = "prefetch"


def build_source(config: Mapping[str, Any], *, split: Split, seed: int) -> SampleSource | None:
    """Returns the samples of a split, None where a configuration has no held-out ones.

    Args:
        config: the `data` part of the configuration, with `_target_`.
        split: "train" or "heldout".
        seed: the run's seed; keys the randomness of a user's data set.

    Raises:
        ConfigError: the target cannot be found, or takes other keywords.
        DataError: the data cannot be read.
    """
    words = _words_of(config, split)
    if words is None:
        return None
    reading = {key: words.pop(key) for key in _READING if key in words}
    takes_split = accepts_keyword(callable_target(words), "split") and "split" not in words
    made = instantiate(words, **({"split": split} if takes_split else {}))
    if made is None and split == "heldout":
        return None
    if isinstance(made, SampleSource):
        for key in reading:
            raise ConfigError(
                f"data.{key} is for map-style data sets; {type(made).__name__} reads whole batches itself",
                hint=f"leave data.{key} out",
            )
        return made
    collate = reading.get("collate")
    return MapStyleSource(
        made,
        collate=resolve_target(collate) if isinstance(collate, str) else collate,
        num_workers=int(reading.get("num_workers", 0)),
        seed=seed if reading.get("keyed_randomness", True) else None,
    )


def prefetch_depth(config: Mapping[str, Any], source: SampleSource) -> int:
    """Returns how many micro-batches of the training samples a thread reads ahead, 0 for none.

    Raises:
        ConfigError: it is no count, or reading these samples in a thread would disturb the training.
    """
    depth = config.get(_PREFETCH) or 0
    if not isinstance(depth, int) or depth < 0:
        raise ConfigError(
            f"data.prefetch must be a whole number of at least 0, got {depth!r}", hint="0 reads nothing ahead"
        )
    if depth and config.get("num_workers"):
        raise ConfigError(
            "data.prefetch and data.num_workers both read ahead", hint="keep data.num_workers and drop data.prefetch"
        )
    if depth and getattr(source, "draws_at_random", False):
        raise ConfigError(
            "data.prefetch reads in a thread, which would share its random generators with the training",
            hint="read ahead in processes: data.num_workers=N; or, if reading draws nothing at random: "
            "data.keyed_randomness=false",
        )
    return depth


def _words_of(config: Mapping[str, Any], split: Split) -> dict[str, Any] | None:
    """Returns the mapping to build a split from, or None where there is none."""
    words = {str(key): value for key, value in config.items() if key not in (_HELDOUT, _PREFETCH)}
    if split == "train":
        return words
    other = config.get(_HELDOUT)
    if other is not None:
        return dict(other) if TARGET in other else {**words, **other}
    by_split = accepts_keyword(callable_target(words), "split") and "split" not in words
    return words if by_split else None
