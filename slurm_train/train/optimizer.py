"""The optimizer and its groups of parameters, the learning rate over the run, and how gradients are applied.

Every optimizer with the interface of torch's can be used. For AdamW and SGD the division by the number of items, the
clipping and the update are one pass where torch has a fused kernel: once the state exists, `Update` calls the kernel
itself, with the divisor of the gradients. That saves a pass over all gradients and the time in which `Optimizer.step`
collects its tensors (0.06 ms a step with two parameter groups), and a GPU can skip a step without the host. The
optimizer and its state stay torch's own, so checkpoints do not depend on it.
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

from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.state import local_part
from slurm_train.config.batch import schedule_samples, total_steps
from slurm_train.config.frozen import config_of_values
from slurm_train.config.schema import GroupRule, OptimSection, nested
from slurm_train.config.target import TARGET, accepts_keyword, callable_target, instantiate
from slurm_train.errors import ConfigError
from slurm_train.train.position import Position

_FUSED_TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
_HALF_TYPES = {torch.bfloat16, torch.float16}
LR_SCALE = "lr_scale"
"""Key in a group of parameters: its learning rate as a multiple of the run's; 1 where it is absent."""


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

    A rule that names another optimizer may fit none: `optim=muon` lists the usual names of embeddings and heads.

    Raises:
        ConfigError: another rule fits no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    for index, rule in enumerate(optim.rules()):
        if rule.match and rule._target_ is None and not any(rule.fits(name) for name in names):
            raise ConfigError(
                f"optim.groups[{index}].match={rule.match} fits no parameter of {type(model).__name__}",
                hint=f"a pattern is compared with the whole name, e.g. {names[0]}; * matches any text",
            )


def _settings_of(name: str, parameter: Tensor, *, optim: OptimSection, rules: Sequence[GroupRule]) -> dict[str, Any]:
    """Returns the settings by which parameters are grouped: class of the optimizer, and keywords for this parameter.

    The first rule that fits counts.
    """
    settings: dict[str, Any] = {
        TARGET: optim._target_,
        "weight_decay": optim.weight_decay if parameter.dim() >= 2 else 0.0,
    }
    for rule in rules:
        if not rule.fits(name, dims=parameter.dim()):
            continue
        if rule._target_:
            settings[TARGET] = rule._target_
        if rule.weight_decay is not None:
            settings["weight_decay"] = rule.weight_decay
        lr_scale = rule.lr_scale if rule.lr is None else rule.lr / optim.lr
        if lr_scale != 1.0:
            settings[LR_SCALE] = lr_scale
        return settings | rule.keywords
    return settings


def _build(path: str, groups: list[dict[str, Any]], *, optim: OptimSection, is_alone: bool) -> Optimizer:
    """Returns the optimizer of one class.

    Args:
        path: dotted path of the class.
        groups: its groups: settings and parameters.
        optim: settings that the groups have in common.
        is_alone: whether no other class is used. `Update` then calls the kernel with this rank's parts of parameters,
            unless a setting is on that it does not pass to the kernel (AMSGrad, for instance).

    Raises:
        ConfigError: the class does not take the parameters or keywords, or is no optimizer for this trainer.
    """
    target = callable_target({TARGET: path})
    keywords: dict[str, Any] = {"lr": optim.lr, **(optim.keywords if path == optim._target_ else {})}
    # Where it takes both, eps means what it means to Adam; Adafactor's eps is a pair.
    if accepts_keyword(target, "betas") and accepts_keyword(target, "eps"):
        keywords |= {"betas": tuple(optim.betas), "eps": optim.eps}
    has_decay = accepts_keyword(target, "weight_decay")
    parameters = [parameter for group in groups for parameter in group["params"]]
    # torch's foreach loops refuse a mixture of DTensors and ordinary parameters.
    is_mixed = len({hasattr(p, "placements") for p in parameters}) > 1
    # SGD sets its first buffer to the gradient; a buffer of zeros (`begin_state`) gives that only without dampening.
    is_damped = any({**keywords, **group}.get("dampening") for group in groups)
    if target in _KEPT and not is_damped and not keywords.get("foreach"):
        can_fuse = all(p.dtype in _FUSED_TYPES and p.device.type in ("cpu", "cuda") for p in parameters)
        calls_kernel = is_alone and not any({**keywords, **group}.get(flag) for group in groups for flag in _FLAGS)
        if not calls_kernel and any(hasattr(p, "placements") for p in parameters):
            # torch then calls the kernel with DTensors: it can for AdamW, and where all parameters are (torch 2.13).
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
        # torch accepts unknown keys in a group, so they are checked as keywords of the class.
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
    """Several optimizers of different parameters as one; it shares its groups and its state with them.

    Args:
        parts: the optimizers.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over groups and state that were loaded, and shares them with the parts."""
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
    """Returns whether an optimizer keeps averaged weights beside those that are trained (schedule-free)."""
    return bool(_averaging(optimizer))


def to_training(optimizer: Optimizer) -> None:
    """Puts the trained weights into the model, where the optimizer also keeps averaged ones (schedule-free)."""
    for part in _averaging(optimizer):
        part.train()


def to_average(optimizer: Optimizer) -> None:
    """Puts the averaged weights into the model, as at the end of a run."""
    for part in _averaging(optimizer):
        part.eval()


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Puts the averaged weights into the model within the context; the trained ones are restored bit for bit."""
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
    """Returns the optimizers that keep averaged weights: those with `train()` and `eval()`."""
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
    """Name of a shape, or a function of the user's own that returns the whole factor."""

    def lr_at(self, samples: int) -> float:
        """Returns the learning rate of the step after which so many samples are consumed.

        Args:
            samples: global samples consumed, the step's own included.
        """
        warmup = self.warmup_samples
        total = self.total_samples
        if callable(self.shape):
            return self.peak_lr * self.shape(samples, warmup_samples=warmup, total_samples=total)
        if samples < warmup:
            return self.peak_lr * samples / warmup
        if self.shape == "inverse_sqrt":
            # Vaswani et al., 2017: the rate falls with the root of all samples.
            return self.peak_lr * max(math.sqrt(max(warmup, 1) / max(samples, 1)), self.min_lr_ratio)
        # From 0 at the end of the warm-up to 1 at the end of the run.
        progress = min((samples - warmup) / max(total - warmup, 1), 1.0)
        # Where the rate is between its peak (1) and its lowest value (0).
        height = {
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "linear": 1.0 - progress,
            "constant": 1.0,
            # Warm-up, stable, decay (Hu et al., MiniCPM, 2024).
            "wsd": min(max(total - samples, 0) / max(self.decay_samples, 1), 1.0),
        }[self.shape]
        return self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * height)


def build_schedule(optim: OptimSection, *, peak_lr: float, total_samples: int) -> Schedule:
    """Returns the schedule of a run.

    Args:
        optim: shape, warm-up and decay.
        peak_lr: `optim.lr`, adapted to the global batch where `optim.lr_retune` says so.
        total_samples: samples of all steps.

    Raises:
        ConfigError: a function of the user's own cannot be found.
    """
    warmup, decay = schedule_samples(optim, total_samples=total_samples)
    shape = optim.schedule
    return Schedule(
        peak_lr=peak_lr,
        warmup_samples=warmup,
        total_samples=total_samples,
        decay_samples=decay,
        min_lr_ratio=optim.min_lr_ratio,
        shape=shape if isinstance(shape, str) else instantiate({**shape, "_partial_": True}),
    )


def note_on_rate(manifest: Manifest, schedule: Schedule, *, next_samples: int) -> str | None:
    """Returns what accepted changes do to the learning rate of the next step; None where it is as planned before.

    Args:
        manifest: of the checkpoint that is resumed, with the settings that it was trained with.
        schedule: from now on.
        next_samples: samples consumed after the next step.
    """
    settings = manifest.extra.get("settings")
    lr = manifest.extra.get("lr")
    if not settings or not lr:
        return None
    try:
        config = config_of_values(nested(settings))
    except ConfigError:
        # Of a version that knew other settings; the run goes on without the note.
        return None
    position = Position.of(manifest)
    global_size = int(manifest.batch_plan["global_size"])
    max_steps = total_steps(
        config,
        num_samples=int(manifest.extra.get("num_samples", 0)),
        global_size=global_size,
        since=position.batch_since,
    )
    total_samples = position.samples_at(max_steps, global_size=global_size, growth=config.batch.growth)
    before = build_schedule(config.optim, peak_lr=float(lr["peak"]), total_samples=total_samples)
    planned, rate = (one.lr_at(next_samples) for one in (before, schedule))
    if math.isclose(planned, rate, rel_tol=1e-6):
        return None
    return (
        f"the learning rate was {before.lr_at(manifest.samples):.3g} at step {manifest.step} and is {rate:.3g} at the "
        f"next one, of a schedule over {schedule.total_samples:,} samples; to go on flat: optim.schedule=constant "
        "optim.warmup_samples=0 optim.lr=LR"
    )


class Update:
    """Divides the gradients by a number, and updates the parameters with them.

    Args:
        optimizer: any; its kernel is called directly where `can_call_kernel`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        """All parameters, group after group: the order of the gradients."""
        self._optimizer = optimizer
        self._calls_kernel = can_call_kernel(optimizer)
        # What `_groups` was made for: the optimizer's state, and the numbers of the parameters with a gradient.
        self._grouped: tuple[Any, list[int]] = (None, [])
        self._all = list(range(len(self.parameters)))
        # Per group and number type: settings; places of its gradients; parameters, and a list per name of `_kept_by`.
        self._groups: list[tuple[dict[str, Any], list[int], list[list[Tensor]]]] = []
        # AdamW's counts of steps, which its kernel reads and does not advance.
        self._steps: list[Tensor] = []

    def apply(self, gradients: list[Tensor], divisor: Tensor, *, skip: Tensor | None = None) -> None:
        """Takes one step, or none.

        Args:
            gradients: this rank's parts of the gradients of `parameters`; may be scaled in place. Parameters without a
                gradient are left out.
            divisor: float32 scalar on their device.
            skip: float32 scalar there; where it is 1, parameters and the optimizer's state do not change. The kernel
                masks the update on the device; for `Optimizer.step` the host waits for the value.
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
                # The overload is named: torch would take a scalar tensor for a number, and read it on the host.
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
        """Collects the tensors for the kernel, anew after a load or where other parameters have gradients.

        Returns:
            False where the optimizer has no state yet of some parameter with a gradient.
        """
        state = self._optimizer.state
        with_gradient = self._all
        if num_gradients < len(with_gradient):
            with_gradient = [number for number in with_gradient if self.parameters[number].grad is not None]
        if state is self._grouped[0] and with_gradient == self._grouped[1]:
            return True
        place_of = {self.parameters[number]: place for place, number in enumerate(with_gradient)}
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
        self._steps = []
        if isinstance(self._optimizer, AdamW):
            for _, _, tensors in groups:
                self._steps += tensors[-1]
        self._groups = groups
        self._grouped = (state, with_gradient)
        return True


@contextmanager
def refusing_parts(optimizer: Optimizer) -> Iterator[None]:
    """Explains errors of an optimizer that cannot update parts of tensors; around its step, or where its state is made.

    Raises:
        ConfigError: in place of torch's error.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as err:
        # torch has no class of its own for these errors.
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
    """Returns the names of the state that AdamW or SGD keeps of each parameter of a group."""
    is_plain_sgd = group.get("momentum") == 0
    return () if is_plain_sgd else _KEPT[type(optimizer)]


def can_call_kernel(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer is torch's AdamW or SGD with `fused=True`, without hooks, on one device."""
    groups = optimizer.param_groups
    devices = {param.device for group in groups for param in group["params"]}
    plain = all(group.get("fused") and not any(map(group.get, _FLAGS)) for group in groups)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in _KEPT and plain and len(devices) == 1 and not hooked


def begin_state(optimizer: Optimizer) -> None:
    """Makes the state as the first step would, so that `Update` calls the kernel from the first step on.

    torch's own first step needs parameters that are all cut alike; here some are cut and others whole.

    Args:
        optimizer: one that `can_call_kernel`.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                name: torch.zeros((), dtype=torch.float32, device=local_part(param).device)
                if name == "step"
                else torch.zeros_like(param)
                for name in _kept_by(optimizer, group)
            }
