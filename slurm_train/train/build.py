"""One rank's way from a frozen configuration to an exit code, with the built-in trainer.

`train` is what the worker calls on every rank; it reads in the order of what happens: parts, group, layout, trainer,
loop, result. Every part is made by a `build_*` function beside its class, and can be used without the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from slurm_train.checkpoint.state import names_of_groups
from slurm_train.config.batch import planned_lr, total_steps
from slurm_train.config.parallel import stages_of
from slurm_train.config.schema import RunConfig
from slurm_train.data.batches import Split
from slurm_train.data.build import build_source
from slurm_train.data.stream import StreamSource
from slurm_train.distributed.group import shutdown, use_timeout
from slurm_train.distributed.pipeline import Pipeline, keep_stages, split_stages
from slurm_train.distributed.seeds import seed_everything
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from slurm_train.metrics import Display, open_display
from slurm_train.models.build import build_model, load_start_weights
from slurm_train.models.first_weights import fill, first_values
from slurm_train.models.head import Head
from slurm_train.models.objective import Objective, default_loss
from slurm_train.rundir.timing import Spent, StepTimes
from slurm_train.train.callbacks import Callback, build_callbacks
from slurm_train.train.checkpointer import build_checkpointer
from slurm_train.train.compile_cache import CompileCache, mark_compilations, require_compiler
from slurm_train.train.context import Parts, Rank
from slurm_train.train.ending import end_training
from slurm_train.train.evaluate import build_evaluator
from slurm_train.train.health import Health, position_after_rollbacks
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.metrics import PaceProbe, build_recorder, flops_per_token
from slurm_train.train.optimizer import (
    begin_state,
    build_optimizer,
    build_schedule,
    can_call_kernel,
    require_rules_fit,
    to_training,
)
from slurm_train.train.samples import begin_stream, build_global_batches, build_samples, build_split
from slurm_train.train.start_up import StartUp
from slurm_train.train.step import (
    Passes,
    PipelinePasses,
    ReplicaPasses,
    ShardPasses,
    Stepper,
    TrainingModule,
    build_ddp,
    send_bfloat16,
)
from slurm_train.train.stops import Stops
from slurm_train.train.timing import Timing
from slurm_train.train.trainer import Trainer


def train(rank: Rank) -> int:
    """Trains one rank to the end or to an agreed stop; returns the exit code. All ranks call it.

    Returns:
        EXIT_DONE when the run is finished, EXIT_REQUEUE when it saved itself and wants to continue.

    Raises:
        SlurmTrainError: the user can correct it; the caller must end the process without tearing the group down.
    """
    rank.enter_device()
    require_compiler(rank)
    parts = build_parts(rank)
    callbacks = build_callbacks(rank.config.callbacks)
    spent = join(rank)
    apply_parallelism(parts)
    display = None
    if rank.place.is_first:
        display = open_display(sys.stderr, max_steps=rank.config.train.max_steps, env=rank.env)
    start_s = rank.clock()
    trainer = build_trainer(parts, callbacks=callbacks, display=display, spent=spent)
    spent.add("load_s", rank.clock() - start_s)
    try:
        finished = trainer.run()
        rank.heartbeat.mark("end")
    finally:
        if trainer.recorder is not None:
            trainer.recorder.close()
    end_training(trainer, parts, display, finished=finished)
    shutdown()
    return EXIT_DONE if finished else EXIT_REQUEUE


def join(rank: Rank) -> Spent:
    """Opens the process group; returns what this rank has spent its time on so far. Collective over all ranks.

    Raises:
        RendezvousError: the ranks do not find each other.
    """
    start_s = rank.clock()
    spent = Spent(begin_unix_s=time.time() - rank.clock.away_s)
    if rank.place.is_first:
        spent.write(rank.run.account(rank.attempt))
    rank.join()
    spent.add("rendezvous_s", rank.clock() - start_s)
    return spent


def build_parts(rank: Rank) -> Parts:
    """Returns model, optimizer and data; nothing here needs the other ranks.

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
        note=_print if rank.place.is_first and not rank.layout.is_replicated else _ignore,
        ranks_on_node=rank.place.local_world_size,
    )
    load_start_weights(model, config, run=rank.run)
    require_rules_fit(model, optim=config.optim)
    train_data = build_source(
        config.data,
        split="train",
        seed=config.seed,
        part=(rank.layout.data_parallel_index(rank.place.rank), rank.layout.data_parallel_size),
    )
    assert train_data is not None
    if isinstance(train_data, StreamSource):
        _refuse_for_streams(config)
    heldout = build_source(
        config.data,
        split="heldout",
        seed=config.seed,
        note=_print if rank.place.is_first else _ignore,
    )
    return Parts(
        rank=rank,
        model=model,
        optimizer=build_optimizer(model, optim=config.optim),
        train_data=train_data,
        heldout=heldout,
        flops_per_token=flops_per_token(model, positions=getattr(train_data, "context", 0)),
    )


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def _ignore(_text: str) -> None:
    pass


def _refuse_for_streams(config: RunConfig) -> None:
    """Refuses settings that need samples which are counted and read by number.

    Raises:
        ConfigError: one of them is set.
    """
    key = hint = ""
    if config.batch.by_length:
        key, hint = "batch.by_length", "leave batch.by_length out"
    if config.train.max_epochs is not None:
        key, hint = "train.max_epochs", "leave train.max_epochs out; train.max_steps=N"
    if key:
        raise ConfigError(
            f"{key} was asked, and the data are a stream, whose samples are neither counted nor read by number",
            hint=hint,
        )


def apply_parallelism(parts: Parts) -> None:
    """Leaves this rank's part of the model with its first weights, and an optimizer of it. Collective over all ranks.

    Raises:
        ConfigError: the model does not say how it can be cut.
    """
    from slurm_train.distributed.parallelize import to_float8

    if parts.rank.config.train.precision == "fp8":
        to_float8(parts.model)
    if parts.rank.layout.is_replicated:
        _prepare_replica(parts)
    else:
        _prepare_shards(parts)


def _prepare_replica(parts: Parts) -> None:
    """Gives a whole model its weights; its blocks change where activation checkpointing is configured."""
    from slurm_train.distributed.parallelize import is_deep, prepare_blocks

    rank = parts.rank
    model = parts.model
    config = rank.config
    fill([model], first_values(model), device=rank.device, progress=partial(rank.heartbeat.mark, "start"))
    # What is fused depends on the device.
    parts.optimizer = build_optimizer(model, optim=config.optim)
    by_blocks = rank.compiles and is_deep(model)
    if by_blocks or config.parallel.activation_checkpointing != "none":
        prepare_blocks(model, settings=config.parallel, compiles=by_blocks)
    if config.ddp.find_unused_parameters:
        # A checkpoint needs the state of every parameter, also of one that was never used.
        if not can_call_kernel(parts.optimizer):
            name = type(parts.optimizer).__name__
            raise ConfigError(
                f"ddp.find_unused_parameters was asked, but {name} has no state for unused parameters",
                hint="use optim=adamw or optim=sgd",
            )
        begin_state(parts.optimizer)


def _prepare_shards(parts: Parts) -> None:
    """Cuts the model into the parts of the layout, and gives this rank's part its weights."""
    from slurm_train.distributed.parallelize import build_mesh, gathers_in_bfloat16, has_own_loss, parallelize

    rank = parts.rank
    model = parts.model
    config = rank.config
    layout = rank.layout
    values = first_values(model)
    mesh = build_mesh(layout, device=rank.device)
    gathers_half = gathers_in_bfloat16(model, layout=layout, settings=config.parallel, autocast=rank.autocast)
    rank.casts_shards = gathers_half and not has_own_loss(model)
    settings = replace(config.parallel, gather_dtype="bfloat16" if gathers_half else "float32")
    roots = [model]
    if layout.pp > 1:
        parts.group_names = names_of_groups(model, parts.optimizer)
        place = layout.coordinates(rank.place.rank).pp
        num_stages = layout.pp * settings.stages_per_rank
        stages = stages_of(place, num_ranks=layout.pp, per_rank=settings.stages_per_rank)
        keep_stages(model, stages=stages, num_stages=num_stages)
        roots = split_stages(model, stages=stages, num_stages=num_stages)
        group = mesh["pp"].get_group()
        parts.pipeline = Pipeline(parts=roots, place=place, num_ranks=layout.pp, device=rank.device, group=group)
    parallelize(model, layout=layout, mesh=mesh, roots=roots, settings=settings, compiles=rank.compiles)
    fill(
        [model, *roots],
        values,
        device=rank.device,
        # Each weight is progress: the supervisor's watchdog waits for what it knows of.
        progress=partial(rank.heartbeat.mark, "start"),
        shards_device=torch.device("cpu") if settings.cpu_offload else None,
    )
    use_timeout(rank.collective_timeout_s(config.train.start_timeout_s))
    # The parameters are other objects now.
    parts.optimizer = build_optimizer(model, optim=config.optim)
    if can_call_kernel(parts.optimizer):
        begin_state(parts.optimizer)


def build_trainer(parts: Parts, *, callbacks: Mapping[str, Callback], display: Display | None, spent: Spent) -> Trainer:
    """Returns the trainer at the newest checkpoint's position. Collective over all ranks.

    Long because it lists the trainer's parts in the order in which each needs the ones before it.

    Args:
        parts: model, optimizer and data.
        callbacks: by the names of their states, in the order of their calls.
        display: rank 0's; None on the others.
        spent: what the start of this rank was spent on.
    """
    rank = parts.rank
    config = rank.config
    objective = Objective(parts.model)
    compile_cache = CompileCache(rank)
    compile_cache.load()
    if rank.compiles:
        mark_compilations(rank)
        _compile(parts, objective)

    # The state of the newest checkpoint, and the position of the run.
    peak_lr = planned_lr(config.optim, global_size=rank.plan.global_size)
    checkpointer = build_checkpointer(parts, callbacks=callbacks, peak_lr=peak_lr)
    for callback in callbacks.values():
        callback.attach(parts)
    position, notes = checkpointer.resume()
    saved_samples = position.samples
    position.samples, num_rollbacks = position_after_rollbacks(rank.run, position, checkpointer.origin)
    parts.max_steps = total_steps(
        config,
        num_samples=len(parts.train_data),
        global_size=rank.plan.global_size,
        since=position.batch_since,
    )
    batches = build_global_batches(rank, parts.train_data, position)
    if position.step == 0:
        seed_everything(config.seed, data_parallel_rank=rank.layout.data_parallel_index(rank.place.rank))
    parts.random_stream = rank.layout.random_stream(rank.place.rank, splits_positions=config.parallel.sequence_parallel)

    recorder = None
    if display is not None:
        for note in notes:
            display.say(note)
        recorder = build_recorder(parts, display, spent, first_step=position.step)

    # The data from that position on.
    split = build_split(rank, is_over=position.step >= parts.max_steps, display=display)
    if isinstance(parts.train_data, StreamSource):
        begin_stream(
            rank,
            parts.train_data,
            batches,
            split,
            samples=position.samples,
            saved_samples=saved_samples,
            state=checkpointer.stream_state,
            display=display,
        )

    # What takes and measures steps.
    stepper = build_stepper(
        parts,
        objective,
        before_change=checkpointer.saves.buffers.hold_changes,
        loss_scale=position.loss_scale,
    )
    evaluator = build_evaluator(parts, objective, callbacks, display=display)
    health = Health(
        rank,
        batches=batches,
        checkpointer=checkpointer,
        num_rollbacks=num_rollbacks,
        say=_ignore if display is None else display.say,
    )
    stops = Stops(rank.run, rank.attempt, rank.stop, spent=None if display is None else spent)
    stops.is_agreed = bool(position.ended)
    planned_samples = position.samples_at(
        parts.max_steps, global_size=rank.plan.global_size, growth=config.batch.growth
    )
    to_training(parts.optimizer)
    return Trainer(
        parts=parts,
        position=position,
        samples=build_samples(rank, parts.train_data, batches, split, start_samples=position.samples),
        stepper=stepper,
        schedule=build_schedule(config.optim, peak_lr=peak_lr, total_samples=planned_samples),
        health=health,
        evaluator=evaluator,
        checkpointer=checkpointer,
        saves=checkpointer.saves,
        stops=stops,
        timing=_build_timing(rank, stepper.passes, split),
        recorder=recorder,
        callbacks=callbacks,
        start_up=StartUp(rank, parts.model, compile_cache=compile_cache),
    )


def _compile(parts: Parts, objective: Objective) -> None:
    """Compiles model and loss, in place, so that names of parameters stay.

    A shallow model is one graph. The blocks of any other have been compiled one by one.
    """
    from slurm_train.distributed.parallelize import is_deep

    model = parts.model
    if parts.rank.layout.is_replicated and not is_deep(model):
        objective.compile()
        # Evaluation calls the model by itself.
        model.compile()
        return
    objective.default_loss = torch.compile(default_loss)
    for module in model.modules():
        if isinstance(module, Head):
            module.compile()


def _build_timing(rank: Rank, passes: Passes, split: Split) -> Timing:
    """Returns what measures the steps; the heartbeat writes the histograms now and then."""
    batch = rank.config.batch

    def data_wait_s() -> float:
        return passes.data_wait_s

    step_times = StepTimes(rank.run, rank.attempt, rank=rank.place.rank, host=rank.place.host, clock=rank.clock)
    rank.heartbeat.also = step_times.keep_when_due
    probe = PaceProbe(
        passes.ddp,
        rank.heartbeat,
        every=rank.config.health.pace_every_steps,
        data_wait_s=data_wait_s,
        on_device=rank.device.type != "cpu",
        # Weights are meant to make up for the speed of a rank; batches by length are equal work.
        work=split.work if batch.shares == "even" and not batch.by_length else 1.0,
    )
    return Timing(rank.clock, step_times=step_times, probe=probe, data_wait_s=data_wait_s)


def build_stepper(
    parts: Parts,
    objective: Objective,
    *,
    before_change: Callable[[], None],
    loss_scale: Sequence[float] | None = None,
) -> Stepper:
    """Returns what takes steps in this run's layout. Collective: DDP compares the ranks' parameters.

    Args:
        parts: what this rank computes with.
        objective: the loss around the model.
        before_change: called before parameters change: a copy of them may be running.
        loss_scale: state of the loss scale in the checkpoint.
    """
    scale = LossScale(parts.rank.device, loss_scale) if parts.rank.autocast is torch.float16 else None
    passes = _build_passes(parts, objective, factor=None if scale is None else scale.factor)
    return Stepper(parts.rank, passes, parts.optimizer, before_update=before_change, scale=scale)


def _build_passes(parts: Parts, objective: nn.Module, *, factor: torch.Tensor | None) -> Passes:
    """Returns forward and backward of a step's micro-batches, in the run's layout. Collective.

    Args:
        parts: what this rank computes with.
        objective: the loss around the model.
        factor: of the losses that are back-propagated; None for 1.
    """
    rank = parts.rank
    if rank.layout.is_replicated:
        module = TrainingModule(objective, stop=rank.stop, device=rank.device, autocast=rank.autocast, factor=factor)
        ddp = None
        # DDP copies gradients into its buckets and cuts compiled graphs, so a single rank does without.
        if rank.place.world_size > 1:
            ddp = build_ddp(module, ddp=rank.config.ddp, device=rank.device)
            if rank.config.ddp.comm == "bf16":
                send_bfloat16(ddp, module.stats_param)
        return ReplicaPasses(rank, module, ddp)
    parameters = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
    if parts.pipeline is None:
        return ShardPasses(rank, model=parts.model, objective=objective, parameters=parameters, factor=factor)
    return PipelinePasses(
        rank, parts.pipeline, model=parts.model, objective=objective, parameters=parameters, factor=factor
    )
