"""The samples of a training: which global batches each step takes, and this rank's micro-batches of them.

`data.order` defines the order of samples, and `data.batches` cuts it into micro-batches. This module begins both at the
position of a run: a resume continues at the next sample, also after a rollback, a change of the global batch, and with
a stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.state import can_pin
from slurm_train.config.batch import BatchShare, num_batches, shares_by_weight, shares_in_words
from slurm_train.config.parallel import ParallelLayout
from slurm_train.data.batches import BatchStream, GlobalBatches, MicroBatch, Prefetch
from slurm_train.data.build import ALLOW_WORLD_CHANGE, prefetch_depth
from slurm_train.data.length_batches import LengthBatches
from slurm_train.data.mapstyle import Padding
from slurm_train.data.order import DIGEST_MODULUS, SampleOrder, samples_digest
from slurm_train.data.source import Draw, SampleSource, lengths_of
from slurm_train.data.stream import StreamSource
from slurm_train.errors import DataError
from slurm_train.models.own_loss import own_loss_of
from slurm_train.train.context import Rank, gather
from slurm_train.train.device_copies import Pinning
from slurm_train.train.position import Position

_FEW_FOR_NORMS = 8
"""With fewer samples errors rise (Wu and He, Group Normalization, 2018, figure 1)."""


class Samples:
    """Iterates over this rank's micro-batches, with digests of them; knows how many samples a step takes.

    Args:
        batches: the global batches of the run.
        stream: this rank's micro-batches from the run's position on.
        growth: `batch.growth`: global batches per step, by the step after which they count.
        has_digests: whether each step gets a digest of its samples (`train.samples_digest`).
        is_counted: whether this rank's samples count in the digest; another rank may read the same ones.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        stream: Iterator[MicroBatch],
        *,
        growth: Mapping[str, int],
        has_digests: bool = False,
        is_counted: bool = True,
    ) -> None:
        self.has_digests = has_digests
        self._stream = stream
        # The first micro-batch, from `peek` until it is taken.
        self._first: MicroBatch | None = None
        self._batches = batches
        self._growth = growth
        self._is_counted = is_counted
        # Digest of this rank's samples of the present step.
        self._digest = 0
        # Digests of all ranks' samples by step, until the step's result is read.
        self._digests: dict[int, int] = {}

    def peek(self) -> MicroBatch:
        """Returns the first micro-batch without consuming it: the first step takes it again."""
        self._first = next(self._stream)
        return self._first

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        batch = next(self._stream) if self._first is None else self._first
        self._first = None
        if self.has_digests:
            self._digest = (self._digest + samples_digest(batch.indices)) % DIGEST_MODULUS
        return batch

    def num_batches_of(self, step: int) -> int:
        """Returns how many global batches a step takes."""
        return num_batches(self._growth, step) - num_batches(self._growth, step - 1)

    def end_of(self, num: int, *, samples: int) -> int:
        """Returns the position in samples after so many global batches from a position on."""
        for _ in range(num):
            samples += self._batches.size_at(samples)
        return samples

    def exchange_digest(self, step: int) -> None:
        """Adds up the digests of a step's samples over all ranks. Collective."""
        total = torch.tensor(self._digest if self._is_counted else 0, dtype=torch.int64)
        self._digest = 0
        dist.all_reduce(total)
        self._digests[step] = int(total.item()) % DIGEST_MODULUS

    def pop_digest(self, step: int) -> int | None:
        """Returns the digest of a step's samples, once; None where there are no digests."""
        return self._digests.pop(step, None)

    def forget_digests(self) -> None:
        """Drops all digests: after a rollback the results of these steps are not read."""
        self._digests.clear()


def note_of_few(num_samples: int, *, global_size: int) -> str:
    """Returns a line about data of which a step takes samples more than once; "" for others."""
    if num_samples >= global_size:
        return ""
    return (
        f"the training data have {num_samples} samples and a step takes {global_size}, so some count several times in "
        f"a step: set batch.global_size={num_samples} or less if that is not meant"
    )


def note_of_batch_norms(model: nn.Module, *, local_size: int, global_size: int) -> str | None:
    """Returns a line about batch norms that see few samples of a step at a time; None where there are enough of them.

    Norms in evaluation mode use what they know, and synchronised ones see the micro-batches of all ranks.

    Args:
        model: whole, or this rank's part.
        local_size: samples of a micro-batch.
        global_size: samples of a step.
    """
    if local_size >= min(_FEW_FOR_NORMS, global_size):
        return None
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    if not any(norm.training and not isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        return None
    return (
        f"batch norms of {type(model).__name__} normalise by the {local_size} samples of a micro-batch, not by the "
        f"{global_size} of a step: fewer micro-batches (batch.accumulation, ranks), or on GPUs "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm in the model's constructor, give them more"
    )


def padding_for(model: nn.Module) -> Padding:
    """Returns what fills samples of unequal length up for a model, so that they do not depend on each other."""
    own_loss = own_loss_of(model)
    has_own_loss = hasattr(model, "training_loss")
    return Padding(
        tokens=own_loss.padding_id,
        adds_mask=own_loss.needs_mask and not has_own_loss,
        has_own_loss=has_own_loss,
    )


def build_global_batches(rank: Rank, source: SampleSource, position: Position) -> GlobalBatches:
    """Returns the global batches of the run; moves the position to the beginning of a global batch.

    The position is there already, unless the lengths of samples or the settings of the batch were changed on purpose.

    Raises:
        DataError: batches by length need samples with lengths.
    """
    config = rank.config
    global_size = rank.plan.global_size
    order = source.order if isinstance(source, StreamSource) else SampleOrder(len(source), seed=config.seed)
    if config.batch.by_length:
        batches: GlobalBatches = LengthBatches(
            order,
            lengths_of(source),
            global_size=global_size,
            pool_batches=config.batch.pool,
            first=position.batch_since[1],
        )
    else:
        batches = GlobalBatches(order, global_size=global_size)
    position.samples = batches.align(position.samples)
    return batches


def build_share(rank: Rank, *, is_over: bool) -> BatchShare:
    """Returns which micro-batches of each global batch are this rank's. Collective where ranks have weights.

    Args:
        rank: this rank.
        is_over: whether no step is left to be taken.

    Raises:
        BatchError: the weights do not fit the nodes and ranks of this attempt; on every rank alike.
    """
    weights = rank.config.batch.shares
    sizes = None
    if not isinstance(weights, str) and rank.plan.ranks > 1 and not is_over:
        sizes = _weighted_shares(rank, weights)
    return rank.plan.share(rank.layout.data_parallel_index(rank.place.rank), sizes=sizes)


def _weighted_shares(rank: Rank, weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the samples of a global batch, rank by rank, in proportion to weights. Collective."""
    num_ranks_of = Counter(gather((rank.place.node_rank, rank.place.host)))
    ranks_per_node = list(num_ranks_of.values())
    shares = shares_by_weight(weights, rank.plan, ranks_per_node=ranks_per_node)
    if rank.place.is_first:
        hosts = [host for _, host in num_ranks_of]
        sentence = shares_in_words(shares, ranks_per_node=ranks_per_node, nodes=hosts)
        rank.say(f"shares: {sentence}")
        rank.append_event("shares", sentence=sentence, sizes=list(shares))
    return shares


class StreamPlace:
    """Where this rank's stream of samples is, as a part of what is saved; the stream takes it over when it begins.

    Args:
        stream: the data.
        position: of the loop.
        may_begin_anew: whether another number of readers may begin a pass anew.
    """

    def __init__(self, stream: StreamSource, position: Position, *, may_begin_anew: bool) -> None:
        self._stream = stream
        self._position = position
        self._may_begin_anew = may_begin_anew
        self.saved: dict[str, Any] | None = None
        """The state at the checkpoint; None to begin anew."""

    def state_dict(self) -> dict[str, Any]:
        """Returns where the stream is."""
        return self._stream.state(self._position.samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps a state until the stream begins."""
        self.saved = state

    def check_readers(self, manifest: Manifest, *, num_readers: int) -> list[str]:
        """Returns a note for the user where the stream begins anew, since other ranks read it than before.

        Args:
            manifest: of the checkpoint.
            num_readers: data-parallel ranks.

        Raises:
            DataError: the state is of another number of ranks, and `data.allow_world_change` is not set.
        """
        num_saved = ParallelLayout(**manifest.mesh).data_parallel_size
        if num_saved == num_readers:
            return []
        if not self._may_begin_anew:
            raise DataError(
                f"step {manifest.step} was saved with streams of {num_saved} data-parallel ranks, and there are "
                f"{num_readers}",
                hint=f"resume on {num_saved}; or with +data.{ALLOW_WORLD_CHANGE}=true all streams begin anew, so "
                "samples of the present pass come again",
            )
        self.saved = None
        return [
            f"stream state of {num_saved} ranks cannot resume on {num_readers}: resetting it, "
            "samples of the present pass come again"
        ]


def begin_stream(
    rank: Rank,
    stream: StreamSource,
    batches: GlobalBatches,
    share: BatchShare,
    *,
    samples: int,
    saved_samples: int,
    state: dict[str, Any] | None,
) -> None:
    """Moves a stream to the next sample of the run.

    Args:
        rank: this rank.
        stream: the data.
        batches: the global batches of the run.
        share: this rank's part of them.
        samples: position of the run.
        saved_samples: position of the checkpoint; after a rollback the samples in between are passed over.
        state: state of the stream at the checkpoint; None at the beginning.

    Raises:
        DataError: the stream makes whole batches of another size than this rank's micro-batches.
    """
    stream.require_batches_of(share.micro_sizes)
    if stream.reads_again:
        reason = f"the stream {stream.name} has no state that tells its next sample"
        if state is not None:
            rank.say(f"{reason}: what was consumed is read again and passed over")
        else:
            rank.say(
                f"{reason}: a resume reads it again from the beginning of the pass, or of the run where it has no "
                "set_epoch"
            )
    stream.begin(
        samples=samples,
        state=state,
        num_skipped=share.share_of(samples - saved_samples),
        draws=partial(_draws_between, batches, share, rank.plan.global_size),
    )


def _draws_between(
    batches: GlobalBatches, share: BatchShare, global_size: int, first: int, last: int
) -> Iterator[Draw]:
    """Yields this rank's micro-batches between two numbers of global samples, of steps of equal size."""
    num_steps = (last - first) // global_size
    return islice(batches.draws(share, start_samples=first), num_steps * share.accumulation)


def build_samples(
    rank: Rank, source: SampleSource, batches: GlobalBatches, share: BatchShare, *, start_samples: int
) -> Samples:
    """Returns the samples of a training from a position on; begins to read ahead where that is configured.

    Args:
        rank: this rank.
        source: the data.
        batches: the global batches of the run.
        share: this rank's part of them.
        start_samples: the position.

    Raises:
        ConfigError: they cannot be read ahead as configured.
    """
    stream: Iterator[MicroBatch] = BatchStream(source, batches.draws(share, start_samples=start_samples))
    depth = prefetch_depth(rank.config.data or {}, source)
    if depth:
        pins = rank.device.type == "cuda" and can_pin()
        stream = Prefetch(stream, depth=depth, prepare=Pinning(rank.device) if pins else None)
    return Samples(
        batches,
        stream,
        growth=rank.config.batch.growth,
        has_digests=rank.config.train.samples_digest,
        is_counted=rank.layout.owns_samples(rank.place.rank),
    )
