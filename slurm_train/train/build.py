"""From a configuration to the parts of a training run: one function each, no part knows the others' builders."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from slurm_train.config.schema import DdpSection, OptimSection, RunConfig, TrainSection
from slurm_train.config.target import TARGET, instantiate
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError
from slurm_train.models.objective import Objective
from slurm_train.rundir.layout import RunDirectory, list_checkpoints
from slurm_train.train.module import TrainingModule

_FUSED_TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def build_model(config: RunConfig, *, device: torch.device) -> nn.Module:
    """Returns the model with its first weights, the same on every rank.

    Raises:
        ConfigError: no model is configured, or its target does not give an nn.Module.
    """
    if not config.model:
        raise ConfigError("no model is configured", hint="choose one: model=gpt, or model._target_=my_package.MyModel")
    torch.manual_seed(config.seed)
    model = instantiate(config.model)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.{TARGET}={config.model[TARGET]} gave a {type(model).__name__}, not a torch.nn.Module",
            hint="name a class that derives from torch.nn.Module",
        )
    return model.to(device)


def load_start_weights(model: nn.Module, config: RunConfig, *, run: RunDirectory) -> None:
    """Gives a model the weights of `train.init_from`, where it says any and no checkpoint has later ones.

    Raises:
        ConfigError: there are none, or they are another model's.
    """
    path = config.train.init_from
    if path is None or list_checkpoints(run.checkpoints):
        return
    from slurm_train.models.pretrained import load_pretrained

    load_pretrained(model, Path(path).expanduser(), settings=config.model or {})


def build_objective(model: nn.Module, *, train: TrainSection) -> Objective:
    """Returns the loss around the model; compiled in place where asked, so parameter names stay."""
    if train.compile:
        model.compile()
    return Objective(model)


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
    betas = (optim.betas[0], optim.betas[1])
    return AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=_can_fuse(parameters))


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    return all(p.dtype in _FUSED_TYPES and p.device.type in ("cpu", "cuda") for p in parameters)


def build_ddp(module: TrainingModule, *, ddp: DdpSection, device: torch.device) -> DistributedDataParallel:
    """Returns the module wrapped for data parallelism. Collective over all ranks.

    Buffers are not broadcast before each forward pass: rank 0's are taken where they matter, at evaluation and save.
    """
    # torch 2.13 renamed the option, and the old name warns.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    no_broadcast: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        **no_broadcast,
        bucket_cap_mb=ddp.bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=ddp.static_graph,
    )


def autocast_dtype(train: TrainSection, *, device: torch.device) -> torch.dtype | None:
    """Returns the type of the forward pass's matrix products, None for the parameters' own."""
    if train.precision == "bfloat16":
        return torch.bfloat16
    if train.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return None


def set_threads(train: TrainSection, *, place: RankPlace) -> None:
    """Gives torch this rank's share of the cores: those it is bound to, or an equal part of an unbound node."""
    if train.threads is not None:
        torch.set_num_threads(train.threads)
        return
    bound, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    torch.set_num_threads(max(1, bound if bound < cores else cores // place.local_world_size))


def set_determinism(train: TrainSection) -> None:
    """Switches deterministic kernels on where asked; before anything touches the GPU."""
    if not train.deterministic:
        return
    # cuBLAS reads it when its first handle is made; without it, deterministic mode raises on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
