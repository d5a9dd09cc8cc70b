"""Combines several sources into one, in given proportions: `data=mix`.

An epoch of the mix has as many samples as all its sources together. Each source has a share of the sample numbers by
its weight, so every epoch has the same proportions, and every global batch about the same. Each sample of a source is
used once before any is used again: the k-th draw from a source in a run is position k of the source's own keyed order,
in whatever epoch of the mix. All of that is arithmetic on the run's position, so order, resume and independence of the
number of ranks are the same as for one source.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from slurm_train.config.data_kinds import PREPARED
from slurm_train.config.target import TARGET
from slurm_train.data.build import build_source
from slurm_train.data.check import require_sources
from slurm_train.data.order import Int64Array, SampleOrder
from slurm_train.data.shards import Split
from slurm_train.data.source import Batch, Description, Draw, SampleSource, StreamingSource, describe, map_tensors
from slurm_train.errors import DataError
from slurm_train.rundir.events import ITEMS, with_items


class _SourcePart(NamedTuple):
    """The part of a micro-batch that one source gives: its rows in the micro-batch, and the draw that reads them."""

    source: int
    rows: Int64Array
    draw: Draw


class MixedSource:
    """Samples of several sources.

    Args:
        sources: by name; they must give tensors of the same shapes and kinds.
        weights: of each, any positive numbers; the shares of the samples are proportional to them.
        seed: the run's seed, keys the order of each source.
    """

    def __init__(self, sources: Mapping[str, SampleSource], *, weights: Mapping[str, float], seed: int) -> None:
        self._names = sorted(sources)
        self._sources = [sources[name] for name in self._names]
        self._orders = [
            SampleOrder(len(source), seed=_seed_of(name, seed))
            for name, source in zip(self._names, self._sources, strict=True)
        ]
        self._weights = np.array([weights[name] for name in self._names], dtype=np.float64)
        num_samples = sum(map(len, self._sources))
        shares = np.cumsum(self._weights / self._weights.sum()) * num_samples
        # Sample number n belongs to the source s with borders[s] <= n < borders[s + 1].
        self._borders = np.concatenate([[0], np.rint(shares)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._borders[-1])

    def fingerprint(self) -> str:
        """Returns a hash over names, fingerprints and weights, and one over the digests of items."""
        fingerprints = [source.fingerprint().partition(ITEMS) for source in self._sources]
        parts = [
            f"{name} {fingerprint} {weight!r}"
            for name, (fingerprint, _, _), weight in zip(self._names, fingerprints, self._weights.tolist(), strict=True)
        ]
        items = "\n".join(digest for _, _, digest in fingerprints)
        fingerprint = xxhash.xxh3_128_hexdigest("\n".join(parts).encode())
        return with_items(fingerprint, xxhash.xxh3_128_hexdigest(items.encode()) if items.strip() else "")

    def batch(self, indices: Int64Array) -> Batch:
        """Returns the samples with these numbers as they are in the first epoch."""
        return next(self.stream(iter([Draw(indices, indices)])))

    def describe(self) -> Description:
        """Returns what all sources have in common; the encoding of the first is that of all, if they are text."""
        described = [describe(source) for source in self._sources]
        num_targets = sum(one.num_targets for one in described)
        is_text = all(one.bytes_per_target is not None for one in described)
        num_bytes = math.fsum((one.bytes_per_target or 0.0) * one.num_targets for one in described)
        return Description(
            bytes_per_target=num_bytes / num_targets if is_text else None,
            num_targets=num_targets if is_text else 0,
            encoding=described[0].encoding,
            draws_at_random=any(one.draws_at_random for one in described),
            collates_at_random=self._collates_at_random,
        )

    def _collates_at_random(self, indices: Int64Array) -> bool:
        """Returns whether the collate function of a source draws random numbers."""
        for part in self._parts(Draw(indices, indices)):
            of_source = describe(self._sources[part.source]).collates_at_random
            if of_source is not None and of_source(part.draw.indices):
                return True
        return False

    def stream(self, draws: Iterator[Draw]) -> Iterator[Batch]:
        """Yields one micro-batch per draw; sources that read ahead do so here too."""
        waiting: list[deque[Draw]] = [deque() for _ in self._sources]
        plans: deque[list[_SourcePart]] = deque()

        def pull() -> bool:
            draw = next(draws, None)
            if draw is None:
                return False
            plans.append(list(self._parts(draw)))
            for part in plans[-1]:
                waiting[part.source].append(part.draw)
            return True

        def draws_of(number: int) -> Iterator[Draw]:
            while waiting[number] or pull():
                if waiting[number]:
                    yield waiting[number].popleft()

        streams = [
            source.stream(draws_of(number))
            if isinstance(source, StreamingSource)
            else _batches(source, draws_of(number))
            for number, source in enumerate(self._sources)
        ]
        while plans or pull():
            yield self._join([(part, next(streams[part.source])) for part in plans.popleft()])

    def _parts(self, draw: Draw) -> Iterator[_SourcePart]:
        owners = np.searchsorted(self._borders, draw.indices, side="right") - 1
        epochs = draw.positions // len(self)
        for number in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == number)
            first = self._borders[number]
            size = self._borders[number + 1] - self._borders[number]
            positions = epochs[rows] * size + draw.indices[rows] - first
            rising = np.argsort(positions, kind="stable")  # as `SampleOrder` wants them
            samples = self._orders[number].at(positions[rising])
            yield _SourcePart(source=number, rows=rows[rising], draw=Draw(samples, positions[rising]))

    def _join(self, parts: list[tuple[_SourcePart, Batch]]) -> Batch:
        # Restores the order of the draw.
        back = torch.from_numpy(np.argsort(np.concatenate([part.rows for part, _ in parts])))
        try:
            return map_tensors(lambda *column: torch.cat(column)[back], *(batch for _, batch in parts))
        except (KeyError, RuntimeError, ValueError) as err:
            shapes = ", ".join(f"{self._names[part.source]} {_shapes(batch)}" for part, batch in parts)
            raise DataError(
                f"the sources of the mix give samples of different shapes: {shapes}",
                hint="e.g. set the same `context` for all of them",
            ) from err


def _shapes(batch: Batch) -> object:
    if isinstance(batch, dict):
        return {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}
    return [tuple(tensor.shape[1:]) for tensor in batch]


def _batches(source: SampleSource, draws: Iterator[Draw]) -> Iterator[Batch]:
    return (source.batch(draw.indices) for draw in draws)


def _seed_of(name: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{name} {seed}".encode())


def build(
    *, sources: Mapping[str, Mapping[str, Any]], seed: int, split: Split = "train", **common: Any
) -> SampleSource | None:
    """Returns several data sets as one, None where no held-out samples are left.

    Args:
        sources: by name: a `data` mapping each, of prepared text where it has no `_target_`, with `weight` (1) besides;
            e.g. `{web: {path: data/web, weight: 3}, code: {path: data/code}}`.
        seed: the run's seed.
        split: "train", or "heldout": the held-out samples of all, each once, whatever the weights.
        common: keywords that all of them get, e.g. `context`.

    Raises:
        ConfigError: there is no source, one is no mapping, or a weight is not above 0.
    """
    require_sources(sources)
    weights = {}
    made = {}
    for name, mapping in sources.items():
        words = {TARGET: PREPARED.target, **common, **mapping}
        weight = float(words.pop("weight", 1.0))
        source = build_source(words, split=split, seed=seed)
        if source is not None and len(source):
            made[name] = source
            weights[name] = weight
    if not made:
        return None
    if split == "heldout":
        weights = {name: float(len(source)) for name, source in made.items()}
    return MixedSource(made, weights=weights, seed=seed)
