"""Builds a sample source from the `data` part of a configuration.

`data._target_` names a function of this package that returns a source, or a user's own map-style `Dataset`. Besides its
own keyword arguments, `data` of a user's data set may have

- `heldout`: what differs for the held-out samples, e.g. `{train: false}`; with a `_target_` it is used alone;
- `num_workers`: processes that read ahead ("auto", see `data.workers`);
- `collate`: what makes a batch of a list of items: dotted path of a function, or a mapping with `_target_`;
- `keyed_randomness`: seed the random generators before each sample (true); false is faster where nothing is random.

Instead of a map-style data set it may be a stream with a state (`data.stream`). A callable that takes `rank` and
`num_ranks` gets the data-parallel rank and their number; with several ranks a stream has to take them, so that each
rank gets samples of its own. `allow_world_change` (false) lets a stream begin anew on another number of ranks.

Any source may have `prefetch`: micro-batches that a thread of the training process reads ahead (0).

A callable that takes `split` gets "train" or "heldout", unless the configuration sets `split` itself; if it refuses
"heldout", the first of "val", "valid", "validation" and "test" that it takes. One that does not take it, and has no
`heldout`, has no held-out samples, and evaluation is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurm_train.config.target import TARGET, accepts_keyword, callable_target, instantiate, resolve_target
from slurm_train.data.mapstyle import MapStyleSource, WorkerChoice
from slurm_train.data.shards import Split
from slurm_train.data.source import SampleSource, StreamingSource, describe
from slurm_train.data.stream import StreamSource, is_stream
from slurm_train.data.workers import AUTO
from slurm_train.errors import ConfigError, DataError

_HELDOUT = "heldout"
_NAMES_OF_HELDOUT = (_HELDOUT, "val", "valid", "validation", "test")
"""What a data set with a `split` may call its held-out samples; the first that it takes is used."""
_READING_KEYS = ("num_workers", "collate", "keyed_randomness")
_PREFETCH = "prefetch"
ALLOW_WORLD_CHANGE = "allow_world_change"


def build_source(
    config: Mapping[str, Any],
    *,
    split: Split,
    seed: int,
    part: tuple[int, int] | None = None,
    note: Callable[[str], None] = lambda _text: None,
    workers: WorkerChoice | None = None,
) -> SampleSource | None:
    """Returns the samples of a split, None where a configuration has no held-out ones.

    Args:
        config: the `data` part of the configuration, with `_target_`.
        split: "train" or "heldout".
        seed: the run's seed; keys the randomness of a user's data set.
        part: the data-parallel rank and how many they are; None where a stream cannot be used.
        note: called with a line where held-out samples have another name than "heldout".
        workers: chooses the number of workers where `num_workers` is "auto"; None for no workers then.

    Raises:
        ConfigError: the target cannot be found, or takes other keywords.
        DataError: the data cannot be read.
    """
    words = _words_of(config, split)
    if words is None:
        return None
    reading = {key: words.pop(key) for key in _READING_KEYS if key in words}
    target = callable_target(words)
    given: dict[str, Any] = {"split": split} if accepts_keyword(target, "split") and "split" not in words else {}
    takes_part = accepts_keyword(target, "rank") and accepts_keyword(target, "num_ranks")
    if part is not None and takes_part:
        given |= {"rank": part[0], "num_ranks": part[1]}
    made = _instantiate_split(words, given, note=note)
    if made is None and split == "heldout":
        return None
    collate = reading.get("collate")
    if isinstance(collate, Mapping):
        collate = instantiate(collate)
    collate = resolve_target(collate) if isinstance(collate, str) else collate
    if collate is not None and not callable(collate):
        raise ConfigError(
            f"data.collate={reading['collate']} gave a {type(collate).__name__}, which cannot be called",
            hint="name a function of a list of items, or {_target_: a class with __call__, its arguments}",
        )
    keyed = seed if reading.get("keyed_randomness", True) else None
    if is_stream(made):
        _check_stream(made, reading, part=part, takes_part=takes_part)
        return StreamSource(made, collate=collate, seed=keyed, rebuild=lambda: instantiate(words, **given))
    if isinstance(made, SampleSource):
        for key in reading:
            raise ConfigError(
                f"data.{key} is for map-style data sets; {type(made).__name__} reads whole batches itself",
                hint=f"leave data.{key} out",
            )
        if callable(getattr(made, "set_epoch", None)) and not isinstance(made, StreamingSource):
            raise DataError(
                f"set_epoch of {type(made).__name__}, which reads whole batches itself, would never be called",
                hint="define stream(draws): draw.positions // len(self) are the epochs of a draw's samples; or leave "
                "set_epoch out",
            )
        return made
    num_workers: Any = reading.get("num_workers", AUTO)
    if num_workers == AUTO:
        # No workers beside a thread that reads ahead: it would only wait for them.
        num_workers = 0 if workers is None or config.get(_PREFETCH) else workers
    return MapStyleSource(made, collate=collate, num_workers=num_workers, seed=keyed)


def _instantiate_split(words: Mapping[str, Any], given: dict[str, Any], *, note: Callable[[str], None]) -> Any:
    """Returns the data set; one that refuses split="heldout" is asked for its held-out samples by other names.

    torchvision's data sets refuse all names but their own.

    Raises:
        ConfigError: the target has no held-out samples by any name that is known here.
    """
    names = _NAMES_OF_HELDOUT if given.get("split") == _HELDOUT else (given.get("split"),)
    refusals: list[str] = []
    for name in names:
        try:
            made = instantiate(words, **(given if name is None else {**given, "split": name}))
        except (ValueError, KeyError) as err:
            if name is None or given.get("split") != _HELDOUT or str(name) not in str(err):
                raise
            refusals.append(str(err))
            continue
        if refusals:
            note(f"held-out samples: split={name} of {words[TARGET]}, which has none called {_HELDOUT}")
        return made
    raise ConfigError(
        f"data.{TARGET}={words[TARGET]} takes none of split={', '.join(map(str, names))}: {refusals[0]}",
        hint="name its held-out part: data.heldout={split: NAME}, and set data.split to that of the training",
    )


def _check_stream(made: Any, reading: Mapping[str, Any], *, part: tuple[int, int] | None, takes_part: bool) -> None:
    name = type(made).__qualname__
    if part is None:
        raise DataError(
            f"{name} is a stream, and held-out samples and parts of a mix are asked for by number",
            hint="name a map-style data set there; for no evaluation return None for split=heldout",
        )
    if part[1] > 1 and not takes_part:
        raise DataError(
            f"the stream {name} does not know its rank: all {part[1]} data-parallel ranks would read the same samples",
            hint="let what data._target_ names take `rank` and `num_ranks`, and give each rank its own part",
        )
    if reading.get("num_workers", AUTO) not in (AUTO, 0):
        raise ConfigError(
            f"data.num_workers={reading['num_workers']} was asked of the stream {name}",
            hint="let the stream read ahead itself, e.g. a StatefulDataLoader with num_workers",
        )


def prefetch_depth(config: Mapping[str, Any], source: SampleSource) -> int:
    """Returns how many micro-batches of the training samples a thread reads ahead, 0 for none.

    Raises:
        ConfigError: reading these samples in a thread would disturb the training.
    """
    depth = config.get(_PREFETCH) or 0
    if depth and isinstance(source, StreamSource):
        raise ConfigError(
            "data.prefetch would read a stream ahead of the place that is saved",
            hint="let the stream itself read ahead",
        )
    if depth and config.get("num_workers", AUTO) not in (AUTO, 0):
        raise ConfigError(
            "data.prefetch and data.num_workers both read ahead", hint="keep data.num_workers and drop data.prefetch"
        )
    if depth and describe(source).draws_at_random:
        raise ConfigError(
            "data.prefetch reads in a thread, which would share its random generators with the training",
            hint="read ahead in processes: data.num_workers=N; or, if reading draws nothing at random: "
            "data.keyed_randomness=false",
        )
    return depth


def _words_of(config: Mapping[str, Any], split: Split) -> dict[str, Any] | None:
    """Returns the mapping to build a split from, or None where there is none."""
    words = {str(key): value for key, value in config.items() if key not in (_HELDOUT, _PREFETCH, ALLOW_WORLD_CHANGE)}
    if split == "train":
        return words
    other = config.get(_HELDOUT)
    if other is not None:
        return dict(other) if TARGET in other else {**words, **other}
    by_split = accepts_keyword(callable_target(words), "split") and "split" not in words
    return words if by_split else None
