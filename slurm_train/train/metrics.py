"""Records the steps on rank 0: lines of metrics.jsonl, the display, and the account of what the time was spent on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slurm_train.data.source import SampleSource
from slurm_train.metrics import MetricsWriter
from slurm_train.rundir.heartbeat import AwakeClock
from slurm_train.rundir.timing import Spent
from slurm_train.train.context import Parts, Rank
from slurm_train.train.ddp import sent_bytes
from slurm_train.train.step import StepResult

# A killed attempt loses the times since its last account.
_ACCOUNT_EVERY_S = 2.0
_READ_GPU_EVERY_S = 2.0
PEAK_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H20": 148e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "MI355X": 2500e12,
    "MI350X": 2300e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI300A": 980e12,
    "MI250X": 191.5e12,
    "MI250": 181e12,
    "MI210": 181e12,
}
"""Dense bfloat16 peaks per second, from the vendors' data sheets, where half of what is given with sparsity counts. The
first name of which all words are in the device's own is taken. ROCm shows a MI250 as two devices, each of half of it.
"""


class Recorder:
    """Records results of steps; time spent otherwise (evaluation, saving) does not count as step time. Rank 0 only.

    A window is the steps since the last line of metrics.jsonl; rates and times in a line are those of its window.

    Wide because it holds the sums of a window, which are reset together.

    Args:
        rank: this rank.
        source: the training samples.
        spent: what this attempt's time was spent on so far; changed here.
        flops_per_token: floating-point operations, see `flops_per_token`; used where samples are text.
        max_steps: steps of the whole run, written into each line; None where the plan has them.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        source: SampleSource,
        spent: Spent,
        flops_per_token: tuple[float, float],
        max_steps: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._display = rank.display
        self.spent = spent
        self._length = {} if max_steps is None else {"max_steps": max_steps}
        self._writer = MetricsWriter(rank.run.metrics)
        self._account = rank.run.account(rank.attempt)
        self._clock = rank.clock if clock is None else clock
        self._unit = "tokens" if hasattr(source, "bytes_per_target") else "samples"
        self._num_samples = len(source)
        self._gpu = GpuReader(rank.device, clock=time.monotonic) if rank.device.type == "cuda" else None
        self._peak: float | None = None
        """Peak of all ranks in operations per second; None where it is not known, or samples are no text."""
        peak = peak_flops(rank.device)
        if peak is not None and self._unit == "tokens":
            self._peak = peak * rank.place.world_size
        self._flops, self._papers_flops = flops_per_token
        self._attempt = rank.attempt
        self._world_size = rank.place.world_size
        self._shown: tuple[float, int] | None = None
        self._newest: StepResult | None = None
        self._account_due_s = 0.0
        self.restart_window()

    def count(self, result: StepResult) -> None:
        """Counts a step; shows it when the display is due."""
        self._window_steps += 1
        self._window_items += self._items_of(result)
        self._newest = result
        now = self._clock()
        if self._shown is None:  # the first step's time is start-up; a speed is known from the second on
            self._shown = (now, result.facts.step)
            self._start_up_s = now - self._window_start
            self._start_up_items = self._window_items
        elif now >= self._display.due_s:
            self._show(result, now, *self._shown)

    def write(self, result: StepResult, *, items: int, data_wait_s: float, digest: int | None) -> None:
        """Writes the line of a step and opens the next window.

        Args:
            result: the step.
            items: items of the whole run up to this step.
            data_wait_s: seconds that this window's steps waited for data on this rank.
            digest: order-free digest of the samples of the step, None where it is not asked for.
        """
        now = self._clock()
        elapsed_s = now - self._window_start
        steps = max(self._window_steps, 1)
        num_items = self._window_items
        if self._start_up_s and steps > 1:
            elapsed_s -= self._start_up_s
            steps -= 1
            num_items -= self._start_up_items
        elapsed_s = max(elapsed_s, 1e-9)
        rate = num_items / elapsed_s
        line = {
            **self._head(result.facts.step, result.facts.samples),
            "tokens": items if self._unit == "tokens" else None,
            # JSON has no NaN, and the loss of a step that was not applied does not count.
            "loss": result.loss if result.applied else None,
            "lr": result.facts.lr,
            "grad_norm": result.grad_norm if result.applied else None,
            "step_time_s": elapsed_s / steps,
            "data_time_s": data_wait_s / max(self._window_steps, 1),
            f"{self._unit}_per_s": rate,
            "mfu": None if self._peak is None else rate * self._flops / self._peak,
            "mfu_6n_12ltc": rate * self._papers_flops / self._peak if self._peak and self._papers_flops else None,
            **({} if self._gpu is None else self._gpu.read()),
            **self._tail(),
        }
        self._writer.write(line if digest is None else {**line, "samples_digest": digest})
        self.book(data_wait_s=data_wait_s)
        if now >= self._account_due_s:
            self._account_due_s = now + _ACCOUNT_EVERY_S
            self._keep_account()

    def write_evaluation(self, step: int, samples: int, measures: Mapping[str, float]) -> None:
        """Writes the line of an evaluation."""
        self._writer.write({**self._head(step, samples), **measures, **self._tail()})

    def book(self, *, data_wait_s: float) -> None:
        """Adds the steps of the current window to the account and opens the next window.

        Args:
            data_wait_s: seconds that these steps waited for data on this rank.
        """
        if self._window_steps:
            seconds = self._clock() - self._window_start
            self.spent.add_steps(self._window_steps, seconds=seconds, data_wait_s=data_wait_s)
        self.restart_window()

    def restart_window(self) -> None:
        """Begins to measure step times anew."""
        self._window_start = self._clock()
        self._window_steps = 0
        self._window_items = 0
        self._start_up_s = 0.0
        """Time of the attempt's first step, in the window that it is in, and its items."""
        self._start_up_items = 0

    def skip(self, seconds: float, cause: str = "") -> None:
        """Takes time that was spent outside of steps out of the current window and of the display's rate.

        Args:
            seconds: how long it was.
            cause: what it was spent on, e.g. "evaluate_s"; see `rundir.timing`.
        """
        self._window_start += seconds
        self.spent.add(cause, seconds)
        if self._shown is not None:
            self._shown = (self._shown[0] + seconds, self._shown[1])

    def close(self) -> None:
        """Closes the display at the newest step and makes the lines durable."""
        if self._newest is not None and self._shown is not None and self._newest.facts.step > self._shown[1]:
            self._show(self._newest, self._clock(), *self._shown)
        self._display.close()
        self._writer.close()
        self._keep_account()

    def _items_of(self, result: StepResult) -> int:
        """Returns the tokens of a step, or its samples: a loss may count pixels or labels in place of them."""
        return result.num_items if self._unit == "tokens" else result.facts.size

    def _head(self, step: int, samples: int) -> dict[str, Any]:
        return {"step": step, "epoch": samples // self._num_samples, "samples": samples}

    def _tail(self) -> dict[str, Any]:
        return {"attempt": self._attempt, "world_size": self._world_size, "time_unix_s": time.time(), **self._length}

    def _keep_account(self) -> None:
        if isinstance(self._clock, AwakeClock):
            self.spent.suspended_s = self._clock.away_s
        self.spent.write(self._account)

    def _show(self, result: StepResult, now: float, since: float, step_then: int) -> None:
        step = result.facts.step
        step_time_s = max(now - since, 1e-9) / max(step - step_then, 1)
        rate = self._items_of(result) / step_time_s
        self._display.show(step, loss=result.loss, rate=rate, unit=self._unit, step_time_s=step_time_s)
        self._shown = (now, step)


def build_recorder(parts: Parts, spent: Spent, *, first_step: int, max_steps: int) -> Recorder:
    """Returns the recorder of this attempt. Rank 0 only."""
    rank = parts.rank
    spent.first_step = first_step
    rank.display.begin(max_steps=max_steps)
    if rank.layout.is_replicated:
        _write_sent_bytes(rank, parts.model)
    return Recorder(
        rank,
        source=parts.train_data,
        spent=spent,
        flops_per_token=parts.flops_per_token,
        max_steps=None if rank.config.train.max_epochs is None else max_steps,
    )


def _write_sent_bytes(rank: Rank, model: nn.Module) -> None:
    """Records how many bytes of gradients a step sends where ranks hold whole replicas. Rank 0 only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    comm = rank.config.ddp.comm
    facts = {
        "comm": comm,
        "gradient_bytes": sent_bytes(parameters, comm="none"),
        "sent_bytes": sent_bytes(parameters, comm=comm),
    }
    # An error of the file system costs this figure and must not end the run.
    with contextlib.suppress(OSError):
        rank.append_event("exchange", **facts)


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
    multiplies by it. The second number is 6 N + 12 L T C, as in papers and in torchtitan: N are all parameters, the
    other term is attention's products in L layers of width C over T positions. It is 0 where the model does not define
    `attention_width`, which is L x C.

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
        num_parameters += parameter.numel()
        is_trained_before = is_trained_before or parameter.requires_grad
        is_looked_up = id(parameter) in looked_up
        if parameter.dim() < 2 or (is_looked_up and id(parameter) not in multiplied):
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
