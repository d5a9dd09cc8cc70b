"""Evaluation over the held-out samples: each rank adds up sums and counts, which are gathered once at the end.

No sample is padded and none counts twice, so the result depends neither on the number of ranks nor on the layout. Where
the model or the collate function draws random numbers (noise, masks), all generators are seeded before each batch by
the run's seed and the number of the batch's first sample, and the batches are small blocks that are the same on any
number of ranks: the same weights have the same result at each step and in `evaluate`. With
whole replicas a rank may have more batches than another, or none: the only exchange is at the end, and if some rank was
asked to stop, the evaluation has no result on any. With parts of a model each pass is an exchange, so all ranks make
the same number of passes, some of them with a batch that does not count, and they agree on a stop before each pass.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.config.schema import measured_average
from slurm_train.data.batches import evaluation_batches
from slurm_train.data.generators import positions_of, seed_each
from slurm_train.data.length_batches import evaluation_by_length
from slurm_train.data.source import SampleSource, describe, lengths_of
from slurm_train.distributed.seeds import mix, seed_streams, stream_positions
from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import labels_in
from slurm_train.train.buffers import SharedBuffers
from slurm_train.train.callbacks import Callback, Monitor
from slurm_train.train.context import Parts, Rank, gather
from slurm_train.train.continuity import EvaluationBasis
from slurm_train.train.held import HeldModel
from slurm_train.train.preserve import modes_kept, preserved
from slurm_train.train.stops import by_exchange

_MOST_NUMBERS = 1024
_BLOCK = 8
"""Samples of a batch where random numbers are drawn, or the next lower power of two where micro-batches are smaller."""
_STREAM = 0x65766C75
"""Sets the seeds of evaluations apart from those of steps."""


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    """Measures a model on the held-out samples."""

    rank: Rank
    held: HeldModel
    """The model in the run's layout."""
    source: SampleSource
    _draws: bool | None = field(default=None, init=False)
    """Whether evaluations draw random numbers; None before the first one."""
    _own: list[Any] = field(default_factory=list, init=False)
    """Random generators that the model owns."""

    def evaluate(self, *, within: Iterable[AbstractContextManager[Any]] = ()) -> dict[str, float] | None:
        """Returns "eval_loss" and the objective's other measures, the same on every rank. Collective.

        The model and the random generators of this process are left as they were, bit for bit.

        Args:
            within: contexts in which the evaluation runs, e.g. with averaged weights; entered in this order.

        Returns:
            None if some rank was asked to stop during the evaluation.
        """
        with ExitStack() as stack:
            objective = self.held.objective
            self._own = stack.enter_context(preserved(objective.model))
            stack.enter_context(modes_kept(objective))
            for context in within:
                stack.enter_context(context)
            SharedBuffers(objective.model).take_first_ranks()
            objective.eval()
            sums = self._sums()
        self.rank.heartbeat.mark("gather")
        counts = sums is None or self.held.counts_items
        of_ranks = gather(sums if counts else {})
        if None in of_ranks:
            return None
        return measures(of_ranks, bytes_per_item=describe(self.source).bytes_per_target)

    @torch.no_grad()
    def _sums(self) -> dict[str, float] | None:
        """Returns the sums of this rank's samples, {} without any, None when a stop interrupts the evaluation."""
        stop = self.rank.stop
        totals: dict[str, Tensor] = {}
        start_s = self.rank.clock()
        for num_done, (first, batch, counts) in enumerate(self._all_batches()):
            self.rank.heartbeat.mark("evaluate")
            self.rank.display.show_evaluation(num_done, self._num_batches(), elapsed_s=self.rank.clock() - start_s)
            is_stopping = bool(stop.requested) if self.held.is_replica else by_exchange(stop)
            if is_stopping:
                return None
            own_part = self.held.on_device(batch)
            self._seed(first)
            sums = self.held.evaluate(own_part)
            if not counts:
                continue
            for name, value in sums.items():
                # float64 on the device: exact for counts, and nothing waits for the host.
                totals[name] = totals[name] + value.double() if name in totals else value.double()
        return _as_numbers(totals)

    def _all_batches(self) -> Iterator[tuple[int, Any, bool]]:
        """Yields what `_batches` does; the first evaluation finds out whether they have to be blocks. Collective."""
        batches = self._batches()
        if self._draws is None:
            self.rank.heartbeat.mark("evaluate")
            first = next(batches, None)
            self._draws = any(gather(first is not None and self._draws_at_random(first[1])))
            if self._draws:
                # Read anew, in blocks.
                batches.close()
                batches = self._batches()
            elif first is not None:
                yield first
        yield from batches

    def _draws_at_random(self, batch: Any) -> bool:
        """Returns whether the collate function draws random numbers, or the model does for a batch, by trying it."""
        numbers = np.arange(min(2, len(self.source)), dtype=np.int64)
        collates_at_random = describe(self.source).collates_at_random
        self.rank.say(self.held.check_held_out(batch, labels_in(batch)))
        batch = self.held.on_device(batch)
        self._seed(0)
        before = (stream_positions(), positions_of(self._own))
        # A model may count its batches.
        with preserved(self.held.objective.model):
            self.held.evaluate(batch)
            is_moved = (stream_positions(), positions_of(self._own)) != before
        return is_moved or (collates_at_random is not None and collates_at_random(numbers))

    def _seed(self, first: int) -> None:
        """Seeds all random generators for the batch that begins with this sample.

        Ranks that compute the same layers of the same positions draw the same.
        """
        stream = self.rank.random_stream // self.rank.layout.data_parallel_size
        seed = mix(self.rank.config.seed, first, stream, _STREAM)
        seed_streams(seed)
        seed_each(self._own, seed)

    def try_out(self) -> list[str]:
        """Returns the names of the measures, by evaluating two samples before the training. Collective.

        The model is left as it was.

        Raises:
            ConfigError: the model's `evaluation_sums` returns sums that cannot be used.
        """
        samples = self.source.batch(np.arange(min(2, len(self.source)), dtype=np.int64))
        with self._tried():
            self.rank.say(self.held.check_held_out(samples, labels_in(samples)))
            sums = _as_numbers(self.held.evaluate(self.held.on_device(samples)))
        of_ranks = gather(sums)
        for of_rank in of_ranks:
            if of_rank:
                # Two samples may have no item that counts.
                of_rank["count"] = 1.0
        return sorted(measures(of_ranks, bytes_per_item=describe(self.source).bytes_per_target))

    def gives_loss(self) -> bool:
        """Returns whether the model returns a loss in evaluation mode, which detectors do not. Collective.

        A sample of lists of tensors is tried; others always have a loss. The model is left as it was.
        """
        if not self.held.may_lack_loss:
            return True
        sample = self.source.batch(np.zeros(1, dtype=np.int64))
        with self._tried():
            return self.held.gives_loss_of(sample)

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Has the model in evaluation mode, without gradients; it is left as it was."""
        objective = self.held.objective
        with preserved(objective.model), modes_kept(objective), torch.no_grad():
            objective.eval()
            yield

    def _batches(self) -> Generator[tuple[int, Any, bool], None, None]:
        """Yields for each of this rank's batches the number of its first sample, the batch, and whether it counts.

        With parts of a model all ranks have as many: the last ones are the first sample again, which does not count.
        """
        layout = self.rank.layout
        source = self.source
        by_length = self.rank.config.batch.by_length and self.held.is_replica and not self._draws
        batches = evaluation_batches(
            source,
            rank=layout.data_parallel_index(self.rank.place.rank),
            size=layout.data_parallel_size,
            batch_size=self._batch_size,
            divide=partial(evaluation_by_length, lengths_of(source)) if by_length else None,
            most=self._num_samples(),
            in_blocks=bool(self._draws),
        )
        num_yielded = 0
        for batch in batches:
            num_yielded += 1
            yield int(batch.indices[0]), batch.tensors, True
        if self.held.is_replica:
            return
        for _ in range(num_yielded, self._num_batches()):
            yield 0, source.batch(np.zeros(1, dtype=np.int64)), False

    @property
    def _batch_size(self) -> int:
        size = self.rank.plan.local_size
        return min(_BLOCK, 1 << (size.bit_length() - 1)) if self._draws else size

    def _num_samples(self) -> int:
        """Returns how many samples all ranks evaluate."""
        return _num_evaluated(self.rank, self.source)

    def _num_batches(self) -> int:
        """Returns the most batches that a rank has."""
        num_ranks = self.rank.layout.data_parallel_size
        if self._draws:
            return math.ceil(math.ceil(self._num_samples() / self._batch_size) / num_ranks)
        return math.ceil(math.ceil(self._num_samples() / num_ranks) / self._batch_size)


def _num_evaluated(rank: Rank, source: SampleSource) -> int:
    max_batches = rank.config.train.eval_max_batches
    return len(source) if max_batches is None else min(len(source), max_batches * rank.plan.global_size)


def find_measured(parts: Parts) -> EvaluationBasis | None:
    """Returns what evaluations of this attempt measure; None where there are none. Collective."""
    rank = parts.rank
    source = parts.heldout
    if source is None or not rank.config.train.evaluate:
        return None
    averaged = measured_average(rank.config.callbacks) is not None
    num_samples = _num_evaluated(rank, source)
    # Files may change while the ranks read them, and all have to compare alike.
    data = on_rank_zero(dist.group.WORLD, source.fingerprint)
    return EvaluationBasis(data=data, num_samples=num_samples, averaged=averaged)


def measures(of_ranks: list[dict[str, float]], *, bytes_per_item: float | None) -> dict[str, float]:
    """Returns the measures from all ranks' sums; the order of summation is fixed, so the result is so bit for bit.

    Args:
        of_ranks: sums by name, one mapping per rank; a rank without batches gives {}.
        bytes_per_item: bytes of text per predicted token, None for other data.
    """
    names = sorted({name for sums in of_ranks for name in sums})
    total = {name: math.fsum(sums.get(name, 0.0) for sums in of_ranks) for name in names}
    count = total.pop("count", 0.0)
    if not count:
        return {}
    loss = total.pop("loss") / count
    results = {"eval_loss": loss}
    num_correct = total.pop("correct", None)
    if num_correct is not None and bytes_per_item is None:
        results["eval_accuracy"] = num_correct / count
    if bytes_per_item is not None:
        results["eval_bits_per_byte"] = loss / math.log(2) / bytes_per_item
    for name, value in total.items():
        results[f"eval_{name}"] = value / count
    return results


def _as_numbers(totals: dict[str, Tensor]) -> dict[str, float]:
    """Returns sums as numbers; each element of a tensor gets its place behind the name, e.g. "per_class_0".

    Raises:
        ConfigError: loss, count or correct is no scalar, or a tensor has too many elements.
    """
    numbers: dict[str, float] = {}
    for name, value in totals.items():
        if value.dim() and (name in ("loss", "count", "correct") or value.numel() > _MOST_NUMBERS):
            raise ConfigError(
                f"evaluation_sums gave {name} as a tensor of {tuple(value.shape)}",
                hint=f"loss, count and correct are scalars, other sums have at most {_MOST_NUMBERS} numbers",
            )
        places = np.ndindex(*value.shape) if value.dim() else [()]
        for place, number in zip(places, value.flatten().tolist(), strict=True):
            numbers["_".join((name, *map(str, place)))] = number
    return numbers


def build_evaluator(parts: Parts, held: HeldModel, callbacks: Mapping[str, Callback]) -> Evaluator | None:
    """Returns the evaluator; None without held-out samples, or where the model has no loss of them. Collective.

    Args:
        parts: model, optimizer and data of this rank.
        held: the model in the run's layout.
        callbacks: by name; some compare measures.

    Raises:
        ConfigError: as `check_measures`.
    """
    evaluator = None
    if parts.heldout is not None and parts.rank.config.train.evaluate:
        evaluator = Evaluator(rank=parts.rank, held=held, source=parts.heldout)
    check_measures(parts, callbacks, evaluator)
    if evaluator is None or evaluator.gives_loss():
        return evaluator
    parts.rank.say(
        f"{type(parts.model).__name__} gives predictions and no loss in evaluation mode: held-out samples are "
        "not evaluated (define evaluation_sums(batch) on the model)"
    )
    return None


def check_measures(parts: Parts, callbacks: Mapping[str, Callback], evaluator: Evaluator | None) -> None:
    """Checks before the first step that evaluations have the measures that callbacks compare. Collective.

    Two samples are evaluated for that, where callbacks compare measures or the model has its own `evaluation_sums`.

    Raises:
        ConfigError: there are no held-out samples, no measure of that name, or the model's sums cannot be used.
    """
    monitors = []
    for callback in callbacks.values():
        if isinstance(callback, Monitor) and not callback.follower:
            monitors.append(callback)
    if evaluator is None:
        if monitors:
            raise ConfigError(
                "a callback compares evaluations, and the data have no held-out samples",
                hint="set data.heldout, or let the data set take a `split`; or leave the callback out",
            )
        return
    if not monitors and not hasattr(parts.model, "evaluation_sums"):
        return
    names = evaluator.try_out()
    for monitor in monitors:
        monitor.read(dict.fromkeys(names, 0.0))
