"""What this rank's steps are spent on: its own work, or waiting for the others' gradients. Sampled, never exchanged.

DDP has timers of its own; they are off but for the sampled steps, and what they say goes into the heartbeat, which is
written anyway. So no collective is added, and a step between samples costs two comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from slurm_train.rundir.heartbeat import Heartbeat

_AIM_S = 0.25
_MOST_STEPS = 64
# On a GPU reading the timers waits for the device once.
_LEAST_STEPS_ON_DEVICE = 50
_NEVER = 2**30
# What comes before is still warming up.
_FIRST_STEP = 5
_NS = 1e-9


class _Counters(NamedTuple):
    """What only ever grows, at one moment."""

    clock_s: float
    data_s: float
    exchange_s: float


class PaceProbe:
    """Measures every so many steps; the loop calls `begin` and `end` around each.

    Args:
        ddp: the wrapped module; torch itself measures its first ten passes. None: nothing is measured.
        heartbeat: carries the sums.
        every: steps between samples, the first of which is step 5; "auto": about four samples a second, at least one
            in 64 steps; None: none.
        data_wait_s: gives the seconds that this rank has waited for data so far.
        on_device: whether steps run beside the host.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | None,
        heartbeat: Heartbeat,
        *,
        every: int | Literal["auto"] | None,
        data_wait_s: Callable[[], float],
        on_device: bool,
    ) -> None:
        self.exchange_s = 0.0
        """Seconds of exchanges outside DDP so far, added by whoever makes them: they are waits, too."""
        # Their types are not told by torch.
        self._ddp: Any = ddp
        self._heartbeat = heartbeat
        self._data_wait_s, self._every, self._on_device = data_wait_s, every, on_device
        # The interface is a prototype of torch's (2.6 to 2.13): without it, or unasked, nothing is measured.
        can_measure = every is not None and hasattr(ddp, "_set_ddp_runtime_logging_sample_rate")
        self._steps_left = _FIRST_STEP if can_measure else _NEVER
        self._before: _Counters | None = None
        self._step: _Counters | None = None
        self._iteration = -1

    def begin(self) -> None:
        """Takes note of the begin of a step."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self._ddp._set_ddp_runtime_logging_sample_rate(1)
            self._before = self._counters()

    def end(self) -> None:
        """Takes note of its end. The timers of a step can be read when the pass after it has begun."""
        if self._steps_left > 0:
            return
        if self._step is None:
            before, now = self._before, self._counters()
            assert before is not None
            self._step = _Counters(*(late - early for late, early in zip(now, before, strict=True)))
            return
        step, self._step = self._step, None
        self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)
        self._steps_left = self._steps_to_next(step.clock_s)
        facts = self._ddp._get_ddp_logging_data()
        # A pass that torch did not measure leaves the numbers of an earlier one.
        if facts.get("iteration") != self._iteration:
            self._iteration = facts.get("iteration", -1)
            self._add(facts, step)

    def _counters(self) -> _Counters:
        return _Counters(self._heartbeat.clock(), self._data_wait_s(), self.exchange_s)

    def _add(self, facts: Mapping[str, int], step: _Counters) -> None:
        # From the first gradient that is sent to the last that comes back, without the part spent on computing others.
        waited_ns = facts.get("backward_comm_time", 0) - facts.get("backward_compute_comm_overlap_time", 0)
        wait_s = max(waited_ns * _NS, 0.0) + step.exchange_s
        own_s = max(step.clock_s - wait_s, 0.0)
        if self._on_device:
            # The host runs ahead of the device, so its clock says nothing of one step; the device's timers do.
            computed_ns = facts.get("forward_compute_time", 0) + facts.get("backward_compute_time", 0)
            own_s = computed_ns * _NS + step.data_s
        self._heartbeat.pace = self._heartbeat.pace.plus(own_s=own_s, wait_s=wait_s, data_s=step.data_s)

    def _steps_to_next(self, step_s: float) -> int:
        if isinstance(self._every, int):
            return max(self._every - 1, 1)
        least = _LEAST_STEPS_ON_DEVICE if self._on_device else 1
        return max(min(math.ceil(_AIM_S / max(step_s, 1e-6)), _MOST_STEPS), least)
