"""What a command line would change in a run that has been trained already: shown, and refused until it is accepted.

Everything is compared with the newest checkpoint, which keeps the settings, the code and the data it was trained with.
A run without a checkpoint has nothing to protect. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.checkpoint.directory import read_manifest, survey
from slurm_train.cli.terminal import note
from slurm_train.config.frozen import Change, all_changes, is_below, load_config, unaccepted
from slurm_train.config.schema import RunConfig, all_keys, unknown_key_error
from slurm_train.data.shards import known_fingerprint
from slurm_train.errors import CheckpointError, ConfigError, RunError, SlurmTrainError
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.snapshot import (
    FileChange,
    Source,
    compare_code,
    digest_code,
    index_code,
    live_file,
    matters,
    names_own_code,
    read_index,
    shorten,
)
from slurm_train.rundir.events import AcceptedChange, covers_code, covers_config, covers_data, read_changes
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lookup import list_runs

if TYPE_CHECKING:
    from slurm_train.checkpoint.manifest import Manifest

_MOST_SHOWN = 20
_ALIKE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What a plan and a working tree have that the run was not trained with."""

    step: int
    """Step of the newest checkpoint."""
    config: list[Change]
    code: list[FileChange]
    old_code: str
    new_code: str
    data: tuple[str, str] | None
    """Fingerprints of the data set, old and new, where a login node can tell that they differ."""


def check_drift(plan: RunPlan, source: Source | None, *, accept: Collection[str]) -> AcceptedChange | None:
    """Returns what has to be put on record before the run goes on as planned; None where it is the same training.

    Args:
        plan: how it shall go on.
        source: the code it shall go on with; None for its own snapshot.
        accept: what the person accepts: keys or sections of the configuration, "config", "code", "data".

    Raises:
        RunError: it would not be the same training, and that was not accepted; or it cannot be.
    """
    check_names(accept)
    if any(is_below("batch.global_size", name) for name in accept):
        # The batch that the learning rate was tuned for goes with it, see `replan_run`.
        accept = {*accept, "optim.lr_global_size"}
    manifest = newest_manifest(plan.run)
    before = _read_before(plan.run)
    if before is None or manifest is None:
        return None
    known = read_changes(plan.run)
    found = _not_accepted_before(_compare(plan, source, *before, manifest=manifest), known)
    _refuse_impossible(plan.run, found)
    _refuse_unaccepted(plan.run, found, accept)
    _say_harmless(found)
    trained = {change.key: [change.old, change.new] for change in found.config if change.kind == "training"}
    accepts_data = any(is_below(name, "data") for name in accept)
    new_data = "" if found.data is None else found.data[1]
    change = AcceptedChange(
        number=max((item.number for item in known), default=0) + 1,
        step=found.step,
        config=trained,
        code={"old": found.old_code, "new": found.new_code, "files": [str(c) for c in found.code]}
        if found.code
        else None,
        data={"old": manifest.data_fingerprint, "new": new_data} if accepts_data else None,
    )
    return change if change.names else None


def check_names(accept: Collection[str]) -> None:
    """Refuses a name that nothing could be accepted by.

    Raises:
        ConfigError: as said, with the nearest ones.
    """
    known = ["config", "code", *all_keys(RunConfig)]
    for name in accept:
        if name not in known and not name.startswith(("model.", "data.", "task.")):
            error = unknown_key_error(name, known)
            raise ConfigError(f"--accept {name}: there is no such key", hint=f"{error.hint} Or: config, code, data")


def newest_manifest(run: RunDirectory) -> Manifest | None:
    """Returns what the newest complete checkpoint says about itself; None where nothing was ever saved."""
    found = (manifest for _, manifest in survey(run.checkpoints, read_manifest))
    return next((manifest for manifest in found if not isinstance(manifest, CheckpointError)), None)


def tell_of_another(plan: RunPlan) -> None:
    """Prints a line where the newest unfinished run of this name differs in little from a new one."""
    if plan.run.path.exists():
        return
    others = [run for run in list_runs(plan.run.path.parent.parent) if run.name == plan.run.name]
    if not others or others[0].result.exists():
        return
    try:
        before, manifest = _read_before(others[0]), newest_manifest(others[0])
        found = [] if before is None or manifest is None else _compare(plan, None, *before, manifest=manifest).config
    except SlurmTrainError:
        return
    trained = [change for change in found if change.kind != "harmless"]
    if manifest is not None and 0 < len(trained) <= _ALIKE:
        words = " ".join(f"{change.key}={change.new}" for change in trained)
        names = ",".join(change.key for change in trained)
        run = others[0]
        note(f"a new run; {run.name}/{run.run_id} (unfinished, step {manifest.step}) has {_in_one_line(trained)}")
        if all(change.kind == "training" for change in trained):
            note(f"to continue that one with the change: resume {run.run_id} {words} --accept {names}")


def tell_of_other_code(run: RunDirectory, config: RunConfig, directory: Path) -> None:
    """Prints a line where the files that the run's code was copied from have changed since: it runs the copy."""
    before, index = _read_before(run), read_index(run)
    if before is None or index is None or before[1].get("directory") != str(directory):
        return
    folders = {**(read_json(run.code_index) or {}).get("folders", {}), "": str(directory)}
    locate = partial(live_file, folders)
    changes = compare_code(index, index_code(locate, index), old_file=run.code.joinpath, new_file=locate)
    changes = [change for change in changes if matters(change.name, is_own_code=names_own_code(config))]
    if changes:
        note(f"your files have changed since this run copied them: {shorten(map(str, changes))}")
        note(f"it goes on with its copy; to take the files as they are now: resume {run.run_id} --accept code")


def _in_one_line(changes: Sequence[Change]) -> str:
    return ", ".join(f"{change.key}={change.old} instead of {change.new}" for change in changes)


def _not_accepted_before(found: Differences, changes: list[AcceptedChange]) -> Differences:
    """Leaves out what was accepted earlier, and is in no checkpoint yet."""
    config = [
        change
        for change in found.config
        if change.kind == "harmless" or not covers_config(changes, change.key, change.new)
    ]
    code = [] if found.code and covers_code(changes, found.new_code) else found.code
    data = found.data
    if data is not None and covers_data(changes, old=data[0], new=data[1]):
        data = None
    return replace(found, config=config, code=code, data=data)


def _read_before(run: RunDirectory) -> tuple[RunConfig, dict[str, Any]] | None:
    plan = read_json(run.plan)
    if not run.config.exists() or plan is None or "batch" not in plan:
        return None
    return load_config(run.config), plan


def _compare(
    plan: RunPlan, source: Source | None, config: RunConfig, old_plan: dict[str, Any], *, manifest: Manifest
) -> Differences:
    trained = manifest.extra.get("settings")
    changes = all_changes(
        config,
        plan.config,
        old_global_size=int(old_plan["batch"]["global_size"]),
        new_global_size=plan.batch.global_size,
        trained=trained if isinstance(trained, dict) else None,
    )
    code, old_code, new_code = _compare_code(plan, source)
    # A function or script of one's own reads its own data; the configured set is none of its business.
    data = plan.config.data if plan.config.trains else None
    now = known_fingerprint(data or {}, cwd=Path(plan.directory))
    was = manifest.data_fingerprint
    return Differences(
        step=manifest.step,
        config=changes,
        code=code,
        old_code=old_code,
        new_code=new_code,
        data=(was, now) if now is not None and now != was else None,
    )


def _compare_code(plan: RunPlan, source: Source | None) -> tuple[list[FileChange], str, str]:
    old = read_index(plan.run)
    if source is None or old is None:
        return [], "", ""
    new = source.index()
    is_own = names_own_code(plan.config)
    changes = compare_code(old, new, old_file=plan.run.code.joinpath, new_file=source.file)
    found = [change for change in changes if matters(change.name, is_own_code=is_own)]
    return found, digest_code(old, is_own_code=is_own), digest_code(new, is_own_code=is_own)


def _refuse_impossible(run: RunDirectory, found: Differences) -> None:
    impossible = [change for change in found.config if change.kind == "impossible"]
    if impossible:
        raise RunError(
            f"the weights of {run.name}/{run.run_id} (step {found.step}) do not fit another shape of the model:\n"
            + _rows([(change.key, str(change).partition(": ")[2], "") for change in impossible]),
            hint="start another run with run.name=NAME",
        )


def _refuse_unaccepted(run: RunDirectory, found: Differences, accept: Collection[str]) -> None:
    left = unaccepted(found.config, accept)
    rows = [(change.key, str(change).partition(": ")[2], change.consequence) for change in left]
    names = [change.key for change in left]
    if found.code and "code" not in accept:
        rows += [("code", str(change), "") for change in found.code]
        names.append("code")
    if found.data is not None and not any(is_below(name, "data") for name in accept):
        rows.append(("data", f"fingerprint {found.data[0]} -> {found.data[1]}", ""))
        names.append("data")
    if rows:
        raise RunError(
            f"{run.name}/{run.run_id} has been trained up to step {found.step}; from there on it would be trained "
            f"differently:\n{_rows(rows)}",
            hint=f"to go on with that: --accept {','.join(names)}; to go on as it was: `resume {run.run_id}`; "
            "to start another run: run.name=NAME",
        )


def _say_harmless(found: Differences) -> None:
    for change in [change for change in found.config if change.kind == "harmless"][:_MOST_SHOWN]:
        note(f"{change} (does not change what is trained)")


def _rows(rows: Sequence[tuple[str, str, str]]) -> str:
    width = max(len(row[0]) for row in rows)
    lines = [f"  {key:<{width}}  {text}{f'  ({more})' if more else ''}" for key, text, more in rows]
    more = [f"  and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    return "\n".join([*lines[:_MOST_SHOWN], *more])
