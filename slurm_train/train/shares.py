"""How many samples of each micro-batch the ranks compute: the weights that were asked for, or what they are fast for.

Speed is measured at the start of every attempt, on all ranks at once, with forward and backward passes over the same
samples, which leave no trace. What the ranks measured goes to all, and rank 0's arithmetic counts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.config.batch import MOST, BatchPlan, Choice, sizes_by_speed, sizes_by_weight, sizes_in_words
from slurm_train.data.global_batches import GlobalBatches
from slurm_train.data.source import Draw, SampleSource
from slurm_train.data.stream import BatchStream
from slurm_train.metrics.progress import Display
from slurm_train.models.objective import Objective
from slurm_train.rundir.events import append_event
from slurm_train.train.build import autocast_dtype
from slurm_train.train.module import TrainingModule
from slurm_train.train.saving import Position
from slurm_train.train.start import RankStart
from slurm_train.train.step import to_device
from slurm_train.train.traces import without_traces

if TYPE_CHECKING:
    from slurm_train.train.trainer import Built, RankRun

_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S = 3, 30, 0.5


class Told(NamedTuple):
    """What a rank tells the others."""

    host: str
    node_rank: int
    once_s: float
    """A pass over an equal share; 0 where nothing was measured."""
    double_s: float
    """A pass over `MOST` times as many samples; infinite where they have no room."""


def build_shares(
    rank_run: RankRun,
    built: Built,
    *,
    objective: Objective,
    batches: GlobalBatches,
    position: Position,
    display: Display | None,
) -> tuple[int, ...] | None:
    """Returns the samples of a micro-batch, rank by rank, None where all get the same. Collective.

    Called before DDP is around the model: its hooks would count passes that exchange nothing.

    Raises:
        BatchError: there are other ranks than weights; on every rank alike.
    """
    start = rank_run.start
    asked, plan = start.config.batch.shares, start.plan
    if asked == "even" or plan.ranks == 1 or position.step >= start.config.train.max_steps:
        return None
    once_s = double_s = 0.0
    if asked == "measured":
        module = TrainingModule(
            objective,
            stop=start.stop,
            device=rank_run.device,
            autocast=autocast_dtype(start.config.train, device=rank_run.device),
        )
        samples = read_samples(built.train, batches, plan, first=position.samples)
        with _uncompiled() if start.config.train.compile else contextlib.nullcontext():
            once_s, double_s = time_passes(module, samples, clock=start.clock, meet=_meet)
    told = _tell(Told(start.place.host, start.place.node_rank, once_s, double_s))
    ranks_per_node = [len(list(ranks)) for _, ranks in itertools.groupby(told, key=lambda one: one.node_rank)]
    if isinstance(asked, str):
        choice = sizes_by_speed([(one.once_s, one.double_s) for one in told], plan)
    else:
        choice = Choice(sizes=sizes_by_weight(asked, plan, ranks_per_node=ranks_per_node), equal_s=0.0, chosen_s=0.0)
    sizes = _agree(choice.sizes)
    if display is not None:
        _note(start, choice, told, ranks_per_node, display=display)
    return sizes


def read_samples(
    source: SampleSource, batches: GlobalBatches, plan: BatchPlan, *, first: int
) -> list[tuple[Tensor, ...]]:
    """Returns micro-batches of an equal share and of `MOST` times as many samples, the same on every rank.

    Args:
        source: where samples come from.
        batches: their order.
        plan: the cut of the global batch.
        first: position of the first sample.
    """
    draws = []
    for size in (plan.local_size, MOST * plan.local_size):
        indices = batches.sample_ids(first, size)
        draws.append(Draw(indices, torch.arange(first, first + size).numpy()))
    return [batch.tensors for batch in BatchStream(source, iter(draws))]


def time_passes(
    module: TrainingModule,
    samples: Sequence[tuple[Tensor, ...]],
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
    device = module.rider.device
    found: list[list[float]] = [[] for _ in samples]
    with without_traces(module):
        passes = [
            partial(_pass_s, module, tensors if device.type == "cpu" else to_device(tensors, device), clock=clock)
            for tensors in samples
        ]
        has_room = [one() < math.inf for one in passes]
        meet()
        start = clock()
        for number in range(_MOST_ROUNDS):
            if number >= _LEAST_ROUNDS and clock() - start > _ENOUGH_S:
                break
            for one, times, fits in zip(passes, found, has_room, strict=True):
                times.append(one() if fits else math.inf)
    return tuple(median(times) for times in found)


def _uncompiled() -> contextlib.AbstractContextManager[None]:
    # What is compiled outside of DDP's forward is not cut at its buckets, and would be used in it all the same.
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _pass_s(module: TrainingModule, tensors: tuple[Tensor, ...], *, clock: Callable[[], float]) -> float:
    device = module.rider.device
    start = clock()
    try:
        module.backward(module(*tensors))
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


def _tell(own: Told) -> list[Told]:
    """Returns what every rank tells, in rank order."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def _agree(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns rank 0's sizes."""
    agreed = torch.tensor(sizes, dtype=torch.int64)
    dist.broadcast(agreed, src=0)
    return tuple(agreed.tolist())


def _note(
    start: RankStart, choice: Choice, told: Sequence[Told], ranks_per_node: Sequence[int], *, display: Display
) -> None:
    """Says the shares and writes them down. Rank 0 only."""
    sentence, facts = _in_words(choice, told, ranks_per_node, start.plan), {}
    if choice.equal_s:
        facts = {"equal_pass_s": choice.equal_s, "expected_pass_s": choice.chosen_s}
    display.say(f"shares: {sentence}")
    append_event(start.run, "shares", attempt=start.attempt, sentence=sentence, sizes=list(choice.sizes), **facts)


def _in_words(choice: Choice, told: Sequence[Told], ranks_per_node: Sequence[int], plan: BatchPlan) -> str:
    if math.isnan(choice.equal_s):
        odd = next(rank for rank, one in enumerate(told) if not (0 < one.once_s < math.inf and one.double_s > 0))
        return f"equal, since rank {odd} on {told[odd].host} has measured {told[odd].once_s:g} s"
    firsts = itertools.accumulate(ranks_per_node[:-1], initial=0)
    words = sizes_in_words(
        choice.sizes,
        ranks_per_node=ranks_per_node,
        nodes=[told[first].host for first in firsts],
        seconds=[one.once_s for one in told] if choice.equal_s else None,
    )
    sentence = f"{words} of the {plan.local_size * plan.ranks} samples of a micro-batch"
    if not choice.equal_s:
        return sentence
    gain = f"; a pass takes {1e3 * choice.chosen_s:.3g} ms instead of {1e3 * choice.equal_s:.3g} ms"
    if choice.chosen_s >= choice.equal_s:
        gain = "; other shares would save less than 5 %"
    return f"{sentence} (in brackets: a pass over {plan.local_size}){gain}"
