"""Cuts a model into stages of a pipeline: a rank keeps its own blocks, and other parts return their input unchanged.

The model's `pipeline_plan` names which parts are the first stage's, which are spread over all, and which are the last
one's; torch's schedules move the micro-batches. A stage's parameters have the names that they have in the whole model,
so a checkpoint of stages is a checkpoint of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_train.config.parallel import stage_blocks, stages_of
from slurm_train.distributed.group import torch_release
from slurm_train.errors import ConfigError

_PLAN = ("first", "spread", "last")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class PassThrough(nn.Module):
    """Replaces a part that another stage has; returns its first argument."""

    def forward(self, first: Tensor, *_others: Any) -> Tensor:
        """Returns the first argument."""
        return first


def keep_stages(model: nn.Module, *, stages: Sequence[int], num_stages: int) -> None:
    """Replaces, in place, what is in none of these stages.

    Raises:
        ConfigError: the model has no plan for it, shares a weight between stages, or has fewer blocks than stages.
    """
    plan = model_plan(model, "pipeline_plan", key="parallel.pp", names=_PLAN)
    _refuse_shared_state(model)
    require_default_loss(model, key="parallel.pp")
    for name in plan["spread"]:
        num_blocks = len(_blocks(model, name))
        if num_blocks < num_stages:
            raise ConfigError(
                f"parallel asks for {num_stages} stages, but the model has {num_blocks} blocks",
                hint=f"choose a parallel.pp x parallel.stages_per_rank of at most {num_blocks}",
            )
    _replace_others(model, model, plan, stages=stages, num_stages=num_stages)


def split_stages(model: nn.Module, *, stages: Sequence[int], num_stages: int) -> list[nn.Module]:
    """Returns one module for each of a rank's stages; they share their parts with the model, which holds them all."""
    if len(stages) == 1:
        return [model]
    plan = model_plan(model, "pipeline_plan", key="parallel.pp", names=_PLAN)
    parts = []
    for stage in stages:
        parts.append(_sibling(model))
        _replace_others(parts[-1], model, plan, stages=[stage], num_stages=num_stages)
    return parts


def _replace_others(
    part: nn.Module, model: nn.Module, plan: Mapping[str, Any], *, stages: Sequence[int], num_stages: int
) -> None:
    """Replaces in `part`, which is the model or a sibling of it, what is in none of these stages."""
    for name in plan["first"] if 0 not in stages else ():
        part.set_submodule(name, PassThrough())
    for name in plan["last"] if num_stages - 1 not in stages else ():
        part.set_submodule(name, PassThrough())
    for name in plan["spread"]:
        blocks = _blocks(model, name)
        numbers = set[int]()
        for stage in stages:
            numbers.update(stage_blocks(len(blocks), stage=stage, num_stages=num_stages))
        kept = (block if number in numbers else PassThrough() for number, block in enumerate(blocks))
        part.set_submodule(name, nn.ModuleList(kept))


def _blocks(model: nn.Module, name: str) -> nn.ModuleList:
    blocks = model.get_submodule(name)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _sibling(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares its parts, with tables of its own, so that hooks are not shared."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(twin)[name] = value.copy()
    return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This rank's stages, and its neighbours."""

    parts: list[nn.Module]
    """This rank's stages in order, from `split_stages`; parallelized further."""
    place: int
    """Place of this rank in its pipeline: stages `place`, `place + num_ranks`, ... are its own."""
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup
    """The ranks of this pipeline, in order."""

    @property
    def is_first(self) -> bool:
        """Whether this rank gets the inputs."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank gives the outputs."""
        return self.place == self.num_ranks - 1

    def build_schedule(self, *, name: str, num_batches: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
        """Returns torch's schedule over this many micro-batches; its gradients are sums.

        Args:
            name: "1f1b", "gpipe" or "zero_bubble".
            num_batches: micro-batches of a step.
            loss: gives the sum of the loss of (outputs, targets); only the last stage calls it.
        """
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
            ScheduleInterleavedZeroBubble,
        )

        numbers = stages_of(self.place, num_ranks=self.num_ranks, per_rank=len(self.parts))
        count = self.num_ranks * len(self.parts)
        stages = [
            PipelineStage(part, number, count, self.device, group=self.group)
            for number, part in zip(numbers, self.parts, strict=True)
        ]
        options: dict[str, Any] = {"n_microbatches": num_batches, "loss_fn": loss, "scale_grads": False}
        if name == "zero_bubble":
            return ScheduleInterleavedZeroBubble(list(stages), **options)
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(list(stages), **options)
        return (Schedule1F1B if name == "1f1b" else ScheduleGPipe)(stages[0], **options)

    def forward(self, inputs: Tensor, **more: Tensor) -> Tensor | None:
        """Returns the outputs of one batch on the last rank, None on the others; without gradients. Collective.

        Args:
            inputs: the model's; only the first rank looks at them.
            **more: what every part of the model takes besides.
        """
        for number, part in enumerate(self.parts):
            carried = inputs if self.is_first and number == 0 else self._receive()
            outputs: Tensor = part(carried, **more)
            if self.is_last and number == len(self.parts) - 1:
                return outputs
            self._send(outputs)
        return None

    def _send(self, tensor: Tensor) -> None:
        facts = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        header = torch.tensor(facts + [0] * (8 - len(facts)), device=self.device)
        for part in (header, tensor.contiguous()):
            dist.send(part, group=self.group, group_dst=(self.place + 1) % self.num_ranks)

    def _receive(self) -> Tensor:
        header = torch.zeros(8, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=(self.place - 1) % self.num_ranks)
        kind, num_dims, *sizes = header.tolist()
        tensor = torch.empty(sizes[:num_dims], dtype=_DTYPES[kind], device=self.device)
        dist.recv(tensor, group=self.group, group_src=(self.place - 1) % self.num_ranks)
        return tensor


def require_gloo_pipelines(device: torch.device) -> None:
    """Refuses a pipeline on CPUs where the stages of torch cannot exchange tensors by gloo.

    Before torch 2.10 its messages get mixed up and the ranks abort: with 2.9 from two stages on, with 2.7 from four.

    Raises:
        ConfigError: it is such a torch.
    """
    if device.type == "cpu" and torch_release() < (2, 10):
        raise ConfigError(
            f"parallel.pp on CPUs needs torch 2.10 or newer, and this is {torch.__version__}",
            hint="install it, or use parallel.dp_replicate or tp",
        )


def model_plan(model: nn.Module, method: str, *, key: str, names: Sequence[str] = ()) -> Any:
    """Returns the plan by which a model can be cut.

    Args:
        model: the model.
        method: of the model, e.g. "pipeline_plan".
        key: what was asked, e.g. "parallel.pp".
        names: what the plan must have, all of it.

    Raises:
        ConfigError: the model has no such plan.
    """
    build_plan = getattr(model, method, None)
    plan = None if build_plan is None else build_plan()
    if plan is None or (names and set(plan) != set(names)):
        needed = f" with {', '.join(names)}" if names else ""
        raise ConfigError(
            f"{key} was asked, but {type(model).__name__} has no {method}(){needed}, so it is not known how to cut it",
            hint=f"define {method}(){needed} on the model (docs/parallel.md), or leave {key} out",
        )
    return plan


def require_default_loss(model: nn.Module, *, key: str) -> None:
    """Checks that a model leaves its loss to the default one.

    Raises:
        ConfigError: it brings its own, which needs the outputs of whole models and sequences.
    """
    if hasattr(model, "training_loss") or hasattr(model, "evaluation_sums"):
        raise ConfigError(
            f"{key} was asked, but {type(model).__name__} brings its own loss, which may need the whole model or whole "
            "sequences",
            hint=f"let the model give scores and the default loss compare them, or leave {key} at 1",
        )


def _refuse_shared_state(model: nn.Module) -> None:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ConfigError(
                f"parallel.pp was asked, but {first} and {name} are one weight, which two stages would need",
                hint="give each its own: model.tied=false for the shipped GPT",
            )
    refuse_saved_buffers(model)


def refuse_saved_buffers(model: nn.Module) -> None:
    """Checks that a model or a stage of it keeps nothing but parameters, whatever its `state_dict` gives.

    Args:
        model: before or after training, which may have made buffers.

    Raises:
        ConfigError: it has a buffer that is saved; the stages do not share it.
    """
    saved = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    if saved:
        raise ConfigError(
            f"parallel.pp was asked, but {type(model).__name__} keeps statistics ({min(saved)}) that stages do not "
            "share",
            hint="use norms without running statistics, or leave parallel.pp at 1",
        )
