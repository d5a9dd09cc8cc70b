"""One rank's way from a frozen configuration to an exit code, with the built-in trainer.

`train` is what the worker calls on every rank: parts, group, parallelism, resume, loop, last lines. Every part is made
by a `build_*` function and can be used without the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero, rank_in, size_of
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.division import Division
from slurm_train.checkpoint.load import (
    check_owners,
    load_rank_state,
    load_tensors,
    require_fit,
)
from slurm_train.checkpoint.local import LocalSaves, NodePlace
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.save import BackgroundSaver
from slurm_train.checkpoint.state import StagingBuffers, can_pin, names_of_groups, take_extra_states
from slurm_train.checkpoint.verify import share_of, verify
from slurm_train.config.batch import cut_equally, planned_lr, shares_by_weight, shares_in_words, total_steps
from slurm_train.config.frozen import config_hash
from slurm_train.config.parallel import stages_of
from slurm_train.config.schema import RunConfig
from slurm_train.config.target import TARGET, callable_target, instantiate
from slurm_train.data.batches import BatchStream, GlobalBatches, LengthBatches, MicroBatch, Prefetch, Split
from slurm_train.data.build import build_source, prefetch_depth
from slurm_train.data.order import SampleOrder
from slurm_train.data.source import Draw, SampleSource, lengths_of
from slurm_train.data.stream import StreamSource
from slurm_train.distributed.group import open_side_group, shutdown, use_timeout
from slurm_train.distributed.pipeline import Pipeline, keep_stages, split_stages
from slurm_train.distributed.seeds import seed_everything
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, ConfigError, DataError
from slurm_train.metrics import Display, open_display
from slurm_train.models.causal_lm import causal_lm
from slurm_train.models.first_weights import (
    NeedsMemoryError,
    build_in_host_memory,
    build_without_memory,
    defines_init_weights,
    fill,
    first_values,
    lower_parameters,
    without_memory,
)
from slurm_train.models.head import Head
from slurm_train.models.objective import Objective, default_loss
from slurm_train.rundir.attempts import check_fence
from slurm_train.rundir.events import SaveLog, append_event
from slurm_train.rundir.node_disk import open_private
from slurm_train.rundir.paths import RunDirectory, find_save, list_checkpoints
from slurm_train.rundir.timing import Spent, StepTimes
from slurm_train.session.stopping import Stopping
from slurm_train.train.callbacks import Callback, Monitor, build_callbacks
from slurm_train.train.compile_cache import CompileCache, mark_compilations, require_compiler
from slurm_train.train.context import Parts, Rank, gather
from slurm_train.train.ending import end_training, write_result
from slurm_train.train.evaluate import Evaluator, continue_texts
from slurm_train.train.health import Health, position_after_rollbacks
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.metrics import (
    PaceProbe,
    Recorder,
    flops_per_token,
    format_measures,
)
from slurm_train.train.optimizer import (
    begin_state,
    build_optimizer,
    build_schedule,
    can_call_kernel,
    require_rules_fit,
    to_training,
)
from slurm_train.train.position import Position
from slurm_train.train.saving import Checkpointer, build_continuity, build_save_pace
from slurm_train.train.step import (
    Passes,
    PinnedBatches,
    PipelinePasses,
    ReplicaPasses,
    ShardPasses,
    Stepper,
    TrainingModule,
    build_ddp,
    send_bfloat16,
    sent_bytes,
)
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
    clock, is_first = rank.clock, rank.place.is_first
    joining_s = clock()
    spent = Spent(begin_unix_s=time.time() - clock.away_s)
    if is_first:
        spent.write(rank.run.account(rank.attempt))
    rank.join()
    spent.add("rendezvous_s", clock() - joining_s)
    apply_parallelism(parts)
    if rank.config.train.evaluate_from is not None:
        return evaluate_checkpoint(parts, Path(rank.config.train.evaluate_from))
    display = open_display(sys.stderr, max_steps=rank.config.train.max_steps, env=rank.env) if is_first else None
    loading_s = clock()
    trainer = build_trainer(parts, callbacks=callbacks, display=display, spent=spent)
    spent.add("load_s", clock() - loading_s)
    try:
        finished = trainer.run()
        rank.heartbeat.mark("end")
    finally:
        if trainer.recorder is not None:
            trainer.recorder.close()
    end_training(trainer, parts, display, finished=finished)
    shutdown()
    return EXIT_DONE if finished else EXIT_REQUEUE


def evaluate_checkpoint(parts: Parts, save: Path) -> int:
    """Measures or uses the weights of a checkpoint and writes the result; returns the exit code. Collective.

    Args:
        parts: model and data.
        save: the checkpoint, by a path from `save_path`.

    Raises:
        ConfigError: texts are asked of a model that writes none, or their encoding is not known.
        DataError: there are no held-out samples, or other ones than when the evaluation was asked for.
        CheckpointError: the checkpoint does not verify, or belongs to another user.
        RunError: its weights do not fit the model.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    rank, group = parts.rank, dist.group.WORLD
    asked = rank.config.train.generate
    if asked is None and parts.heldout is None:
        raise DataError("the data have no held-out samples to evaluate", hint="set data.heldout, or take a `split`")
    fingerprint = None if parts.heldout is None else parts.heldout.fingerprint()
    expected = rank.config.train.evaluate_data
    if asked is None and expected not in (None, fingerprint):
        raise DataError(
            f"the held-out samples have changed since this was asked for: fingerprint {expected} -> {fingerprint}",
            hint="type the `evaluate` again: other samples are another evaluation",
        )
    state = get_model_state_dict(parts.model)

    def load(path: Path) -> Manifest:
        manifest = on_rank_zero(group, lambda: verify(path))
        on_every_rank(group, lambda: check_owners(path, share_of(manifest, rank_in(group), size_of(group))))
        modules = (load_rank_state(path, 0) or {}).get("modules")
        # Older checkpoints have extra states among the tensors.
        extra = {} if modules is None else take_extra_states(state)
        described = require_fit(path, state, is_stage=parts.pipeline is not None)
        load_tensors(path, {"model": state}, group=group, described=described)
        if modules is not None and extra:
            saved = {name: modules["extra"].get(name, value) for name, value in extra.items()}
            set_model_state_dict(parts.model, state | saved)
        return manifest

    while True:
        path = on_rank_zero(group, lambda: find_save(save))
        try:
            manifest = load(path)
            break
        except CheckpointError:
            # The run gives its checkpoints a new name when it resumes.
            if on_rank_zero(group, lambda: find_save(save)) == path:
                raise
    if asked is not None:
        found: dict[str, Any] | None = {"texts": continue_texts(rank, parts.model, **asked)}
    else:
        assert parts.heldout is not None
        objective = Objective(parts.model)
        found = Evaluator(rank=rank, objective=objective, source=parts.heldout, pipeline=parts.pipeline).evaluate()
    if found is not None and rank.place.is_first:
        facts = {"step": manifest.step, "samples": manifest.samples, **found, "checkpoint": str(path)}
        write_result(rank, facts)
        said = format_measures(found) if asked is None else f"{len(found['texts'])} texts"
        print(f"step {manifest.step}: {said}", file=sys.stderr, flush=True)
    shutdown()
    return EXIT_REQUEUE if found is None else EXIT_DONE


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
    says = rank.place.is_first and not rank.layout.is_replicated
    model = build_model(
        config,
        note=partial(print, file=sys.stderr) if says else lambda _text: None,
        ranks_on_node=rank.place.local_world_size,
    )
    load_start_weights(model, config, run=rank.run)
    require_rules_fit(model, optim=config.optim)
    part = rank.layout.data_parallel_index(rank.place.rank), rank.layout.data_parallel_size
    train_data = build_source(config.data, split="train", seed=config.seed, part=part)
    assert train_data is not None
    if isinstance(train_data, StreamSource):
        _refuse_for_streams(config)
    return Parts(
        rank=rank,
        model=model,
        optimizer=build_optimizer(model, optim=config.optim),
        train_data=train_data,
        heldout=build_source(
            config.data,
            split="heldout",
            seed=config.seed,
            note=partial(print, file=sys.stderr) if rank.place.is_first else lambda _text: None,
        ),
        flops_per_token=flops_per_token(model, positions=getattr(train_data, "context", 0)),
    )


def _refuse_for_streams(config: RunConfig) -> None:
    batch, train = config.batch, config.train
    for is_asked, what in (
        (train.max_epochs is not None, "train.max_epochs"),
        (batch.by_length, "batch.by_length"),
    ):
        if is_asked:
            raise ConfigError(
                f"{what} was asked, and the data are a stream, whose samples are neither counted nor read by number",
                hint=f"leave {what} out" + ("; train.max_steps=N" if what == "train.max_epochs" else ""),
            )


def build_model(
    config: RunConfig, *, note: Callable[[str], None] = lambda _text: None, ranks_on_node: int = 1
) -> nn.Module:
    """Returns the whole model, the same on every rank.

    Where the model's class defines `init_weights(name, part)`, or the weights are files of transformers, the parameters
    have no memory until `fill` gives it to them. Any other model has all its weights in host memory at once.

    Args:
        config: the run's.
        note: gets the reason in that case.
        ranks_on_node: how many ranks of this node build it at the same time.

    Raises:
        ConfigError: no model is configured, its target does not give an nn.Module, or there is not enough memory.
    """
    settings = _model_settings(config)
    target = callable_target(settings)
    build = partial(_instantiate_model, settings, config.seed)
    reason = "its class has no init_weights(self, name, part)"
    if target is causal_lm or defines_init_weights(target):
        try:
            return _lowered(build_without_memory(build, seed=config.seed), config)
        except NeedsMemoryError as err:
            reason = str(err)
    note(f"each rank builds all of {settings[TARGET]} in host memory: {reason}")
    model = build_in_host_memory(build, name=settings[TARGET], ranks_on_node=ranks_on_node)
    return _lowered(model, config)


def build_names_and_shapes(config: RunConfig) -> nn.Module:
    """Returns the model for its names and shapes; its parameters have no memory unless its constructor needs values.

    Raises:
        ConfigError: as `build_model`.
    """
    settings = _model_settings(config)
    try:
        with without_memory():
            return _lowered(_instantiate_model(settings, config.seed), config)
    except ConfigError:
        raise
    except Exception:  # a constructor that looks at values fails in many ways
        return build_model(config)


def _model_settings(config: RunConfig) -> dict[str, Any]:
    if not config.model:
        raise ConfigError("no model is configured", hint="choose one: model=gpt, or model._target_=my_package.MyModel")
    return config.model


def _instantiate_model(settings: Mapping[str, Any], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = instantiate(settings)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.{TARGET}={settings[TARGET]} gave a {type(model).__name__}, not a torch.nn.Module",
            hint="name a class that derives from torch.nn.Module",
        )
    return model


def _lowered(model: nn.Module, config: RunConfig) -> nn.Module:
    if config.train.param_dtype == "bfloat16":
        lower_parameters(model)
    return model


def build_filled_model(config: RunConfig, *, device: torch.device) -> nn.Module:
    """Returns the whole model with its first weights on a device.

    Raises:
        ConfigError: as `build_model`.
    """
    model = build_model(config)
    fill([model], first_values(model), device=device)
    return model


def load_start_weights(model: nn.Module, config: RunConfig, *, run: RunDirectory) -> None:
    """Lets a model begin with the weights of `train.init_from`, if it is set and no checkpoint has later ones.

    Raises:
        ConfigError: there are none, or they are another model's.
    """
    path = config.train.init_from
    if path is not None and not list_checkpoints(run.checkpoints):
        from slurm_train.models.pretrained import load_pretrained

        load_pretrained(model, Path(path).expanduser(), settings=config.model or {})


def apply_parallelism(parts: Parts) -> None:
    """Leaves this rank's part of the model with its first weights, and an optimizer of it. Collective over all ranks.

    Whole replicas get their weights, and their blocks change where activation checkpointing is asked for.

    Raises:
        ConfigError: the model does not say how it can be cut.
    """
    from slurm_train.distributed.parallelize import (
        build_mesh,
        gathers_in_bfloat16,
        has_own_loss,
        is_deep,
        parallelize,
        prepare_blocks,
        to_float8,
    )

    rank, model, config = parts.rank, parts.model, parts.rank.config
    if config.train.precision == "fp8":
        to_float8(model)
    layout, settings, values = rank.layout, config.parallel, first_values(model)
    # Each weight is progress: the supervisor's watchdog waits for what it knows of.
    fill_in = partial(fill, values=values, device=rank.device, progress=partial(rank.heartbeat.mark, "start"))
    if layout.is_replicated:
        fill_in([model])
        # What is fused depends on the device.
        parts.optimizer = build_optimizer(model, optim=config.optim)
        by_blocks = rank.compiles and is_deep(model)
        if by_blocks or settings.activation_checkpointing != "none":
            prepare_blocks(model, settings=settings, compiles=by_blocks)
        if config.ddp.find_unused_parameters:
            # A checkpoint is asked for the state of every parameter, of one that was never used as well.
            if not can_call_kernel(parts.optimizer):
                name = type(parts.optimizer).__name__
                raise ConfigError(
                    f"ddp.find_unused_parameters was asked, but {name} has no state for unused parameters",
                    hint="use optim=adamw or optim=sgd",
                )
            begin_state(parts.optimizer)
        return
    mesh = build_mesh(layout, device=rank.device)
    gathers_half = gathers_in_bfloat16(model, layout=layout, settings=settings, autocast=rank.autocast)
    rank.casts_shards = gathers_half and not has_own_loss(model)
    settings = replace(settings, gather_dtype="bfloat16" if gathers_half else "float32")
    roots = [model]
    if layout.pp > 1:
        parts.group_names = names_of_groups(model, parts.optimizer)
        place, per_rank = layout.coordinates(rank.place.rank).pp, settings.stages_per_rank
        stages, num_stages = stages_of(place, num_ranks=layout.pp, per_rank=per_rank), layout.pp * per_rank
        keep_stages(model, stages=stages, num_stages=num_stages)
        roots = split_stages(model, stages=stages, num_stages=num_stages)
        group = mesh["pp"].get_group()
        parts.pipeline = Pipeline(parts=roots, place=place, num_ranks=layout.pp, device=rank.device, group=group)
    parallelize(model, layout=layout, mesh=mesh, roots=roots, settings=settings, compiles=rank.compiles)
    fill_in([model, *roots], shards_device=torch.device("cpu") if settings.cpu_offload else None)
    use_timeout(rank.collective_timeout_s(config.train.start_timeout_s))
    # The parameters are other objects now.
    parts.optimizer = build_optimizer(model, optim=config.optim)
    if can_call_kernel(parts.optimizer):
        begin_state(parts.optimizer)


def build_trainer(parts: Parts, *, callbacks: Mapping[str, Callback], display: Display | None, spent: Spent) -> Trainer:
    """Returns the trainer at the newest checkpoint's position. Collective over all ranks.

    Long because it lists the trainer's parts in the order in which one needs the other.

    Args:
        parts: model, optimizer and data.
        callbacks: by the names of their states, in the order of their calls.
        display: rank 0's; None on the others.
        spent: what the start of this rank was spent on.
    """
    from slurm_train.distributed.parallelize import is_deep

    rank, config, layout = parts.rank, parts.rank.config, parts.rank.layout
    objective = Objective(parts.model)
    compile_cache = CompileCache(rank)
    compile_cache.load()
    if rank.compiles:
        mark_compilations(rank)
        _compile(parts.model, objective, is_whole=layout.is_replicated and not is_deep(parts.model))
    peak_lr = planned_lr(config.optim, global_size=rank.plan.global_size)
    checkpointer = build_checkpointer(parts, callbacks=callbacks, peak_lr=peak_lr)
    for callback in callbacks.values():
        callback.attach(parts)
    position, notes = checkpointer.resume()
    saved_samples = position.samples
    position.samples, num_rollbacks = position_after_rollbacks(rank.run, position, checkpointer.origin)
    size = {"num_samples": len(parts.train_data), "global_size": rank.plan.global_size}
    parts.max_steps = total_steps(config, **size, since=position.batch_since)
    batches = build_global_batches(rank, parts.train_data, position)
    if position.step == 0:
        seed_everything(config.seed, data_parallel_rank=layout.data_parallel_index(rank.place.rank))
    recorder = None
    if display is not None:
        for note in notes:
            display.say(note)
        recorder = _build_recorder(parts, display, spent, first_step=position.step)
    shares = cut_equally(rank.plan.global_size, rank.plan.ranks)
    if not isinstance(config.batch.shares, str) and rank.plan.ranks > 1 and position.step < parts.max_steps:
        shares = _weighted_shares(rank, config.batch.shares, display=display)
    split = Split(
        rank=layout.data_parallel_index(rank.place.rank),
        accumulation=rank.plan.accumulation,
        shares=shares,
    )
    if isinstance(parts.train_data, StreamSource):
        stream = parts.train_data
        stream.require_batches_of(split.micro_sizes)
        if display is not None and stream.reads_again:
            display.say(_note_reading_again(stream, is_resumed=checkpointer.stream_state is not None))
        stream.begin(
            samples=position.samples,
            state=checkpointer.stream_state,
            num_skipped=split.share_of(position.samples - saved_samples),
            draws=partial(draws_between, rank, batches, split),
        )
    stepper = build_stepper(
        parts,
        objective,
        before_change=checkpointer.buffers.hold_changes,
        loss_scale=position.loss_scale,
    )
    passes = stepper.passes
    evaluator = _build_evaluator(parts, objective, callbacks, display=display)
    global_size, growth = rank.plan.global_size, config.batch.growth
    total_samples = position.samples_at(parts.max_steps, global_size=global_size, growth=growth)
    step_times = StepTimes(rank.run, rank.attempt, rank=rank.place.rank, host=rank.place.host, clock=rank.clock)
    # The heartbeat writes them down now and then.
    rank.heartbeat.also = step_times.keep_when_due
    to_training(parts.optimizer)
    return Trainer(
        rank=rank,
        position=position,
        model=parts.model,
        max_steps=parts.max_steps,
        checkpointer=checkpointer,
        save_pace=build_save_pace(rank, start_step=position.step),
        global_batches=batches,
        batches=build_stream(rank, parts.train_data, batches, split, start_samples=position.samples),
        health=Health(
            rank,
            batches=batches,
            checkpointer=checkpointer,
            num_rollbacks=num_rollbacks,
            say=(lambda _: None) if display is None else display.say,
        ),
        stepper=stepper,
        schedule=build_schedule(config.optim, peak_lr=peak_lr, total_samples=total_samples),
        evaluator=evaluator,
        recorder=recorder,
        stopping=Stopping(
            rank.run,
            rank.attempt,
            rank.stop,
            spent=None if display is None else spent,
            group=lambda: dist.group.WORLD,
        ),
        step_times=step_times,
        probe=PaceProbe(
            passes.ddp,
            rank.heartbeat,
            every=config.health.pace_every_steps,
            data_wait_s=lambda: passes.data_wait_s,
            on_device=rank.device.type != "cpu",
            # Weights are meant to make up for the speed of a rank; batches by length are equal work.
            work=split.work if config.batch.shares == "even" and not config.batch.by_length else 1.0,
        ),
        callbacks=callbacks,
        compile_cache=compile_cache,
    )


def _weighted_shares(rank: Rank, weights: Sequence[float], *, display: Display | None) -> tuple[int, ...]:
    """Returns the samples of a global batch, rank by rank, in proportion to weights. Collective.

    Raises:
        BatchError: the weights do not fit the nodes and ranks of this attempt; on every rank alike.
    """
    places = gather((rank.place.node_rank, rank.place.host))
    ranks_per_node = Counter(places)
    shares = shares_by_weight(weights, rank.plan, ranks_per_node=list(ranks_per_node.values()))
    if display is not None:
        hosts = [host for _, host in ranks_per_node]
        sentence = shares_in_words(shares, ranks_per_node=list(ranks_per_node.values()), nodes=hosts)
        display.say(f"shares: {sentence}")
        append_event(rank.run, "shares", attempt=rank.attempt, sentence=sentence, sizes=list(shares))
    return shares


def _compile(model: nn.Module, objective: Objective, *, is_whole: bool) -> None:
    """Compiles model and loss, in place, so that names of parameters stay.

    Args:
        model: this rank's; evaluation calls it by itself.
        objective: the loss around it.
        is_whole: whether the whole model is one graph; the blocks of any other have been compiled one by one.
    """
    if is_whole:
        objective.compile()
        model.compile()
        return
    objective.default_loss = torch.compile(default_loss)
    for module in model.modules():
        if isinstance(module, Head):
            module.compile()


def _build_recorder(parts: Parts, display: Display, spent: Spent, *, first_step: int) -> Recorder:
    """Returns what records the steps of this attempt. Rank 0 only."""
    rank = parts.rank
    spent.first_step = first_step
    display.max_steps = parts.max_steps
    if rank.layout.is_replicated:
        _write_sent_bytes(rank, parts.model)
    return Recorder(
        rank,
        display=display,
        source=parts.train_data,
        spent=spent,
        flops_per_token=parts.flops_per_token,
        max_steps=None if rank.config.train.max_epochs is None else parts.max_steps,
    )


def _build_evaluator(
    parts: Parts, objective: Objective, callbacks: Mapping[str, Callback], *, display: Display | None
) -> Evaluator | None:
    """Returns what evaluates held-out samples; None without samples, or without a loss of them. Collective.

    Raises:
        ConfigError: evaluations do not give what callbacks look at.
    """
    evaluator = None
    if parts.heldout is not None and parts.rank.config.train.evaluate:
        evaluator = Evaluator(rank=parts.rank, objective=objective, source=parts.heldout, pipeline=parts.pipeline)
    _check_measures(parts, callbacks, evaluator)
    if evaluator is None or evaluator.gives_loss():
        return evaluator
    if display is not None:
        display.say(
            f"{type(parts.model).__name__} gives predictions and no loss in evaluation mode: held-out samples are "
            "not evaluated (define evaluation_sums(batch) on the model)"
        )
    return None


def _check_measures(parts: Parts, callbacks: Mapping[str, Callback], evaluator: Evaluator | None) -> None:
    """Checks, before the first step, that evaluations give what callbacks look at. Collective.

    Two samples are evaluated for it where a callback or a model's own evaluation_sums could be at odds.

    Raises:
        ConfigError: there are no held-out samples, or no measure of the name, or sums that are none.
    """
    monitors = [callback for callback in callbacks.values() if isinstance(callback, Monitor)]
    if evaluator is None:
        if monitors:
            raise ConfigError(
                "a callback compares evaluations, and the data have no held-out samples",
                hint="set data.heldout, or let the data set take a `split`; or leave the callback out",
            )
        return
    if not monitors and not hasattr(parts.model, "evaluation_sums"):
        return
    names = evaluator.try_out()
    for monitor in monitors:
        monitor.read(dict.fromkeys(names, 0.0))


def build_checkpointer(parts: Parts, *, callbacks: Mapping[str, Callback], peak_lr: float) -> Checkpointer:
    """Returns what saves and restores this run. Collective over all ranks."""
    rank, run, config, global_size = parts.rank, parts.rank.run, parts.rank.config, parts.rank.plan.global_size
    settings, optim = config.checkpoint, config.optim
    place = Place(
        root=run.checkpoints,
        attempt=rank.attempt,
        keep=settings.keep,
        fence=partial(check_fence, run, rank.attempt),
        is_leader=rank.place.is_first,
    )
    group = open_side_group(settings.save_timeout_s)
    return Checkpointer(
        parts=parts,
        callbacks=callbacks,
        continuity=build_continuity(
            run,
            config,
            global_size=global_size,
            data=parts.train_data.fingerprint(),
            num_samples=len(parts.train_data),
        ),
        config_hash=config_hash(config, global_size=global_size),
        lr={"peak": peak_lr, "retune": optim.lr_retune, "tuned_for_global_size": optim.lr_global_size},
        place=place,
        local=build_local_saves(rank, place),
        group=group,
        division=Division(group=group, stage=rank.layout.coordinates(rank.place.rank).pp),
        saver=BackgroundSaver(clock=rank.clock),
        buffers=StagingBuffers(rank.device),
        log=SaveLog(run, rank.attempt) if rank.place.is_first else None,
    )


def build_local_saves(rank: Rank, target: Place) -> LocalSaves | None:
    """Returns this rank's part in the fast tier, None where none is configured. Collective over all ranks.

    Args:
        rank: this rank.
        target: the run directory's checkpoints.

    Raises:
        ConfigError: `checkpoint.local_dir` names a variable that is not set.
        RunError: the folder is not there, or not this user's.
    """
    settings, place, run = rank.config.checkpoint, rank.place, rank.run
    if settings.local_dir is None:
        return None
    base = Path(expand(settings.local_dir, rank.env))
    path_hash = hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
    is_leader = place.local_rank == 0
    # Nodes that share the folder after all, a network mount say, do not share their files. A node keeps its folder
    # when it gets another place in the job.
    hosts = on_every_rank(dist.group.WORLD, lambda: (place.host, place.node_rank))
    alike = sorted({node for host, node in hosts if host == place.host})
    parts = (f"{run.name}-{run.run_id}-{path_hash}", f"{place.host}-{alike.index(place.node_rank)}")
    # One rank of a node makes the folder, and the others take it: its name may be a random one.
    key = "checkpoint.local_dir"
    opened = on_every_rank(
        dist.group.WORLD, lambda: (place.node_rank, str(open_private(base, *parts, key=key)) if is_leader else "")
    )
    node = NodePlace(
        root=Path(next(path for node, path in opened if path and node == place.node_rank)),
        node=place.node_rank,
        is_leader=is_leader,
        keep=settings.local_keep,
        attempt=rank.attempt,
        fence=target.fence,
        keeps_copies=rank.config.cluster is not None and rank.config.cluster.spare_nodes > 0,
    )
    return LocalSaves(
        run=run,
        place=node,
        target=target,
        copy_every=settings.copy_every,
        group=open_side_group(settings.save_timeout_s),
        thread=ThreadPoolExecutor(1, thread_name_prefix="copy"),
    )


def expand(path: str, env: Mapping[str, str]) -> str:
    """Returns a path with its $VARIABLES filled in, as this node has them.

    Raises:
        ConfigError: one of them is not set here.
    """
    full = Template(path).safe_substitute(env)
    if "$" in full:
        raise ConfigError(
            f"checkpoint.local_dir={path} names a variable that is not set on this node: {full}",
            hint="name a folder that every node has, e.g. /tmp",
        )
    return full


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
        before_change: called before parameters change: a copy of them may be under way.
        loss_scale: state of the loss scale in the checkpoint.
    """
    rank, model, optimizer = parts.rank, parts.model, parts.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scale = LossScale(rank.device, loss_scale) if rank.autocast is torch.float16 else None
    factor = None if scale is None else scale.factor
    how: dict[str, Any] = {"model": model, "objective": objective, "parameters": parameters, "factor": factor}
    passes: Passes
    if rank.layout.is_replicated:
        module = TrainingModule(objective, stop=rank.stop, device=rank.device, autocast=rank.autocast, factor=factor)
        ddp = None
        # DDP copies gradients into its buckets and cuts compiled graphs, so one rank does without.
        if rank.place.world_size > 1:
            ddp = build_ddp(module, ddp=rank.config.ddp, device=rank.device)
            if rank.config.ddp.comm == "bf16":
                send_bfloat16(ddp, module.stats_param)
        passes = ReplicaPasses(rank, module, ddp)
    elif parts.pipeline is None:
        passes = ShardPasses(rank, **how)
    else:
        passes = PipelinePasses(rank, parts.pipeline, **how)
    return Stepper(rank, passes, optimizer, before_update=before_change, scale=scale)


def build_global_batches(rank: Rank, source: SampleSource, position: Position) -> GlobalBatches:
    """Returns the samples of every step; moves the position to where a global batch begins.

    It is there already unless the lengths of the samples or the settings of the batch were changed on purpose.

    Raises:
        DataError: batches by length are asked of samples without lengths.
    """
    config, global_size = rank.config, rank.plan.global_size
    order = source.order if isinstance(source, StreamSource) else SampleOrder(len(source), seed=config.seed)
    batches = GlobalBatches(order, global_size=global_size)
    if config.batch.by_length:
        first, pool = position.batch_since[1], config.batch.pool
        batches = LengthBatches(order, lengths_of(source), global_size=global_size, pool_batches=pool, first=first)
    position.samples = batches.align(position.samples)
    return batches


def build_stream(
    rank: Rank, source: SampleSource, batches: GlobalBatches, split: Split, *, start_samples: int
) -> Iterator[MicroBatch]:
    """Returns this rank's micro-batches from a position on.

    Args:
        rank: this rank.
        source: the samples.
        batches: which of them every step takes.
        split: which of those are this rank's.
        start_samples: the position.

    Raises:
        ConfigError: they cannot be read ahead as asked.
    """
    stream: Iterator[MicroBatch] = BatchStream(source, batches.draws(split, start_samples=start_samples))
    depth = prefetch_depth(rank.config.data or {}, source)
    if depth and rank.device.type == "cuda" and can_pin():
        stream = PinnedBatches(stream, device=rank.device)
    return Prefetch(stream, depth=depth) if depth else stream


def draws_between(rank: Rank, batches: GlobalBatches, split: Split, first: int, last: int) -> Iterator[Draw]:
    """Yields this rank's micro-batches between two numbers of global samples, of steps of equal size."""
    num_steps = (last - first) // rank.plan.global_size
    return islice(batches.draws(split, start_samples=first), num_steps * split.accumulation)


def _note_reading_again(source: StreamSource, *, is_resumed: bool) -> str:
    reason = f"the stream {source.name} has no state that tells its next sample"
    if is_resumed:
        return f"{reason}: what was consumed is read again and passed over"
    return f"{reason}: a resume reads it again from the beginning of the pass, or of the run where it has no set_epoch"


def _write_sent_bytes(rank: Rank, model: nn.Module) -> None:
    """Records how many bytes of gradients a step sends where ranks hold whole replicas. Rank 0 only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    comm = rank.config.ddp.comm
    facts = {
        "comm": comm,
        "gradient_bytes": sent_bytes(parameters, comm="none"),
        "sent_bytes": sent_bytes(parameters, comm=comm),
    }
    # A file system that refuses costs a figure, never the run.
    with contextlib.suppress(OSError):
        append_event(rank.run, "exchange", attempt=rank.attempt, **facts)
