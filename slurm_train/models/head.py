"""The last layer of a language model and its cross entropy in one operation, which never holds all scores.

The scores of 65,536 tokens over GPT-2's vocabulary take 13 GB in float32, and the plain way holds several tensors of
that size. Here scores exist for a chunk of tokens at a time: the forward pass computes the gradients of what goes into
the layer and of its weight chunk by chunk, and the backward pass only multiplies them. No product is computed twice.
Small products go the plain way, whose bits are those of torch's `linear` and `cross_entropy`.

On a GPU the vocabulary is padded to a multiple of 64 inside, so that the products are aligned. A padded id has a weight
of zeros and is left out of the sums: it has no probability and no gradient, and no tensor outside knows of it.

With tensor parallelism each rank computes the scores of a part of the ids; the ranks exchange two numbers per token
and the gradients of what goes in. The weight is spread over them, or whole if the ids give no equal parts; its gradient
is exchanged then, too.

torch 2.13 has `torch.nn.functional.linear_cross_entropy`, which warns and stays eager under torch.compile, and knows no
part of a vocabulary.

Shapes: N tokens, n of a chunk; C width; V ids, all or this rank's; P this rank's, padded.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError
from slurm_train.models.own_loss import IGNORED
from slurm_train.models.scores import default_loss, default_sums

# Up to so many scores go the plain way. A chunk on a GPU has more of them than one on the CPU: large products are what
# is fast there, and 270 MB are little.
_PLAIN_SCORES = 2**22
_CHUNK_SCORES = 2**27
_CHUNK_SCORES_ON_CPU = 2**24
_ALIGNMENT = 64
_ALIGNMENT_ON_CPU = 1


class Head(nn.Linear):
    """A last layer without bias that gives scores or, with targets, the sums of their cross entropy."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size, bias=False)
        self.score_group = ""
        """Name of the process group whose ranks share the work on scores; all have the same input."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns scores (..., V); with targets what `linear_cross_entropy` gives.

        Args:
            x: (..., C).
            targets: whole numbers (...), -100 where an item does not count.
        """
        weight: Any = self.weight
        is_part = hasattr(weight, "placements")
        if targets is None:
            return _scores_of_parts(x, weight) if is_part else super().forward(x)
        if is_part:
            weight = weight.to_local()
        return linear_cross_entropy(
            x, weight, targets, counts=not self.training, group=self.score_group, is_part=is_part
        )


def linear_cross_entropy(
    x: Tensor,
    weight_VC: Tensor,
    targets: Tensor,
    *,
    counts: bool,
    group: str = "",
    is_part: bool = False,
) -> Tensor:
    """Returns (1,), the sum of the cross entropy, or (2,), also how many targets have the highest score.

    It is float32, or float64 where the input is.

    Args:
        x: (..., C).
        weight_VC: of the layer.
        targets: whole numbers (...), -100 where an item does not count.
        counts: whether the second number is asked; it has no gradient.
        group: name of a process group whose ranks have the same arguments and take a part of the ids each; "" for one
            rank. Collective along it.
        is_part: the weight has this rank's part of the ids alone; all have equally many.

    Raises:
        ConfigError: there is not one whole-number target for each vector.
    """
    if targets.is_floating_point() or x.shape[:-1] != targets.shape:
        raise ConfigError(
            f"the last layer got {tuple(x.shape)} and targets of {tuple(targets.shape)}, {targets.dtype}",
            hint="give one token id per position as a target, or define training_loss(batch) on the model",
        )
    if not is_part and targets.numel() * len(weight_VC) <= _PLAIN_SCORES:
        scores = functional.linear(x, weight_VC)
        if not counts:
            return default_loss(scores, targets)[0].reshape(1)
        sums = default_sums(scores, targets)
        return torch.stack((sums["loss"], sums["correct"].to(sums["loss"].dtype)))
    kind = x.device.type
    is_lowered = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    totals: Tensor = _sums_and_gradients(
        x.flatten(0, -2),
        weight_VC,
        targets.flatten().long(),
        torch.get_autocast_dtype(kind) if is_lowered else x.dtype,
        group,
        is_part,
        counts,
        torch.is_grad_enabled(),
        # In a graph this operation is one node; what it does to a chunk of scores is compiled apart.
        torch.compiler.is_compiling(),
    )[0]
    return totals


@torch.library.custom_op(
    "slurm_train::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, ScalarType dtype, str group, bool is_part, bool counts, "
    "bool differentiates, bool compiles) -> (Tensor, Tensor, Tensor)",
)
def _sums_and_gradients(
    x_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    dtype: torch.dtype,
    group: str,
    is_part: bool,
    counts: bool,
    differentiates: bool,
    compiles: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sums, and the gradients of the first: (N, C) in `dtype`, and (V, C) in the weight's type.

    Args:
        x_NC: what goes into the layer.
        weight_VC: of it.
        targets_N: int64.
        dtype: of the products.
        group: as for `linear_cross_entropy`.
        is_part: as for `linear_cross_entropy`.
        counts: as for `linear_cross_entropy`.
        differentiates: whether gradients are computed; else they are empty.
        compiles: whether what is done to a chunk of scores is compiled.
    """
    is_counted_N = targets_N != IGNORED
    bounds, rank = _bounds(len(weight_VC), group, is_part)
    is_valid_N = ~is_counted_N | ((targets_N >= 0) & (targets_N < bounds[-1]))
    torch._assert_async(is_valid_N.all(), "a target is no id of the vocabulary")
    precise = torch.promote_types(dtype, torch.float32)
    first = bounds[rank]
    own_VC = weight_VC if is_part else weight_VC[bounds[rank] : bounds[rank + 1]]
    weight_PC = _padded(own_VC, dtype)
    sums = x_NC.new_zeros(1 + counts, dtype=precise)
    grad_x_NC = x_NC.new_empty(x_NC.shape if differentiates else 0, dtype=dtype)
    grad_PC = x_NC.new_zeros(weight_PC.shape if differentiates else 0, dtype=precise)
    log_sum, to_probabilities = _compiled() if compiles else (_log_sum, _to_probabilities)
    with torch.autocast(x_NC.device.type, enabled=False):
        for part in _chunks(len(x_NC), num_ids=len(weight_PC), kind=x_NC.device.type):
            x_nC = x_NC[part].to(dtype)
            is_counted_n = is_counted_N[part]
            scores_nP = x_nC @ weight_PC.T
            scores_nV = scores_nP[:, : len(own_VC)]
            own_n = targets_N[part] - first
            is_here_n = (own_n >= 0) & (own_n < len(own_VC))
            own_n1 = own_n.where(is_here_n, 0).unsqueeze(1)
            score_n = scores_nV.gather(1, own_n1).squeeze(1).to(precise) * is_here_n
            best = list(scores_nV.max(dim=1)) if counts else []
            log_n, score_n, *best = _joined(group, log_sum(scores_nV, precise), score_n, *best, first=first)
            sums[0] += ((log_n - score_n) * is_counted_n).sum()
            if counts:
                sums[1] += (best[0] == targets_N[part]).sum()
            if not differentiates:
                continue
            # Of an item that does not count every gradient is exp(-inf).
            log_n = log_n.masked_fill(~is_counted_n, math.inf)
            to_probabilities(scores_nV, log_n)
            # Probability - 1, without the digits that a rounded probability has lost.
            at_target_n = torch.expm1(score_n - log_n).masked_fill(~is_counted_n, 0).to(dtype)
            elsewhere_n1 = scores_nV.gather(1, own_n1)
            scores_nV.scatter_(1, own_n1, at_target_n.unsqueeze(1).where(is_here_n.unsqueeze(1), elsewhere_n1))
            torch.mm(scores_nP, weight_PC, out=grad_x_NC[part])
            if dtype == precise:
                grad_PC.addmm_(scores_nP.T, x_nC)
            else:
                grad_PC += scores_nP.T @ x_nC
    grad_VC = grad_PC[: len(own_VC)].to(weight_VC.dtype)
    if group and differentiates:
        dist.all_reduce(grad_x_NC, group=group_named(group))
    if group and differentiates and not is_part:
        sizes = [after - before for before, after in itertools.pairwise(bounds)]
        # Ranks with one row fewer send one that is not used.
        parts = _gathered(functional.pad(grad_VC, (0, 0, 0, max(sizes) - len(own_VC))), group)
        grad_VC = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return sums, grad_x_NC, grad_VC


@_sums_and_gradients.register_fake
def _shapes(
    x_NC: Tensor,
    weight_VC: Tensor,
    _targets_N: Tensor,
    dtype: torch.dtype,
    _group: str,
    _is_part: bool,
    counts: bool,
    differentiates: bool,
    _compiles: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = x_NC.new_empty(1 + counts, dtype=torch.promote_types(dtype, torch.float32))
    if differentiates:
        return sums, x_NC.new_empty(x_NC.shape, dtype=dtype), weight_VC.new_empty(weight_VC.shape)
    return sums, x_NC.new_empty(0, dtype=dtype), weight_VC.new_empty(0)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.x_dtype = inputs[0].dtype
    ctx.save_for_backward(*output[1:])
    # Else the outputs that nothing uses would get gradients of zeros.
    ctx.set_materialize_grads(False)


def _multiply(ctx: Any, factors: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    grad_x_NC, grad_VC = ctx.saved_tensors
    return grad_x_NC.to(ctx.x_dtype) * factors[0], grad_VC * factors[0], *[None] * 7


_sums_and_gradients.register_autograd(_multiply, setup_context=_keep_gradients)


def _chunks(num_tokens: int, *, num_ids: int, kind: str) -> list[slice]:
    """Returns parts of equal size, but for the last one, so that few shapes are compiled."""
    limit = max(1, (_CHUNK_SCORES_ON_CPU if kind == "cpu" else _CHUNK_SCORES) // num_ids)
    num_chunks = -(-num_tokens // limit)
    size = -(-num_tokens // max(num_chunks, 1))
    return [slice(start, start + size) for start in range(0, num_tokens, size)] if num_tokens else []


def _padded(weight_VC: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight in the type of the products, with rows of zeros that align them."""
    multiple = _ALIGNMENT_ON_CPU if weight_VC.device.type == "cpu" else _ALIGNMENT
    num_ids = -(-len(weight_VC) // multiple) * multiple
    if num_ids == len(weight_VC):
        return weight_VC.to(dtype)
    weight_PC = weight_VC.new_zeros((num_ids, weight_VC.shape[1]), dtype=dtype)
    weight_PC[: len(weight_VC)] = weight_VC
    return weight_PC


def _log_sum(scores_nV: Tensor, precise: torch.dtype) -> Tensor:
    """Returns what `logsumexp` does, with one copy of the scores instead of two: it is the fullest moment of a step."""
    highest_n1 = scores_nV.amax(dim=1, keepdim=True).to(precise)
    above_nV = scores_nV.to(precise, copy=True).sub_(highest_n1)
    return above_nV.exp_().sum(dim=1).log_() + highest_n1.squeeze(1)


def _to_probabilities(scores_nV: Tensor, log_n: Tensor) -> None:
    """Turns scores into probabilities, in place."""
    if scores_nV.dtype == log_n.dtype:
        scores_nV.sub_(log_n.unsqueeze(1)).exp_()
    else:
        scores_nV.copy_(scores_nV.to(log_n.dtype).sub_(log_n.unsqueeze(1)).exp_())


@functools.cache
def _compiled() -> tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, Tensor], None]]:
    return torch.compile(_log_sum), torch.compile(_to_probabilities)


def _joined(group: str, log_n: Tensor, score_n: Tensor, *best: Tensor, first: int) -> tuple[Tensor, ...]:
    """Returns of all rows: the logarithm of the sum, the target's score, the id with the highest score. One exchange.

    Args:
        group: name of the process group.
        log_n: of this rank's rows.
        score_n: 0 where the target's row is on another rank.
        *best: score and row of the best of this rank's rows, or nothing.
        first: id of the first row.
    """
    if not group:
        return log_n, score_n, *best[1:]
    # float64 holds every id.
    facts = torch.stack([fact.double() for fact in (log_n, score_n, *best)])
    facts[3:] += first
    logs, scores, *highest = torch.stack(_gathered(facts, group)).unbind(1)
    ids = [highest[1].gather(0, highest[0].argmax(dim=0, keepdim=True)).squeeze(0)] if highest else []
    return logs.logsumexp(dim=0).to(log_n.dtype), scores.sum(dim=0).to(log_n.dtype), *ids


def _scores_of_parts(x: Tensor, weight: Any) -> Tensor:
    """Returns the scores of all ids, from a weight whose rows are spread over a mesh of one axis. Collective."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = weight.device_mesh
    # The gradients of what goes in are added up.
    x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    spread_scores = DTensor.from_local(
        functional.linear(x, weight.to_local()), mesh, [Shard(x.dim() - 1)], run_check=False
    )
    scores: Tensor = spread_scores.redistribute(placements=[Replicate()]).to_local()
    return scores


def _bounds(num_ids: int, group: str, is_part: bool) -> tuple[list[int], int]:
    """Returns where each rank's ids begin, and the end, and this rank's place in the group."""
    if not group:
        return [0, num_ids], 0
    process_group = group_named(group)
    world = dist.get_world_size(process_group)
    num_ids *= world if is_part else 1
    return [num_ids * place // world for place in range(world + 1)], dist.get_rank(process_group)


def _gathered(tensor: Tensor, group: str) -> list[Tensor]:
    """Returns the tensors of all ranks, in order."""
    process_group = group_named(group)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, tensor, group=process_group)
    return parts


def group_named(name: str) -> dist.ProcessGroup:
    """Returns the process group of a name, which a graph can hold."""
    distributed: Any = dist.distributed_c10d
    resolved: dist.ProcessGroup = distributed._resolve_process_group(name)
    return resolved
