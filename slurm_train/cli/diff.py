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
from slurm_train.config.frozen import differences, in_words, load_config
from slurm_train.config.words import read_names
from slurm_train.errors import ConfigError, RunError
from slurm_train.launch.git import read_git
from slurm_train.launch.provenance import EnvironmentChange, environment_changes, environment_of, read_environment
from slurm_train.launch.snapshot import Code, FileChange, compare_code, index_code, read_index, read_source
from slurm_train.rundir.files import read_json
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import RunDirectory

PARTS = ("config", "code", "environment")
_STYLES = {"---": BOLD, "+++": BOLD, "+": "32", "-": "31", "@@": "36"}
"""Of a line by its beginning, the first that fits; 32 is green, 31 red, 36 cyan."""


def main(words: Sequence[str]) -> int:
    """Prints what differs and returns 0, whether or not something does."""
    arguments = parse_runs("diff", words)
    parts = list(PARTS) if arguments.only is None else read_names(arguments.only)
    if unknown := [name for name in parts if name not in PARTS]:
        raise ConfigError(f"--only {unknown[0]}: there is no such part", hint=f"parts: {', '.join(PARTS)}")
    root = arguments.root
    old = find_run(root, arguments.run)
    new = find_run(root, arguments.other) if arguments.other else None
    found = compare(old, new, parts=parts, env=os.environ)
    if arguments.json:
        print(json.dumps(found, indent=2, default=str))
        return 0
    in_colour = takes_escapes(sys.stdout, os.environ)
    for line in _lines(old, new, found, stat=arguments.stat):
        style = next((style for start, style in _STYLES.items() if line.startswith(start)), "")
        print(painted(line, style if in_colour else ""))
    return 0


# --- what differs, as plain values ---


def compare(
    old: RunDirectory, new: RunDirectory | None, *, parts: Collection[str], env: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what `--json` prints: what differs between two runs, or between a run and what is here now.

    Args:
        old: the one.
        new: the other; None: its folder and environment as they are now, which have no configuration.
        parts: which of `PARTS` are asked for.
        env: environment, for asking git.

    Raises:
        RunError: the folder that the code came from is not there any more.
    """
    found: dict[str, Any] = {"old": str(old.path), "new": None if new is None else str(new.path)}
    if "config" in parts and new is not None:
        sizes = [((read_json(run.plan) or {}).get("batch") or {}).get("global_size") for run in (old, new)]
        configs = [load_config(run.config) for run in (old, new)]
        old_size, new_size = (size if config.trains else None for size, config in zip(sizes, configs, strict=True))
        found["config"] = [
            {"key": change.key, "old": change.old, "new": change.new, "trains": change.kind != "harmless"}
            for change in differences(*configs, old_global_size=old_size, new_global_size=new_size)
        ]
    if "code" in parts:
        sides = _copied_code(old), _code_now(old, env) if new is None else _copied_code(new)
        (before, _), (after, _) = sides
        files = [
            {**asdict(change), "diff": "\n".join(_unified(change, before, after))}
            for change in compare_code(before, after)
        ]
        found["code"] = {"revisions": [revision for _, revision in sides], "files": files}
    unknown = []
    if "environment" in parts:
        was = environment_of(old)
        now = environment_of(new) if new is not None else was and read_environment(slurm=was.get("slurm"))
        if was is not None and now is not None:
            found["environment"] = [change._asdict() for change in environment_changes(was, now)]
        for run, its in ((old, was), (new, now)):
            if run is not None and its is None:
                unknown.append(f"nothing is known of the environment of {run.name}/{run.run_id}")
    same = not (found.get("config") or found.get("code", {}).get("files") or found.get("environment"))
    return found | {"same": same} | ({"unknown": unknown} if unknown else {})


def _copied_code(run: RunDirectory) -> tuple[Code, str]:
    """Returns a run's copy of the code and the commit that it was made from, see `_revision`."""
    facts, index = read_json(run.provenance) or {}, read_index(run)
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
    code = read_source(run, load_config(run.config), folder, state, env=env).code()
    # What was not copied then (a shipped model outside git has no code) is not looked at now.
    code = code if read_index(run) else Code({}, code.locate)
    return code, _revision(state.commit, is_dirty=bool(state.difference))


def _revision(commit: str | None, *, is_dirty: bool) -> str:
    """Returns a commit in short, e.g. "1f2e3d4c5 with changes"; "no commit" outside git."""
    return "no commit" if commit is None else commit[:9] + (" with changes" if is_dirty else "")


def _unified(change: FileChange, before: Code, after: Code) -> Iterator[str]:
    """Yields the lines of a file's unified diff, without line breaks; one sentence for what is no text."""
    name = change.name
    old, new = before.lines(name), after.lines(name)
    if old is None or new is None:
        yield f"Files a/{name} and b/{name} differ"
        return
    if old == new:
        yield f"Files a/{name} and b/{name} differ in how lines end"
    paths = (
        "/dev/null" if change.what == "new" else f"a/{name}",
        "/dev/null" if change.what == "gone" else f"b/{name}",
    )
    yield from difflib.unified_diff(old, new, *paths, lineterm="")


# --- the same for people ---


def _lines(old: RunDirectory, new: RunDirectory | None, found: Mapping[str, Any], *, stat: bool) -> Iterator[str]:
    yield f"--- {old.name}/{old.run_id}  {old.path}"
    yield "+++ now" if new is None else f"+++ {new.name}/{new.run_id}  {new.path}"
    if (config := found.get("config")) is not None:
        yield _heading("config", config)
        width = max((len(change["key"]) for change in config), default=0)
        for change in sorted(config, key=lambda change: (not change["trains"], change["key"])):
            remark = "" if change["trains"] else "  (does not change what is trained)"
            yield f"  {change['key']:<{width}}  {in_words(change['old'])} -> {in_words(change['new'])}{remark}"
    if (code := found.get("code")) is not None:
        revisions = "" if len(set(code["revisions"])) == 1 else f": {' -> '.join(code['revisions'])}"
        yield _heading(f"code{revisions}", code["files"])
        for file in code["files"]:
            lines = file.pop("diff").split("\n")
            yield from [f"  {FileChange(**file)}"] if stat else lines
    if (environment := found.get("environment")) is not None:
        yield _heading("environment", environment)
        yield from (f"  {EnvironmentChange(**change)}" for change in environment)
    yield from found.get("unknown", ())


def _heading(name: str, changes: Sequence[object]) -> str:
    return f"\n{name}{'' if changes else ': the same'}"
