"""What is said of a model that raises: how it was called, and the cause where torch's own words do not name it."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import inputs_in, kind_of, labels_in
from slurm_train.models.loss import Loss
from slurm_train.models.mean_loss import MeanLoss
from slurm_train.models.model_call import ModelCall
from slurm_train.models.objective import Objective
from slurm_train.models.own_loss import IGNORED
from slurm_train.models.score_loss import ScoreLoss

_NO_SCORE = re.compile(r"Target -?\d+ is out of bounds")
_ONE_VALUE = "Expected more than 1 value per channel when training"
_OTHER_TYPE = re.compile(r"(?:must have the same dtype, but got|Input type \()\s*(\w[\w ]*?)(?: and |\))")
_NAMES_OF_TYPES = {
    torch.float64: ("double",),
    torch.uint8: ("byte", "unsigned char"),
    torch.int64: ("long", "long int"),
    torch.int32: ("int",),
}
"""How torch's messages call types, in lower case."""


def call_in(err: BaseException) -> str:
    """Returns how a model was called that has raised an exception, in one line; "" where no call of one is in it."""
    found = _called_in(err, ModelCall.outputs_of)
    if found is None:
        return ""
    called, batch = found
    name = type(called.model).__name__
    if isinstance(batch, dict):
        return f"{name} was called with {', '.join(f'{key}: {_typed(item)}' for key, item in batch.items())}"
    return (
        f"{name} was called with the inputs of a batch (inputs, targets): {_typed(batch[0])}; a model that takes the "
        "whole batch has training_loss(batch), see docs/own-model.md"
    )


def cause_in_batch(err: BaseException) -> ConfigError | None:
    """Returns the error for what torch says of labels, types or a batch norm without naming the cause; else None.

    Args:
        err: what was raised while a batch was scored.
    """
    found = _called_in(err, Objective.forward, Objective.evaluation_sums, ScoreLoss.check_scores, MeanLoss.check_scores)
    if found is None:
        return None
    called, batch = found
    name = type(called.model).__name__
    words = str(err)
    labels = labels_in(batch)
    if _NO_SCORE.search(words) and isinstance(labels, Tensor):
        counted = labels[labels != IGNORED]
        return ConfigError(
            f"labels of a batch are {counted.min()} to {counted.max()}, and {name} has no score for one: {words}",
            hint="labels begin at 0, and the model gives a score for each; -100 marks those that do not count",
        )
    inputs = inputs_in(batch)
    if not isinstance(inputs, Tensor):
        return None
    if _ONE_VALUE in words and len(inputs) == 1:
        return ConfigError(
            f"a batch norm of {name} got a micro-batch of one sample, of which it has no variance: {words}",
            hint="give each micro-batch two samples or more: batch.local_size=2, a larger batch.global_size, fewer "
            "ranks or a smaller batch.accumulation",
        )
    is_of_type = _OTHER_TYPE.search(words)
    types = {parameter.dtype for parameter in called.model.parameters()}
    if is_of_type and inputs.dtype not in types and is_of_type[1].lower() in _NAMES_OF_TYPES.get(inputs.dtype, ()):
        scaled = " / 255" if inputs.dtype == torch.uint8 else ""
        return ConfigError(
            f"the inputs are {_typed(inputs)}, and {name} computes with {_named(types)}: {words}",
            hint=f"return x.float(){scaled} from __getitem__ (numpy makes float64 of Python's floats)",
        )
    return None


def _called_in(err: BaseException, *functions: Callable[..., Any]) -> tuple[Objective | Loss | ModelCall, Any] | None:
    """Returns what has the model, and the batch of the last call of one of its functions in a traceback."""
    codes = [inspect.unwrap(function).__code__ for function in functions]
    frames = [frame for frame, _ in traceback.walk_tb(err.__traceback__) if frame.f_code in codes]
    if not frames:
        return None
    values = frames[-1].f_locals
    batch = values.get("batch", values.get("samples"))
    return None if batch is None else (values["self"], batch)


def _named(types: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))


def _typed(item: object) -> str:
    """Returns e.g. "float32 (32, 10)"."""
    if not isinstance(item, Tensor):
        return kind_of(item)
    return f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
