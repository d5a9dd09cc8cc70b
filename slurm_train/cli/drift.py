"""What a command line would change in a run that has been trained already: printed, and refused until it is accepted.

Everything is compared with the newest checkpoint, which keeps the settings, the code and the data it was trained with.
A run without a checkpoint has nothing to protect. Nothing here writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.cli.terminal import note
from slurm_train.config.frozen import Change, all_changes, in_words, is_below, load_config, unaccepted
from slurm_train.config.schema import RunConfig, all_keys, unknown_key_error
from slurm_train.data.check import known_fingerprint
from slurm_train.errors import CheckpointError, ConfigError, RunError, SlurmTrainError
from slurm_train.formatting import shorten
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.snapshot import (
    MOST_CHANGES_SHOWN,
    Code,
    FileChange,
    Source,
    compare_code,
    digest_code,
    live_code,
    matters,
    names_own_code,
    read_index,
)
from slurm_train.rundir.events import AcceptedChange, covers_code, covers_config, covers_data, read_changes
from slurm_train.rundir.files import read_json
from slurm_train.rundir.lookup import list_runs
from slurm_train.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from slurm_train.checkpoint.manifest import Manifest

_MOST_SHOWN = 20
_ALIKE = 3


def check_drift(plan: RunPlan, source: Source | None, *, accept: Collection[str]) -> AcceptedChange | None:
    """Returns what has to be recorded before the run goes on as planned; None where it is the same training.

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
    run, manifest, before = plan.run, newest_manifest(plan.run), _read_before(plan.run)
    if before is None or manifest is None:
        return None
    # What was accepted earlier may be in no checkpoint yet.
    known = read_changes(run)
    config = [
        change
        for change in _compare_config(plan, *before, manifest=manifest)
        if change.kind == "harmless" or not covers_config(known, change.key, change.new)
    ]
    if impossible := [change for change in config if change.kind == "impossible"]:
        raise RunError(
            f"the checkpoint of {run.name}/{run.run_id} (step {manifest.step}) does not fit another shape of the "
            "model or another optimizer:\n"
            + _rows((change.key, str(change).partition(": ")[2]) for change in impossible),
            hint="start another run with run.name=NAME",
        )
    code, old_code, new_code = _compare_code(plan, source)
    if covers_code(known, new_code):
        code = []
    # A function or script of one's own reads its own data, not the configured set.
    data = plan.config.data if plan.config.trains else None
    was = manifest.data_fingerprint
    now = known_fingerprint(data or {}, cwd=Path(plan.directory)) or was
    has_other_data = now != was and not covers_data(known, old=was, new=now)
    accepts_data = any(is_below(name, "data") for name in accept)

    rows = []
    for change in unaccepted(config, accept):
        consequence = f"  ({change.consequence})" if change.consequence else ""
        rows.append((change.key, str(change).partition(": ")[2] + consequence))
    rows += [("code", str(change)) for change in code if "code" not in accept]
    if has_other_data and not accepts_data:
        rows.append(("data", f"fingerprint {was} -> {now}"))
    if rows:
        names = ",".join(dict.fromkeys(name for name, _ in rows))
        raise RunError(
            f"{run.name}/{run.run_id} has been trained up to step {manifest.step}; from there on it would be trained "
            f"differently:\n{_rows(rows)}",
            hint=f"to go on with that: --accept {names}; to go on as it was: `resume {run.run_id}`; "
            "to start another run: run.name=NAME",
        )
    for change in [change for change in config if change.kind == "harmless"][:_MOST_SHOWN]:
        note(f"{change} (does not change what is trained)")
    accepted = AcceptedChange(
        number=max((item.number for item in known), default=0) + 1,
        step=manifest.step,
        config={change.key: [change.old, change.new] for change in config if change.kind == "training"},
        code={"old": old_code, "new": new_code, "files": list(map(str, code))} if code else None,
        data={"old": was, "new": now if has_other_data else ""} if accepts_data else None,
    )
    return accepted if accepted.names else None


def check_names(accept: Collection[str]) -> None:
    """Refuses a name that nothing could be accepted by.

    Raises:
        ConfigError: there is no such key, with the nearest ones.
    """
    known = ["config", "code", *all_keys(RunConfig)]
    for name in accept:
        if name not in known and not name.startswith(("model.", "data.", "task.", "optim.")):
            error = unknown_key_error(name, known)
            raise ConfigError(f"--accept {name}: there is no such key", hint=f"{error.hint} Or: config, code, data")


def newest_manifest(run: RunDirectory) -> Manifest | None:
    """Returns what the newest complete checkpoint says about itself; None where nothing was ever saved."""
    if not run.checkpoints.exists():
        return None
    # Imported only where there is something to read: without it a new run has its job id 5 ms earlier.
    from slurm_train.checkpoint.verify import read_manifest, survey

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
        found = [] if before is None or manifest is None else _compare_config(plan, *before, manifest=manifest)
    except SlurmTrainError:
        return
    trained = [change for change in found if change.kind != "harmless"]
    if manifest is not None and 0 < len(trained) <= _ALIKE:
        # Hydra, which a run that is made anew has loaded already.
        from slurm_train.config.compose import spelled

        words = shlex.join(f"{change.key}={spelled(change.new)}" for change in trained)
        names = ",".join(change.key for change in trained)
        run, has = (
            others[0],
            ", ".join(f"{change.key}={in_words(change.old)} instead of {in_words(change.new)}" for change in trained),
        )
        note(f"a new run; {run.name}/{run.run_id} (unfinished, step {manifest.step}) has {has}")
        if all(change.kind == "training" for change in trained):
            note(f"to continue that one with the change: resume {run.run_id} {words} --accept {names}")


def changed_files(run: RunDirectory, config: RunConfig, directory: Path) -> str:
    """Returns which files have changed since the run copied them, e.g. "mine.py: +2 -1"; "" if none is known to.

    Args:
        run: the run.
        config: its configuration.
        directory: where its command is typed now; the files of another folder are not looked at.
    """
    before, index = _read_before(run), read_index(run)
    if before is None or index is None or before[1].get("directory") != str(directory):
        return ""
    folders = {**(read_json(run.code_index) or {}).get("folders", {}), "": str(directory)}
    changes = compare_code(Code(index, run.code.joinpath), live_code(run, folders))
    changes = [change for change in changes if matters(change.name, is_own_code=names_own_code(config))]
    return shorten(map(str, changes), MOST_CHANGES_SHOWN)


def tell_of_other_code(run: RunDirectory, config: RunConfig, directory: Path) -> None:
    """Prints a line where the files that the run's code was copied from have changed since: it runs the copy."""
    if changed := changed_files(run, config, directory):
        note(f"your files have changed since this run copied them: {changed}")
        note(f"it goes on with its copy; to take the files as they are now: resume {run.run_id} --accept code")


def _read_before(run: RunDirectory) -> tuple[RunConfig, dict[str, Any]] | None:
    plan = read_json(run.plan)
    if not run.config.exists() or plan is None or "batch" not in plan:
        return None
    return load_config(run.config), plan


def _compare_config(plan: RunPlan, config: RunConfig, old_plan: dict[str, Any], *, manifest: Manifest) -> list[Change]:
    trained = manifest.extra.get("settings")
    return all_changes(
        config,
        plan.config,
        old_global_size=int(old_plan["batch"]["global_size"]),
        new_global_size=plan.batch.global_size,
        trained=trained if isinstance(trained, dict) else None,
    )


def _compare_code(plan: RunPlan, source: Source | None) -> tuple[list[FileChange], str, str]:
    """Returns the files that differ in what a run could notice, and the digests of the old and the new code."""
    old = read_index(plan.run)
    if source is None or old is None:
        return [], "", ""
    new, is_own = source.code(), names_own_code(plan.config)
    changes = compare_code(Code(old, plan.run.code.joinpath), new)
    found = [change for change in changes if matters(change.name, is_own_code=is_own)]
    return found, digest_code(old, is_own_code=is_own), digest_code(new.index, is_own_code=is_own)


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    shown = list(rows)
    width = max(len(name) for name, _ in shown)
    lines = [f"  {name:<{width}}  {text}" for name, text in shown]
    more = [f"  and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    return "\n".join([*lines[:_MOST_SHOWN], *more])
