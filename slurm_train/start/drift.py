"""Compares a planned start with the checkpoint of the run: differences are reported, and refused until accepted.

Everything is compared with the newest checkpoint, which records the settings, the code and the data of its training. A
run without a checkpoint may change in any way. Nothing here writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.code.snapshot import (
    MOST_CHANGES_SHOWN,
    Code,
    FileChange,
    Source,
    compare_code,
    digest_code,
    live_code,
    matters,
    may_be_written,
    names_own_code,
    read_index,
)
from slurm_train.config.frozen import Change, all_changes, in_words, is_below, load_config, unaccepted
from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig, all_keys, unknown_key_error
from slurm_train.data.check import known_fingerprint
from slurm_train.errors import CheckpointError, ConfigError, RunError, SlurmTrainError
from slurm_train.formatting import shorten
from slurm_train.plan.plan import RunPlan
from slurm_train.rundir.events import AcceptedChange, covers_code, covers_config, covers_data, read_changes
from slurm_train.rundir.files import read_json
from slurm_train.rundir.lookup import is_own, list_runs
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlannedBatch, PlanRecord

if TYPE_CHECKING:
    from slurm_train.checkpoint.manifest import Manifest

_MOST_SHOWN = 20
# If a run differs from a new one in more settings, it is another experiment.
_MOST_DIFFERENCES = 3


def refuse_finished(run: RunDirectory, before: RunConfig, now: RunConfig, *, accept: Collection[str]) -> None:
    """Refuses to resume a run that is finished, unless it is to be trained longer.

    Args:
        run: the run.
        before: its configuration.
        now: the configuration with which it is to continue.
        accept: what the person accepts; of a run that a callback has ended, any change.

    Raises:
        RunError: there is nothing to resume.
    """
    if not run.result.exists():
        return
    ended_early = (read_json(run.result) or {}).get("ended_early")
    has_more_steps = now.train.max_steps > before.train.max_steps
    has_other_epochs = now.train.max_epochs != before.train.max_epochs
    program = program_of(before)
    # A program that has saved nothing here has nothing to go on from.
    can_go_on = program.saves or newest_manifest(run) is not None
    has_other_words = can_go_on and (now.script, now.task) != (before.script, before.task)
    if has_more_steps or has_other_epochs or has_other_words or (ended_early and accept):
        return
    reason = f" ({ended_early})" if ended_early else ""
    key = "callbacks=[] --accept callbacks; " if ended_early else ""
    longer = f"to train it longer: {program.to_train_longer.replace('{with}', key)}; " if can_go_on else ""
    raise RunError(
        f"{run.name}/{run.run_id} is finished{reason}; there is nothing to resume",
        hint=f"{longer}another run of the same: the first command again with run.name=NAME, or seed=N",
    )


def check_drift(
    plan: RunPlan, source: Source | None, *, accept: Collection[str], say: Callable[[str], None]
) -> AcceptedChange | None:
    """Returns the change to record before the run continues as planned; None if it is the same training.

    Args:
        plan: the plan by which it is to continue.
        source: the code with which it is to continue; None for its own snapshot.
        accept: what the person accepts: keys or sections of the configuration, "config", "code", "data".
        say: prints a line for the person: settings that differ and do not change what is trained.

    Raises:
        RunError: it would not be the same training and that was not accepted, or the checkpoint does not fit.
    """
    check_names(accept)
    if any(is_below("batch.global_size", name) for name in accept):
        # The batch size for which the learning rate was tuned changes with it, see `replan_run`.
        accept = {*accept, "optim.lr_global_size"}
    run = plan.run
    manifest = newest_manifest(run)
    frozen = _read_frozen(run)
    if frozen is None or manifest is None:
        return None
    # Changes that were accepted earlier may be in no checkpoint yet.
    accepted_before = read_changes(run)
    config = [
        change
        for change in _compare_config(plan, *frozen, manifest=manifest)
        if change.kind == "harmless" or not covers_config(accepted_before, change.key, change.new)
    ]
    impossible = [change for change in config if change.kind == "impossible"]
    if impossible:
        raise RunError(
            f"the checkpoint of {run.name}/{run.run_id} (step {manifest.step}) does not fit another shape of the "
            "model or another optimizer:\n"
            + _rows((change.key, str(change).partition(": ")[2]) for change in impossible),
            hint="start another run with run.name=NAME",
        )
    code, old_code, new_code = _compare_code(plan, source)
    if covers_code(accepted_before, new_code):
        code = []
    data = plan.program.used.data
    old_data = manifest.data_fingerprint
    new_data = known_fingerprint(data or {}, cwd=Path(plan.directory)) or old_data
    has_other_data = new_data != old_data and not covers_data(accepted_before, old=old_data, new=new_data)
    accepts_data = any(is_below(name, "data") for name in accept)

    rows = []
    for change in unaccepted(config, accept):
        consequence = f"  ({change.consequence})" if change.consequence else ""
        rows.append((change.key, str(change).partition(": ")[2] + consequence))
    rows += [("code", str(change)) for change in code if "code" not in accept]
    if has_other_data and not accepts_data:
        rows.append(("data", f"fingerprint {old_data} -> {new_data}"))
    if rows:
        raise RunError(
            f"{run.name}/{run.run_id} has been trained up to step {manifest.step}; from there on it would be trained "
            f"differently:\n{_rows(rows)}",
            hint=_ways_on(run, dict.fromkeys(name for name, _ in rows), code),
        )
    harmless = [change for change in config if change.kind == "harmless"]
    for change in harmless[:_MOST_SHOWN]:
        say(f"{change} (does not change what is trained)")
    accepted = AcceptedChange(
        number=max((item.number for item in accepted_before), default=0) + 1,
        step=manifest.step,
        config={change.key: [change.old, change.new] for change in config if change.kind == "training"},
        code={"old": old_code, "new": new_code, "files": list(map(str, code))} if code else None,
        data={"old": old_data, "new": new_data if has_other_data else ""} if accepts_data else None,
    )
    return accepted if accepted.names else None


def _ways_on(run: RunDirectory, names: Iterable[str], code: Iterable[FileChange]) -> str:
    """Returns what to type where a run would be trained differently: the names to accept, and files that changed."""
    accepted = ",".join(names)
    hint = f"to go on with that: --accept {accepted}; to go on as it was: `resume {run.run_id}`; "
    hint += "to start another run: run.name=NAME"
    if accepted == "code" and all(may_be_written(change.name) for change in code):
        hint += "; what the program writes belongs into its run directory ($SLURM_TRAIN_RUN_DIR), or .gitignore"
    return hint


def check_names(accept: Collection[str]) -> None:
    """Refuses a name of `--accept` that is no key.

    Raises:
        ConfigError: there is no such key, with the nearest ones.
    """
    names = ["config", "code", *all_keys(RunConfig)]
    for name in accept:
        if name not in names and not name.startswith(("model.", "data.", "task.", "optim.")):
            error = unknown_key_error(name, names)
            raise ConfigError(f"--accept {name}: there is no such key", hint=f"{error.hint} Or: config, code, data")


def newest_manifest(run: RunDirectory) -> Manifest | None:
    """Returns the manifest of the newest complete checkpoint; None if there is none."""
    if not run.checkpoints.exists():
        return None
    # Imported only if there is a checkpoint: without the import a new run has its job id 5 ms earlier.
    from slurm_train.checkpoint.verify import read_manifest, survey

    for _, manifest in survey(run.checkpoints, read_manifest):
        if not isinstance(manifest, CheckpointError):
            return manifest
    return None


def similar_run_notes(plan: RunPlan) -> list[str]:
    """Returns lines about the newest unfinished run of this name if a new run differs from it only slightly."""
    if plan.run.path.exists():
        return []
    runs = [run for run in list_runs(plan.run.place) if run.name == plan.run.name and is_own(run)]
    if not runs or runs[0].result.exists():
        return []
    newest = runs[0]
    try:
        frozen = _read_frozen(newest)
        manifest = newest_manifest(newest)
        if frozen is None or manifest is None:
            return []
        changes = _compare_config(plan, *frozen, manifest=manifest)
    except SlurmTrainError:
        return []
    trained = [change for change in changes if change.kind != "harmless"]
    if not 0 < len(trained) <= _MOST_DIFFERENCES:
        return []
    # This imports Hydra, which was loaded already to compose a new run.
    from slurm_train.config.compose import spelled

    differences = [f"{change.key}={in_words(change.old)} instead of {in_words(change.new)}" for change in trained]
    notes = [
        f"a new run; {newest.name}/{newest.run_id} (unfinished, step {manifest.step}) has {', '.join(differences)}"
    ]
    if all(change.kind == "training" for change in trained):
        words = shlex.join(f"{change.key}={spelled(change.new)}" for change in trained)
        names = ",".join(change.key for change in trained)
        notes.append(f"to continue that one with the change: resume {newest.run_id} {words} --accept {names}")
    return notes


def changed_files(run: RunDirectory, config: RunConfig, directory: Path) -> str:
    """Returns which files have changed since the run copied them, e.g. "mine.py: +2 -1"; "" if none is known.

    Args:
        run: the run.
        config: its configuration.
        directory: where its command is typed now; files of another folder are not compared.
    """
    index = read_index(run)
    if index is None or PlanRecord.read(run.plan).directory != str(directory):
        return ""
    folders = {**(read_json(run.code_index) or {}).get("folders", {}), "": str(directory)}
    changes = compare_code(Code(index, run.code.joinpath), live_code(run, folders))
    changes = [change for change in changes if matters(change.name, is_own_code=names_own_code(config))]
    return shorten(map(str, changes), MOST_CHANGES_SHOWN)


def changed_code_notes(run: RunDirectory, config: RunConfig, directory: Path) -> list[str]:
    """Returns lines about files that have changed since the run copied its code; none if no change is known."""
    changed = changed_files(run, config, directory)
    if not changed:
        return []
    return [
        f"your files have changed since this run copied them: {changed}",
        f"it goes on with its copy; to take the files as they are now: resume {run.run_id} --accept code",
    ]


def _read_frozen(run: RunDirectory) -> tuple[RunConfig, PlannedBatch] | None:
    batch = PlanRecord.read(run.plan).batch
    return None if batch is None or not run.config.exists() else (load_config(run.config), batch)


def _compare_config(plan: RunPlan, config: RunConfig, old_batch: PlannedBatch, *, manifest: Manifest) -> list[Change]:
    trained = manifest.extra.get("settings")
    return all_changes(
        config,
        plan.config,
        old_global_size=old_batch.global_size,
        new_global_size=plan.batch.global_size,
        trained=trained if isinstance(trained, dict) else None,
    )


def _compare_code(plan: RunPlan, source: Source | None) -> tuple[list[FileChange], str, str]:
    """Returns the changed files that could affect a run, and the digests of the old and the new code."""
    old_index = read_index(plan.run)
    if source is None or old_index is None:
        return [], "", ""
    new_code = source.code()
    is_own_code = names_own_code(plan.config)
    changes = [
        change
        for change in compare_code(Code(old_index, plan.run.code.joinpath), new_code)
        if matters(change.name, is_own_code=is_own_code)
    ]
    old_digest = digest_code(old_index, is_own_code=is_own_code)
    new_digest = digest_code(new_code.index, is_own_code=is_own_code)
    return changes, old_digest, new_digest


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    shown = list(rows)
    width = max(len(name) for name, _ in shown)
    lines = [f"  {name:<{width}}  {text}" for name, text in shown]
    num_hidden = len(lines) - _MOST_SHOWN
    if num_hidden > 0:
        lines = [*lines[:_MOST_SHOWN], f"  and {num_hidden} more"]
    return "\n".join(lines)
