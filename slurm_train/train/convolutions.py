"""Makes convolutions fast on a GPU: cuDNN's fastest algorithm for each shape, and images with channels last.

torch computes a convolution, and the layers behind it, in the memory format of its input. So only the images are
converted, on their way to the model; weights, gradients, the optimizer's state and checkpoints keep their format, which
FSDP2 requires (it takes contiguous parameters only). Channels last is used with 16-bit types only, in which tensor
cores read it; in float32 it may be slower. Some models fail with it (`x.view(len(x), -1)` behind a convolution raises
an error), so it is tried before the first step.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from slurm_train.data.source import Batch, map_tensors
from slurm_train.models.batch_parts import has_lists
from slurm_train.models.objective import Objective
from slurm_train.train.context import Rank
from slurm_train.train.device_copies import in_format
from slurm_train.train.inputs import ModelInputs
from slurm_train.train.preserve import preserved

_NEEDS_CONTIGUOUS = ("view size is not compatible", "expected contiguous", "must be contiguous", "to be contiguous")


def tune_convolutions(rank: Rank, objective: Objective, batch: Batch, *, inputs: ModelInputs) -> str | None:
    """Chooses how the convolutions of a model are computed on a GPU; returns a note for the user, if there is one.

    Args:
        rank: this rank.
        objective: the loss around the model.
        batch: some samples, on the device.
        inputs: gets the images' format.
    """
    if rank.config.train.deterministic or rank.device.type == "cpu" or not has_convolutions(objective.model):
        return None
    # For each new shape cuDNN tries its algorithms anew, and AMD's library takes minutes.
    if torch.version.hip is None and not rank.config.batch.by_length and not has_lists(batch):
        torch.backends.cudnn.benchmark = True
    # Layouts that cut the model have not been tried with this format.
    if not rank.layout.is_replicated or rank.autocast is None or not has_images(batch):
        return None
    obstacle = obstacle_to_channels_last(objective, batch, autocast=rank.autocast)
    if obstacle is None:
        inputs.image_format = torch.channels_last
        # Weights of one channel or pixel are the same in both formats, and their gradients get the images' strides. DDP
        # copies them as other gradients, but warns.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return None
    return (
        f"images stay as they are: {type(objective.model).__name__} cannot be computed with channels_last, which is "
        f"faster ({obstacle}); write reshape in place of view"
    )


def has_convolutions(model: nn.Module) -> bool:
    """Returns whether a model has convolutions over images."""
    return any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in model.modules())


def has_images(batch: Batch) -> bool:
    """Returns whether a batch has tensors that may be images: floating-point, with four dimensions."""
    shapes: list[bool] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tensor.dim() == 4 and tensor.is_floating_point())
        return tensor

    map_tensors(note, batch)
    return not has_lists(batch) and any(shapes)


def obstacle_to_channels_last(objective: Objective, batch: Batch, *, autocast: torch.dtype | None) -> str | None:
    """Returns why a model cannot be trained with images in channels_last, None if it can; leaves it as it was.

    Args:
        objective: the loss around the model.
        batch: some samples, on the model's device.
        autocast: lower precision of the forward pass, None for none.
    """
    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    images = in_format(batch, torch.channels_last)
    try:
        # Not compiled, since the graphs would serve this trial only. `backward` would make DDP exchange gradients.
        with preserved(objective.model), torch.compiler.set_stance("force_eager"):
            with torch.autocast(parameters[0].device.type, dtype=autocast, enabled=autocast is not None):
                loss, _ = objective(images)
            torch.autograd.grad(loss, parameters, allow_unused=True)
    except Exception as err:
        text = str(err).strip().partition("\n")[0]
        if not any(words in text for words in _NEEDS_CONTIGUOUS):
            # If the model itself is wrong, the first step raises the same error with its traceback.
            return f"{type(err).__name__} in a trial"
        return text[:120]
    return None
