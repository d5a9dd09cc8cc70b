"""A stream of samples that keeps its own place, as a sample source; its samples cannot be asked for by number.

Every data-parallel rank has a stream of its own and takes from it what its part of each global batch needs. What the
stream gives as `state_dict()` is in each checkpoint, so a run on as many data-parallel ranks goes on with the very next
sample. On another number of ranks the states fit no rank: the run is refused, or all streams begin anew where
`data.allow_world_change=true` accepts that samples of the present pass come again. When a stream ends, its next pass
begins, on each rank by itself.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from slurm_train.data.mapstyle import (
    Collate,
    as_batch,
    default_fingerprint,
    generators_put_back,
    keys_of,
    pad_or_stack,
    prepare_worker,
    seed_generators,
)
from slurm_train.data.order import Int64Array, SampleOrder
from slurm_train.data.source import Batch, Draw
from slurm_train.errors import DataError

_METHODS = ("__iter__", "state_dict", "load_state_dict")
# The number of samples is unknown; no run reads this many.
_NUM_SAMPLES = 2**60


class StreamOrder(SampleOrder):
    """The order in which samples come: a position is a sample's number."""

    def __init__(self) -> None:
        super().__init__(_NUM_SAMPLES, seed=0)

    def indices(self, start: int, count: int) -> Int64Array:
        """Returns consecutive positions, int64 (count,)."""
        return np.arange(start, start + count, dtype=np.int64)

    def at(self, positions: Int64Array) -> Int64Array:
        """Returns the positions themselves."""
        return positions


class StreamSource:
    """Adapts an object with `__iter__`, `state_dict` and `load_state_dict`, e.g. torchdata's StatefulDataLoader.

    Args:
        stream: gives samples; where it has a `batch_size`, whole micro-batches of as many.
        collate: makes a micro-batch of a list of samples; None as for map-style data sets.
        seed: keys the random generators while samples are read; None leaves them alone.
    """

    def __init__(self, stream: Any, *, collate: Collate | None = None, seed: int | None = None) -> None:
        self.order = StreamOrder()
        self._stream, self._collate, self._seed = stream, collate or pad_or_stack, seed
        self._batch_size: int | None = getattr(stream, "batch_size", None)
        self.num_short = 0
        """Batches that had fewer samples than a micro-batch: the last ones of passes."""
        if getattr(stream, "worker_init_fn", 0) is None:
            stream.worker_init_fn = prepare_worker
        self._iterator: Iterator[Any] | None = None
        # Where this attempt began, and the state there: one micro-batch is read before the first step.
        self._start: tuple[int, dict[str, Any]] = (-1, {})

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def fingerprint(self) -> str:
        """Returns the stream's own `fingerprint()`, else a hash of its class."""
        return default_fingerprint(self._stream, _NUM_SAMPLES)

    def batch(self, indices: Int64Array) -> Batch:
        """Raises an error: there is no sample by number.

        Raises:
            DataError: always.
        """
        raise DataError(
            f"sample {indices[0]} of a {type(self._stream).__qualname__} was asked for by number, and it is a stream",
            hint="give a map-style data set where samples are read by number",
        )

    def begin(self, *, samples: int, state: dict[str, Any] | None, num_skipped: int) -> None:
        """Takes up the stream's place; called once, before anything is read.

        Args:
            samples: global samples consumed so far.
            state: this rank's from a checkpoint, None to begin anew.
            num_skipped: samples of this rank to pass over after it.

        Raises:
            DataError: the state cannot be kept in a checkpoint.
        """
        with generators_put_back():
            seed_generators(self._seed)
            if state is not None:
                self._stream.load_state_dict(state)
            for _ in range(num_skipped // (self._batch_size or 1)):
                self._next()
            self._start = samples, self._copy_state()
        written = io.BytesIO()
        torch.save(self._start[1], written)
        try:
            torch.load(io.BytesIO(written.getvalue()), weights_only=True)
        except pickle.UnpicklingError as err:
            reason = str(err).splitlines()[0]
            raise DataError(
                f"the state of a {type(self._stream).__qualname__} cannot be in a checkpoint: {reason}",
                hint="let state_dict() give numbers, text, bytes, tensors, and lists and dicts of them",
            ) from err

    def state(self, samples: int) -> dict[str, Any]:
        """Returns the state of the stream when so many global samples have been consumed, which is now."""
        first, state = self._start
        return state if samples == first else self._copy_state()

    def stream(self, draws: Iterator[Draw]) -> Iterator[Batch]:
        """Yields one micro-batch per draw, of as many samples."""
        for draw in draws:
            if self._seed is None:
                yield self._read(len(draw.indices))
                continue
            with generators_put_back():
                # What is drawn at random belongs to the position: a resumed run draws the same.
                seed_generators(keys_of(self._seed, draw.positions[:1])[0])
                batch = self._read(len(draw.indices))
            yield batch

    def _read(self, count: int) -> Batch:
        if self._batch_size is None:
            return as_batch(self._collate([self._next() for _ in range(count)]))
        batch = as_batch(self._next())
        found = len(next(iter(batch.values() if isinstance(batch, dict) else batch)))
        # The last batch of a pass may be shorter: losses count by items.
        is_last = self._batch_size == count and 0 < found < count
        if found != count and not is_last:
            raise DataError(
                f"the stream gave a batch of {found} samples, and a micro-batch is {count}",
                hint=f"make the stream with batch_size={count}, or with batch_size=None, which leaves batching to the "
                "run; or set batch.local_size",
            )
        self.num_short += is_last
        return batch

    def _next(self) -> Any:
        # A state from the end of a pass gives an empty one first.
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._stream)
            for item in self._iterator:
                return item
            self._iterator = None
        raise DataError(
            f"a {type(self._stream).__qualname__} gives no sample",
            hint="iter() of it must begin a new pass each time; has each rank at least one sample or shard?",
        )

    def _copy_state(self) -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(self._stream.state_dict())
        return state


def is_stream(found: Any) -> bool:
    """Returns whether an object gives samples one after the other and has a state, and none can be asked for."""
    by_number = hasattr(found, "__getitem__") and not isinstance(found, torch.utils.data.IterableDataset)
    return not by_number and all(callable(getattr(found, name, None)) for name in _METHODS)
