"""The run of an `evaluate` or a `generate`: the weights of a checkpoint are measured or used, not trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero, rank_in, size_of
from slurm_train.checkpoint.choice import check_owners
from slurm_train.checkpoint.division import OTHERS
from slurm_train.checkpoint.earlier import EXTRA, as_now
from slurm_train.checkpoint.load import load_rank_state, load_tensors, require_fit
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.state import (
    local_part,
    make_buffers,
    model_state,
    restore_model_state,
    take_extra_states,
)
from slurm_train.checkpoint.training import MADE_BUFFERS, of_model
from slurm_train.checkpoint.verify import read_manifest, share_of, verify
from slurm_train.config.schema import measured_average
from slurm_train.distributed.group import shutdown
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, DataError
from slurm_train.evaluation.texts import continue_texts
from slurm_train.models.objective import Objective
from slurm_train.rundir.events import is_same_data
from slurm_train.rundir.paths import find_save
from slurm_train.train.build import build_alone, join
from slurm_train.train.context import Parts, Rank
from slurm_train.train.ending import write_result
from slurm_train.train.evaluate import Evaluator
from slurm_train.train.held import hold
from slurm_train.train.metrics import format_measures
from slurm_train.train.optimizer import averages_itself


def evaluate_checkpoint(rank: Rank) -> int:
    """Measures or uses the weights of the checkpoint `train.evaluate_from`, and writes the result. All ranks call it.

    Returns:
        EXIT_DONE, or EXIT_REQUEUE where a stop has interrupted the evaluation.

    Raises:
        ConfigError: texts are wanted from a model that writes none, or their encoding is not known.
        DataError: there are no held-out samples, or other ones than when the evaluation was typed.
        CheckpointError: the checkpoint does not verify, or belongs to another user.
        RunError: its weights do not fit the model.
    """
    parts = join(*build_alone(rank))[0]
    rank = parts.rank
    texts_wanted = rank.config.train.generate
    if texts_wanted is None:
        require_same_samples(parts)
    path, manifest = load_weights(parts, Path(str(rank.config.train.evaluate_from)))
    values: dict[str, Any] | None
    if texts_wanted is not None:
        texts = continue_texts(parts, **texts_wanted)
        values = {"texts": texts}
        summary = f"{len(texts)} texts"
    else:
        values = measure(parts)
        summary = f"{_whose(parts)}{format_measures(values or {})}"
    if values is not None and rank.place.is_first:
        facts = {"step": manifest.step, "samples": manifest.samples, **values, "checkpoint": str(path)}
        write_result(rank, facts)
        rank.say(f"step {manifest.step}: {summary}")
    shutdown()
    return EXIT_REQUEUE if values is None else EXIT_DONE


def require_same_samples(parts: Parts) -> None:
    """Checks that the held-out samples are those of which the evaluation was typed.

    Raises:
        DataError: there are none, or other ones.
    """
    if parts.heldout is None:
        raise DataError("the data have no held-out samples to evaluate", hint="set data.heldout, or take a `split`")
    fingerprint = parts.heldout.fingerprint()
    expected = parts.rank.config.train.evaluate_data
    if expected is not None and not is_same_data(expected, fingerprint):
        raise DataError(
            f"the held-out samples have changed since this was asked for: fingerprint {expected} -> {fingerprint}",
            hint="type the `evaluate` again: other samples are another evaluation",
        )


def measure(parts: Parts) -> dict[str, float] | None:
    """Returns the measures of the model as it is now, None where a rank was asked to stop. Collective."""
    assert parts.heldout is not None
    held = hold(parts, Objective(parts.model))
    return Evaluator(rank=parts.rank, held=held, source=parts.heldout).evaluate()


def load_weights(parts: Parts, save: Path) -> tuple[Path, Manifest]:
    """Loads the weights of a checkpoint; returns where it lies now, and its manifest. Collective.

    Args:
        parts: has the model.
        save: the checkpoint, by a path from `save_path`.

    Raises:
        CheckpointError: the checkpoint does not verify, or belongs to another user.
        RunError: its weights do not fit the model.
    """
    group = dist.group.WORLD
    while True:
        path = on_rank_zero(group, lambda: find_save(save))
        try:
            return path, _load(parts, path)
        except CheckpointError:
            # The run gives its checkpoints a new name when it resumes.
            if on_rank_zero(group, lambda: find_save(save)) == path:
                raise


def _load(parts: Parts, path: Path) -> Manifest:
    group = dist.group.WORLD
    manifest = on_rank_zero(group, lambda: verify(path))
    share = share_of(manifest, rank_in(group), size_of(group))
    files: dict[str, Any] = {}

    def read_files() -> None:
        check_owners(path, share)
        files["rank state"] = load_rank_state(path, 0) or {}
        files["metadata"] = read_metadata(path)

    # The name may change at any moment, and it may be one rank alone that finds a file gone.
    on_every_rank(group, read_files)
    extra_states = as_now(files["rank state"]).get(EXTRA)
    is_stage = parts.pipeline is not None
    described = files["metadata"]
    fill_model(
        parts.model, path, manifest, extra_states=extra_states, group=group, is_stage=is_stage, described=described
    )
    name = measured_average(parts.rank.config.callbacks)
    if name is not None:
        _take_average(parts.model, path, name, described=described)
    return manifest


@torch.no_grad()
def _take_average(model: nn.Module, path: Path, name: str, *, described: Any) -> None:
    """Puts averaged weights of a checkpoint into a model in place of the trained ones. Collective.

    A checkpoint from before the callback was there has none; an average begins with the trained weights.

    Args:
        model: whole, or what this rank has of it.
        path: the checkpoint.
        name: of the callback's state.
        described: what `read_metadata` has returned for the checkpoint.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    place = (OTHERS, name, "average")
    stored = {saved[3] for saved in (described.planner_data or {}).values() if saved[:3] == place}
    if not stored:
        return
    average = {
        key: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        for key, parameter in parameters.items()
        if key in stored
    }
    state = {OTHERS: {name: {"average": average}}} if average else {}
    load_tensors(path, state, group=dist.group.WORLD, described=described)
    for key, tensor in average.items():
        local_part(parameters[key].detach()).copy_(local_part(tensor))


def _whose(parts: Parts) -> str:
    """Returns which weights were measured, where there could be others."""
    if measured_average(parts.rank.config.callbacks) is not None:
        return "averaged weights, as in the training's own evaluations: "
    if averages_itself(parts.optimizer):
        return "the weights as they are saved, averaged ones only at the end of a run: "
    return ""


def load_model(model: nn.Module, path: Path) -> None:
    """Fills a whole model with the weights of a checkpoint, in one process.

    Raises:
        CheckpointError: the checkpoint does not verify, or belongs to another user.
        RunError: its weights do not fit the model.
    """
    manifest = verify(path)
    check_owners(path, manifest.files)
    extra_states = as_now(load_rank_state(path, 0) or {}).get(EXTRA)
    fill_model(model, path, manifest, extra_states=extra_states)


def require_same_weights(model: nn.Module, path: Path) -> None:
    """Checks that a checkpoint holds the weights of a whole model; its tensors are not read.

    Raises:
        CheckpointError: a file cannot be read.
        RunError: it does not.
    """
    extra_states = as_now(load_rank_state(path, 0) or {}).get(EXTRA)
    _matching_state(model, path, read_manifest(path), extra_states=extra_states, described=read_metadata(path))


def fill_model(
    model: nn.Module,
    path: Path,
    manifest: Manifest,
    *,
    extra_states: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None = None,
    is_stage: bool = False,
    described: Any = None,
) -> None:
    """Fills a model with the weights of a verified checkpoint, and its modules with their own states. Collective.

    Args:
        model: whole, or what this rank has of it.
        path: the checkpoint.
        manifest: its manifest.
        extra_states: what modules of rank 0 have saved by `get_extra_state`; None in an older checkpoint.
        group: all ranks; None for one process.
        is_stage: see `require_fit`.
        described: what `read_metadata` has returned for it, where the caller has it.

    Raises:
        CheckpointError: a file cannot be read.
        RunError: the weights do not fit the model.
    """
    described = described or read_metadata(path)
    state, extra = _matching_state(
        model, path, manifest, extra_states=extra_states, is_stage=is_stage, described=described
    )
    load_tensors(path, {"model": state}, group=group, described=described)
    if extra_states is not None and extra:
        restored = {name: extra_states.get(name, value) for name, value in extra.items()}
        restore_model_state(model, state | restored)


def _matching_state(
    model: nn.Module,
    path: Path,
    manifest: Manifest,
    *,
    extra_states: Mapping[str, Any] | None,
    is_stage: bool = False,
    described: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes the buffers that the training has made; returns the tensors to be filled, and the modules' own states."""
    # Imported late, since it takes long.
    from slurm_train.checkpoint.tensors import tensor_shapes

    saved = of_model(tensor_shapes(path, described=described))
    make_buffers(model, manifest.extra.get(MADE_BUFFERS, []), saved=saved)
    state = model_state(model)
    # Older checkpoints have extra states among the tensors.
    extra = {} if extra_states is None else take_extra_states(state)
    require_fit(path, state, is_stage=is_stage, described=described)
    return state, extra
