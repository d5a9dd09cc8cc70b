"""AdamW: which parameters decay, the learning rate over the run, and how gradients are applied.

The division by the number of items, the clipping and AdamW are one pass where torch has it. The optimizer stays torch's
own and its state is where it always is, so checkpoints see nothing of this. Once the state exists, the fused kernel is
called directly with the gradients' divisor: that saves a pass over all gradients, and what `Optimizer.step` spends on
finding its tensors again (0.06 ms a step, measured with two parameter groups; also with its public `grad_scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from slurm_train.checkpoint.state import local_part
from slurm_train.config.schema import OptimSection
from slurm_train.errors import ConfigError

_FUSED_TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
_WARMUP_SHARE = 0.05


def build_optimizer(model: nn.Module, *, optim: OptimSection) -> Optimizer:
    """Returns AdamW with decay on matrices only, fused where the parameters allow it.

    Raises:
        ConfigError: the model has nothing to train.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient", hint="check model._target_"
        )
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, optim.weight_decay), (others, 0.0))
        if members
    ]
    can_fuse = all(p.dtype in _FUSED_TYPES and p.device.type in ("cpu", "cuda") for p in parameters)
    return AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=can_fuse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up, then a cosine or nothing: a pure function of samples, so there is nothing to save or resume."""

    peak_lr: float
    warmup_samples: int
    """Samples over which the rate rises from 0 to the peak."""
    total_samples: int
    """Samples of the whole run; the cosine ends there."""
    min_lr_ratio: float
    """Last rate of the cosine as a fraction of the peak."""
    shape: Literal["cosine", "constant"]

    def lr_at(self, samples: int) -> float:
        """Returns the learning rate of the step that brings the run to so many samples.

        Args:
            samples: global samples consumed, the step's own included.
        """
        if samples < self.warmup_samples:
            return self.peak_lr * samples / self.warmup_samples
        if self.shape == "constant":
            return self.peak_lr
        done = (samples - self.warmup_samples) / max(self.total_samples - self.warmup_samples, 1)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
        return self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine)


def build_schedule(optim: OptimSection, *, peak_lr: float, total_samples: int) -> Schedule:
    """Returns the schedule of a run.

    Args:
        optim: its shape.
        peak_lr: `optim.lr` after the retune of the batch plan.
        total_samples: samples of all steps.
    """
    warmup = optim.warmup_samples if optim.warmup_samples is not None else round(total_samples * _WARMUP_SHARE)
    return Schedule(
        peak_lr=peak_lr,
        warmup_samples=warmup,
        total_samples=total_samples,
        min_lr_ratio=optim.min_lr_ratio,
        shape=optim.schedule,
    )


class Update:
    """Divides the gradients by a number and lets the optimizer use them.

    Args:
        optimizer: any; the kernel is called directly where `can_call_kernel`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        """All parameters, group after group: the order of the gradients."""
        self._optimizer = optimizer
        self._calls_kernel = can_call_kernel(optimizer)
        self._known_state: Any = None
        # Per group: settings, parameters, averages, squares, step counts.
        self._groups: list[tuple[dict[str, Any], list[list[Tensor]]]] = []
        self._steps: list[Tensor] = []

    def apply(self, gradients: list[Tensor], divisor: Tensor, *, skip: Tensor | None = None) -> None:
        """Takes one step, or none.

        Args:
            gradients: of `parameters`, this rank's parts of them; they may be scaled in place. Shorter if some
                parameters have none.
            divisor: a float32 scalar on their device.
            skip: a float32 scalar there; where it is 1, parameters and state stay as they are, moments and step
                count too. The kernel masks on the device; `Optimizer.step` waits for the value.
        """
        if not (self._calls_kernel and len(gradients) == len(self.parameters) and self._find_state()):
            if skip is not None and skip.item():
                return
            torch._foreach_div_(gradients, divisor)
            self._optimizer.step()
            return
        with torch.no_grad():
            torch._foreach_add_(self._steps, 1 if skip is None else 1 - skip)
            start = 0
            for settings, (params, averages, squares, steps) in self._groups:
                end = start + len(params)
                beta1, beta2 = settings["betas"]
                torch._fused_adamw_(
                    params,
                    gradients[start:end],
                    averages,
                    squares,
                    [],
                    steps,
                    lr=settings["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=settings["weight_decay"],
                    eps=settings["eps"],
                    amsgrad=False,
                    maximize=False,
                    grad_scale=divisor,
                    found_inf=skip,
                )
                start = end

    def _find_state(self) -> bool:
        """Looks the optimizer's tensors up, again after a load has replaced them; False before its first step."""
        state = self._optimizer.state
        if state is self._known_state:
            return True
        if len(state) < len(self.parameters):
            return False
        self._groups = [
            (
                group,
                [
                    [local_part(param) for param in group["params"]],
                    *([local_part(state[param][name]) for param in group["params"]] for name in _STATE),
                ],
            )
            for group in self._optimizer.param_groups
        ]
        self._steps = [step for _, tensors in self._groups for step in tensors[-1]]
        self._known_state = state
        return True


_STATE = ("exp_avg", "exp_avg_sq", "step")
_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def can_call_kernel(optimizer: Optimizer) -> bool:
    """Returns whether it is a plain AdamW with `fused=True`, without hooks, of parameters of one type on one device."""
    groups = optimizer.param_groups
    kinds = {(param.dtype, param.device) for group in groups for param in group["params"]}
    plain = all(group.get("fused") and not any(group[flag] for flag in _FLAGS) for group in groups)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) is AdamW and plain and len(kinds) == 1 and not hooked and hasattr(torch, "_fused_adamw_")


def begin_state(optimizer: Optimizer) -> None:
    """Makes the state of a fused AdamW as its first step would, so that `Update` calls the kernel from the start.

    AdamW's own first step asks for parameters that are cut alike; here some are cut and others whole.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=local_part(param).device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
