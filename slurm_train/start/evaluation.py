"""Runs that use checkpoints of another run: an evaluation, an evaluator that follows the run, continued texts.

Each is a separate run in the directory of the other run (`evaluations/`, `generations/`), with its code, model and
data. The checkpoint and the held-out samples are the identity of an evaluation: a second request for the same ones
refers to the same run, and other samples are another evaluation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_train.code.imports import import_from_snapshot
from slurm_train.config.compose import Composed, apply_words
from slurm_train.config.frozen import load_config
from slurm_train.config.program import program_of
from slurm_train.config.schema import (
    EMA,
    BatchSection,
    DdpSection,
    ParallelSection,
    RunConfig,
    RunSection,
    TrackSection,
)
from slurm_train.config.target import TARGET
from slurm_train.data.check import known_fingerprint
from slurm_train.errors import CheckpointError, ClusterError, ConfigError, RunError, SlurmTrainError
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.rundir.attempts import withdraw_result
from slurm_train.rundir.events import is_same_data
from slurm_train.rundir.files import make_folder
from slurm_train.rundir.paths import (
    RunDirectory,
    as_typed,
    existing_attempts,
    find_save,
    parse_name,
    require_private,
    save_path,
)
from slurm_train.rundir.pins import pin_save, release_pins, renew_lease
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import clear_dead_pins, refuse_active


def enter_run(folder: Path) -> RunDirectory:
    """Returns the run in a folder, and changes to the directory where the run was typed, for relative paths.

    Raises:
        RunError: other users may have written it.
    """
    # The path as it was typed: a link may lead elsewhere on the nodes.
    run = RunDirectory(as_typed(folder))
    # Its code runs as the user who types the command.
    require_private(run)
    directory = PlanRecord.read(run.plan).directory
    if directory and Path(directory).is_dir():
        os.chdir(directory)
    return run


def plan_evaluation(
    run: RunDirectory,
    checkpoint: Path,
    *,
    env: Mapping[str, str],
    settings: Sequence[str] = (),
    config_dir: str | None = None,
) -> RunPlan:
    """Returns the plan of an evaluation of one checkpoint on the held-out samples.

    Args:
        run: the run.
        checkpoint: the checkpoint that is evaluated.
        env: the environment.
        settings: settings of the command line.
        config_dir: folder with YAML files of the person.

    Raises:
        RunError: the run has no model and data of the built-in trainer.
        ConfigError: a setting is not possible.
    """
    alone = _on_saved_weights(run, checkpoint, "evaluations", settings)
    config = apply_words(alone, settings, config_dir=config_dir)
    return _planned(_with_heldout_samples(config, run, env), env)


def plan_texts(
    run: RunDirectory,
    checkpoint: Path,
    texts: dict[str, Any],
    *,
    env: Mapping[str, str],
    settings: Sequence[str] = (),
    config_dir: str | None = None,
) -> RunPlan:
    """Returns the plan of a run that continues texts.

    Args:
        run: the run.
        checkpoint: the checkpoint with the weights.
        texts: the texts and how they are continued, as `train.generate`.
        env: the environment.
        settings: settings of the command line.
        config_dir: folder with YAML files of the person.

    Raises:
        RunError: the run has no model and data of the built-in trainer.
        ConfigError: a setting is not possible, or a text cannot be continued in the layout.
    """
    alone = _on_saved_weights(run, checkpoint, "generations", settings)
    alone = replace(alone, callbacks=[], train=replace(alone.train, generate=texts))
    plan = _planned(apply_words(alone, settings, config_dir=config_dir), env)
    splits_positions = plan.config.parallel.sequence_parallel
    if plan.layout.pp * plan.layout.cp > 1 or splits_positions:
        by_positions = " with parallel.sequence_parallel=true" if splits_positions else ""
        raise ConfigError(
            f"a text cannot be continued in a layout of {plan.layout}{by_positions}",
            hint="leave parallel.pp and parallel.cp at 1, and sequence_parallel out; parallel.dp_shard and parallel.tp "
            "spread the weights",
        )
    return plan


def plan_following(
    run: RunDirectory,
    *,
    env: Mapping[str, str],
    settings: Sequence[str] = (),
    config_dir: str | None = None,
    name: str = "",
    scorer: str | None = None,
) -> RunPlan:
    """Returns the plan of an evaluator that follows a run.

    Args:
        run: the run.
        env: the environment.
        settings: settings of the command line.
        config_dir: folder with YAML files of the person.
        name: of the scores, "" for none.
        scorer: the setting that names a scorer of the person, e.g. "script=[score.py]".

    Raises:
        RunError: the run has no model and data of the built-in trainer, and there is no scorer.
        ConfigError: a setting is not possible, or a scorer would run on several ranks.
    """
    alone = _on_saved_weights(run, run.checkpoints, "evaluations", settings, needs_trainer=scorer is None)
    alone = replace(alone, train=replace(alone.train, follow=name))
    words = list(settings)
    if scorer is not None:
        alone = replace(alone, run=replace(alone.run, processes=1), task=None)
        words.append(scorer)
    config = apply_words(alone, words, config_dir=config_dir)
    plan = _planned(_with_heldout_samples(config, run, env), env)
    if scorer is not None and plan.world.num_ranks != 1:
        raise ConfigError(
            f"a scorer is called once per checkpoint, and {plan.world.num_ranks} ranks are asked for",
            hint="+cluster=1x1; the scorer may start processes itself",
        )
    return plan


def is_for_slurm(settings: Sequence[str]) -> bool:
    """Returns whether the settings ask for a cluster."""
    return any(word.lstrip("+").startswith("cluster=") for word in settings)


def require_trainer(run: RunDirectory) -> None:
    """Checks that a run has model and data of the built-in trainer.

    Raises:
        RunError: it is a task or script.
    """
    # A folder without a configuration is refused by whoever reads it.
    if run.config.is_file() and program_of(load_config(run.config)).name:
        raise RunError(
            f"{run.name}/{run.run_id} is a task or script of your own, which the built-in evaluation does not know",
            hint="`evaluate` and `generate` are for runs with model and data; `evaluate --follow --with "
            '"script=[score.py]"` calls a scorer of your own',
        )


def _on_saved_weights(
    run: RunDirectory, checkpoint: Path, name: str, settings: Sequence[str], *, needs_trainer: bool = True
) -> RunConfig:
    """Returns the run's configuration with its model and data, without the settings of its training."""
    if needs_trainer:
        require_trainer(run)
    trained = load_config(run.config)
    batch = PlanRecord.read(run.plan).batch
    return replace(
        trained,
        launch="slurm",
        run=RunSection(root=str(run.path), name=name, processes=trained.run.processes),
        batch=BatchSection(local_size=None if batch is None else batch.local_size, by_length=trained.batch.by_length),
        train=replace(
            trained.train,
            evaluate=True,
            eval_max_batches=None,
            evaluate_from=str(save_path(checkpoint)),
            generate=None,
            follow=None,
            init_from=None,
        ),
        ddp=DdpSection(),
        parallel=ParallelSection(),
        track=TrackSection(),
        callbacks=_averages(trained.callbacks),
        script=None,
        cluster=trained.cluster if is_for_slurm(settings) else None,
    )


def _averages(callbacks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the callbacks whose averaged weights the run's own evaluations measure, with their places; else none."""
    averages = [callback for callback in callbacks if callback.get(TARGET) == EMA]
    return averages if any(callback.get("evaluate") for callback in averages) else []


def _planned(config: RunConfig, env: Mapping[str, str]) -> RunPlan:
    return plan_run(Composed(config, {}, {}), cwd=Path.cwd(), env=env)


def _with_heldout_samples(config: RunConfig, run: RunDirectory, env: Mapping[str, str]) -> RunConfig:
    """Returns the configuration with the identity of the held-out samples, where the ranks read them."""
    data = program_of(config).used.data
    if data is None:
        return config
    fingerprint = _heldout_fingerprint(data, run, env, seed=config.seed)
    return replace(config, train=replace(config.train, evaluate_data=fingerprint))


def evaluations_of_other_samples(plan: RunPlan, run: RunDirectory) -> list[RunDirectory]:
    """Returns the evaluations of the same checkpoint whose held-out samples were others than those of a plan."""
    section = plan.config.train
    others: list[RunDirectory] = []
    if section.evaluate_data is None:
        return others
    for result in sorted(run.path.glob("evaluations/*/result.json")):
        evaluation = RunDirectory(result.parent)
        with contextlib.suppress(SlurmTrainError):
            measured = load_config(evaluation.config).train
            is_of_checkpoint = measured.evaluate_from == section.evaluate_from and measured.evaluate_data is not None
            if is_of_checkpoint and not is_same_data(str(measured.evaluate_data), section.evaluate_data):
                others.append(evaluation)
    return others


def _heldout_fingerprint(
    data: Mapping[str, Any], run: RunDirectory, env: Mapping[str, str], *, seed: int
) -> str | None:
    """Returns the identity of the held-out samples as this machine sees them; None where it cannot read them."""
    fingerprint = None
    if not {"heldout", "split"} & data.keys():
        fingerprint = known_fingerprint(data, cwd=Path.cwd(), split="heldout")
    if fingerprint is not None:
        return fingerprint
    import_from_snapshot(str(run.path), python_path=env.get("PYTHONPATH", ""))
    from slurm_train.data.build import build_source

    try:
        source = build_source(data, split="heldout", seed=seed)
        return None if source is None else source.fingerprint()
    except Exception:  # a user's own data set may raise any class; the ranks report the error
        return None


@contextlib.contextmanager
def pinned(plan: RunPlan, run: RunDirectory, commands: SlurmCommands) -> Iterator[None]:
    """Protects the checkpoint of a plan from removal while it is started; a submitted job keeps the protection.

    Raises:
        CheckpointError: the run has removed it meanwhile.
    """
    with contextlib.suppress(ClusterError):  # where Slurm does not answer, what is pinned stays
        clear_dead_pins(run, commands)
    save = Path(str(plan.config.train.evaluate_from))
    name = parse_name(find_save(save).name)
    # The run does not remove directories of other names, or outside of its own.
    is_new = name is not None and save.parent == run.checkpoints and pin_save(save.parent, name.save_id, plan.run)
    try:
        if not find_save(save).is_dir():
            raise CheckpointError(f"{save} was removed just now", hint="`checkpoint ls` shows what the run has")
        yield
    except BaseException:
        # Where a job of the same evaluation is active, the pin is that job's.
        if is_new:
            release_pins(plan.run)
        raise
    if not plan.config.is_submitted:
        release_pins(plan.run)


@contextlib.contextmanager
def leased(plan: RunPlan, run: RunDirectory, commands: SlurmCommands, *, most: int) -> Iterator[None]:
    """Keeps so many checkpoints without a score while an evaluator that follows the run is started, see `pinned`.

    Raises:
        RunError: the evaluator is active already.
    """
    evaluation = plan.run
    with contextlib.suppress(ClusterError):  # where Slurm does not answer, what is kept stays
        clear_dead_pins(run, commands)
        refuse_active(evaluation, commands)
    if evaluation.result.exists():
        # It had ended with the run, which may have gone on since.
        keep = evaluation.path / "before" / f"result_{len(existing_attempts(evaluation))}.json"
        make_folder(keep.parent, within=evaluation.path)
        withdraw_result(evaluation, keep)
    renew_lease(run.checkpoints, evaluation, most=most)
    try:
        yield
    except BaseException:
        release_pins(evaluation)
        raise
    if plan.config.is_submitted:
        # A job of the run that began meanwhile has seen no job of the follower.
        renew_lease(run.checkpoints, evaluation, most=most)
    else:
        release_pins(evaluation)
