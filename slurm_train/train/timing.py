"""Measures this rank's steps: their time, the wait for data in it, and how much of it is the rank's own work."""

from __future__ import annotations

from collections.abc import Callable

from slurm_train.data.batches import Split
from slurm_train.distributed.pace import PaceProbe, WaitTimer
from slurm_train.rundir.heartbeat import AwakeClock
from slurm_train.rundir.timing import StepTimes
from slurm_train.train.context import Rank
from slurm_train.train.passes import Passes


class Timing:
    """Measures the steps of this rank, for histograms and for finding stragglers.

    Args:
        clock: seconds in which this process ran.
        step_times: histograms of step times and of the waits for data in them.
        probe: measures in sampled steps how long this rank works and how long it waits for other ranks.
        data_wait_s: returns the seconds that this rank has waited for data so far.
    """

    def __init__(
        self,
        clock: AwakeClock,
        *,
        step_times: StepTimes,
        probe: PaceProbe,
        data_wait_s: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.step_times = step_times
        self.probe = probe
        self._data_wait_s = data_wait_s
        self._start_s = 0.0
        self._start_wait_s = 0.0
        self._logged_wait_s = 0.0

    def begin_step(self) -> None:
        """Starts to measure a step; to be called before it."""
        self.probe.begin()
        self._start_s = self.clock()
        self._start_wait_s = self._data_wait_s()

    def add_step(self) -> None:
        """Adds the step that has just ended to the histograms; not called for an attempt's first, which is start-up."""
        self.step_times.add(self.clock() - self._start_s, self._data_wait_s() - self._start_wait_s)

    def take_data_wait_s(self) -> float:
        """Returns the seconds that steps have waited for data since this was last called."""
        before_s = self._logged_wait_s
        self._logged_wait_s = self._data_wait_s()
        return self._logged_wait_s - before_s


def build_timing(rank: Rank, passes: Passes, split: Split) -> Timing:
    """Returns the measurement of a rank's steps; the heartbeat's thread writes the histograms now and then."""
    batch = rank.config.batch

    def data_wait_s() -> float:
        return passes.data_wait_s

    step_times = StepTimes(rank.run, rank.attempt, rank=rank.place.rank, host=rank.place.host, clock=rank.clock)
    rank.heartbeat.periodic_work = step_times.keep_when_due
    probe = PaceProbe(
        passes.ddp,
        rank.heartbeat,
        every=rank.config.health.pace_every_steps,
        data_wait_s=data_wait_s,
        on_device=rank.device.type != "cpu",
        # Weights are meant to make up for the speed of a rank; batches by length are equal work.
        work=split.work if batch.shares == "even" and not batch.by_length else 1.0,
        # None for DDP, which has timers of its own, and for one rank, which waits for nobody.
        waits=None if rank.layout.is_replicated else WaitTimer(rank.device, sees_functions=not rank.compiles),
    )
    return Timing(rank.clock, step_times=step_times, probe=probe, data_wait_s=data_wait_s)
