"""The code of a submission before it is copied: the submitting directory, and further folders that were named."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_train.config.schema import RunConfig, RunSection
from slurm_train.errors import ConfigError
from slurm_train.launch.code_index import CodeIndex, index_code
from slurm_train.launch.editable import code_elsewhere, import_roots, own_paths, package_folders
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.snapshot import OtherFolder, SourceState, ask_git, plan_snapshot, read_answers
from slurm_train.rundir.layout import RunDirectory

# Hidden, so that no folder of the user's is in the way.
_OTHERS = ".folders"


@dataclass(frozen=True, slots=True)
class Source:
    """The submitting directory and the files of it that belong to the code."""

    directory: Path
    state: SourceState
    files: Sequence[str]
    others: Sequence[OtherFolder] = ()
    """Further folders that are copied, below `.folders` in the snapshot."""
    roots: Sequence[str] = ()
    """Places in the snapshot that packages are imported from, e.g. "src"."""
    elsewhere: Sequence[str] = ()
    """Folders that packages are imported from and that are not copied."""
    left_out: Sequence[str] = ()
    """Folders in the copied ones that are no part of the copy, each with the reason."""

    @property
    def names(self) -> list[str]:
        """The files as they are called in the snapshot."""
        return [*self.files, *(f"{other.prefix}/{name}" for other in self.others for name in other.files)]

    def file(self, name: str) -> Path:
        """Returns the place of a file by its name in the snapshot."""
        return live_file(self.folders, name)

    @property
    def folders(self) -> dict[str, str]:
        """Each folder by its place in the snapshot; "" is the submitting directory."""
        return {"": str(self.directory), **{other.prefix: str(other.directory) for other in self.others}}

    def index(self) -> CodeIndex:
        """Returns the hashes of the files as they are now."""
        return index_code(self.file, self.names)

    def as_record(self) -> dict[str, Any]:
        """Returns what the snapshot's record says about where it came from; the job's imports follow it."""
        return {"folders": self.folders, "roots": list(self.roots)}


def live_file(folders: Mapping[str, str], name: str) -> Path:
    """Returns where a file of a snapshot was copied from.

    Args:
        folders: each copied folder by its place in the snapshot.
        name: the file, relative to the snapshot.
    """
    for prefix, directory in folders.items():
        if prefix and name.startswith(f"{prefix}/"):
            return Path(directory) / name[len(prefix) + 1 :]
    return Path(folders.get("", "")) / name


def read_source(plan: RunPlan, directory: Path, state: SourceState, *, env: Mapping[str, str]) -> Source:
    """Returns what would be copied from the submitting directory; touches nothing.

    Outside git, and with none of your own code named, there is nothing that a job would need from there.

    Raises:
        ConfigError: more than a code snapshot may be, or a folder that is not there.
    """
    settings = plan.config.run
    if state.files is None and not uses_own_code(plan) and not settings.snapshot_folders:
        return Source(directory, state, ())
    source = plan_source(plan.run, directory, state, settings=settings, env=env)
    if uses_own_code(plan):
        return source
    # What the job does not import cannot change under it.
    return replace(source, elsewhere=(), left_out=())


def plan_source(
    run: RunDirectory, directory: Path, state: SourceState, *, settings: RunSection, env: Mapping[str, str]
) -> Source:
    """Returns what would be copied for a run from a directory that holds its code; touches nothing.

    Raises:
        ConfigError: more than `run.snapshot_limit_mb`, or a folder that is not there.
    """
    root = run.path.parent.parent
    # Where the runs' root holds the code as well (run.root=.), only this run's own folder is left out.
    runs = run.path.parent if directory.resolve().is_relative_to(root) else root
    paths, finders = own_paths(), sys.meta_path
    roots = import_roots(str(directory), paths, finders)

    left_out: list[str] = []

    def plan(folder: Path, answers: SourceState) -> list[str]:
        places = package_folders(str(folder), paths, finders)
        limit_mb = settings.snapshot_limit_mb
        files, without = plan_snapshot(folder, answers, limit_mb=limit_mb, exclude=runs, roots=places)
        left_out.extend(without)
        return files

    files = plan(directory, state)
    others = []
    for folder, prefix in _named_folders(settings.snapshot_folders, directory):
        answers = read_answers(ask_git(folder, env))
        others.append(OtherFolder(prefix, folder, answers, plan(folder, answers)))
        roots += [f"{prefix}/{part}".rstrip("/") for part in import_roots(str(folder), paths, finders)]
    copied = [str(directory), *(str(other.directory) for other in others)]
    elsewhere = code_elsewhere(copied, paths, finders)
    return Source(directory, state, files, others, roots, elsewhere, left_out)


def _named_folders(folders: Sequence[str], directory: Path) -> list[tuple[Path, str]]:
    found: dict[str, Path] = {}
    for text in folders:
        folder = (directory / Path(text).expanduser()).resolve()
        if not folder.is_dir():
            raise ConfigError(f"run.snapshot_folders: {text} is not a folder", hint="name a folder with code of yours")
        if folder.is_relative_to(directory.resolve()):
            raise ConfigError(
                f"run.snapshot_folders: {text} lies in {directory}, which is copied anyway",
                hint="name folders outside of it; files in it that git ignores are no code",
            )
        same = sum(place.name == folder.name for place in found.values())
        found[f"{_OTHERS}/{folder.name}{f'-{same + 1}' if same else ''}"] = folder
    return [(folder, prefix) for prefix, folder in found.items()]


def uses_own_code(plan: RunPlan) -> bool:
    """Returns whether the run names code that does not ship with this package."""
    return names_own_code(plan.config)


def names_own_code(config: RunConfig) -> bool:
    """Returns whether a configuration names code that does not ship with this package."""
    targets = [str(part.get("_target_", "")) for part in (config.model, config.data, config.task) if part]
    return config.script is not None or any(not target.startswith("slurm_train.") for target in targets)
