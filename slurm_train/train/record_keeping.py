"""Builds what keeps record of a training: rank 0's recorder, each rank's counts of step times and its pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_train.metrics.progress import Display
from slurm_train.metrics.writer import MetricsWriter
from slurm_train.rundir.step_times import StepTimes
from slurm_train.rundir.timing import Spent, account_path
from slurm_train.train.flops import peak_flops
from slurm_train.train.loop import TakesSteps
from slurm_train.train.pace import PaceProbe
from slurm_train.train.recorder import Recorder, RunFacts
from slurm_train.train.start import RankStart
from slurm_train.train.step import Stepper

if TYPE_CHECKING:
    from slurm_train.train.trainer import Built, RankRun


def build_recorder(
    rank_run: RankRun, built: Built, *, display: Display, spent: Spent, notes: Sequence[str] = ()
) -> Recorder:
    """Returns what keeps the metrics; says the notes about the checkpoint that was resumed from. Rank 0 only."""
    for note in notes:
        display.say(note)
    run = rank_run.start.run
    unit = "tokens" if hasattr(built.train, "bytes_per_target") else "samples"
    peak = peak_flops(rank_run.device)
    facts = RunFacts(
        attempt=rank_run.start.attempt,
        world_size=rank_run.start.place.world_size,
        num_samples=len(built.train),
        unit=unit,
        flops_per_item=built.flops_per_token if unit == "tokens" else None,
        peak_flops=None if peak is None else peak * rank_run.start.place.world_size,
    )
    return Recorder(
        facts,
        writers=[MetricsWriter(run.metrics)],
        display=display,
        spent=spent,
        account=account_path(run, rank_run.start.attempt),
        clock=rank_run.start.clock,
    )


def build_step_times(start: RankStart) -> StepTimes:
    """Returns this rank's counts of step times, which its heartbeat writes down now and then."""
    place = start.place
    times = StepTimes(start.run, start.attempt, rank=place.rank, host=place.host, clock=start.clock)
    start.heartbeat.also = times.keep_when_due
    return times


def build_probe(rank_run: RankRun, stepper: TakesSteps) -> PaceProbe:
    """Returns what measures how much of a step is this rank's own work; nothing where DDP and its timers are not."""
    return PaceProbe(
        stepper.ddp if isinstance(stepper, Stepper) else None,
        rank_run.start.heartbeat,
        every=rank_run.start.config.health.pace_every_steps,
        data_wait_s=lambda: stepper.data_wait_s,
        on_device=rank_run.device.type != "cpu",
    )
