"""The model of a run, from its configuration: with or without memory for its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter as _Uninitialized

from slurm_train.config.schema import RunConfig
from slurm_train.config.target import TARGET, callable_target, instantiate
from slurm_train.errors import ConfigError
from slurm_train.models.first_weights import (
    NeedsMemoryError,
    build_in_host_memory,
    build_without_memory,
    defines_init_weights,
    fill,
    first_values,
    lower_parameters,
    without_memory,
)
from slurm_train.rundir.paths import RunDirectory, list_checkpoints


def build_model(
    config: RunConfig, *, note: Callable[[str], None] = lambda _text: None, ranks_on_node: int = 1
) -> nn.Module:
    """Returns the whole model, the same on every rank.

    Where the model's class defines `init_weights(name, part)`, or the weights are files of transformers, the parameters
    have no memory until `fill` gives it to them. Any other model has all its weights in host memory at once.

    Args:
        config: the run's.
        note: gets the reason in that case.
        ranks_on_node: how many ranks of this node build it at the same time.

    Raises:
        ConfigError: no model is configured, its target does not give an nn.Module, or there is not enough memory.
    """
    settings = _model_settings(config)
    target = callable_target(settings)
    build = partial(_instantiate_model, settings, config.seed)
    reason = "its class has no init_weights(self, name, part)"
    if defines_init_weights(target):
        try:
            return _lowered(build_without_memory(build, seed=config.seed), config)
        except NeedsMemoryError as err:
            reason = str(err)
    note(f"each rank builds all of {settings[TARGET]} in host memory: {reason}")
    model = build_in_host_memory(build, name=settings[TARGET], ranks_on_node=ranks_on_node)
    return _lowered(model, config)


def build_names_and_shapes(config: RunConfig) -> nn.Module:
    """Returns the model for its names and shapes; its parameters have no memory unless its constructor needs values.

    Raises:
        ConfigError: as `build_model`.
    """
    settings = _model_settings(config)
    try:
        with without_memory():
            return _lowered(_instantiate_model(settings, config.seed), config)
    except ConfigError:
        raise
    except Exception:  # a constructor that looks at values fails in many ways
        return build_model(config)


def _model_settings(config: RunConfig) -> dict[str, Any]:
    if not config.model:
        raise ConfigError("no model is configured", hint="choose one: model=gpt, or model._target_=my_package.MyModel")
    return config.model


def _instantiate_model(settings: Mapping[str, Any], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = instantiate(settings)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.{TARGET}={settings[TARGET]} gave a {type(model).__name__}, not a torch.nn.Module",
            hint="name a class that derives from torch.nn.Module",
        )
    without_shape = [name for name, parameter in model.named_parameters() if isinstance(parameter, _Uninitialized)]
    if without_shape:
        raise ConfigError(
            f"{len(without_shape)} parameters of {settings[TARGET]} get their shapes in the first forward only, among "
            f"them {without_shape[0]}: the optimizer, the exchange between ranks and a resume need them before",
            hint="give the sizes, e.g. nn.Linear(64, 32) in place of nn.LazyLinear(32); or call the model once on a "
            "sample in a function that returns it, and name that function as _target_",
        )
    _give_elements_memory(model)
    return model


def _give_elements_memory(model: nn.Module) -> None:
    """Copies buffers that `expand` has made: their elements share memory, and cannot be received nor loaded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and 0 in buffer.stride():
                module._buffers[name] = buffer.contiguous()


def _lowered(model: nn.Module, config: RunConfig) -> nn.Module:
    if config.train.param_dtype == "bfloat16":
        lower_parameters(model)
    return model


def build_filled_model(config: RunConfig, *, device: torch.device) -> nn.Module:
    """Returns the whole model with its first weights on a device.

    Raises:
        ConfigError: as `build_model`.
    """
    model = build_model(config)
    fill([model], first_values(model), device=device)
    return model


def load_start_weights(
    model: nn.Module, config: RunConfig, *, run: RunDirectory, buffers: Mapping[str, Tensor]
) -> None:
    """Lets a model begin with the weights of `train.init_from`, if it is set and no checkpoint has later ones.

    Args:
        model: see `load_pretrained`.
        config: the run's.
        run: where its checkpoints are.
        buffers: those of the model that are saved, by full name.

    Raises:
        ConfigError: there are none, or they are another model's.
    """
    path = config.train.init_from
    if path is not None and not list_checkpoints(run.checkpoints):
        from slurm_train.models.pretrained import load_pretrained

        load_pretrained(model, Path(path).expanduser(), settings=config.model or {}, buffers=buffers)
