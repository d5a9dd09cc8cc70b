"""What a training leaves when it ends: the result of a finished run, and on rank 0 a few lines for the person."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from slurm_train.checkpoint.load import saved_weights, weights_digest
from slurm_train.data.stream import StreamSource
from slurm_train.rundir.attempts import publish_result
from slurm_train.rundir.paths import list_checkpoints, name_of
from slurm_train.rundir.sweep import sweep_of
from slurm_train.train.context import Parts, Rank
from slurm_train.train.metrics import format_measures
from slurm_train.train.texts import say_text
from slurm_train.train.trainer import Trainer


def end_training(trainer: Trainer, *, finished: bool) -> None:
    """Writes the result and says how the run ended; on rank 0. Collective where ranks hold parts of the weights."""
    parts = trainer.parts
    rank = parts.rank
    is_whole = rank.layout.is_replicated
    # Of what is sharded every rank gives its part; a digest of a replica is rank 0's own business.
    takes_part = finished and (rank.place.is_first or not is_whole)
    digest = _digest_weights(parts, step=trainer.position.step) if takes_part else ""
    if not rank.place.is_first:
        return
    if not finished:
        say_stopped(trainer)
        return
    position = trainer.position
    facts = {"step": position.step, "samples": position.samples, "loss": position.loss, **trainer.measures}
    early = {"ended_early": position.ended} if position.ended else {}
    write_result(rank, {**facts, "weights_digest": digest, **early})
    if isinstance(parts.train_data, StreamSource) and parts.train_data.num_short:
        rank.say(f"{parts.train_data.num_short} micro-batches of rank 0 were shorter: the last ones of a pass")
    if trainer.stepper.passes.num_cut:
        rank.say(f"{trainer.stepper.passes.num_cut} samples of rank 0 were cut to the model's positions")
    say_finished(trainer, has_heldout=parts.heldout is not None)
    say_text(
        rank.say,
        parts.model,
        train=parts.train_data,
        heldout=parts.heldout,
        # One rank alone cannot run a model that is spread over several.
        num_tokens=rank.config.train.sample_tokens if is_whole else 0,
    )


def _digest_weights(parts: Parts, *, step: int) -> str:
    """Returns the identity of all weights at the end, on rank 0. Collective where ranks hold parts of them."""
    if parts.group_names is None:
        return weights_digest(parts.model.named_parameters())
    if not parts.rank.place.is_first:
        return ""
    # No rank has a way to the parameters of all stages but the checkpoint that was just saved.
    names = [name for group in parts.group_names for name in group]
    checkpoints = list_checkpoints(parts.rank.run.checkpoints)
    return weights_digest(saved_weights(next(path for path in checkpoints if name_of(path).step == step), names))


def write_result(rank: Rank, values: Mapping[str, Any]) -> None:
    """Writes result.json, which says that the run is finished.

    Raises:
        RunError: a newer attempt has taken over; the result is that attempt's.
    """
    facts = {"attempt": rank.attempt, "world_size": rank.place.world_size, "time_unix_s": time.time()}
    publish_result(rank.run, rank.attempt, {**values, **facts})


def say_finished(trainer: Trainer, *, has_heldout: bool) -> None:
    """Prints the held-out numbers, where everything is, and what to do next."""
    say = trainer.rank.say
    nothing = "nothing was evaluated"
    if not has_heldout:
        nothing += ", the data have no held-out samples (set data.heldout, or take a `split`)"
    say(f"finished step {trainer.position.step}: {format_measures(trainer.measures) or nothing}")
    if trainer.position.empty_steps:
        say(f"nothing was learned in {trainer.position.empty_steps} steps in which no item counted")
    if trainer.position.ended:
        say(f"ended early: {trainer.position.ended}")
    say(f"run directory: {trainer.rank.run.path}")
    if sweep_of(trainer.rank.run) is not None:
        return  # The sweep says what is next, once.
    say(f"next: python -m slurm_train status {trainer.rank.run.run_id}")
    say("      to repeat with another seed: the same words with seed=N or run.name=NAME")


def say_stopped(trainer: Trainer) -> None:
    """Prints where the run stopped and how it goes on."""
    say = trainer.rank.say
    config = trainer.rank.config
    resume = f"python -m slurm_train resume {trainer.rank.run.run_id}"
    if trainer.stops.not_saved:
        why = f"{trainer.stops.not_saved}; the run will continue from its newest checkpoint"
        say(f"stopped at step {trainer.position.step} without a save: {why}")
    else:
        say(f"stopped at step {trainer.position.step}; everything is saved in {trainer.rank.run.path}")
    # The job is requeued after a preemption or a time limit; a rank does not know which it was.
    if config.is_submitted and config.requeue.enabled:
        say("next: nothing to do after a preemption or at the time limit: the job is requeued automatically")
        say(f"      after a cancel: {resume}")
    else:
        say(f"next: {resume}")
