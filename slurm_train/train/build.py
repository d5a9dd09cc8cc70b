"""One rank's way from a frozen configuration to an exit code, with the built-in trainer.

`train` is what the worker calls on every rank; it reads in the order of what happens: parts, group, layout, trainer,
loop, result. Every part is made by a `build_*` function beside its class, and can be used without the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from slurm_train.checkpoint.state import saved_buffers
from slurm_train.config.batch import check_schedule, planned_lr, total_steps
from slurm_train.config.schema import RunConfig
from slurm_train.data.build import build_source
from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.data.source import describe
from slurm_train.data.stream import StreamSource
from slurm_train.data.workers import AutoWorkers, cpus_of_rank
from slurm_train.distributed.group import shutdown
from slurm_train.distributed.seeds import seed_everything
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from slurm_train.models.build import build_model, load_start_weights
from slurm_train.models.objective import Objective
from slurm_train.rundir.timing import Spent
from slurm_train.train.buckets import RecordedOrder
from slurm_train.train.callbacks import Callback, build_callbacks
from slurm_train.train.compilation import CompileCache, compile_in_place, require_compiler
from slurm_train.train.context import Built, Parts, Rank
from slurm_train.train.ending import end_training
from slurm_train.train.evaluate import build_evaluator, find_measured
from slurm_train.train.facts import build_facts, build_saver
from slurm_train.train.health import Health, RecentLosses, position_after_rollbacks
from slurm_train.train.layout import apply_parallelism, failures_explained
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.metrics import flops_per_token
from slurm_train.train.optimizer import build_optimizer, build_schedule, note_on_rate, require_rules_fit, to_training
from slurm_train.train.position import Position
from slurm_train.train.progress import build_progress
from slurm_train.train.samples import (
    begin_stream,
    build_global_batches,
    build_samples,
    build_share,
    note_of_few,
    padding_for,
)
from slurm_train.train.start_up import StartUp
from slurm_train.train.step import build_stepper
from slurm_train.train.stops import Stops
from slurm_train.train.trainer import Trainer

TURN_OF_A_THREAD_S = 5e-5
"""How long a thread keeps the interpreter while another one waits for it.

Python's 5 ms made an operation of 14 us take 6 ms beside a thread that computes. With 50 us it takes 165 us; with 10 us
it takes 117 us, and the thread gets 5 % less done.
"""


def train(rank: Rank) -> int:
    """Trains one rank to the end or to an agreed stop; returns the exit code. All ranks call it.

    Returns:
        EXIT_DONE when the run is finished, EXIT_REQUEUE when it saved itself and wants to continue.

    Raises:
        SlurmTrainError: the user can correct it; the caller must end the process without tearing the group down.
    """
    # Threads beside this one read samples and write checkpoints, and torch gives the interpreter away in each
    # operation: with Python's 5 ms a save in the background made a step on a GPU 1.6 times as long.
    sys.setswitchinterval(TURN_OF_A_THREAD_S)
    rank, built = build_alone(rank)
    callbacks = build_callbacks(rank.config.callbacks)
    parts, spent = join(rank, built)
    rank = parts.rank
    start_s = rank.clock()
    with failures_explained(parts):
        trainer = build_trainer(parts, callbacks=callbacks, spent=spent)
    spent.add("load_s", rank.clock() - start_s)
    try:
        with failures_explained(parts):
            finished = trainer.run()
        rank.heartbeat.mark("end")
    finally:
        trainer.progress.close()
    end_training(trainer, finished=finished)
    shutdown()
    return EXIT_DONE if finished else EXIT_REQUEUE


def join(rank: Rank, built: Built) -> tuple[Parts, Spent]:
    """Opens the process group; returns this rank's parts, and what it has spent its time on so far. Collective.

    Raises:
        RendezvousError: the ranks do not find each other.
        ConfigError: the layout does not suit the model.
    """
    start_s = rank.clock()
    spent = Spent(begin_unix_s=time.time() - rank.clock.away_s)
    if rank.place.is_first:
        spent.write(rank.run.account(rank.attempt))
    rank = rank.join()
    spent.add("rendezvous_s", rank.clock() - start_s)
    return apply_parallelism(rank, built), spent


def build_alone(rank: Rank) -> tuple[Rank, Built]:
    """Returns the rank on its device, with model, optimizer and data; nothing here needs the other ranks.

    Raises:
        ConfigError: no model or no data set is configured, or they cannot be made.
        PreflightError: the run is to be compiled, and the node cannot.
    """
    rank = rank.enter_device()
    require_compiler(rank)
    return rank, build_parts(rank)


def build_parts(rank: Rank) -> Built:
    """Returns model, optimizer and data of a rank on its device.

    Raises:
        ConfigError: no model or no data set is configured, or they cannot be made.
    """
    config = rank.config
    if not config.data:
        raise ConfigError(
            "no data set is configured", hint="choose one: data=stdlib, or data._target_=my_package.MyData"
        )
    model = build_model(
        config,
        note=_ignore if rank.layout.is_replicated else rank.say,
        ranks_on_node=rank.place.local_world_size,
    )
    load_start_weights(model, config, run=rank.run, buffers=saved_buffers(model))
    require_rules_fit(model, optim=config.optim)
    train_data = build_source(
        config.data,
        split="train",
        seed=config.seed,
        part=(rank.layout.data_parallel_index(rank.place.rank), rank.layout.data_parallel_size),
        workers=AutoWorkers(
            cpus=cpus_of_rank(rank.env, ranks_on_node=rank.place.local_world_size),
            ranks_on_node=rank.place.local_world_size,
            note=rank.say,
        ),
    )
    assert train_data is not None
    if isinstance(train_data, StreamSource):
        _refuse_for_streams(config)
    heldout = build_source(
        config.data,
        split="heldout",
        seed=config.seed,
        note=rank.say,
    )
    for source in (train_data, heldout):
        if isinstance(source, (MapStyleSource, StreamSource)):
            source.pad_with(padding_for(model))
    return Built(
        model=model,
        optimizer=build_optimizer(model, optim=config.optim),
        train_data=train_data,
        heldout=heldout,
        flops_per_token=flops_per_token(model, positions=describe(train_data).context),
    )


def _ignore(_text: str) -> None:
    pass


def _refuse_for_streams(config: RunConfig) -> None:
    """Refuses settings that need samples which are counted and read by number.

    Raises:
        ConfigError: one of them is set.
    """
    key = hint = ""
    if config.batch.by_length:
        key = "batch.by_length"
        hint = "leave batch.by_length out"
    if config.train.max_epochs is not None:
        key = "train.max_epochs"
        hint = "leave train.max_epochs out; train.max_steps=N"
    if key:
        raise ConfigError(
            f"{key} was asked, and the data are a stream, whose samples are neither counted nor read by number",
            hint=hint,
        )


def build_trainer(parts: Parts, *, callbacks: Mapping[str, Callback], spent: Spent) -> Trainer:
    """Returns the trainer at the newest checkpoint's position. Collective over all ranks.

    Long because it lists the trainer's parts in the order in which each needs the ones before it.

    Args:
        parts: model, optimizer and data.
        callbacks: by the names of their states, in the order of their calls.
        spent: what the start of this rank was spent on.
    """
    rank = parts.rank
    config = rank.config
    objective = Objective(parts.model)
    compile_cache = CompileCache(rank)
    compile_cache.load()
    compile_in_place(parts, objective)

    # The state of the newest checkpoint, and the position of the run.
    peak_lr = planned_lr(config.optim, global_size=rank.plan.global_size)
    parts = replace(parts, measured=find_measured(parts))
    position = Position()
    for callback in callbacks.values():
        callback.attach(parts)
    facts = build_facts(parts, position, callbacks=callbacks, peak_lr=peak_lr)
    saver = build_saver(facts, spent=spent)
    order = RecordedOrder()
    losses = RecentLosses(config.health)
    saver.state.add("bucket_order", order, of="run")
    saver.state.add("recent_losses", losses, of="run")
    scale = LossScale(rank.device) if rank.autocast is torch.float16 else None
    if scale is not None:
        saver.state.add("loss_scale", scale, of="run")
    saver.resume()
    saved_samples = position.samples
    position.samples, num_rollbacks = position_after_rollbacks(rank.run, position, facts.resumption.origin)
    max_steps = total_steps(
        config,
        num_samples=len(parts.train_data),
        global_size=rank.plan.global_size,
        since=position.batch_since,
    )
    batches = build_global_batches(rank, parts.train_data, position)
    if position.step == 0:
        seed_everything(config.seed, data_parallel_rank=rank.layout.data_parallel_index(rank.place.rank))

    planned_samples = position.samples_at(max_steps, global_size=rank.plan.global_size, growth=config.batch.growth)
    if position.step == 0:
        check_schedule(config.optim, total_samples=planned_samples, global_size=rank.plan.global_size)
    schedule = build_schedule(config.optim, peak_lr=peak_lr, total_samples=planned_samples)
    if saver.resumed_from is not None and position.step < max_steps:
        next_samples = position.samples_at(
            position.step + 1, global_size=rank.plan.global_size, growth=config.batch.growth
        )
        rank.say(note_on_rate(saver.resumed_from, schedule, next_samples=next_samples))

    is_stream = isinstance(parts.train_data, StreamSource)
    few = "" if is_stream else note_of_few(len(parts.train_data), global_size=rank.plan.global_size)
    rank.say(few)

    # The data from that position on.
    share = build_share(rank, is_over=position.step >= max_steps)
    if isinstance(parts.train_data, StreamSource):
        begin_stream(
            rank,
            parts.train_data,
            batches,
            share,
            samples=position.samples,
            saved_samples=saved_samples,
            state=None if facts.stream is None else facts.stream.saved,
        )

    # What takes and measures steps.
    stepper = build_stepper(
        parts,
        objective,
        hold_changes=saver.saves.buffers.hold_changes,
        scale=scale,
        order=order,
    )
    evaluator = build_evaluator(parts, stepper.passes, callbacks)
    health = Health(
        rank,
        batches=batches,
        saver=saver,
        resumption=facts.resumption,
        losses=losses,
        num_rollbacks=num_rollbacks,
    )
    stops = Stops(rank, spent=spent)
    stops.agree(bool(position.ended))
    to_training(parts.optimizer)
    return Trainer(
        parts=parts,
        max_steps=max_steps,
        position=position,
        samples=build_samples(rank, parts.train_data, batches, share, start_samples=position.samples),
        stepper=stepper,
        schedule=schedule,
        health=health,
        evaluator=evaluator,
        saver=saver,
        resumption=facts.resumption,
        stops=stops,
        progress=build_progress(
            parts, stepper.passes, share, spent=spent, first_step=position.step, max_steps=max_steps
        ),
        callbacks=callbacks,
        start_up=StartUp(rank, parts.model, watched=saver.state.watched, compile_cache=compile_cache),
    )
