"""The interfaces of sample sources, and the batches that they return.

A source returns whole micro-batches by sample number. It knows neither ranks nor order nor epochs: `data.batches` does.
The randomness of reading a sample is keyed by its draw, never by how often something was read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slurm_train.data.order import Int64Array
from slurm_train.errors import DataError

if TYPE_CHECKING:
    from slurm_train.data.prepare import Encoding
    from slurm_train.data.shards import Tokens

Batch = tuple[Tensor, ...] | dict[str, Tensor]
"""A micro-batch: (inputs, targets) or another tuple of tensors, or tensors by name."""
Lengths = NDArray[np.integer[Any]]
IGNORED = -100
"""What torch's cross entropy passes over: targets that only pad a sample do not count."""
IGNORED_VALUE = float("-inf")
"""The same of float targets: -100 may be a value, and NaN is a fault that has to be seen."""


class Draw(NamedTuple):
    """The samples of one micro-batch before they are read.

    Attributes:
        indices: int64 (n,), sample numbers.
        positions: int64 (n,), the global positions they are drawn at; a position is one (epoch, sample), so seed and
            position key whatever is random about reading it.
    """

    indices: Int64Array
    positions: Int64Array


def map_tensors(function: Callable[..., Tensor], *batches: Batch) -> Batch:
    """Returns the batch of what a function makes of the tensors at the same place, or of the same name, in each.

    Raises:
        KeyError, ValueError: the batches are not of the same kind.
    """
    first = batches[0]
    if isinstance(first, dict):
        if any(set(batch) != set(first) for batch in batches):
            raise KeyError(", ".join(sorted(first)))
        named: tuple[Any, ...] = batches
        return {name: _mapped(function, *(batch[name] for batch in named)) for name in first}
    return tuple(_mapped(function, *parts) for parts in zip(*batches, strict=True))


def _mapped(function: Callable[..., Tensor], *parts: Any) -> Any:
    """Returns what a function makes of tensors, also of those in lists and dicts, as targets of a detector are."""
    first = parts[0]
    if isinstance(first, Tensor):
        return function(*parts)
    if len(parts) > 1:
        raise KeyError(f"a {type(first).__name__} of tensors, of which several cannot become one")
    if isinstance(first, dict):
        return {name: _mapped(function, part) for name, part in first.items()}
    return [_mapped(function, part) for part in first] if isinstance(first, (list, tuple)) else first


@runtime_checkable
class SampleSource(Protocol):
    """A data set that gives a whole micro-batch at once."""

    def __len__(self) -> int:
        """Returns the number of samples."""
        ...

    def batch(self, indices: Int64Array) -> Batch:
        """Returns the samples with these numbers, each tensor (n, ...) on the CPU.

        Args:
            indices: int64 (n,), each in [0, len(self)).
        """
        ...

    def fingerprint(self) -> str:
        """Returns a text without spaces that changes when the samples or their numbering change, e.g. 32 hex digits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a source says of its samples; what it does not know, or what does not apply, keeps its default."""

    context: int = 0
    """Positions of a sample, 0 where they are not known."""
    lengths: Any = None
    """What each sample costs: see `lengths_of`."""
    bytes_per_target: float | None = None
    """Bytes of text per predicted token: loss in nats / ln 2 / this = bits per byte. None for other data than text."""
    num_targets: int = 0
    """Predicted tokens of all samples, of text."""
    encoding: Callable[[], Encoding] | None = None
    """Gives the encoding of text, to decode what a model writes."""
    shards: Callable[[], Iterator[Tokens]] | None = None
    """Gives the tokens themselves."""
    draws_at_random: bool = False
    """Whether reading uses the random generators of this process."""
    collates_at_random: Callable[[Int64Array], bool] | None = None
    """Tells of samples with these numbers whether what makes a batch of them draws random numbers."""


def describe(source: SampleSource) -> Description:
    """Returns what a source says of itself in its method `describe`; a user's own may have `lengths` alone."""
    described: Description
    if hasattr(source, "describe"):
        described = source.describe()
    else:
        described = Description(lengths=getattr(source, "lengths", None))
    return described


def lengths_of(source: SampleSource) -> Lengths:
    """Returns what each sample costs, whole numbers (len(source),).

    They are the attribute or method `lengths` of a source, or of the map-style data set that it reads: a numpy array (a
    memory-mapped one will do), a tensor or a list.

    Raises:
        DataError: there is none, or the lengths are not whole numbers.
    """
    values = describe(source).lengths
    if callable(values):
        values = values()
    if values is None:
        raise DataError(
            f"batch.by_length=true needs the lengths of samples, and {type(source).__name__} has none",
            hint="give the data set an attribute `lengths`: one whole number per sample",
        )
    lengths = np.asarray(values)
    if not np.issubdtype(lengths.dtype, np.integer):
        raise DataError(f"lengths of samples are {lengths.dtype}", hint="they must be whole numbers")
    return lengths


@runtime_checkable
class StreamingSource(SampleSource, Protocol):
    """A source that wants to see the draws in advance, to read ahead or to key its randomness."""

    def stream(self, draws: Iterator[Draw]) -> Iterator[Batch]:
        """Yields one micro-batch per draw, in the same order."""
        ...
