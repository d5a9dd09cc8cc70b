"""Measures in sampled steps how long a rank works and how long it waits for other ranks; sent with the heartbeat.

In synchronous training all ranks take the same time for a step; the rank that delays the others is the one that waits
least. DDP has timers of its own. Where a model is cut, ranks wait many times in a step: `WaitTimer` adds these waits
up. No collective is added, and a step that is not sampled costs two comparisons.
"""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from slurm_train.rundir.heartbeat import Heartbeat

# With "auto": seconds between two samples, and the most steps between them.
_AIM_S = 0.25
_MOST_STEPS = 64
# Reading the timers of a GPU makes the host wait for it, so samples are rarer there.
_LEAST_STEPS_ON_DEVICE = 50
_NEVER = 2**30
# Earlier steps are slower: caches and buckets are still being set up.
_FIRST_STEP = 5
_NS = 1e-9


class WaitTimer:
    """Adds up, in one step, for how long this rank waits in exchanges with others; for layouts without DDP.

    On the CPU the host waits: in `Work.wait`, and in `wait_tensor` for functional collectives (tensor parallelism). On
    a GPU the computing stream waits, and these calls only enqueue the wait: a pair of events is recorded around each
    call, and around each wait of the computing stream for an event of another stream, which is how FSDP waits. torch
    has no hook for that, so these functions are replaced for the sampled step and restored after it. Waits inside a
    compiled graph are not measured: they count as the rank's own time, on all ranks alike.

    Args:
        device: where steps run.
        sees_functions: whether `wait_tensor` may be replaced; not where compiled graphs call it, since torch would
            compile them again.
    """

    def __init__(self, device: torch.device, *, sees_functions: bool) -> None:
        self._device = device if device.type == "cuda" else None
        self._sees_functions = sees_functions
        self._replaced: list[tuple[Any, str, Any]] = []
        self._wait_s = 0.0
        self._is_waiting = False
        self._thread = 0
        self._others: set[int | None] = set()
        self._pairs: list[tuple[Any, Any]] = []
        self._step: list[Any] = []

    def start(self) -> None:
        """Begins to measure the waits of a step."""
        self._thread = threading.get_ident()
        # Python lists threads of torch, such as that of a backward pass on a GPU, as dummies.
        python = (thread.ident for thread in threading.enumerate() if not thread.name.startswith("Dummy-"))
        self._others = set(python) - {self._thread}
        self._wait_s = 0.0
        self._pairs = []
        self._replace(dist.Work, "wait")
        if self._sees_functions:
            self._replace(functional, "wait_tensor")
        if self._device is not None:
            self._computing = torch.cuda.current_stream(self._device)
            self._replace(torch.cuda.Stream, "wait_event")
            self._step = [self._event()]

    def stop(self) -> None:
        """Ends the measurement, and restores the replaced functions."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)
        if self._device is not None:
            self._step.append(self._event())

    def read(self) -> tuple[float, float | None]:
        """Returns the seconds of waiting, and the seconds of the step on a GPU (None on the CPU). Waits for a GPU."""
        if self._device is None:
            return self._wait_s, None
        begin, end = self._step
        end.synchronize()
        waits_ms = sum(early.elapsed_time(late) for early, late in self._pairs)
        return waits_ms / 1e3, begin.elapsed_time(end) / 1e3

    def _replace(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            # A wait may call another one, which must not count twice.
            if self._is_waiting or not self._is_of_step():
                return original(*args, **kwargs)
            self._is_waiting = True
            try:
                return self._timed(lambda: original(*args, **kwargs))
            finally:
                self._is_waiting = False

        self._replaced.append((owner, name, original))
        setattr(owner, name, timed)

    def _is_of_step(self) -> bool:
        """Returns whether this thread works on the step; saves in the background have exchanges of their own."""
        thread = threading.get_ident()
        return thread == self._thread if self._device is None else thread not in self._others

    def _timed(self, wait: Callable[[], Any]) -> Any:
        if self._device is None:
            start = time.perf_counter()
            try:
                return wait()
            finally:
                self._wait_s += time.perf_counter() - start
        # The waits of other streams do not delay the step.
        if torch.cuda.current_stream(self._device) != self._computing:
            return wait()
        early = self._event()
        result = wait()
        self._pairs.append((early, self._event()))
        return result

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record(self._computing)
        return event


class PaceProbe:
    """Measures in sampled steps what a rank's step is spent on: its own work, or waiting for other ranks.

    Timers are on in sampled steps only, and the sums are written with the heartbeat. The loop calls `begin` and `end`
    around each step.

    Args:
        ddp: the wrapped module; torch itself measures its first ten passes. None: there is none.
        heartbeat: carries the sums.
        every: steps between samples, the first of which is step 5; "auto": about four samples a second, at least one
            in 64 steps; None: none.
        data_wait_s: gives the seconds that this rank has waited for data so far.
        on_device: whether steps run on a GPU, asynchronously to the host.
        work: this rank's samples of a step as a multiple of the mean. The rank's own time is divided by it: a rank that
            has one sample more than others is not slower for that.
        waits: measures waits where there is no DDP; None for DDP, and where nothing is to be measured.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | None,
        heartbeat: Heartbeat,
        *,
        every: int | Literal["auto"] | None,
        data_wait_s: Callable[[], float],
        on_device: bool,
        work: float = 1.0,
        waits: WaitTimer | None = None,
    ) -> None:
        self.exchange_s = 0.0
        """Seconds of exchanges outside DDP so far, added by whoever makes them: they are waits, too."""
        # torch has no types for its timers.
        self._ddp: Any = ddp
        self._heartbeat = heartbeat
        self._data_wait_s = data_wait_s
        self._every = every
        self._on_device = on_device
        self._work = work
        # The interface is a prototype of torch's (2.6 to 2.13): without it, or unasked, nothing is measured.
        has_timers = waits is not None or hasattr(ddp, "_set_ddp_runtime_logging_sample_rate")
        self._waits = waits
        can_measure = every is not None and has_timers
        self._steps_left = _FIRST_STEP if can_measure else _NEVER
        # Seconds by the clock, of waits for data, of exchanges: at the start of the sampled step, then of the step.
        self._before: tuple[float, ...] = ()
        self._step: tuple[float, ...] | None = None
        self._iteration = -1

    def begin(self) -> None:
        """Starts to measure, if the step is sampled; to be called before each step."""
        self._steps_left -= 1
        if self._steps_left == 0:
            if self._waits is not None:
                self._waits.start()
            else:
                self._ddp._set_ddp_runtime_logging_sample_rate(1)
            self._before = self._counters()

    def end(self) -> None:
        """Reads the timers of a sampled step, once the next step has ended; to be called after each step."""
        if self._steps_left > 0:
            return
        if self._step is None:
            self._step = tuple(late - early for late, early in zip(self._counters(), self._before, strict=True))
            if self._waits is not None:
                self._waits.stop()
            return
        step_s, data_s, exchange_s = self._step
        self._step = None
        if self._waits is not None:
            self._steps_left = self._steps_to_next(step_s)
            wait_s, device_s = self._waits.read()
            own_s = max((step_s if device_s is None else device_s) - wait_s, 0.0)
            self._heartbeat.pace = self._heartbeat.pace.plus(own_s=own_s / self._work, wait_s=wait_s, data_s=data_s)
            return
        self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)
        self._steps_left = self._steps_to_next(step_s)
        facts = self._ddp._get_ddp_logging_data()
        # A pass that torch did not measure leaves the numbers of an earlier one.
        if facts.get("iteration") == self._iteration:
            return
        self._iteration = facts.get("iteration", -1)
        # From the first gradient that is sent to the last that comes back, without the part spent on computing others.
        waited_ns = facts.get("backward_comm_time", 0) - facts.get("backward_compute_comm_overlap_time", 0)
        wait_s = max(waited_ns * _NS, 0.0) + exchange_s
        own_s = max(step_s - wait_s, 0.0)
        if self._on_device:
            # The host runs ahead of the device, so its clock says nothing of one step; the device's timers do.
            computed_ns = facts.get("forward_compute_time", 0) + facts.get("backward_compute_time", 0)
            own_s = computed_ns * _NS + data_s
        self._heartbeat.pace = self._heartbeat.pace.plus(own_s=own_s / self._work, wait_s=wait_s, data_s=data_s)

    def leave_out(self) -> None:
        """Drops the sample of the present step, which contained something else, and samples the next step instead.

        For programs with their own loop, whose saves happen between two reports.
        """
        if self._steps_left > 0 or self._step is not None:
            return
        self._steps_left = 1
        if self._waits is not None:
            self._waits.stop()

    def end_for_good(self) -> None:
        """Takes no more samples."""
        self._steps_left = _NEVER

    def _counters(self) -> tuple[float, ...]:
        return self._heartbeat.clock(), self._data_wait_s(), self.exchange_s

    def _steps_to_next(self, step_s: float) -> int:
        if isinstance(self._every, int):
            return max(self._every - 1, 1)
        least = _LEAST_STEPS_ON_DEVICE if self._on_device else 1
        return max(min(math.ceil(_AIM_S / max(step_s, 1e-6)), _MOST_STEPS), least)


def probe_program(
    heartbeat: Heartbeat,
    *,
    every: int | Literal["auto"] | None,
    data_wait_s: Callable[[], float],
    device: torch.device,
) -> PaceProbe | None:
    """Returns the probe of a user's own program after its first steps; None where there are no other ranks.

    Args:
        heartbeat: carries the sums.
        every: see `PaceProbe`.
        data_wait_s: see `PaceProbe`.
        device: of this rank, for a program without DDP.
    """
    if every is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ddp = _largest_ddp()
    if ddp is None:
        on_device = device.type != "cpu"
        # Whether it compiles is not known here.
        waits = WaitTimer(device, sees_functions=False)
        return PaceProbe(None, heartbeat, every=every, data_wait_s=data_wait_s, on_device=on_device, waits=waits)
    on_device = next(ddp.parameters()).device.type != "cpu"
    # The program may let its model go.
    model: Any = weakref.proxy(ddp)
    probe = PaceProbe(model, heartbeat, every=every, data_wait_s=data_wait_s, on_device=on_device)
    weakref.finalize(ddp, probe.end_for_good).atexit = False
    return probe


def _largest_ddp() -> DistributedDataParallel | None:
    """Returns the wrapped module of this process, wherever the program holds it; of several the one with most values.

    Takes tens of milliseconds.
    """
    modules = [value for value in gc.get_objects() if issubclass(type(value), DistributedDataParallel)]
    return max(modules, key=lambda module: sum(value.numel() for value in module.parameters()), default=None)
