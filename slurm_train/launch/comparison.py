"""What differs between two runs, or between a run and the folder it came from: configuration, code, environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import Change, differences, load_config
from slurm_train.errors import RunError
from slurm_train.launch.code_index import (
    CodeIndex,
    FileChange,
    Locate,
    compare_code,
    index_code,
    read_index,
    read_text_lines,
)
from slurm_train.launch.environment import EnvironmentChange, environment_changes, read_environment
from slurm_train.launch.provenance import environment_of
from slurm_train.launch.snapshot import ask_git, read_answers
from slurm_train.launch.source import plan_source
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory

PARTS = ("config", "code", "environment")


@dataclass(frozen=True, slots=True)
class Code:
    """One side of a comparison of code."""

    index: CodeIndex
    file: Locate
    commit: str | None
    is_dirty: bool

    @property
    def revision(self) -> str:
        """The commit in short, e.g. "1f2e3d4 with changes"; "no commit" outside git."""
        return "no commit" if self.commit is None else self.commit[:9] + (" with changes" if self.is_dirty else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs; a part that was not asked for is None."""

    config: list[Change] | None = None
    code: list[FileChange] | None = None
    revisions: tuple[str, str] = ("", "")
    environment: list[EnvironmentChange] | None = None
    unknown: list[str] = field(default_factory=list)
    """Why a part could not be compared."""
    sides: tuple[Code, Code] | None = None

    @property
    def is_same(self) -> bool:
        """Whether nothing that was asked for differs."""
        return not (self.config or self.code or self.environment)

    def unified(self, change: FileChange) -> Iterator[str]:
        """Yields the lines of a file's unified diff, without line breaks; one sentence for what is no text."""
        assert self.sides is not None
        old, new = (read_text_lines(side.file, change.name, side.index.files.get(change.name)) for side in self.sides)
        if old is None or new is None:
            yield f"Files a/{change.name} and b/{change.name} differ"
            return
        names = {"new": ("/dev/null", f"b/{change.name}"), "gone": (f"a/{change.name}", "/dev/null")}
        before, after = names.get(change.what, (f"a/{change.name}", f"b/{change.name}"))
        if old == new:
            yield f"Files a/{change.name} and b/{change.name} differ in how lines end"
        yield from difflib.unified_diff(old, new, before, after, lineterm="")


def compare_runs(old: RunDirectory, new: RunDirectory, *, parts: Collection[str]) -> Comparison:
    """Returns what differs between two runs.

    Args:
        old: the one.
        new: the other.
        parts: which of `PARTS` are asked for.
    """
    environments = [environment_of(run) for run in (old, new)]
    unknown = [
        f"nothing is known of the environment of {run.name}/{run.run_id}"
        for run, found in zip((old, new), environments, strict=True)
        if found is None and "environment" in parts
    ]
    sides = (_copied_code(old), _copied_code(new)) if "code" in parts else None
    known = [found for found in environments if found is not None]
    return Comparison(
        config=_configs(old, new) if "config" in parts else None,
        code=None if sides is None else _codes(*sides),
        revisions=("", "") if sides is None else (sides[0].revision, sides[1].revision),
        environment=environment_changes(*known) if "environment" in parts and len(known) == 2 else None,
        unknown=unknown,
        sides=sides,
    )


def compare_with_now(run: RunDirectory, *, parts: Collection[str], env: Mapping[str, str]) -> Comparison:
    """Returns what differs between a run and its folder and environment as they are now; no configuration.

    Raises:
        RunError: the folder that its code came from is not there any more.
    """
    folder = Path(str((read_json(run.code_index) or {}).get("folders", {}).get("", "")))
    if "code" in parts and not (folder.is_absolute() and folder.is_dir()):
        raise RunError(
            f"the folder that the code of {run.name}/{run.run_id} came from is not there: {folder}",
            hint="compare it with another run: diff RUN_A RUN_B",
        )
    sides = (_copied_code(run), _code_now(run, folder, env)) if "code" in parts else None
    before = environment_of(run)
    return Comparison(
        code=None if sides is None else _codes(*sides),
        revisions=("", "") if sides is None else (sides[0].revision, sides[1].revision),
        environment=environment_changes(before, read_environment(slurm=before.slurm))
        if before is not None and "environment" in parts
        else None,
        sides=sides,
    )


def _code_now(run: RunDirectory, folder: Path, env: Mapping[str, str]) -> Code:
    state = read_answers(ask_git(folder, env))
    # What was not copied then (a shipped model outside git has no code) is not looked at now.
    if not (read_index(run) or CodeIndex({})).files:
        return Code(CodeIndex({}), folder.joinpath, state.commit, bool(state.difference))
    source = plan_source(run, folder, state, settings=load_config(run.config).run, env=env)
    return Code(source.index(), source.file, state.commit, bool(state.difference))


def _configs(old: RunDirectory, new: RunDirectory) -> list[Change]:
    configs = [load_config(run.config) for run in (old, new)]
    sizes = [_global_size(run) if config.trains else None for run, config in zip((old, new), configs, strict=True)]
    return differences(*configs, old_global_size=sizes[0], new_global_size=sizes[1])


def _global_size(run: RunDirectory) -> int | None:
    found = ((read_json(run.plan) or {}).get("batch") or {}).get("global_size")
    return None if found is None else int(found)


def _copied_code(run: RunDirectory) -> Code:
    facts = read_json(run.provenance) or {}
    index = read_index(run)
    if index is None:
        # Of runs that are older than the index of files.
        names = [os.path.relpath(path, run.code) for path in run.code.rglob("*") if path.is_file()]
        index = index_code(run.code.joinpath, names)
    return Code(index, run.code.joinpath, facts.get("git_commit"), bool(facts.get("git_dirty")))


def _codes(old: Code, new: Code) -> list[FileChange]:
    return compare_code(old.index, new.index, old_file=old.file, new_file=new.file)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns what differs as plain values."""
    found: dict[str, Any] = {"same": comparison.is_same}
    if comparison.config is not None:
        found["config"] = [
            {"key": change.key, "old": change.old, "new": change.new, "trains": change.kind != "harmless"}
            for change in comparison.config
        ]
    if comparison.code is not None:
        files = [_file(comparison, change) for change in comparison.code]
        found["code"] = {"revisions": list(comparison.revisions), "files": files}
    if comparison.environment is not None:
        found["environment"] = [
            {"name": change.name, "old": change.old, "new": change.new, "is_package": change.is_package}
            for change in comparison.environment
        ]
    return found | ({"unknown": comparison.unknown} if comparison.unknown else {})


def _file(comparison: Comparison, change: FileChange) -> dict[str, Any]:
    facts = {"name": change.name, "what": change.what or "changed", "added": change.added, "removed": change.removed}
    return {**facts, "diff": "\n".join(comparison.unified(change))}
