"""Adapts a stream of samples, which cannot be read by number, to a sample source.

Every data-parallel rank has a stream of its own and takes its part of each global batch from it. A run that resumes on
the same number of data-parallel ranks continues with the very next sample. There are two ways to find it:

- by state: the stream's `state_dict()` is in each checkpoint;
- by reading again: a stream without a state, or one whose state lacks the samples in its shuffle buffer, is read from
  its beginning with the same random numbers, and what has been consumed is dropped. The last dropped micro-batch is
  compared with the one before the interruption.

The state of another number of ranks cannot resume: the run is refused, or all streams are reset where
`data.allow_world_change=true` accepts that samples of the present pass come again. When a stream ends, its next pass
begins, on each rank by itself; objects with `set_epoch` get the number of each pass.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset

from slurm_train.data.mapstyle import (
    Collate,
    Padding,
    as_batch,
    default_fingerprint,
    generators_put_back,
    keys_of,
    pad_or_stack,
    padded_by,
    prepare_worker,
    seed_generators,
)
from slurm_train.data.order import Int64Array, SampleOrder
from slurm_train.data.source import Batch, Draw, map_tensors
from slurm_train.errors import DataError

_METHODS = ("__iter__", "state_dict", "load_state_dict")
_STATE_KEYS = {"stream", "number", "taken"}
_SEED_IT = "seed its shuffle (of webdataset: detshuffle, or shuffle with a seed)"
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
    """Adapts a stream, e.g. torchdata's StatefulDataLoader or an IterableDataset.

    Wide because it keeps apart what was read, what was consumed and what is to be passed over after a resume.

    Args:
        stream: gives samples; where it has a `batch_size`, whole micro-batches of as many.
        collate: makes a micro-batch of a list of samples; None as for map-style data sets.
        seed: keys the random generators while samples are read; None leaves them alone.
        rebuild: gives another such stream, to see whether it has the same samples; None: not to be seen.
    """

    def __init__(
        self,
        stream: Any,
        *,
        collate: Collate | None = None,
        seed: int | None = None,
        rebuild: Callable[[], Any] | None = None,
    ) -> None:
        self.order = StreamOrder()
        self.reads_again = needs_reading_again(stream)
        """A resume reads the stream from the beginning."""
        self._stream = stream
        self._collate = collate or pad_or_stack
        self._seed = seed
        self._rebuild = rebuild
        self._batch_size: int | None = getattr(stream, "batch_size", None)
        self.num_short = 0
        """Batches that had fewer samples than a micro-batch: the last ones of passes."""
        if getattr(stream, "worker_init_fn", 0) is None:
            stream.worker_init_fn = prepare_worker
        self._epoch_setters = _epoch_setters(stream)
        self._iterator: Iterator[Any] | None = None
        self._place = _Place()
        # Where this attempt began, and the state there: one micro-batch is read before the first step.
        self._start: tuple[int, dict[str, Any]] = (-1, {})
        # After a resume: the state that was loaded, and the one after the first item.
        self._loaded: dict[str, Any] | None = None
        self._after_first: dict[str, Any] | None = None
        # Keys the randomness of the present micro-batch.
        self._key: int | None = None
        # Digest of the first micro-batch of another such stream.
        self._expected: str | None = None

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def pad_with(self, padding: Padding) -> None:
        """Fills samples of unequal length up with what suits the model, before the first one is read."""
        self._collate = padded_by(self._collate, padding)

    @property
    def name(self) -> str:
        """Of the stream's class."""
        return type(self._stream).__qualname__

    def fingerprint(self) -> str:
        """Returns the stream's own `fingerprint()`, else a hash of its class."""
        return default_fingerprint(self._stream, _NUM_SAMPLES)

    def batch(self, indices: Int64Array) -> Batch:
        """Raises an error: there is no sample by number.

        Raises:
            DataError: always.
        """
        raise DataError(
            f"sample {indices[0]} of a {self.name} was asked for by number, and it is a stream",
            hint="give a map-style data set where samples are read by number",
        )

    def begin(
        self,
        *,
        samples: int,
        state: dict[str, Any] | None,
        num_skipped: int,
        draws: Callable[[int, int], Iterator[Draw]] | None = None,
    ) -> None:
        """Takes up the stream's place; called once, before anything is read.

        Args:
            samples: global samples consumed so far.
            state: this rank's from a checkpoint, None to begin anew.
            num_skipped: samples of this rank to pass over after it.
            draws: gives this rank's micro-batches between two numbers of global samples; for streams that are read
                again.

        Raises:
            DataError: the state cannot be kept in a checkpoint, or the stream has other samples than before.
        """
        with generators_put_back():
            seed_generators(self._seed)
            if self.reads_again:
                self._take_up_by_reading(samples, state, draws)
            else:
                self._take_up_by_state(state)
                for _ in range(num_skipped // (self._batch_size or 1)):
                    self._next()
            self._start = samples, self._copy_state(samples)
        written = io.BytesIO()
        try:
            torch.save(self._start[1], written)
            torch.load(io.BytesIO(written.getbuffer()), weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as err:
            reason = str(err).splitlines()[0]
            raise DataError(
                f"the state of a {self.name} cannot be in a checkpoint: {reason}",
                hint="let state_dict() give numbers, text, bytes, tensors, and lists and dicts of them",
            ) from err

    def state(self, samples: int) -> dict[str, Any]:
        """Returns the state of the stream when so many global samples have been consumed, which is now."""
        first, state = self._start
        return state if samples == first else self._copy_state(samples)

    def stream(self, draws: Iterator[Draw]) -> Iterator[Batch]:
        """Yields one micro-batch per draw, of as many samples."""
        for draw in draws:
            yield self._read(draw)

    def _take_up_by_state(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self._set_epoch()
            return
        if state.keys() == _STATE_KEYS:
            self._loaded = state["stream"]
            self._place = _Place(number=state["number"], taken=state["taken"])
        else:  # an older version has kept what the stream gave
            self._loaded = state
            self._place = _Place(taken=1)
        self._set_epoch()
        self._stream.load_state_dict(copy.deepcopy(self._loaded))

    def _take_up_by_reading(
        self, samples: int, state: dict[str, Any] | None, draws: Callable[[int, int], Iterator[Draw]] | None
    ) -> None:
        if state is None:
            self._place = _Place(origin=samples)
            self._set_epoch()
            self._read_another(samples, draws)
            return
        assert draws is not None
        self._place = _Place(origin=state["origin"])
        if self._epoch_setters:  # an earlier pass has no effect on the present one
            self._place.number = state["number"]
            self._place.pass_began = list(state["pass_began"])
        self._set_epoch()
        passed_over, num_left_out = self._place.pass_began
        self._place.num_read = passed_over
        is_whole = False
        for draw in itertools.islice(draws(state["origin"], state["samples"]), passed_over, None):
            self._read(draw, num_left_out=num_left_out)
            is_whole = not num_left_out
            num_left_out = 0
        if is_whole and self._place.last != state["last"]:
            raise DataError(
                f"a {self.name} gives other samples than before the interruption when it is read again",
                hint=f"{_SEED_IT}; run.name=NAME begins another run",
            )
        for draw in draws(state["samples"], samples):
            self._read(draw)

    def _read_another(self, samples: int, draws: Callable[[int, int], Iterator[Draw]] | None) -> None:
        """Reads the first micro-batch of another such stream, to compare this one's with it."""
        if self._rebuild is None or draws is None:
            return
        other = StreamSource(self._rebuild(), collate=self._collate, seed=self._seed)
        other._set_epoch()
        other._read(next(draws(samples, _NUM_SAMPLES)))
        self._expected = other._place.last

    def _read(self, draw: Draw, *, num_left_out: int = 0) -> Batch:
        """Reads a micro-batch, or the rest of it behind so many samples of the pass before."""
        count = len(draw.indices) - num_left_out
        if self._seed is None:
            batch = self._read_batch(num_left_out, count)
        else:
            with generators_put_back():
                # What is drawn at random belongs to the position: a resumed run draws the same.
                self._key = keys_of(self._seed, draw.positions[:1])[0]
                seed_generators(self._key)
                batch = self._read_batch(num_left_out, count)
        self._place.num_read += 1
        if self.reads_again:
            self._place.last = _digest(batch)
            self._check_expected()
        return batch

    def _check_expected(self) -> None:
        expected = self._expected
        self._expected = None
        if expected not in (None, self._place.last):
            raise DataError(
                f"a {self.name} has no state, and gives other samples each time it is made: a "
                "resume would not find its place",
                hint=_SEED_IT,
            )

    def require_batches_of(self, sizes: Sequence[int]) -> None:
        """Refuses a stream that makes whole batches where the micro-batches of a step have other sizes.

        Args:
            sizes: samples of each micro-batch of this rank.

        Raises:
            DataError: as said.
        """
        if self._batch_size is not None and {*sizes} != {self._batch_size}:
            wanted = " or ".join(map(str, sorted({*sizes})))
            raise DataError(
                f"the stream makes batches of {self._batch_size} samples, and a micro-batch of this rank is {wanted}",
                hint="make the stream with batch_size=None, which leaves batching to the run; or set "
                f"batch.local_size={self._batch_size}, and a batch.global_size that is a multiple of data-parallel "
                f"ranks x {self._batch_size}",
            )

    def _read_batch(self, first: int, count: int) -> Batch:
        if self._batch_size is None:
            return as_batch(self._collate([self._next(number) for number in range(first, first + count)]))
        batch = as_batch(self._next())
        num_samples = len(next(iter(batch.values() if isinstance(batch, dict) else batch)))
        # The last batch of a pass may be shorter: losses count by items.
        is_last = self._batch_size == count and 0 < num_samples < count
        if num_samples != count and not is_last:
            raise DataError(
                f"the stream gave a batch of {num_samples} samples, and a micro-batch is {count}",
                hint=f"make the stream with batch_size={count}, or with batch_size=None, which leaves batching to the "
                "run; or set batch.local_size",
            )
        self.num_short += is_last
        return batch

    def _next(self, number_in_batch: int = 0) -> Any:
        # A state from the end of a pass gives an empty one first.
        for _ in range(2):
            if self._iterator is None:
                if self.reads_again and self._key is not None:
                    # What follows must not depend on the samples of the pass before, which are not read again.
                    seed_generators(self._key + 1 + self._place.number)
                self._iterator = iter(self._stream)
            for item in self._iterator:
                self._place.taken += 1
                if self._loaded is not None:
                    self._check_begin_of_pass()
                return item
            self._iterator = None
            self._place.number += 1
            self._place.taken = 0
            self._place.pass_began = [self._place.num_read, number_in_batch]
            self._set_epoch()
        raise DataError(
            f"a {self.name} gives no sample",
            hint="iter() of it must begin a new pass each time; has each rank at least one sample or shard?",
        )

    def _set_epoch(self) -> None:
        for set_epoch in self._epoch_setters:
            set_epoch(self._place.number)

    def _check_begin_of_pass(self) -> None:
        """Checks that the first pass after a resume is not followed by one that begins where the run was resumed."""
        if self._after_first is None:
            self._after_first = copy.deepcopy(self._stream.state_dict())
            if self._place.taken == 1 or _is_same(self._after_first, self._loaded):
                self._loaded = None  # the pass began here, or the state says nothing about the place
        elif self._place.taken == 1:
            self._loaded = None
            if _is_same(self._stream.state_dict(), self._after_first):
                raise DataError(
                    f"iter() of a {self.name} begins again where the run was resumed, not a new pass",
                    hint="let iter() begin at the first sample once a pass has ended; or give the class set_epoch(n)",
                )

    def _copy_state(self, samples: int) -> dict[str, Any]:
        place = self._place
        if not self.reads_again:
            stream: Any = copy.deepcopy(self._stream.state_dict())
            return {"stream": stream, "number": place.number, "taken": place.taken}
        return {
            "samples": samples,
            "origin": place.origin,
            "number": place.number,
            "pass_began": list(place.pass_began),
            "last": place.last,
        }


@dataclass(slots=True)
class _Place:
    """Where a stream is."""

    number: int = 0
    """Of the pass."""
    taken: int = 0
    """Items of this pass."""
    origin: int = 0
    """Global samples consumed when the stream began."""
    num_read: int = 0
    """Micro-batches since then."""
    pass_began: list[int] = field(default_factory=lambda: [0, 0])
    """Micro-batches read when the pass began, and samples of the next one that the pass before gave."""
    last: str = ""
    """Digest of the newest micro-batch."""


def needs_reading_again(stream: Any) -> bool:
    """Returns whether a stream has no state that says which sample is the next one.

    An `IterableDataset` may have none, and a loader of it then only counts. That of a Hugging Face data set lacks the
    samples in a shuffle buffer.
    """
    source = getattr(stream, "dataset", stream)
    if not isinstance(source, IterableDataset):
        return False
    return not callable(getattr(source, "state_dict", None)) or _has_shuffle_buffer(source)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Returns whether a Hugging Face data set shuffles in a buffer."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        step = waiting.pop()
        if "BufferShuffled" in type(step).__name__:
            return True
        for value in vars(step).values() if hasattr(step, "__dict__") else ():
            parts = value if isinstance(value, list) else [value]
            waiting += [part for part in parts if type(part).__name__.endswith("Iterable")]
    return False


def _epoch_setters(stream: Any) -> list[Callable[[int], None]]:
    """Returns the `set_epoch` of a stream and of what a loader reads from."""
    sampler = getattr(stream, "sampler", None)
    batch_sampler = getattr(stream, "batch_sampler", None)
    holders = [
        stream,
        getattr(stream, "dataset", None),
        sampler,
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    distinct = {id(holder): holder for holder in holders}.values()
    return [holder.set_epoch for holder in distinct if callable(getattr(holder, "set_epoch", None))]


def _is_same(item: Any, other: Any) -> bool:
    """Returns whether two states are equal; they may hold tensors."""
    if isinstance(item, dict) and isinstance(other, dict):
        return item.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in item.items())
    if isinstance(item, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(item) == len(other) and all(_is_same(*pair) for pair in zip(item, other, strict=True))
    if isinstance(item, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(item, other)
    return type(item) is type(other) and bool(item == other)


def _digest(batch: Batch) -> str:
    """Returns a digest of all tensors of a batch, also of those in lists and dicts."""
    hasher = xxhash.xxh3_64()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    map_tensors(add, batch)
    return hasher.hexdigest()


def is_stream(dataset: Any) -> bool:
    """Returns whether an object gives samples one after the other, and none can be asked for."""
    if isinstance(dataset, IterableDataset):
        return True
    return not hasattr(dataset, "__getitem__") and all(callable(getattr(dataset, name, None)) for name in _METHODS)
