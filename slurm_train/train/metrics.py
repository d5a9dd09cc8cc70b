"""Figures beside a step: what a GPU says of itself, operations of a model and of a device, measures in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slurm_train.plan.cards import PEAK_FLOPS

_READ_GPU_EVERY_S = 2.0


class GpuReader:
    """Reads memory, power, temperature and clock of one GPU for the log, without waiting for its work.

    All but the memory come from NVML (extra: gpu); where it is missing, or does not support a value, the value is left
    out. NVML takes up to a millisecond, so it is asked every two seconds only.

    Args:
        device: a GPU.
        clock: seconds that never run backwards.
    """

    def __init__(self, device: torch.device, *, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._due_s = 0.0
        self._nvml: Any = None
        # NVML's errors get their classes at run time; none of them may end a training.
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml

    def read(self) -> dict[str, float]:
        """Returns the present values, none within two seconds of the last call that returned some.

        The keys are `gpu_memory_gb` (the most that torch has allocated so far), `gpu_power_w`, `gpu_temperature_c` and
        `gpu_sm_clock_mhz`.
        """
        now = self._clock()
        if now < self._due_s:
            return {}
        self._due_s = now + _READ_GPU_EVERY_S
        readings = {"gpu_memory_gb": torch.cuda.max_memory_allocated(self._device) / 1e9}
        nvml = self._nvml
        if nvml is None:
            return readings
        questions: dict[str, Callable[[], float]] = {
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
        }
        for name, ask in questions.items():
            with contextlib.suppress(Exception):
                readings[name] = float(ask())
        return readings


def peak_flops(device: torch.device) -> float | None:
    """Returns the dense bfloat16 peak of one device per second, None where it is not known (a CPU, another GPU)."""
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device)
    for name, peak in PEAK_FLOPS.items():
        if all(word in device_name for word in name.split()):
            return peak
    return None


def flops_per_token(model: nn.Module, *, positions: int = 0) -> tuple[float, float]:
    """Returns the floating-point operations per token of a forward and a backward pass, counted in two ways.

    The first number is six per weight of a matrix product. A frozen weight has no gradient of its own and counts four,
    one before all that is trained (in the order of the parameters) no backward pass and two. Attention's own products
    do not count, nor does an embedding that is only looked up; a tied embedding counts, since the output layer
    multiplies by it. The second number is 6 N + 12 L T C: N are all parameters but embeddings that are only looked up,
    as torchtitan and nanochat count them, the other term is attention's products in L layers of width C over T
    positions. It is 0 where the model does not define `attention_width`, which is L x C.

    Args:
        model: the whole model.
        positions: T, positions of a sequence; 0 where it is not known.
    """
    # `module.weight` of a parametrized layer would compute it, and a spectral norm counts that as a pass.
    looked_up = {id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = {id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, nn.Linear)}
    operations = 0.0
    num_parameters = 0
    is_trained_before = False
    for parameter in model.parameters():
        is_trained_before = is_trained_before or parameter.requires_grad
        is_looked_up = id(parameter) in looked_up
        if is_looked_up and id(parameter) not in multiplied:
            continue
        num_parameters += parameter.numel()
        if parameter.dim() < 2:
            continue
        # A tied embedding is multiplied in the output layer, behind all others.
        per_frozen_weight = 4 if is_trained_before or is_looked_up else 2
        operations += parameter.numel() * (6 if parameter.requires_grad else per_frozen_weight)
    attention_width: Any = getattr(model, "attention_width", None)
    attention: int = 0 if attention_width is None else positions * attention_width()
    as_in_papers = 6.0 * num_parameters + 12.0 * attention if attention else 0.0
    return operations, as_in_papers


def format_measures(measures: dict[str, float]) -> str:
    """Returns measures for people, e.g. "eval_loss 1.2345, eval_accuracy 0.9832"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in measures.items())
