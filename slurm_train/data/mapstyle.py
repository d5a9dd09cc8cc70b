"""Adapts a map-style data set of torch to a sample source, read in this process or by worker processes.

Randomness inside `__getitem__` is keyed: before each sample the CPU generators of Python, numpy and torch are seeded
with a hash of (seed, global position), that is (seed, epoch, sample), and restored afterwards. Generators that the data
set, its transforms or the collate function own (`data.generators`) are seeded, too. So augmentation is the same for any
number of workers, ranks and restarts. That is why samples are read one by one, even from a data set that can read many
at once (`__getitems__`); without keyed randomness it is asked for all samples of a micro-batch. What a collate function
draws is keyed by the samples of its micro-batch.
"""

from __future__ import annotations

import atexit
import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from multiprocessing.process import BaseProcess
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from slurm_train.data.generators import OwnedGenerators, open_handle
from slurm_train.data.item_digest import digest_items
from slurm_train.data.order import Int64Array, mix64
from slurm_train.data.source import IGNORED, IGNORED_VALUE, Batch, Description, Draw, map_tensors
from slurm_train.distributed.seeds import stream_positions
from slurm_train.errors import ConfigError, DataError
from slurm_train.rundir.events import with_items

Collate = Callable[[list[Any]], Any]


class _Key(NamedTuple):
    """How one sample is read."""

    number: int
    seed: int | None
    """Keys its randomness; None: the random generators are not seeded."""
    epoch: int


class WorkerChoice(Protocol):
    """Says how many processes are to read ahead, once it is known what is read."""

    def choose(
        self,
        read: Callable[[list[Any]], Any],
        keys: list[Any],
        *,
        num_bytes: Callable[[Any], int],
        prepare: Callable[[], None],
        obstacle: Callable[[], str | None],
    ) -> int:
        """Returns the number of processes, 0 for none.

        Args:
            read: makes a batch of samples.
            keys: the samples of a micro-batch.
            num_bytes: of a batch.
            prepare: called first in a process that reads.
            obstacle: says what the data set holds that processes cannot share, None for nothing.
        """


class MapStyleSource:
    """Adapts a map-style `Dataset`.

    Args:
        dataset: has `__len__` and `__getitem__` or `__getitems__`; one item is a tensor, a tuple of them, or a
            mapping of names to tensors, numbers or lists of numbers.
        collate: makes a batch of a list of items; None takes torch's default_collate, and `pad` for mappings.
        num_workers: processes that read ahead; 0 reads in this one. A choice is asked when the reading begins.
        seed: keys the randomness of reading; None leaves the random generators alone, which is faster by some 20 us
            per sample and right for data sets that draw nothing.

    Raises:
        DataError: the data set is not map-style.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        collate: Collate | None = None,
        num_workers: int | WorkerChoice = 0,
        seed: int | None = None,
    ) -> None:
        _require_map_style(dataset)
        self._reader = _ItemReader(dataset, collate or pad_or_stack, seed=seed)
        self._num_workers = num_workers
        self._seed = seed
        self._has_own_collate = collate is not None
        # A tensor data set draws nothing at random and can gather a whole batch at once.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None

    def __len__(self) -> int:
        return len(self._reader)

    def describe(self) -> Description:
        """Returns what is known of the data set: the lengths of its samples or a method that returns them."""
        return Description(
            lengths=getattr(self._reader.dataset, "lengths", None),
            # A tensor data set draws nothing.
            draws_at_random=self._seed is not None and self._tensors is None,
            collates_at_random=self._collates_at_random,
        )

    def pad_with(self, padding: Padding) -> None:
        """Fills samples of unequal length up with what suits the model, before the first one is read."""
        self._reader.collate = padded_by(self._reader.collate, padding)

    def fingerprint(self) -> str:
        """Returns the data set's own `fingerprint()`, else a hash of its class and length, and one of some items."""
        dataset = self._reader.dataset
        fingerprint = default_fingerprint(dataset, len(self))
        can_be_read_aside = multiprocessing.get_start_method(allow_none=True) in (None, "fork")
        if callable(getattr(dataset, "fingerprint", None)) or not can_be_read_aside or open_handle(dataset):
            return fingerprint
        items = digest_items(lambda number: self._reader.item(number, number), len(self), prepare=_prepare_trial)
        return with_items(fingerprint, items)

    def batch(self, indices: Int64Array) -> Batch:
        """Returns the samples with these numbers, randomness keyed by the number alone."""
        return self._read(Draw(indices, indices))

    def _collates_at_random(self, indices: Int64Array) -> bool:
        """Returns whether the collate function draws random numbers, so that what it gives depends on the whole batch.

        Args:
            indices: numbers of samples to try it with.
        """
        return (
            self._has_own_collate
            and self._seed is not None
            and self._reader.collates_at_random(self._keys(Draw(indices, indices)))
        )

    def stream(self, draws: Iterator[Draw]) -> Iterator[Batch]:
        """Yields one micro-batch per draw; with workers, some are read ahead of being asked for."""
        if self._tensors is not None or self._num_workers == 0:
            return (self._read(draw) for draw in draws)
        return self._stream_from_workers(draws)

    def _stream_from_workers(self, draws: Iterator[Draw]) -> Iterator[Batch]:
        """Starts the workers when the first micro-batch is asked for, where there are to be any."""
        if not isinstance(self._num_workers, int):
            first = list(islice(draws, 1))
            draws = chain(first, draws)
            # Chosen once: the stream after a rollback is read as this one.
            self._num_workers = self._choose(self._num_workers, first[0]) if first else 0
        if self._num_workers == 0:
            yield from (self._read(draw) for draw in draws)
            return
        loader = DataLoader(
            cast("Dataset[Any]", self._reader),
            batch_sampler=(self._keys(draw) for draw in draws),
            collate_fn=itemgetter(0),
            num_workers=self._num_workers,
            worker_init_fn=prepare_worker,
            # One of its own: a loader draws a seed from it, and the global one belongs to dropout.
            generator=torch.Generator(),
        )
        earlier_children = set(multiprocessing.active_children())
        batches = iter(loader)
        workers = [child for child in multiprocessing.active_children() if child not in earlier_children]
        end = partial(_end_workers, batches, workers)
        atexit.register(end)
        try:
            yield from batches
        finally:
            atexit.unregister(end)
            end()

    def _choose(self, choice: WorkerChoice, draw: Draw) -> int:
        """Returns how many workers read micro-batches like this one."""

        def obstacle() -> str | None:
            kind = open_handle(self._reader.dataset) or open_handle(self._reader.collate)
            return None if kind is None else f"processes cannot share the open {kind} of the data set"

        return choice.choose(
            self._reader.read, self._keys(draw), num_bytes=_bytes_of, prepare=_prepare_trial, obstacle=obstacle
        )

    def _read(self, draw: Draw) -> Batch:
        if self._tensors is not None:
            numbers = torch.from_numpy(draw.indices)
            return tuple(tensor[numbers] for tensor in self._tensors)
        return self._reader.read(self._keys(draw))

    def _keys(self, draw: Draw) -> list[_Key]:
        numbers = draw.indices.tolist()
        epochs = (draw.positions // len(self)).tolist()
        seeds = [None] * len(numbers) if self._seed is None else keys_of(self._seed, draw.positions)
        return [_Key(*parts) for parts in zip(numbers, seeds, epochs, strict=True)]


def default_fingerprint(dataset: Any, length: int) -> str:
    """Returns a data set's own `fingerprint()`, else a hash of its class and length."""
    fingerprint = getattr(dataset, "fingerprint", None)
    if callable(fingerprint):
        return str(fingerprint())
    kind = type(dataset)
    return xxhash.xxh3_128_hexdigest(f"{kind.__module__}.{kind.__qualname__} {length}".encode())


def keys_of(seed: int, positions: Int64Array) -> list[int]:
    """Returns what keys the randomness of reading at each position."""
    start = np.array([seed % 2**64], dtype=np.uint64)
    keys: list[int] = (mix64(mix64(start) ^ positions.astype(np.uint64)) >> np.uint64(1)).tolist()
    return keys


class _ItemReader:
    """Reads and collates one micro-batch; what a worker process gets a copy of.

    A data set with `set_epoch` is told the epoch of each sample before it is read, in the process that reads it: a
    micro-batch may lie in two epochs, and workers read ahead.

    Args:
        dataset: map-style.
        collate: makes a batch of a list of items.
        seed: keys what `set_epoch` draws at random; None: the random generators are left alone.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate, *, seed: int | None = None) -> None:
        self.dataset: Any = dataset
        self.collate = collate
        self._seed = seed
        self._epoch_setters = _epoch_setters(dataset)
        self._epoch: int | None = None
        # Looked up by the process that reads: a worker has generators of its own.
        self._generators: OwnedGenerators | None = None
        self._generators_of_collate: OwnedGenerators | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: list[_Key]) -> list[Batch]:
        return [self.read(keys)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generators": None, "_generators_of_collate": None}

    def read(self, keys: list[_Key]) -> Batch:
        if keys[0].seed is None:
            return as_batch(self.collate(self._items(keys)))
        with generators_put_back():
            items = self._items(keys)
            # What it draws from the generators of this process follows the last sample.
            self._seed_collate(keys[0].seed)
            return as_batch(self.collate(items))

    def collates_at_random(self, keys: list[_Key]) -> bool:
        """Returns whether the collate function draws random numbers for these samples."""
        with generators_put_back():
            items = self._items(keys)
            own = self._seed_collate(keys[0].seed)
            before = (stream_positions(), own.positions())
            self.collate(items)
            return (stream_positions(), own.positions()) != before

    def _seed_collate(self, key: int | None) -> OwnedGenerators:
        """Seeds the generators that the collate function owns, and returns them."""
        if self._generators_of_collate is None:
            self._generators_of_collate = OwnedGenerators(self.collate)
        assert key is not None
        self._generators_of_collate.seed(key)
        return self._generators_of_collate

    def _items(self, keys: list[_Key]) -> list[Any]:
        """Returns samples, each read in its epoch."""
        if not self._epoch_setters:
            return self._items_of_epoch(keys)
        items: dict[int, Any] = {}
        places = sorted(range(len(keys)), key=lambda place: keys[place].epoch)
        for epoch, group in groupby(places, key=lambda place: keys[place].epoch):
            self._enter(epoch)
            places_in_epoch = list(group)
            read = self._items_of_epoch([keys[place] for place in places_in_epoch])
            items |= zip(places_in_epoch, read, strict=True)
        return [items[place] for place in range(len(keys))]

    def _enter(self, epoch: int) -> None:
        """Tells the data set the epoch of the samples that are read next.

        Raises:
            DataError: the data set has another length then.
        """
        if epoch == self._epoch:
            return
        length = len(self)
        if self._seed is not None:
            # Negative positions: their keys must differ from those of samples.
            key = keys_of(self._seed, np.array([-1 - epoch], dtype=np.int64))[0]
            seed_generators(key)
            OwnedGenerators(self.dataset).seed(key)
        for set_epoch in self._epoch_setters:
            set_epoch(epoch)
        self._epoch = epoch
        if len(self) != length:
            raise DataError(
                f"set_epoch({epoch}) of {type(self.dataset).__qualname__} has changed its length from {length} to "
                f"{len(self)} samples",
                hint="keep __len__, and let set_epoch choose which samples there are; or make a stream of the data set "
                "(docs/own-data.md)",
            )

    def _items_of_epoch(self, keys: list[_Key]) -> list[Any]:
        if keys[0].seed is None:
            return self._items_at_once([key.number for key in keys])
        return [self.item(key.number, key.seed) for key in keys]

    def _items_at_once(self, numbers: list[int]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            return cast("list[Any]", self.dataset.__getitems__(numbers))
        return [self.dataset[number] for number in numbers]

    def item(self, number: int, key: int | None) -> Any:
        """Returns one sample, read after all generators were seeded by its key."""
        if self._generators is None:
            self._generators = OwnedGenerators(self.dataset)
        seed_generators(key)
        assert key is not None
        self._generators.seed(key)
        if hasattr(self.dataset, "__getitem__"):
            return self.dataset[number]
        return self.dataset.__getitems__([number])[0]


def _epoch_setters(dataset: Any) -> list[Callable[[int], None]]:
    """Returns the `set_epoch` of a data set; of a part or a concatenation of torch's those of what it is made of."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset.set_epoch]
    parts = [dataset.dataset] if isinstance(dataset, Subset) else []
    parts += dataset.datasets if isinstance(dataset, ConcatDataset) else []
    return [setter for part in parts for setter in _epoch_setters(part)]


class KeyedNumber(int):
    """The number of a sample, with what keys the randomness of reading it where it is used."""

    key: int


class KeyedData(Dataset[Any]):
    """A data set whose samples are read with randomness that follows from their place in the training alone.

    Python's, numpy's and torch's CPU generators, and those that the data set owns, are seeded before each sample. So
    workers, ranks and interruptions change no augmentation. In the process of the training they are put back.

    Args:
        dataset: a map-style data set.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        _require_map_style(dataset)
        self.dataset = dataset
        self._reader = _ItemReader(dataset, pad_or_stack)

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, number: int) -> Any:
        if not isinstance(number, KeyedNumber):
            raise ConfigError(
                f"sample {number} was asked for by its number alone, and its randomness follows from its place in the "
                "training: it would be the same in each epoch",
                hint="DataLoader(batches.keyed(data), batch_sampler=batches); to look at a sample, ask the data set "
                "itself",
            )
        if torch.utils.data.get_worker_info() is not None:
            return self._reader.item(int(number), number.key)
        with generators_put_back():
            return self._reader.item(int(number), number.key)


def prepare_worker(_: int) -> None:
    """Makes a worker process ignore the signals that ask a job to stop: the training process decides.

    Slurm signals every process of a step. A worker that died of it would take the save at the step boundary with it;
    one that ran the training process's inherited handlers would believe that it had been asked.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _prepare_trial() -> None:
    """Makes a process read as a worker does."""
    prepare_worker(0)
    torch.set_num_threads(1)


def _bytes_of(batch: Batch) -> int:
    """Returns the bytes of a batch's tensors."""
    sizes: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(add, batch)
    return sum(sizes)


def _end_workers(batches: Any, workers: list[BaseProcess]) -> None:
    """Lets the workers finish, and kills those that do not.

    Left to themselves, a loader and multiprocessing's exit send SIGTERM, which the workers ignore, and the exit
    then waits for them without end.
    """
    batches._shutdown_workers()
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _require_map_style(dataset: Any) -> None:
    readable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if isinstance(dataset, IterableDataset) or not (readable and hasattr(dataset, "__len__")):
        raise DataError(
            f"{type(dataset).__qualname__} is not a map-style data set: it needs __len__ and __getitem__",
            hint="an exact order needs samples that can be asked for by number; a stream needs __iter__, state_dict "
            "and load_state_dict, and is resumed exactly on as many ranks (docs/own-data.md)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What fills samples of unequal length up, so that no sample depends on those beside it; follows from the model."""

    tokens: int = 0
    """Fills token ids: the model's padding id."""
    adds_mask: bool = False
    """Token ids and audio without an `attention_mask` get one: the model would count the padding otherwise."""
    has_own_loss: bool = True
    """The model has a `training_loss`, which gets -100 for all targets; other losses would count floats of -100."""


def pad_or_stack(items: list[Any], *, padding: Padding | None = None) -> Any:
    """Returns a batch as torch's default_collate makes it, of mappings as `pad` does."""
    return pad(items, padding=padding) if isinstance(items[0], Mapping) else default_collate(items)


def padded_by(collate: Collate, padding: Padding) -> Collate:
    """Returns a collate function of this module with another padding, and any other as it is."""
    return partial(collate, padding=padding) if collate in (pad, pad_or_stack) else collate


def as_batch(batch: Any) -> Batch:
    """Returns what a collate function gave, as a tuple or a dict of tensors.

    Raises:
        DataError: it is something else.
    """
    parts = (batch,) if isinstance(batch, Tensor) else batch
    if isinstance(parts, Mapping) and parts and all(map(_holds_tensors, parts.values())):
        return {str(name): part for name, part in parts.items()}
    if isinstance(parts, Sequence) and not isinstance(parts, str) and parts and all(map(_holds_tensors, parts)):
        return tuple(parts)
    raise DataError(
        "a collated batch must be a tensor, or a tuple or a dict of tensors or of lists of them, this one is "
        f"{_kind(batch)}",
        hint="return (inputs, targets) or a dict of tensors from __getitem__, or name a function in data.collate",
    )


def _holds_tensors(part: Any) -> bool:
    """Returns whether something is a tensor or has some in lists and dicts; names and numbers may be beside them."""
    if isinstance(part, Mapping):
        return any(map(_holds_tensors, part.values()))
    if isinstance(part, (list, tuple)):
        return any(map(_holds_tensors, part))
    return isinstance(part, Tensor)


def _kind(value: Any) -> str:
    """Returns what a value is, e.g. "a tuple of (Tensor, str)"."""
    if isinstance(value, Mapping):
        return f"a dict of ({', '.join(f'{name}: {type(part).__name__}' for name, part in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of ({', '.join(type(part).__name__ for part in value[:5])})"
    return f"a {type(value).__qualname__}"


def seed_generators(key: int | None) -> None:
    """Seeds Python's, numpy's and torch's CPU generators; None leaves them alone."""
    if key is not None:
        random.seed(key)
        np.random.seed(key % 2**32)
        # torch.manual_seed would also reset the GPUs' generators, which belong to dropout.
        torch.default_generator.manual_seed(key)


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Puts the generators back to where they are now."""
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def pad(
    samples: Sequence[tuple[Tensor, ...]] | Sequence[Mapping[str, Any]], *, padding: Padding | None = None
) -> Batch:
    """Returns a batch of (inputs, targets, ...), or of tensors by name, filled up to the length of the longest sample.

    Inputs are filled with 0, and `input_ids` of mappings with the padding id; `labels` and all that follows the inputs
    of tuples with what does not count: -100, float targets with -inf unless the model has a `training_loss`. For tuples
    of unequal length it is `data.collate=slurm_train.data.mapstyle.pad`, for mappings the default. How little there is
    to pad is up to the batch: `batch.by_length=true` puts samples of about equal length together.

    Args:
        samples: tuples or mappings of tensors (length, ...) of the same kind; those without dimensions are stacked.
        padding: what suits the model; None knows of none.

    Raises:
        DataError: float `labels` have unequal lengths, and the model's own loss would count what fills them up.
    """
    padding = padding or Padding()
    if not isinstance(samples[0], Mapping):
        columns: Any = zip(*samples, strict=True)
        return tuple(
            _filled_up(list(column), value=_value_of_targets(column, padding) if number else 0)
            for number, column in enumerate(columns)
        )
    named: Any = samples
    tensors = {name: [_tensor(value, name) for value in named] for name in named[0]}
    batch = {}
    for name, column in tensors.items():
        value: float = padding.tokens if name in _TOKENS else 0
        if name == _LABELS:
            value = _value_of_targets(column, padding)
            if value == IGNORED_VALUE and _differ_in_length(column):
                raise DataError(
                    f"{name} are floats of unequal length, e.g. {len(column[0])} and {_other_length(column)}, and the "
                    "model's own loss would count what fills them up",
                    hint="define training_loss(batch) on the model, where -100 fills them up; or name a function in "
                    "data.collate",
                )
        batch[name] = _filled_up(column, value=value)
    inputs = next((tensors[name] for name in _MASKED if name in tensors), None)
    # No mask where nothing was filled up: models compute faster so, and the same.
    if padding.adds_mask and _MASK not in tensors and inputs is not None and _differ_in_length(inputs):
        batch[_MASK] = pad_sequence([torch.ones_like(row, dtype=torch.int64) for row in inputs], batch_first=True)
    return batch


_TOKENS = ("input_ids", "decoder_input_ids")
_MASKED = ("input_ids", "input_values")
"""Inputs whose padding an `attention_mask` tells: texts and audio."""
_LABELS = "labels"
_MASK = "attention_mask"


def _value_of_targets(column: Sequence[Tensor], padding: Padding) -> float:
    """Returns what fills targets up."""
    return IGNORED_VALUE if column[0].is_floating_point() and not padding.has_own_loss else IGNORED


def _differ_in_length(column: Sequence[Tensor]) -> bool:
    return bool(column[0].dim()) and any(len(row) != len(column[0]) for row in column)


def _other_length(column: Sequence[Tensor]) -> int:
    return next(len(row) for row in column if len(row) != len(column[0]))


def _filled_up(column: list[Tensor], *, value: float) -> Tensor:
    if not column[0].dim():
        return torch.stack(column)
    return pad_sequence(column, batch_first=True, padding_value=value)


def _tensor(sample: Mapping[str, Any], name: str) -> Tensor:
    try:
        return torch.as_tensor(sample[name])
    except (KeyError, TypeError, ValueError, RuntimeError) as err:
        problem = f"is a {type(sample[name]).__qualname__}" if name in sample else "is missing"
        raise DataError(
            f"{name!r} of a sample cannot become a tensor: it {problem}",
            hint="leave text and other columns out of the samples (remove_columns of a Hugging Face data set), or name "
            "a function in data.collate that makes tensors of them",
        ) from err
