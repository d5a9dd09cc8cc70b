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
from slurm_train.launch.environment import EnvironmentChange, environment_changes, environment_of, read_environment
from slurm_train.launch.snapshot import (
    FileChange,
    Locate,
    compare_code,
    index_code,
    read_git,
    read_index,
    read_source,
    read_text_lines,
)
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory

PARTS = ("config", "code", "environment")


@dataclass(frozen=True, slots=True)
class Code:
    """One side of a comparison of code."""

    index: Mapping[str, str]
    file: Locate
    commit: str | None
    is_dirty: bool

    @property
    def revision(self) -> str:
        """The commit in short, e.g. "1f2e3d4 with changes"; "no commit" outside git."""
        return "no commit" if self.commit is None else self.commit[:9] + (" with changes" if self.is_dirty else "")


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What differs; a part that was not asked for is None."""

    config: list[Change] | None = None
    code: list[FileChange] | None = None
    sides: tuple[Code, Code] | None = None
    environment: list[EnvironmentChange] | None = None
    unknown: list[str] = field(default_factory=list)
    """Why a part could not be compared."""

    @property
    def revisions(self) -> list[str]:
        """The commits of both sides, empty where the code was not asked for."""
        return [side.revision for side in self.sides or ()]

    def unified(self, change: FileChange) -> Iterator[str]:
        """Yields the lines of a file's unified diff, without line breaks; one sentence for what is no text."""
        assert self.sides is not None
        old, new = (read_text_lines(side.file, change.name, side.index.get(change.name)) for side in self.sides)
        if old is None or new is None:
            yield f"Files a/{change.name} and b/{change.name} differ"
            return
        if old == new:
            yield f"Files a/{change.name} and b/{change.name} differ in how lines end"
        before = "/dev/null" if change.what == "new" else f"a/{change.name}"
        after = "/dev/null" if change.what == "gone" else f"b/{change.name}"
        yield from difflib.unified_diff(old, new, before, after, lineterm="")

    def as_json(self) -> dict[str, Any]:
        """Returns what differs as plain values."""
        found: dict[str, Any] = {"same": not (self.config or self.code or self.environment)}
        if self.config is not None:
            found["config"] = [
                {"key": change.key, "old": change.old, "new": change.new, "trains": change.kind != "harmless"}
                for change in self.config
            ]
        if self.code is not None:
            files = [
                {
                    "name": change.name,
                    "what": change.what or "changed",
                    "added": change.added,
                    "removed": change.removed,
                    "diff": "\n".join(self.unified(change)),
                }
                for change in self.code
            ]
            found["code"] = {"revisions": self.revisions, "files": files}
        if self.environment is not None:
            found["environment"] = [
                {"name": change.name, "old": change.old, "new": change.new, "is_package": change.is_package}
                for change in self.environment
            ]
        return found | ({"unknown": self.unknown} if self.unknown else {})


def compare(
    old: RunDirectory, new: RunDirectory | None, *, parts: Collection[str], env: Mapping[str, str]
) -> Comparison:
    """Returns what differs between two runs, or between a run and its folder and environment as they are now.

    Args:
        old: the one.
        new: the other; None: what is here now, which has no configuration.
        parts: which of `PARTS` are asked for.
        env: environment, for asking git.

    Raises:
        RunError: the folder that the code came from is not there any more.
    """
    found = Comparison()
    if "config" in parts and new is not None:
        sizes = [((read_json(run.plan) or {}).get("batch") or {}).get("global_size") for run in (old, new)]
        configs = [load_config(run.config) for run in (old, new)]
        old_size, new_size = (size if config.trains else None for size, config in zip(sizes, configs, strict=True))
        found.config = differences(*configs, old_global_size=old_size, new_global_size=new_size)
    if "code" in parts:
        before, after = _copied_code(old), _code_now(old, env) if new is None else _copied_code(new)
        found.code = compare_code(before.index, after.index, old_file=before.file, new_file=after.file)
        found.sides = (before, after)
    if "environment" in parts:
        was = environment_of(old)
        now = environment_of(new) if new is not None else was and read_environment(slurm=was.slurm)
        if was is not None and now is not None:
            found.environment = environment_changes(was, now)
        for run, its in ((old, was), (new, now)):
            if run is not None and its is None:
                found.unknown.append(f"nothing is known of the environment of {run.name}/{run.run_id}")
    return found


def _copied_code(run: RunDirectory) -> Code:
    facts = read_json(run.provenance) or {}
    index = read_index(run)
    if index is None:
        names = [os.path.relpath(path, run.code) for path in run.code.rglob("*") if path.is_file()]
        index = index_code(run.code.joinpath, names)
    return Code(index, run.code.joinpath, facts.get("git_commit"), bool(facts.get("git_dirty")))


def _code_now(run: RunDirectory, env: Mapping[str, str]) -> Code:
    folder = Path(str((read_json(run.code_index) or {}).get("folders", {}).get("", "")))
    if not (folder.is_absolute() and folder.is_dir()):
        raise RunError(
            f"the folder that the code of {run.name}/{run.run_id} came from is not there: {folder}",
            hint="compare it with another run: diff RUN_A RUN_B",
        )
    state = read_git(folder, env)
    source = read_source(run, load_config(run.config), folder, state, env=env)
    # What was not copied then (a shipped model outside git has no code) is not looked at now.
    index = source.index() if read_index(run) else {}
    return Code(index, source.file, state.commit, bool(state.difference))
