"""The built-in trainer: one rank's way from a frozen configuration to an exit code.

`train` is what the worker calls on every rank. It assembles: group, parts, resume, loop, last words. Every part is made
by a `build_*` function and can be used without the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from slurm_train.config.batch import planned_lr
from slurm_train.config.frozen import config_hash
from slurm_train.data.build import build_source
from slurm_train.data.global_batches import GlobalBatches
from slurm_train.data.source import SampleSource, lengths_of
from slurm_train.distributed.group import choose_device, shutdown, use_steady_timeout
from slurm_train.distributed.pipeline import Pipeline
from slurm_train.distributed.seeds import seed_everything
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from slurm_train.metrics.progress import Display, open_display
from slurm_train.models.objective import Objective
from slurm_train.rundir.events import SaveLog
from slurm_train.rundir.timing import Spent, account_path
from slurm_train.train.beside import build_saving_beside
from slurm_train.train.build import (
    autocast_dtype,
    build_ddp,
    build_model,
    build_objective,
    build_optimizer,
    load_start_weights,
    set_determinism,
    set_threads,
)
from slurm_train.train.continuity import build_continuity
from slurm_train.train.evaluate import Evaluator
from slurm_train.train.exchange import Exchange
from slurm_train.train.exchange_choice import build_exchange, fitting_buckets, note_exchange
from slurm_train.train.feed import build_global_batches, build_stream
from slurm_train.train.flops import flops_per_token
from slurm_train.train.health import Health, HealthParts, position_after_rollbacks
from slurm_train.train.layout import (
    build_layout_evaluator,
    build_layout_stepper,
    build_replica_check,
    digest_weights,
    lay_out,
)
from slurm_train.train.local_tier import build_local_saves
from slurm_train.train.loop import Evaluates, Loop, LoopPace, LoopParts, TakesSteps
from slurm_train.train.module import TrainingModule
from slurm_train.train.record_keeping import build_probe, build_recorder, build_step_times
from slurm_train.train.recorder import Recorder
from slurm_train.train.save_pace import build_save_pace
from slurm_train.train.saving import Checkpointer, Position
from slurm_train.train.schedule import Schedule, build_schedule
from slurm_train.train.shares import build_shares
from slurm_train.train.start import RankStart, patient
from slurm_train.train.step import StepParts, Stepper
from slurm_train.train.stopping import Stopping
from slurm_train.train.summary import say_finished, say_stopped, say_text, write_result


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank knows of its run before anything is built."""

    start: RankStart
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The parts of a training that checkpoints and the last words need too."""

    model: nn.Module
    optimizer: Optimizer
    train: SampleSource
    heldout: SampleSource | None
    flops_per_token: float
    """Of forward and backward pass of the whole model."""
    group_names: list[list[str]] | None = None
    """Names in the optimizer's groups over all stages of a pipeline; None where every rank has them all."""
    pipeline: Pipeline | None = None
    """This rank's stage; None where every rank computes all layers."""


def train(start: RankStart) -> int:
    """Trains one rank to the end or to an agreed stop; returns the exit code. All ranks call it.

    Returns:
        EXIT_DONE when the run is finished, EXIT_REQUEUE when it saved itself and wants to continue.

    Raises:
        SlurmTrainError: what a person can act on; the caller must end the process without tearing the group down.
    """
    config = start.config
    set_determinism(config.train)
    set_threads(config.train, place=start.place)
    rank_run = RankRun(start, choose_device(start.place))
    built = build_parts(rank_run)
    clock, coming_s = start.clock, start.clock()
    spent = Spent(begin_unix_s=time.time() - clock.away_s)
    if start.place.is_first:
        spent.write(account_path(start.run, start.attempt))
    start.join(device=rank_run.device)
    spent.add("rendezvous_s", clock() - coming_s)
    built = lay_out(rank_run, built)
    first = start.place.is_first
    display = open_display(sys.stderr, max_steps=config.train.max_steps, env=start.env) if first else None
    loading_s = clock()
    loop, recorder = build_loop(rank_run, built, display=display, spent=spent)
    spent.add("load_s", clock() - loading_s)
    try:
        finished = loop.run()
        start.heartbeat.mark("end")
    finally:
        if recorder is not None:
            recorder.close()
    _last_words(rank_run, built, loop, display, finished=finished)
    shutdown()
    return EXIT_DONE if finished else EXIT_REQUEUE


def build_parts(rank_run: RankRun) -> Built:
    """Returns model, optimizer and data; nothing here needs the other ranks."""
    config, layout = rank_run.start.config, rank_run.start.layout
    if not config.data:
        raise ConfigError(
            "no data set is configured", hint="choose one: data=stdlib, or data._target_=my_package.MyData"
        )
    # What is cut first need not fit on the device as a whole.
    model = build_model(config, device=rank_run.device if layout.is_replicated else torch.device("cpu"))
    load_start_weights(model, config, run=rank_run.start.run)
    train_source = build_source(config.data, split="train", seed=config.seed)
    assert train_source is not None
    return Built(
        model=model,
        optimizer=build_optimizer(model, optim=config.optim),
        train=train_source,
        heldout=build_source(config.data, split="heldout", seed=config.seed),
        flops_per_token=flops_per_token(model),
    )


def build_loop(
    rank_run: RankRun, built: Built, *, display: Display | None, spent: Spent
) -> tuple[Loop, Recorder | None]:
    """Returns the loop, at the newest checkpoint's position, and rank 0's recorder. Collective over all ranks."""
    start, config, layout = rank_run.start, rank_run.start.config, rank_run.start.layout
    # Blocks of a model that is cut are compiled one by one, when it is.
    objective = build_objective(built.model, train=config.train) if layout.is_replicated else Objective(built.model)
    exchange = build_exchange(config, place=start.place, device=rank_run.device)
    checkpointer = build_checkpointer(rank_run, built, exchange=exchange)
    position, notes = checkpointer.resume()
    batches, health = build_order(rank_run, built, checkpointer=checkpointer, position=position, display=display)
    if position.step == 0:
        seed_everything(config.seed, data_parallel_rank=layout.data_parallel_index(start.place.rank))
    recorder = None
    if display is not None:
        spent.first_step = position.step
        recorder = build_recorder(rank_run, built, display=display, spent=spent, notes=notes)
        note_exchange(start, built.model, exchange)
    hold = checkpointer.hold_changes
    sizes = build_shares(rank_run, built, objective=objective, batches=batches, position=position, display=display)
    stepper = build_any_stepper(rank_run, built, objective=objective, exchange=exchange, before_update=hold)
    parts = LoopParts(
        stepper=stepper,
        batches=build_stream(start, built.train, batches, start_samples=position.samples, sizes=sizes),
        size_at=batches.size_at,
        schedule=build_run_schedule(start, position),
        checkpointer=checkpointer,
        save_pace=build_save_pace(config.checkpoint, run=start.run, start_step=position.step, clock=start.clock),
        evaluator=build_evaluator(rank_run, built, objective=objective),
        recorder=recorder,
        stop=start.stop,
        stopping=build_stopping(rank_run, spent=None if recorder is None else spent),
        on_first_step=lambda: _after_first_step(rank_run, checkpointer),
        health=health,
        heartbeat=start.heartbeat,
        step_times=build_step_times(start),
        probe=build_probe(rank_run, stepper),
        exchange=exchange,
        check_replicas=build_replica_check(rank_run, built.model),
    )
    return Loop(parts, pace=build_pace(rank_run), position=position), recorder


def peak_lr(start: RankStart) -> float:
    """Returns the peak learning rate for this run's global batch."""
    return planned_lr(start.config.optim, global_size=start.plan.global_size)


def build_run_schedule(start: RankStart, position: Position) -> Schedule:
    """Returns the learning rate over the samples of the run."""
    config, global_size = start.config, start.plan.global_size
    return build_schedule(
        config.optim,
        peak_lr=peak_lr(start),
        total_samples=position.samples_at(config.train.max_steps, global_size=global_size),
    )


def build_stopping(rank_run: RankRun, *, spent: Spent | None) -> Stopping:
    """Returns this rank's part in stopping; `spent` is rank 0's, which looks at the clock."""
    start = rank_run.start
    return Stopping(start.run, start.attempt, stop=start.stop, spent=spent, group=dist.group.WORLD)


def build_order(
    rank_run: RankRun, built: Built, *, checkpointer: Checkpointer, position: Position, display: Display | None
) -> tuple[GlobalBatches, Health]:
    """Returns what every step takes, and what judges it; moves the position past what was passed over. Collective."""
    start, group = rank_run.start, dist.group.WORLD
    position.samples, num_rollbacks = position_after_rollbacks(start.run, position, group=group)
    batches = build_global_batches(start, built.train, position)
    parts = HealthParts(
        settings=start.config.health,
        run=start.run,
        attempt=start.attempt,
        is_first=start.place.is_first,
        size_before=batches.size_before,
        sample_ids=lambda first, count: [int(sample) for sample in batches.sample_ids(first, count)],
        say=print if display is None else display.say,
        checkpointer=checkpointer,
        group=group,
    )
    return batches, Health(parts, num_rollbacks=num_rollbacks)


def build_evaluator(rank_run: RankRun, built: Built, *, objective: Objective) -> Evaluates | None:
    """Returns what measures the held-out samples, None where there are none, or none shall be."""
    if built.heldout is None or not rank_run.start.config.train.evaluate:
        return None
    start = rank_run.start
    autocast = autocast_dtype(start.config.train, device=rank_run.device)
    if not start.layout.is_replicated:
        return build_layout_evaluator(rank_run, built, objective=objective, autocast=autocast)
    return Evaluator(
        objective=objective,
        source=built.heldout,
        place=start.place,
        device=rank_run.device,
        batch_size=start.plan.local_size,
        autocast=autocast,
        stop=start.stop,
        heartbeat=start.heartbeat,
        lengths=lengths_of(built.heldout) if start.config.batch.by_length else None,
    )


def build_pace(rank_run: RankRun) -> LoopPace:
    """Returns when the loop logs and evaluates."""
    config, layout, rank = rank_run.start.config, rank_run.start.layout, rank_run.start.place.rank
    return LoopPace(
        max_steps=config.train.max_steps,
        log_every=config.train.log_every_steps,
        eval_every=config.train.eval_every_steps,
        seed=config.seed,
        random_stream=layout.random_stream(rank, splits_positions=config.parallel.sequence_parallel),
        counts=layout.owns_samples(rank),
        digest=config.train.samples_digest,
        check_every=config.health.check_replicas_every_steps,
    )


def build_any_stepper(
    rank_run: RankRun,
    built: Built,
    *,
    objective: Objective,
    exchange: Exchange | None,
    before_update: Callable[[], None],
) -> TakesSteps:
    """Returns what takes steps in this run's layout. Collective."""
    if not rank_run.start.layout.is_replicated:
        return build_layout_stepper(rank_run, built, objective=objective, before_update=before_update)
    autocast = autocast_dtype(rank_run.start.config.train, device=rank_run.device)
    module = TrainingModule(objective, stop=rank_run.start.stop, device=rank_run.device, autocast=autocast)
    return build_stepper(rank_run, module, built, exchange=exchange, before_update=before_update)


def build_stepper(
    rank_run: RankRun,
    module: TrainingModule,
    built: Built,
    *,
    exchange: Exchange | None,
    before_update: Callable[[], None],
) -> Stepper:
    """Returns what takes steps. Collective: DDP compares the ranks' parameters."""
    settings = fitting_buckets(rank_run.start.config.ddp, built.model, device=rank_run.device)
    ddp = build_ddp(module, ddp=settings, device=rank_run.device)
    if exchange is not None:
        exchange.attach(ddp, module.rider)
        exchange.watch(built.optimizer, hold_changes=before_update)
    parts = StepParts(
        ddp=ddp,
        module=module,
        optimizer=built.optimizer,
        clip_norm=rank_run.start.config.optim.grad_clip_norm,
        accumulation=rank_run.start.plan.accumulation,
        world_size=rank_run.start.place.world_size,
        device=rank_run.device,
        before_update=before_update,
        applies_spikes=rank_run.start.config.health.on_spike == "log",
        heartbeat=rank_run.start.heartbeat,
        must_arrange=exchange is not None,
    )
    return Stepper(parts)


def build_checkpointer(rank_run: RankRun, built: Built, *, exchange: Exchange | None = None) -> Checkpointer:
    """Returns what saves and restores this run. Collective over all ranks."""
    start = rank_run.start
    settings, optim, clock = start.config.checkpoint, start.config.optim, start.clock
    return Checkpointer(
        run=rank_run.start.run,
        place=rank_run.start.place,
        layout=rank_run.start.layout,
        plan=rank_run.start.plan,
        attempt=rank_run.start.attempt,
        keep=settings.keep,
        model=built.model,
        optimizer=built.optimizer,
        group_names=built.group_names,
        config_hash=config_hash(start.config, global_size=start.plan.global_size),
        continuity=build_continuity(
            start.run,
            start.config,
            global_size=start.plan.global_size,
            data=built.train.fingerprint(),
            num_samples=len(built.train),
        ),
        lr={"peak": peak_lr(start), "retune": optim.lr_retune, "tuned_for_global_size": optim.lr_global_size},
        job=rank_run.start.job,
        clock=clock,
        beside=build_saving_beside(rank_run.device, timeout_s=settings.save_timeout_s, clock=clock)
        if settings.background
        else None,
        local=build_local_saves(start),
        log=SaveLog(start.run, start.attempt) if start.place.is_first else None,
        exchange=exchange,
    )


def _after_first_step(rank_run: RankRun, checkpointer: Checkpointer) -> None:
    config = rank_run.start.config
    use_steady_timeout(patient(config, config.train.steady_timeout_s))
    if config.checkpoint.every_steps is not None:
        checkpointer.prepare()


def _last_words(rank_run: RankRun, built: Built, loop: Loop, display: Display | None, *, finished: bool) -> None:
    is_whole = rank_run.start.layout.is_replicated
    # Of what is sharded every rank gives its part; a digest of a replica is rank 0's own business.
    takes_part = finished and (display is not None or not is_whole)
    digest = digest_weights(rank_run, built, step=loop.position.step) if takes_part else ""
    if display is None:
        return
    if not finished:
        config = rank_run.start.config
        returns = config.cluster is not None and config.requeue.enabled and config.launch != "interactive"
        say_stopped(display.say, rank_run.start.run, loop, returns=returns)
        return
    write_result(
        rank_run.start.run,
        loop,
        weights_digest=digest,
        attempt=rank_run.start.attempt,
        world_size=rank_run.start.place.world_size,
    )
    say_finished(display.say, rank_run.start.run, loop)
    say_text(
        display.say,
        built.model,
        train=built.train,
        heldout=built.heldout,
        # One rank alone cannot run a model that is spread over several.
        num_tokens=rank_run.start.config.train.sample_tokens if is_whole else 0,
    )
