"""Which samples each optimizer step takes, and the micro-batches of one data-parallel rank, from any position on.

An optimizer step consumes the global positions [c, c + G): c samples were consumed before it, and G is the size of the
global batch. All global batches have the same number of samples, unless a class derived from `GlobalBatches` cuts them
otherwise. Their samples are a function of seed and epoch. The slice of a rank is contiguous, and so is each of its
micro-batches, so every split into ranks x local x accumulation reads the same global batches, and resuming is a seek.
The trainer counts what the optimizer has consumed; the stream only runs ahead of it.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from slurm_train.config.batch import BatchPlan, BatchShare
from slurm_train.data.mapstyle import KeyedData, KeyedNumber, keys_of
from slurm_train.data.order import Int64Array, SampleOrder
from slurm_train.data.source import Batch, Draw, SampleSource, StreamingSource
from slurm_train.errors import ConfigError

T = TypeVar("T")

# Indices permuted in one call. One step at a time would cost 30 us a step; this many cost 0.1 ms once in many steps.
_LOOKAHEAD_INDICES = 4096
_LOOK_EVERY_S = 0.5


class GlobalBatches:
    """The global batches of a run: each has the same number of samples, in the run's order.

    A position is the number of global samples consumed before it.

    Args:
        order: the run's order of samples.
        global_size: samples of a global batch.
    """

    def __init__(self, order: SampleOrder, *, global_size: int) -> None:
        self._order = order
        self._global_size = global_size

    def size_at(self, _samples: int) -> int:
        """Returns the number of samples of the global batch that begins at a position."""
        return self._global_size

    def align(self, samples: int) -> int:
        """Returns the first position from here on at which a global batch begins."""
        return samples

    def sample_ids(self, first: int, count: int) -> Int64Array:
        """Returns the samples at consecutive positions, in the order of the batches, int64 (count,)."""
        return self._order.indices(first, count)

    def draws(self, share: BatchShare, *, start_samples: int) -> Iterator[Draw]:
        """Yields a rank's micro-batches from a position on, without end; many steps are permuted in one call."""
        global_size = self._global_size
        assert sum(share.shares) == global_size, f"not the whole global batch: {share}"
        own = share.shares[share.rank]
        begin = sum(share.shares[: share.rank])
        # At most one epoch ahead: a data set of a few samples would need the permutations of thousands of epochs.
        num_steps = max(1, min(_LOOKAHEAD_INDICES // own, self._order.num_samples // global_size))
        within = np.arange(own, dtype=np.int64) + begin
        offsets = (np.arange(num_steps, dtype=np.int64)[:, None] * global_size + within).reshape(-1)
        while True:
            positions = offsets + start_samples
            indices = self._order.at(positions)
            start = 0
            for size in share.micro_sizes * num_steps:
                stop = start + size
                yield Draw(indices[start:stop], positions[start:stop])
                start = stop
            start_samples += num_steps * global_size


class RankBatches:
    """The sample numbers of one rank's micro-batches, as a `batch_sampler` of torch's DataLoader.

    Each iterator begins behind the steps that are done and ends with the last step. It has no state, so it does not
    matter how far the workers of a loader read ahead. With `steps_per_epoch` an iterator ends with the epoch that
    `set_epoch` has set, for a loop over epochs.

    Args:
        order: the order of the samples.
        global_size: samples of a step over all ranks.
        rank: this one among the ranks that read different samples.
        num_ranks: number of those.
        accumulation: micro-batches of a step.
        steps: steps of the whole training.
        done: how many of these steps are done.
        steps_per_epoch: steps of an epoch of the program, whatever the number of samples; None: one pass is all.

    Raises:
        ConfigError: a micro-batch would have no sample, or an epoch no step.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        global_size: int,
        rank: int,
        num_ranks: int,
        accumulation: int,
        steps: int,
        done: int,
        steps_per_epoch: int | None = None,
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ConfigError(
                f"steps_per_epoch={steps_per_epoch}: an epoch without a step",
                hint=f"global_size={global_size} may be larger than the data set; len(data) // global_size is usual",
            )
        if accumulation < 1 or global_size < num_ranks * accumulation:
            raise ConfigError(
                f"a step of {global_size} samples cannot be cut into {accumulation} micro-batches on each of "
                f"{num_ranks} ranks",
                hint=f"global_size has to be at least {num_ranks * max(accumulation, 1)}",
            )
        self._batches = GlobalBatches(order, global_size=global_size)
        largest = -(-global_size // (num_ranks * accumulation))
        plan = BatchPlan(global_size=global_size, local_size=largest, ranks=num_ranks, accumulation=accumulation)
        self._share = plan.share(rank)
        self._global_size = global_size
        self._steps = steps
        self._done = done
        self._per_epoch = steps_per_epoch
        self._epoch = self.epoch
        self._seed = order.seed
        self._is_keyed = False
        """Whether `keyed` was called: sample numbers then carry the keys of their randomness."""
        self._is_read = False
        """Whether an iterator has read the present epoch to its end."""
        self._random_at_begin: torch.Tensor | None = None
        """State of torch's generator when a first iterator was asked for that begins in the middle of its epoch."""
        self.steps_given: int | None = None
        """Steps of the training of which the newest iterator has given the last micro-batch; None before it began."""

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self._steps

    @property
    def epoch(self) -> int:
        """The epoch that the training continues with, from 0: the number of epochs that are done."""
        return 0 if self._per_epoch is None else self._done // self._per_epoch

    @property
    def start(self) -> int:
        """Micro-batches of the present epoch that are done; without epochs, those of the whole training."""
        first, _ = self._span()
        return max(self._done - first, 0) * self._share.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iterator reads, as of a sampler of torch.

        Raises:
            ConfigError: the training has no epochs, or this one is done.
        """
        if self._per_epoch is None:
            raise ConfigError(
                f"epoch {epoch} was set, and one pass over these batches is the whole training",
                hint="give `batches` the steps_per_epoch of the program",
            )
        if epoch < self.epoch:
            raise ConfigError(
                f"epoch {epoch} was set, and {self.epoch} epochs are done at step {self._done}",
                hint="let the loop begin with `batches.epoch`",
            )
        self._epoch = epoch
        self._is_read = False

    def __len__(self) -> int:
        """Returns all micro-batches of the present epoch, done or not; without epochs those that are not done."""
        first, last = self._span()
        if self._per_epoch is None:
            first = max(first, self._done)
        return max(last - first, 0) * self._share.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        # A loader with workers asks for two iterators, and draws after the first.
        self._take_back_draw()
        if self.start and self.steps_given is None:
            self._random_at_begin = torch.get_rng_state()
        return self._read()

    def _read(self) -> Iterator[list[int]]:
        self._take_back_draw()
        self._random_at_begin = None
        if self._is_read and self._per_epoch is not None:
            raise ConfigError(
                f"epoch {self._epoch} was read to its end, and is read again: its samples would be used twice",
                hint="call set_epoch(epoch) of these batches before each epoch",
            )
        first, last = self._span()
        first = max(first, self._done)
        accumulation = self._share.accumulation
        draws = self._batches.draws(self._share, start_samples=first * self._global_size)
        for number, draw in enumerate(itertools.islice(draws, max(last - first, 0) * accumulation), start=1):
            numbers: list[int] = draw.indices.tolist()
            self.steps_given = first + number // accumulation
            yield _with_keys(numbers, keys_of(self._seed, draw.positions)) if self._is_keyed else numbers
        self._is_read = True

    def _take_back_draw(self) -> None:
        """Puts torch's generator back where a loader has drawn from it for an epoch, or a training, that goes on.

        A loader without a generator of its own draws the seed of its workers whenever it is iterated. The training that
        goes on has done so when it began, so dropout would draw other numbers than without the stop.
        """
        before = self._random_at_begin
        if before is None:
            return
        drawn = torch.Generator()
        drawn.set_state(before)
        torch.empty((), dtype=torch.int64).random_(generator=drawn)
        if torch.equal(drawn.get_state(), torch.get_rng_state()):
            torch.set_rng_state(before)

    def _span(self) -> tuple[int, int]:
        """Returns the first step of the present epoch, and the one after its last."""
        if self._per_epoch is None:
            return 0, self._steps
        first = self._epoch * self._per_epoch
        return first, min(first + self._per_epoch, self._steps)

    def keyed(self, dataset: Dataset[Any]) -> KeyedData:
        """Returns the data set with randomness that depends only on the seed and on a sample's place in the training.

        So its augmentation is the same with any workers, on any number of ranks and after any stop. These batches have
        to be the `batch_sampler` of its loader.
        """
        self._is_keyed = True
        return KeyedData(dataset)

    @property
    def drop_last(self) -> bool:
        """Always refused: `accelerate` (1.15) reads it where it divides the batches of a loader among ranks.

        Raises:
            ConfigError: these batches are those of one rank already.
        """
        raise ConfigError(
            "these batches are those of this rank alone, and would be divided among the ranks once more",
            hint="do not pass their loader to accelerator.prepare; move the tensors to accelerator.device",
        )


def _with_keys(numbers: list[int], keys: list[int]) -> list[int]:
    keyed: list[int] = []
    for number, key in zip(numbers, keys, strict=True):
        sample = KeyedNumber(number)
        sample.key = key
        keyed.append(sample)
    return keyed


class MicroBatch(NamedTuple):
    """One micro-batch on this rank.

    Attributes:
        indices: int64 (local_size,), the numbers of its samples.
        tensors: the collated samples.
    """

    indices: Int64Array
    tensors: Batch


class BatchStream:
    """An endless iterator over this rank's micro-batches.

    Args:
        source: the data.
        draws: the samples of each micro-batch.
    """

    def __init__(self, source: SampleSource, draws: Iterator[Draw]) -> None:
        self._source = source
        self._draws = draws
        self._waiting: deque[Int64Array] = deque()
        # A function and not a method: the workers end when this stream is freed, so nothing they hold may refer to it.
        remembered = _remember(draws, self._waiting)
        self._batches = source.stream(remembered) if isinstance(source, StreamingSource) else None

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if self._batches is None:
            indices = next(self._draws).indices
            return MicroBatch(indices, self._source.batch(indices))
        tensors = next(self._batches)
        return MicroBatch(self._waiting.popleft(), tensors)


def _remember(draws: Iterator[Draw], waiting: deque[Int64Array]) -> Iterator[Draw]:
    """Yields draws, and queues the samples of those that a streaming source has taken and not returned yet."""
    for draw in draws:
        waiting.append(draw.indices)
        yield draw


class Prefetch(Generic[T]):
    """An iterator that returns the items of another one, which a thread reads ahead.

    What the thread has read and the optimizer has not used is read again after a restart, since positions are counted
    at the optimizer. An error of reading is raised in the place of its item. Reading must not draw from the random
    generators of this process, which belong to the training.

    Args:
        items: the iterator; from now on only the thread uses it.
        depth: items that are read ahead, at least 1.
        prepare: what the thread makes of an item; None: nothing else.
    """

    def __init__(self, items: Iterator[T], *, depth: int, prepare: Callable[[T], T] | None = None) -> None:
        assert depth >= 1
        self._items = items
        self._prepare = prepare
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._end: BaseException | None = None
        """What reading has ended with, `StopIteration` included; None while it goes on."""
        # A daemon: the process may end in the middle of reading, and nothing is lost by that.
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is not None:
            raise self._end
        item, error = self._ready.get()
        if error is not None:
            self._end = error
            raise error
        return item  # type: ignore[return-value]  # there is an item where there is no error

    def close(self) -> None:
        """Ends the thread; what it has read is dropped."""
        self._closed.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._closed.is_set():
            try:
                item = next(self._items)
                entry: tuple[T | None, BaseException | None] = (item, None)
                if self._prepare is not None:
                    entry = (self._prepare(item), None)
            except BaseException as err:
                entry = (None, err)
            self._put(entry)
            if entry[1] is not None:
                return

    def _put(self, entry: tuple[T | None, BaseException | None]) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(entry, timeout=_LOOK_EVERY_S)
                return
            except queue.Full:
                continue


class Divide(Protocol):
    """How the held-out samples are divided among ranks and batches."""

    def __call__(self, chosen: Int64Array | None, *, rank: int, size: int, batch_size: int) -> Iterator[Int64Array]:
        """Yields this rank's batches, as places among the chosen samples; None: among all."""


def evaluation_batches(
    source: SampleSource,
    *,
    rank: int,
    size: int,
    batch_size: int,
    divide: Divide | None = None,
    most: int | None = None,
    in_blocks: bool = False,
) -> Iterator[MicroBatch]:
    """Yields the micro-batches that one data-parallel rank evaluates: over all ranks each sample exactly once.

    No batch is filled up. Ranks may get different numbers of batches, some of them none, so the loop over these batches
    must not contain a collective. The randomness of a sample is keyed by its number, so all evaluations are the same.

    Args:
        source: the held-out samples.
        rank: this data-parallel rank, from 0.
        size: number of data-parallel ranks.
        batch_size: samples of a batch; the last may be smaller.
        divide: gives this rank's batches of the chosen samples, None for all of them; None: equal numbers of samples.
        most: at most so many samples are evaluated, chosen at equal distances; None for all.
        in_blocks: see `evaluation_indices`; not with `divide`.
    """
    count = len(source)
    chosen = None
    if most is not None and most < count:
        chosen = np.arange(most, dtype=np.int64) * count // most
        count = most
    if divide is None:
        indices = evaluation_indices(count, rank=rank, size=size, batch_size=batch_size, in_blocks=in_blocks)
    else:
        indices = divide(chosen, rank=rank, size=size, batch_size=batch_size)
    if chosen is not None:
        indices = (chosen[batch] for batch in indices)
    return BatchStream(source, (Draw(batch, batch) for batch in indices))


def evaluation_indices(
    num_samples: int, *, rank: int, size: int, batch_size: int, in_blocks: bool = False
) -> Iterator[Int64Array]:
    """Yields the samples that one rank evaluates, as int64 arrays of at most `batch_size`.

    Args:
        num_samples: held-out samples over all ranks; 0 gives nothing.
        rank: this data-parallel rank, from 0.
        size: number of data-parallel ranks.
        batch_size: samples of a batch; the last one may be smaller.
        in_blocks: whole batches are divided among the ranks, so any number of ranks has the same batches.
    """
    unit = batch_size if in_blocks else 1
    num_units = -(-num_samples // unit)
    first = rank * num_units // size * unit
    last = min((rank + 1) * num_units // size * unit, num_samples)
    for start in range(first, last, batch_size):
        yield np.arange(start, min(start + batch_size, last), dtype=np.int64)
