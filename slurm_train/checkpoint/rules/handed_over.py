"""What cannot be saved whole: refused where it is handed over, after the first step, and at each save."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slurm_train.checkpoint.rules.watched import Watched
from slurm_train.checkpoint.state import plain_names, require_known_state, require_loadable, require_loadable_states
from slurm_train.checkpoint.tree import encode, plain_number, split_state
from slurm_train.errors import ConfigError
from slurm_train.formatting import shorten

# By name, since importing them takes long. What they hold looks like the whole, and is a part.
_OF_PARTS = ("FullyShardedDataParallel", "ZeroRedundancyOptimizer", "DeepSpeedEngine")


def refuse_wrappers(watched: Watched) -> list[str]:
    """Refuses wrappers whose states are parts under the names of the whole.

    Raises:
        ConfigError: naming one.
    """
    parts = (*watched.model.modules(), *watched.optimizers)
    wrapped = sorted({kind.__name__ for part in parts for kind in type(part).__mro__ if kind.__name__ in _OF_PARTS})
    if wrapped:
        raise ConfigError(
            f"{wrapped[0]} keeps parts of other ranks' state under the names of the whole",
            hint="shard by fully_shard (FSDP2), or write the files yourself in `with run.save(step)`",
        )
    return []


def refuse_stateless(watched: Watched) -> list[str]:
    """Refuses objects of which nothing could be saved.

    Raises:
        ConfigError: naming them.
    """
    stateless = [
        name
        for name, part in watched.objects.items()
        if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None))
    ]
    if stateless:
        raise ConfigError(
            f"{shorten(stateless)} has no state_dict or no load_state_dict, so nothing of it could be saved",
            hint="give its class the two methods; or name the object within it that has them in run.training",
        )
    return []


def refuse_unknown_state(watched: Watched) -> list[str]:
    """Refuses optimizers that keep something which no checkpoint has.

    Raises:
        CheckpointError: naming it.
    """
    for optimizer in watched.optimizers:
        require_known_state(optimizer)
    return []


def refuse_packed_weights(watched: Watched) -> list[str]:
    """Refuses a model whose tensors or extra states no checkpoint can have.

    Raises:
        CheckpointError: naming one.
    """
    require_loadable_states(watched.model)
    return []


def refuse_strangers(watched: Watched) -> list[str]:
    """Refuses optimizers of parameters that would not be saved.

    Raises:
        ConfigError: with their shapes.
    """
    of_model = {id(parameter) for _, parameter in watched.model.named_parameters()}
    strangers = [tuple(parameter.shape) for parameter in _optimized(watched) if id(parameter) not in of_model]
    if strangers:
        raise ConfigError(
            f"the optimizer has {len(strangers)} parameters that are not the model's, of shapes "
            f"{shorten(map(str, strangers))}: they would not be saved",
            hint='hand over all modules: run.training({"model": model, "loss": loss}, optimizer)',
        )
    return []


def refuse_repeated(watched: Watched) -> list[str]:
    """Refuses what would be saved twice under one name.

    Raises:
        ConfigError: naming it.
    """
    plain = plain_names(watched.model)
    holders = Counter(id(parameter) for parameter in _optimized(watched))
    twice = [plain(name) for name, parameter in watched.model.named_parameters() if holders[id(parameter)] > 1]
    if twice:
        raise ConfigError(
            f"several optimizers have {shorten(twice)}, and a checkpoint has one state of each parameter",
            hint="hand over the later one by a name: run.training(model, first, second=second)",
        )
    names = [plain(name) for name, _ in watched.model.named_parameters()]
    if len(set(names)) < len(names):
        raise ConfigError("two parameters of the model have the same name", hint="rename one of the modules")
    return []


def refuse_unloadable(watched: Watched) -> list[str]:
    """Refuses what a save would have now beside tensors, and a resume could not read.

    Raises:
        CheckpointError: naming whose it is.
    """
    for optimizer in watched.optimizers:
        for group in optimizer.param_groups:
            settings = {key: plain_number(value) for key, value in group.items() if key != "params"}
            _require_loadable(settings, f"a group of {type(optimizer).__name__}")
    for name, part in watched.objects.items():
        _require_loadable(split_state(encode(part.state_dict()))[1], f"the state of {name}")
    return []


def _optimized(watched: Watched) -> Iterator[Tensor]:
    for optimizer in watched.optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _require_loadable(values: dict[str, Any], subject: str) -> None:
    data = io.BytesIO()
    torch.save(values, data)
    require_loadable(data, subject)
