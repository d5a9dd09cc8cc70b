"""`diff RUN_A [RUN_B]`: what differs between two runs: configuration, code, environment.

With one run: what has changed since in the folder that its code came from, and in the packages installed here.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_train.cli.selection import parse_runs
from slurm_train.cli.terminal import BOLD, painted, takes_escapes
from slurm_train.code.git import read_git
from slurm_train.code.provenance import EnvironmentChange, environment_changes, environment_of, read_environment
from slurm_train.code.snapshot import Code, FileChange, compare_code, index_code, read_index, read_source
from slurm_train.config.frozen import differences, in_words, load_config
from slurm_train.config.program import program_of
from slurm_train.config.words import read_names
from slurm_train.errors import ConfigError, RunError
from slurm_train.rundir.files import read_json
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlanRecord

PARTS = ("config", "code", "environment")
_STYLES = {"---": BOLD, "+++": BOLD, "+": "32", "-": "31", "@@": "36"}
"""The style of a line by its beginning, of which the first that fits counts; 32 is green, 31 red, 36 cyan."""


def main(words: Sequence[str]) -> int:
    """Prints what differs and returns 0, whether or not something does."""
    arguments = parse_runs("diff", words)
    parts = list(PARTS) if arguments.only is None else read_names(arguments.only)
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: there is no such part", hint=f"parts: {', '.join(PARTS)}")
    if arguments.other is None and parts == ["config"]:
        raise ConfigError(
            "--only config needs two runs: a folder has no configuration", hint="diff RUN_A RUN_B --only config"
        )
    root = arguments.root
    old = find_run(root, arguments.run)
    new = find_run(root, arguments.other) if arguments.other else None
    comparison = compare(old, new, parts=parts, env=os.environ)
    if arguments.json:
        print(json.dumps(comparison, indent=2, default=str))
        return 0
    in_colour = takes_escapes(sys.stdout, os.environ)
    for line in _lines(old, new, comparison, stat=arguments.stat):
        print(painted(line, _style_of(line) if in_colour else ""))
    return 0


def _style_of(line: str) -> str:
    for start, style in _STYLES.items():
        if line.startswith(start):
            return style
    return ""


# --- the differences as plain values ---


def compare(
    old: RunDirectory, new: RunDirectory | None, *, parts: Collection[str], env: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what `--json` prints: what differs between two runs, or between a run and what is here now.

    Args:
        old: the first run.
        new: the second run; None: the first run's folder and environment as they are now, which have no configuration.
        parts: which of `PARTS` are asked for.
        env: environment, for asking git.

    Raises:
        RunError: the folder that the code came from is not there any more.
    """
    comparison: dict[str, Any] = {"old": str(old.path), "new": None if new is None else str(new.path)}
    if "config" in parts and new is not None:
        comparison["config"] = _config_changes(old, new)
    if "code" in parts:
        code_of_new = _code_now(old, env) if new is None else _copied_code(new)
        comparison["code"] = _code_changes(_copied_code(old), code_of_new)
    if "environment" in parts:
        comparison |= _compare_environments(old, new)
    files = comparison.get("code", {}).get("files")
    comparison["same"] = not (comparison.get("config") or files or comparison.get("environment"))
    return comparison


def _compare_environments(old: RunDirectory, new: RunDirectory | None) -> dict[str, Any]:
    """Returns the "environment" that differs where both are known, and under "unknown" a line for each that is not."""
    before = environment_of(old)
    if new is not None:
        after = environment_of(new)
    else:
        after = None if before is None else read_environment(slurm=before.get("slurm"))
    if before is not None and after is not None:
        return {"environment": [change._asdict() for change in environment_changes(before, after)]}
    unknown: list[str] = []
    for run, environment in ((old, before), (new, after)):
        if run is not None and environment is None:
            unknown.append(f"nothing is known of the environment of {run.name}/{run.run_id}")
    return {"unknown": unknown}


def _config_changes(old: RunDirectory, new: RunDirectory) -> list[dict[str, Any]]:
    before = load_config(old.config)
    after = load_config(new.config)
    changes = differences(
        before,
        after,
        old_global_size=_global_size(old) if program_of(before).is_planned else None,
        new_global_size=_global_size(new) if program_of(after).is_planned else None,
    )
    return [
        {"key": change.key, "old": change.old, "new": change.new, "trains": change.kind != "harmless"}
        for change in changes
    ]


def _global_size(run: RunDirectory) -> int | None:
    batch = PlanRecord.read(run.plan).batch
    return None if batch is None else batch.global_size


def _code_changes(old: tuple[Code, str], new: tuple[Code, str]) -> dict[str, Any]:
    """Returns the files that differ, each with its diff, and the revisions of both sides.

    Args:
        old: files and revision of the first side.
        new: of the second.
    """
    before, old_revision = old
    after, new_revision = new
    files = []
    for change in compare_code(before, after):
        files.append({**asdict(change), "diff": "\n".join(_unified(change, before, after))})
    return {"revisions": [old_revision, new_revision], "files": files}


def _copied_code(run: RunDirectory) -> tuple[Code, str]:
    """Returns a run's copy of the code and the commit that it was made from, see `_revision`."""
    facts = read_json(run.provenance) or {}
    index = read_index(run)
    if index is None:
        names = [os.path.relpath(path, run.code) for path in run.code.rglob("*") if path.is_file()]
        index = index_code(run.code.joinpath, names)
    return Code(index, run.code.joinpath), _revision(facts.get("git_commit"), is_dirty=bool(facts.get("git_dirty")))


def _code_now(run: RunDirectory, env: Mapping[str, str]) -> tuple[Code, str]:
    folder = Path(str((read_json(run.code_index) or {}).get("folders", {}).get("", "")))
    if not (folder.is_absolute() and folder.is_dir()):
        raise RunError(
            f"the folder that the code of {run.name}/{run.run_id} came from is not there: {folder}",
            hint="compare it with another run: diff RUN_A RUN_B",
        )
    state = read_git(folder, env)
    source = read_source(run, load_config(run.config), folder, state, env=env)
    code = source.code()
    # Where nothing was copied (a shipped model outside git has no code), no file of today is compared.
    if not read_index(run):
        code = Code({}, code.locate)
    return code, _revision(state.commit, is_dirty=source.differs_from_commit())


def _revision(commit: str | None, *, is_dirty: bool) -> str:
    """Returns a commit in short, e.g. "1f2e3d4c5 with changes"; "no commit" outside git."""
    if commit is None:
        return "no commit"
    return f"{commit[:9]} with changes" if is_dirty else commit[:9]


def _unified(change: FileChange, before: Code, after: Code) -> Iterator[str]:
    """Yields the lines of a file's unified diff, without line breaks; one sentence for what is no text."""
    name = change.name
    old = before.lines(name)
    new = after.lines(name)
    if old is None or new is None:
        yield f"Files a/{name} and b/{name} differ"
        return
    if old == new:
        yield f"Files a/{name} and b/{name} differ in how lines end"
    old_path = "/dev/null" if change.what == "new" else f"a/{name}"
    new_path = "/dev/null" if change.what == "gone" else f"b/{name}"
    yield from difflib.unified_diff(old, new, old_path, new_path, lineterm="")


# --- the differences as printed lines ---


def _lines(old: RunDirectory, new: RunDirectory | None, comparison: Mapping[str, Any], *, stat: bool) -> Iterator[str]:
    yield f"--- {old.name}/{old.run_id}  {old.path}"
    yield "+++ now" if new is None else f"+++ {new.name}/{new.run_id}  {new.path}"
    config = comparison.get("config")
    if config is not None:
        yield _heading("config", config)
        width = max((len(change["key"]) for change in config), default=0)
        for change in sorted(config, key=lambda change: (not change["trains"], change["key"])):
            remark = "" if change["trains"] else "  (does not change what is trained)"
            yield f"  {change['key']:<{width}}  {in_words(change['old'])} -> {in_words(change['new'])}{remark}"
    code = comparison.get("code")
    if code is not None:
        is_same_revision = len(set(code["revisions"])) == 1
        revisions = "" if is_same_revision else f": {' -> '.join(code['revisions'])}"
        yield _heading(f"code{revisions}", code["files"])
        for file in code["files"]:
            if stat:
                yield f"  {FileChange(**{name: value for name, value in file.items() if name != 'diff'})}"
            else:
                yield from file["diff"].split("\n")
    environment = comparison.get("environment")
    if environment is not None:
        yield _heading("environment", environment)
        for change in environment:
            yield f"  {EnvironmentChange(**change)}"
    yield from comparison.get("unknown", ())


def _heading(name: str, changes: Sequence[object]) -> str:
    return f"\n{name}{'' if changes else ': the same'}"
