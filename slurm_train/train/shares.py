"""How many samples of each micro-batch the ranks compute: by the weights that were asked for, or by their speed.

Speed is measured at the start of every attempt, on all ranks at once, with forward and backward passes over the same
samples, which leave no trace. What the ranks measured goes to all, and rank 0's arithmetic counts. Only loaded where
`batch.shares` asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from slurm_train.config.batch import MOST, BatchPlan, Choice, sizes_by_speed, sizes_by_weight, sizes_in_words
from slurm_train.data.batches import BatchStream, GlobalBatches
from slurm_train.data.source import Batch, Draw
from slurm_train.metrics import Display
from slurm_train.models.objective import Objective
from slurm_train.rundir.events import append_event
from slurm_train.train.context import Parts, gather
from slurm_train.train.preserve import preserved
from slurm_train.train.saving import Position
from slurm_train.train.step import TrainingModule, to_device

_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S = 3, 30, 0.5


class Measured(NamedTuple):
    """What a rank tells the others."""

    host: str
    node_rank: int
    once_s: float
    """A pass over an equal share; 0 where nothing was measured."""
    double_s: float
    """A pass over `MOST` times as many samples; infinite where they have no room."""


def build_shares(
    parts: Parts, batches: GlobalBatches, *, objective: Objective, position: Position, display: Display | None
) -> tuple[int, ...] | None:
    """Returns the samples of a micro-batch, rank by rank, None where all get the same. Collective.

    Called before DDP is around the model: its hooks would count passes that exchange nothing.

    Raises:
        BatchError: there are other ranks than weights; on every rank alike.
    """
    rank, config, plan = parts.rank, parts.rank.config, parts.rank.plan
    shares = config.batch.shares
    if plan.ranks == 1 or position.step >= parts.max_steps:
        return None
    times: tuple[float, ...] = 0.0, 0.0
    if shares == "measured":
        module = TrainingModule(objective, stop=rank.stop, device=rank.device, autocast=rank.autocast)
        # What is compiled outside of DDP's forward is not cut at its buckets, and would be used in it all the same.
        is_compiled = rank.compiles
        with torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext():
            samples = _read_samples(parts, batches, position.samples)
            times = time_passes(module, samples, clock=rank.clock, meet=_meet)
    found: list[Measured] = gather(Measured(rank.place.host, rank.place.node_rank, *times))
    ranks_per_node = [len(list(ranks)) for _, ranks in itertools.groupby(found, key=lambda one: one.node_rank)]
    if isinstance(shares, str):
        choice = sizes_by_speed([(one.once_s, one.double_s) for one in found], plan)
    else:
        choice = Choice(sizes=sizes_by_weight(shares, plan, ranks_per_node=ranks_per_node), equal_s=0.0, chosen_s=0.0)
    agreed = torch.tensor(choice.sizes, dtype=torch.int64)
    dist.broadcast(agreed, src=0)
    if display is not None:
        sentence, facts = _describe(choice, found, ranks_per_node, plan), {}
        if choice.equal_s:
            facts = {"equal_pass_s": choice.equal_s, "expected_pass_s": choice.chosen_s}
        display.say(f"shares: {sentence}")
        append_event(rank.run, "shares", attempt=rank.attempt, sentence=sentence, sizes=list(choice.sizes), **facts)
    return tuple(agreed.tolist())


def time_passes(
    module: TrainingModule,
    samples: Sequence[Batch],
    *,
    clock: Callable[[], float],
    meet: Callable[[], None],
) -> tuple[float, ...]:
    """Returns the median seconds of a forward and backward pass of each micro-batch, infinite where it has no room.

    Args:
        module: not wrapped in DDP; is left as it was.
        samples: micro-batches on the CPU.
        clock: seconds.
        meet: waits for the other ranks once everything is warm, so that all measure at the same time.
    """
    device = module.stats_param.device
    found: list[list[float]] = [[] for _ in samples]
    with preserved(module):
        passes = [partial(_pass_s, module, to_device(tensors, device), clock=clock) for tensors in samples]
        has_room = [one() < math.inf for one in passes]
        meet()
        start = clock()
        for number in range(_MOST_ROUNDS):
            if number >= _LEAST_ROUNDS and clock() - start > _ENOUGH_S:
                break
            for one, times, fits in zip(passes, found, has_room, strict=True):
                times.append(one() if fits else math.inf)
    return tuple(median(times) for times in found)


def _read_samples(parts: Parts, batches: GlobalBatches, first: int) -> list[Batch]:
    """Returns micro-batches of an equal share and of `MOST` times as many samples, the same on every rank."""
    draws, local_size = [], parts.rank.plan.local_size
    for size in (local_size, MOST * local_size):
        indices = batches.sample_ids(first, size)
        draws.append(Draw(indices, torch.arange(first, first + size).numpy()))
    return [batch.tensors for batch in BatchStream(parts.train_data, iter(draws))]


def _pass_s(module: TrainingModule, tensors: Batch, *, clock: Callable[[], float]) -> float:
    device = module.stats_param.device
    start = clock()
    try:
        module.backward(module(tensors))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        for parameter in module.parameters():
            parameter.grad = None
    return clock() - start


def _meet() -> None:
    dist.all_reduce(torch.zeros(()))


def _describe(choice: Choice, found: Sequence[Measured], ranks_per_node: Sequence[int], plan: BatchPlan) -> str:
    if math.isnan(choice.equal_s):
        odd = next(rank for rank, one in enumerate(found) if not (0 < one.once_s < math.inf and one.double_s > 0))
        return f"equal, since rank {odd} on {found[odd].host} has measured {found[odd].once_s:g} s"
    firsts = itertools.accumulate(ranks_per_node[:-1], initial=0)
    words = sizes_in_words(
        choice.sizes,
        ranks_per_node=ranks_per_node,
        nodes=[found[first].host for first in firsts],
        seconds=[one.once_s for one in found] if choice.equal_s else None,
    )
    sentence = f"{words} of the {plan.local_size * plan.ranks} samples of a micro-batch"
    if not choice.equal_s:
        return sentence
    gain = f"; a pass takes {1e3 * choice.chosen_s:.3g} ms instead of {1e3 * choice.equal_s:.3g} ms"
    if choice.chosen_s >= choice.equal_s:
        gain = "; other shares would save less than 5 %"
    return f"{sentence} (in brackets: a pass over {plan.local_size}){gain}"
