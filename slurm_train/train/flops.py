"""How much arithmetic a step is, and how much the devices could do: the two halves of MFU."""

from __future__ import annotations

import torch
from torch import nn

# Dense bfloat16 peaks per second, from the vendors' data sheets (SXM forms).
_PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


def peak_flops(device: torch.device) -> float | None:
    """Returns the dense bfloat16 peak of one device per second, None where it is not known (a CPU, another GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def flops_per_token(model: nn.Module) -> float:
    """Returns the floating-point operations of forward and backward per token: six per weight of a matrix product.

    Attention's own products are left out, and so is an embedding that is only looked up; a tied one counts, because
    the output layer multiplies by it.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    weights = [p for p in model.parameters() if p.dim() >= 2 and (id(p) not in looked_up or id(p) in multiplied)]
    return 6.0 * sum(weight.numel() for weight in weights)
