"""What the loop is fed with: the run's global batches, and this rank's micro-batches, read ahead where asked."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_train.config.schema import RunConfig
from slurm_train.data.build import prefetch_depth
from slurm_train.data.global_batches import GlobalBatches, LengthBatches, Split
from slurm_train.data.order import SampleOrder
from slurm_train.data.prefetch import Prefetch
from slurm_train.data.source import SampleSource, lengths_of
from slurm_train.data.stream import BatchStream, EvenBatches, MicroBatch
from slurm_train.train.saving import Position
from slurm_train.train.start import RankStart


def build_global_batches(start: RankStart, source: SampleSource, position: Position) -> GlobalBatches:
    """Returns the samples of every step; moves the position to where a global batch begins.

    It is there already unless the lengths of the samples or the settings of the batch were changed on purpose.

    Raises:
        DataError: batches by length are asked of samples without lengths.
    """
    order = SampleOrder(len(source), seed=start.config.seed)
    batches: GlobalBatches = EvenBatches(order, global_size=start.plan.global_size)
    if start.config.batch.by_length:
        batches = LengthBatches(
            order,
            lengths_of(source),
            global_size=start.plan.global_size,
            pool_batches=start.config.batch.pool,
            first=position.batch_since[1],
        )
    position.samples = batches.align(position.samples)
    return batches


def build_stream(
    start: RankStart,
    source: SampleSource,
    batches: GlobalBatches,
    *,
    start_samples: int,
    sizes: tuple[int, ...] | None = None,
) -> Iterator[MicroBatch]:
    """Returns this rank's micro-batches from a position on.

    Args:
        start: what this rank knows.
        source: where samples come from.
        batches: which ones each step takes.
        start_samples: the position.
        sizes: samples of a micro-batch, rank by rank; None: equal numbers of them.

    Raises:
        ConfigError: they cannot be read ahead as asked.
    """
    layout = start.layout
    split = Split(
        rank=layout.data_parallel_index(start.place.rank),
        ranks=layout.data_parallel_size,
        accumulation=start.plan.accumulation,
        sizes=sizes,
    )
    stream = BatchStream(source, batches.draws(split, start_samples=start_samples))
    depth = prefetch_depth(_data_of(start.config), source)
    return Prefetch(stream, depth=depth) if depth else stream


def _data_of(config: RunConfig) -> dict[str, object]:
    return config.data or {}
