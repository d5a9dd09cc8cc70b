"""The optimizer and its groups of parameters, the learning rate over the run, and how gradients are applied.

Any optimizer of torch's kind will do. With AdamW and SGD the division by the number of items, the clipping and the
update are one pass where torch has it: once the state exists, the fused kernel is called directly with the gradients'
divisor. It saves a pass over all gradients, and what `Optimizer.step` spends on finding its tensors again (0.06 ms a
step with two parameter groups; also with its public `grad_scale`), and a GPU decides by itself whether a step is
skipped. The optimizer stays torch's own and its state is where it always is, so checkpoints see nothing of this.
"""

from __future__ import annotations

import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from slurm_train.checkpoint.state import local_part
from slurm_train.config.schema import GroupRule, OptimSection
from slurm_train.config.target import TARGET, accepts_keyword, callable_target, instantiate
from slurm_train.errors import ConfigError

_FUSED_TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
_HALF_TYPES = {torch.bfloat16, torch.float16}
_WARMUP_SHARE = 0.05
_DECAY_SHARE = 0.2
LR_SCALE = "lr_scale"
"""Of a group of parameters: its learning rate as a multiple of the run's; 1 where it is absent."""


def build_optimizer(model: nn.Module, *, optim: OptimSection) -> Optimizer:
    """Returns the optimizer of a model's trainable parameters; fused where it is AdamW or SGD and they allow it.

    Parameters with the same settings are one group. Where no rule says otherwise, matrices decay and vectors do not.

    Raises:
        ConfigError: the model has nothing to train, or the class does not take these parameters or keywords.
    """
    rules = optim.rules()
    groups = dict[str, dict[str, Any]]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            settings = _settings_of(name, parameter, optim=optim, rules=rules)
            group = groups.setdefault(json.dumps(settings, sort_keys=True), {**settings, "params": []})
            group["params"].append(parameter)
    if not groups:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient", hint="check model._target_"
        )
    by_class: dict[str, list[dict[str, Any]]] = {}
    for group in groups.values():
        by_class.setdefault(group.pop(TARGET), []).append(group)
    is_alone = len(by_class) == 1
    parts = [_build(path, members, optim=optim, is_alone=is_alone) for path, members in by_class.items()]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def require_rules_fit(model: nn.Module, *, optim: OptimSection) -> None:
    """Checks that every rule with patterns fits some parameter of a whole model.

    One for another optimizer may fit none: `optim=muon` knows the usual names of embeddings and heads.

    Raises:
        ConfigError: a rule fits none.
    """
    names = [name for name, _ in model.named_parameters()]
    for index, rule in enumerate(optim.rules()):
        if rule.match and rule._target_ is None and not any(rule.fits(name) for name in names):
            raise ConfigError(
                f"optim.groups[{index}].match={rule.match} fits no parameter of {type(model).__name__}",
                hint=f"a pattern is compared with the whole name, e.g. {names[0]}; * matches any text",
            )


def _settings_of(name: str, parameter: Tensor, *, optim: OptimSection, rules: Sequence[GroupRule]) -> dict[str, Any]:
    """Returns the class of a parameter's optimizer, and its keywords in which groups differ."""
    decay = optim.weight_decay if parameter.dim() >= 2 else 0.0
    for rule in rules:
        if rule.fits(name, dims=parameter.dim()):
            scale = rule.lr_scale if rule.lr is None else rule.lr / optim.lr
            return {
                TARGET: rule._target_ or optim._target_,
                "weight_decay": decay if rule.weight_decay is None else rule.weight_decay,
                **({} if scale == 1.0 else {LR_SCALE: scale}),
                **rule.keywords,
            }
    return {TARGET: optim._target_, "weight_decay": decay}


def _build(path: str, groups: list[dict[str, Any]], *, optim: OptimSection, is_alone: bool) -> Optimizer:
    """Returns one class's optimizer of its groups.

    Args:
        path: of the class.
        groups: settings and parameters.
        optim: what the groups have in common.
        is_alone: there is no other class; the kernel is then called here, with what this rank has of parameters,
            unless it is asked for what it is not called with (AMSGrad, for instance).
    """
    target = callable_target({TARGET: path})
    keywords: dict[str, Any] = {"lr": optim.lr, **(optim.keywords if path == optim._target_ else {})}
    # Both, since eps alone is something else to others (Adafactor takes two).
    if accepts_keyword(target, "betas") and accepts_keyword(target, "eps"):
        keywords |= {"betas": tuple(optim.betas), "eps": optim.eps}
    has_decay = accepts_keyword(target, "weight_decay")
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Some are cut and others whole: torch's loops over all at once refuse such a mixture.
    is_mixed = len({hasattr(p, "placements") for p in parameters}) > 1
    # SGD's first buffer is a whole gradient, which zeros make of the second formula only without dampening.
    is_damped = any({**keywords, **group}.get("dampening") for group in groups)
    if target in _KEPT and not is_damped and not keywords.get("foreach"):
        can_fuse = all(p.dtype in _FUSED_TYPES and p.device.type in ("cpu", "cuda") for p in parameters)
        calls_kernel = is_alone and not any({**keywords, **group}.get(flag) for group in groups for flag in _FLAGS)
        if not calls_kernel and any(hasattr(p, "placements") for p in parameters):
            # torch calls it with whole DTensors: it knows how to cut that of AdamW, and no mixture (torch 2.13).
            can_fuse = can_fuse and target is AdamW and not is_mixed
        if target is SGD and any(p.dtype in _HALF_TYPES and p.device.type == "cpu" for p in parameters):
            # torch 2.13 leaves most of such parameters as they are, and its momentum is of memory that it never wrote
            # (pytorch/pytorch#191763).
            can_fuse = False
        keywords = {"fused": can_fuse} | keywords
    if is_mixed and accepts_keyword(target, "foreach") and not keywords.get("fused"):
        keywords = {"foreach": False} | keywords
    for group in groups:
        if not has_decay and not group["weight_decay"]:
            del group["weight_decay"]
        # torch takes any key of a group without a word.
        settings = {name: value for name, value in group.items() if name not in ("params", LR_SCALE)}
        instantiate({TARGET: path, "_partial_": True, "_recursive_": False, **settings})
    try:
        built = instantiate({TARGET: path, "_args_": [groups], "_recursive_": False, **keywords})
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"{path} does not take these parameters or keywords: {err}",
            hint="change the keyword; `optim.groups` can give some parameters to another optimizer, see "
            "conf/optim/muon.yaml",
        ) from err
    if not isinstance(built, Optimizer):
        raise ConfigError(
            f"optim.{TARGET}={path} gave a {type(built).__name__}",
            hint="name a class that derives from torch.optim.Optimizer",
        )
    if any(parameter.default is parameter.empty for parameter in inspect.signature(built.step).parameters.values()):
        raise ConfigError(
            f"{path} computes the loss several times in a step, which this trainer does not",
            hint="use an optimizer whose step needs no closure",
        )
    return built


def settings_of_groups(optimizer: Optimizer) -> set[str]:
    """Returns the keys of an optimizer's groups that the configuration gives; others are state, such as Prodigy's d."""
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    kinds = {kind for part in parts for kind in type(part).__mro__ if issubclass(kind, Optimizer)}
    return {LR_SCALE, *(name for kind in kinds for name in inspect.signature(kind).parameters)}


class CombinedOptimizer(Optimizer):
    """Several optimizers of different parameters as one: its groups and its state are theirs.

    Args:
        parts: the optimizers.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes groups and state that were loaded, and gives the parts theirs."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step of each."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def averages_itself(optimizer: Optimizer) -> bool:
    """Returns whether it has averaged weights besides those that are trained (schedule-free)."""
    return bool(_averaging(optimizer))


def to_training(optimizer: Optimizer) -> None:
    """Lets an optimizer that averages (schedule-free) have the weights that are trained in the model."""
    for part in _averaging(optimizer):
        part.train()


def to_average(optimizer: Optimizer) -> None:
    """Lets an optimizer that averages have the averaged weights in the model, as at the end of a run."""
    for part in _averaging(optimizer):
        part.eval()


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Has the averaged weights in the model meanwhile; those that are trained come back bit for bit."""
    parts = _averaging(optimizer)
    if not parts:
        yield
        return
    parameters = [
        local_part(param.detach()) for part in parts for group in part.param_groups for param in group["params"]
    ]
    trained = [parameter.clone() for parameter in parameters]
    to_average(optimizer)
    try:
        yield
    finally:
        to_training(optimizer)
        for parameter, before in zip(parameters, trained, strict=True):
            parameter.copy_(before)


def _averaging(optimizer: Optimizer) -> list[Any]:
    """Returns those optimizers that have `train()` and `eval()`."""
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    return [part for part in parts if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up, then a shape: a function of samples alone, so there is nothing to save or resume."""

    peak_lr: float
    warmup_samples: int
    """Samples over which the rate rises from 0 to the peak."""
    total_samples: int
    """Samples of the whole run; where the rate falls it has fallen by then."""
    decay_samples: int
    """Samples of the fall at the end of wsd."""
    min_lr_ratio: float
    """The lowest rate after the warm-up, as a fraction of the peak."""
    shape: str | Callable[..., float]
    """The name of one, or a function of the user's own that gives the whole factor."""

    def lr_at(self, samples: int) -> float:
        """Returns the learning rate of the step that brings the run to so many samples.

        Args:
            samples: global samples consumed, the step's own included.
        """
        warmup = self.warmup_samples
        total = self.total_samples
        if callable(self.shape):
            return self.peak_lr * self.shape(samples, warmup_samples=warmup, total_samples=total)
        if samples < warmup:
            return self.peak_lr * samples / warmup
        done = min((samples - warmup) / max(total - warmup, 1), 1.0)
        if self.shape == "inverse_sqrt":
            # Vaswani et al., 2017: with the root of all samples.
            return self.peak_lr * max(math.sqrt(max(warmup, 1) / max(samples, 1)), self.min_lr_ratio)
        left = {
            "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
            "linear": 1.0 - done,
            "constant": 1.0,
            # Warm-up, stable, decay (Hu et al., MiniCPM, 2024).
            "wsd": min(max(total - samples, 0) / max(self.decay_samples, 1), 1.0),
        }[self.shape]
        return self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)


def build_schedule(optim: OptimSection, *, peak_lr: float, total_samples: int) -> Schedule:
    """Returns the schedule of a run.

    Args:
        optim: its shape.
        peak_lr: `optim.lr` after the retune of the batch plan.
        total_samples: samples of all steps.

    Raises:
        ConfigError: a function of the user's own is not there.
    """
    warmup = optim.warmup_samples
    if warmup is None:
        warmup = round(total_samples * _WARMUP_SHARE)
    decay = optim.decay_samples
    if decay is None:
        decay = round(total_samples * _DECAY_SHARE)
    shape = optim.schedule
    return Schedule(
        peak_lr=peak_lr,
        warmup_samples=warmup,
        total_samples=total_samples,
        decay_samples=decay,
        min_lr_ratio=optim.min_lr_ratio,
        shape=shape if isinstance(shape, str) else instantiate({**shape, "_partial_": True}),
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
        self._known: tuple[Any, list[int]] = (None, [])
        self._all = list(range(len(self.parameters)))
        # Per group and type: settings, places of the gradients; parameters, and a list for each name of `_kept_by`.
        self._groups: list[tuple[dict[str, Any], list[int], list[list[Tensor]]]] = []
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
        if not (self._calls_kernel and self._find_state(len(gradients))):
            if skip is not None and skip.item():
                return
            torch._foreach_div_(gradients, divisor)
            self._step()
            return
        with torch.no_grad():
            if self._steps and skip is None:
                torch._foreach_add_(self._steps, 1)
            elif self._steps and skip is not None:
                # By its full name: torch takes a tensor without dimensions for a number, and reads it on the host.
                torch.ops.aten._foreach_add_.Tensor(self._steps, 1 - skip)
            for settings, places, (params, *state) in self._groups:
                parts = [gradients[place] for place in places]
                keywords: dict[str, Any] = {name: settings[name] for name in ("lr", "weight_decay")}
                keywords |= {"maximize": False, "grad_scale": divisor, "found_inf": skip}
                if isinstance(self._optimizer, SGD):
                    keywords |= {name: settings[name] for name in ("momentum", "dampening", "nesterov")}
                    torch._fused_sgd_(params, parts, *(state or [[]]), is_first_step=False, **keywords)
                else:
                    averages, squares, steps = state
                    (beta1, beta2), eps = settings["betas"], settings["eps"]
                    keywords |= {"beta1": beta1, "beta2": beta2, "eps": eps, "amsgrad": False}
                    torch._fused_adamw_(params, parts, averages, squares, [], steps, **keywords)

    def _step(self) -> None:
        with refusing_parts(self._optimizer):
            self._optimizer.step()

    def _find_state(self, num_gradients: int) -> bool:
        """Looks up the tensors of what has gradients, again after a load; False before the first step of any."""
        state = self._optimizer.state
        having = self._all
        if num_gradients < len(having):
            having = [number for number in having if self.parameters[number].grad is not None]
        if state is self._known[0] and having == self._known[1]:
            return True
        place_of = {self.parameters[number]: place for place, number in enumerate(having)}
        groups = []
        for group in self._optimizer.param_groups:
            used = [param for param in group["params"] if param in place_of]
            names = _kept_by(self._optimizer, group)
            if any(name not in state.get(param, ()) for param in used for name in names):
                return False
            by_type: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
            for param in used:
                by_type[param.dtype].append(param)
            for members in by_type.values():
                tensors = [[local_part(param) for param in members]]
                tensors += ([local_part(state[param][name]) for param in members] for name in names)
                groups.append((group, [place_of[param] for param in members], tensors))
        has_steps = isinstance(self._optimizer, AdamW)
        self._steps = [step for _, _, tensors in groups for step in tensors[-1] if has_steps]
        self._groups = groups
        self._known = (state, having)
        return True


@contextmanager
def refusing_parts(optimizer: Optimizer) -> Iterator[None]:
    """Around a step of an optimizer, or what makes its state: says that it cannot update parts of tensors.

    Raises:
        ConfigError: as said.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as err:
        # torch has no error of its own for it.
        if not any(word in str(err) for word in ("placement", "DTensor", "sharding strategy")):
            raise
        parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
        names = " or ".join(type(part).__name__ for part in parts)
        raise ConfigError(
            f"{names} cannot update parameters that are spread over ranks: {str(err).splitlines()[0]}",
            hint="use optim=adamw or sgd with this layout, or whole replicas (leave `parallel` out)",
        ) from err


_KEPT: Mapping[Any, tuple[str, ...]] = {AdamW: ("exp_avg", "exp_avg_sq", "step"), SGD: ("momentum_buffer",)}
_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def _kept_by(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a kernel's optimizer keeps of each parameter of a group."""
    return () if group.get("momentum") == 0 else _KEPT[type(optimizer)]


def can_call_kernel(optimizer: Optimizer) -> bool:
    """Returns whether it is a plain AdamW or SGD with `fused=True`, without hooks, of parameters on one device."""
    groups = optimizer.param_groups
    devices = {param.device for group in groups for param in group["params"]}
    plain = all(group.get("fused") and not any(map(group.get, _FLAGS)) for group in groups)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in _KEPT and plain and len(devices) == 1 and not hooked


def begin_state(optimizer: Optimizer) -> None:
    """Makes the state of what `can_call_kernel` as the first step would, so that `Update` calls it from the start.

    torch's own first step asks for parameters that are cut alike; here some are cut and others whole.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                name: torch.zeros((), dtype=torch.float32, device=local_part(param).device)
                if name == "step"
                else torch.zeros_like(param)
                for name in _kept_by(optimizer, group)
            }
