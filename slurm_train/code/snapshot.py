"""The copy of the code that a run keeps: which files belong to it, how they are copied, and their hashes.

A queued or requeued job runs this copy, whatever is edited meanwhile. In a git repository the code is every file that
git does not ignore, also uncommitted ones; elsewhere files are chosen by their suffixes. The copies are made read-only
(folders are not, so that `rm -r` works and Python can write its caches), and their hashes are compared before each
attempt.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from slurm_train.code.by_file import BesideFile, missing_beside
from slurm_train.code.git import SourceState, is_secret_file, read_git
from slurm_train.code.imports import built_modules, code_elsewhere, import_roots, is_below, own_paths, packages_in
from slurm_train.code.program_source import read_program
from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError, RunError
from slurm_train.formatting import shorten
from slurm_train.rundir.files import is_shared, plain_path, read_json, rename, share_folder, write_atomic
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.removal import remove_tree

# --- which files are copied ---

# Outside git, files are recognized as code by their suffixes only.
_SOURCE_SUFFIXES = frozenset(
    {".py", ".pyi", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".txt", ".sh", ".so", ".cu", ".cpp"}
)
_MAX_ENTRIES = 20_000
_PACKAGE_DATA_BYTES = 1 << 20
_MOST_PACKAGE_DATA = 100
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Source:
    """The code of a submission before it is copied."""

    folders: Mapping[str, Path]
    """The copied folders by their place in the snapshot: "" for the submitting directory, e.g. ".folders/mylib"."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Path of each file by its name in the snapshot."""
    states: Mapping[str, SourceState] = field(default_factory=dict)
    """git's facts about each of `folders`."""
    roots: Sequence[str] = ()
    """Places in the snapshot that packages are imported from, e.g. "src"."""
    elsewhere: Sequence[str] = ()
    """Folders that packages are imported from and that are not copied."""
    left_out: Sequence[str] = ()
    """Files of the copied folders that are not copied, each with the reason."""
    beside: Sequence[BesideFile] = ()
    """What the program looks for by `__file__`, and what is not copied."""

    def code(self) -> Code:
        """Returns the files with their present hashes."""
        return Code(index_code(self.files.__getitem__, self.files), self.files.__getitem__)

    def differs_from_commit(self, place: str = "") -> bool:
        """Returns whether a copied folder has changes or files that are not in its commit."""
        state = self.states.get(place, SourceState())
        if state.difference:
            return True
        return any(os.path.join(place, name) in self.files for name in state.untracked)  # noqa: PTH118  # as below


def names_own_code(config: RunConfig) -> bool:
    """Returns whether a configuration names code that does not ship with this package."""
    from slurm_train.config.target import targets_in

    program = program_of(config)
    if not program.built:
        # A file is run; nothing is built by its name.
        return True
    targets = targets_in(program.sections)
    return any(not target.startswith(("slurm_train.", "torch.")) for target in targets)


def read_source(
    run: RunDirectory,
    config: RunConfig,
    directory: Path,
    state: SourceState | None = None,
    *,
    env: Mapping[str, str],
) -> Source:
    """Returns the code that would be copied for a run; writes nothing.

    Outside git, if the configuration names no code of the user, a job needs no files of the folder.

    Args:
        run: the run; its root is never part of a snapshot.
        config: says whether own code is used, and names further folders.
        directory: the submitting directory.
        state: git's facts about it, None if git has not been asked yet.
        env: environment of git.

    Raises:
        ConfigError: the code is larger than `run.snapshot_limit_mb`, or a folder does not exist.
    """
    if state is None:
        state = read_git(directory, env)
    uses_own_code = names_own_code(config)
    if state.files is None and not uses_own_code and not config.run.snapshot_folders:
        return Source({"": directory}, states={"": state})
    # If the runs' root also contains the code (run.root=.), only this run's own folder is left out.
    root = run.root
    holds_code = directory.resolve().is_relative_to(root.resolve())
    runs = (run.path.parent if holds_code else root).resolve()
    folders = {"": directory, **_further_folders(config.run.snapshot_folders, directory)}
    paths = own_paths()
    files: dict[str, Path] = {}
    states: dict[str, SourceState] = {}
    roots: list[str] = []
    left_out: list[str] = []
    for place, folder in folders.items():
        states[place] = read_git(folder, env) if place else state
        names, not_copied = plan_files(folder, states[place], limit_mb=config.run.snapshot_limit_mb, exclude=runs)
        for name in names:
            files[os.path.join(place, name)] = folder / name  # noqa: PTH118  # paths cost 10x
        left_out += not_copied
        roots += [f"{place}/{part}".strip("/") for part in import_roots(str(folder), paths, sys.meta_path)]
    if not uses_own_code:
        # Code that the job does not import may change.
        return Source(folders, files, states, roots)
    elsewhere = code_elsewhere(map(str, folders.values()), paths, sys.meta_path)
    beside = missing_beside(read_program(config, directory), files=files, folder=directory)
    return Source(folders, files, states, roots, elsewhere, left_out, beside)


def _further_folders(texts: Sequence[str], directory: Path) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for text in texts:
        folder = plain_path(directory, text)
        if not folder.is_dir():
            raise ConfigError(f"run.snapshot_folders: {text} is not a folder", hint="name a folder with your code")
        if folder.resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"run.snapshot_folders: {text} lies in {directory}, which is copied anyway",
                hint="name folders outside of it; files in it that git ignores are not code",
            )
        num_of_this_name = sum(earlier.name == folder.name for earlier in folders.values())
        suffix = f"-{num_of_this_name + 1}" if num_of_this_name else ""
        # In a hidden folder, so that the name cannot equal that of a folder of the user.
        folders[f".folders/{folder.name}{suffix}"] = folder
    return folders


def plan_files(folder: Path, state: SourceState, *, limit_mb: int, exclude: Path) -> tuple[list[str], list[str]]:
    """Returns the files to copy, relative to the folder, and those left out with the reason; writes nothing.

    A link to a folder inside the folder is replaced by the files of that folder. A link to another place is left out.

    Args:
        folder: a folder with code.
        state: git's facts about it.
        limit_mb: largest total size in MiB.
        exclude: the root of the runs, without links.

    Raises:
        ConfigError: the total size is above the limit.
    """
    if state.files is None:
        candidates = _walk(folder, exclude)
    else:
        candidates = [*state.files, *built_modules(str(folder), state.files)]
    secrets = {name for name in candidates if is_secret_file(name)}
    names, left_out = _follow_links(folder, [name for name in candidates if name not in secrets])
    left_out += [f"{name} (may hold secrets)" for name in sorted(secrets)]
    sizes: dict[str, int] = {}
    for name in names:
        path = folder / name
        if path.is_file() and not path.resolve().is_relative_to(exclude):
            sizes[name] = path.stat().st_size
    total = sum(sizes.values())
    if total > limit_mb << 20:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_MOST_NAMED]
        largest = [name for name in largest if sizes[name] > total / 100] or largest
        raise ConfigError(
            f"the code in {folder} is {total / (1 << 20):.1f} MiB, more than run.snapshot_limit_mb={limit_mb}; "
            f"largest: {', '.join(f'{name} ({sizes[name] / (1 << 20):.1f} MiB)' for name in largest)}",
            hint="list what is not code in .gitignore (outside git: start from the folder that holds the code), or "
            "raise run.snapshot_limit_mb",
        )
    return list(sizes), left_out


def _follow_links(folder: Path, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the files, also those behind links to folders, and the folders that are left out, with the reason."""
    real = folder.resolve()
    folders = [name for name in names if (folder / name).is_dir()]
    files = [name for name in names if name not in set(folders)]
    copied = list(files)
    left_out: list[str] = []
    for name in folders:
        target = (folder / name).resolve()
        if not (folder / name).is_symlink():
            left_out.append(f"{name} (a submodule that is not checked out)")
        elif not target.is_relative_to(real):
            left_out.append(f"{name} (a link to {target})")
        else:
            start = "" if target == real else f"{target.relative_to(real)}/"
            inner = [f"{name}/{file[len(start) :]}" for file in files if file.startswith(start)]
            copied += inner
            if not inner:
                left_out.append(f"{name} (a link to {target}, where there is no code)")
    return copied, left_out


def _walk(folder: Path, exclude: Path) -> list[str]:
    names: list[str] = []
    num_entries = 0
    packages: set[Path] = set()
    for current, subfolders, files in os.walk(folder):
        place = Path(current)
        if "__init__.py" in files or place.parent in packages:
            packages.add(place)
        subfolders[:] = sorted(name for name in subfolders if _may_hold_code(place / name, exclude))
        num_entries += len(files) + len(subfolders)
        if num_entries > _MAX_ENTRIES:
            raise ConfigError(
                f"{folder} is not a git repository and holds more than {_MAX_ENTRIES} files: which are the code?",
                hint="start from the folder of your project, or make it a git repository",
            )
        # `os.walk` does not follow links; `_follow_links` handles them.
        chosen = [name for name in subfolders if (place / name).is_symlink()]
        chosen += [name for name in sorted(files) if Path(name).suffix in _SOURCE_SUFFIXES]
        if place in packages:
            chosen += _data_of_package(place, [name for name in sorted(files) if name not in chosen])
        names += [str((place / name).relative_to(folder)) for name in chosen]
    return names


def _data_of_package(place: Path, files: Sequence[str]) -> list[str]:
    """Returns the small files beside the modules of a package, which it opens by `__file__` or importlib.resources.

    A folder with many of them is one of a data set.
    """
    small = [
        name for name in files if (place / name).is_file() and (place / name).stat().st_size <= _PACKAGE_DATA_BYTES
    ]
    return small if len(files) <= _MOST_PACKAGE_DATA else []


def _may_hold_code(folder: Path, exclude: Path) -> bool:
    is_hidden = folder.name.startswith((".", "__"))
    is_virtual_environment = (folder / "pyvenv.cfg").exists()
    return not is_hidden and not is_virtual_environment and os.path.realpath(folder) != str(exclude)


def source_notes(source: Source) -> list[str]:
    """Returns notes about the user's code that a run would not copy; none if it copies everything."""
    notes = []
    for place, state in source.states.items():
        if state.problem:
            notes.append(
                f"git does not read the repository of {source.folders[place]}: {state.problem}; so neither commit nor "
                "difference is recorded, and what is code is chosen by the endings of files, .gitignore unread"
            )
    if source.left_out:
        notes.append(f"not copied into the run: {shorten(source.left_out)}")
    if source.beside:
        notes.append(
            f"looked for by `__file__`, and not in the run's copy: {shorten(map(str, source.beside))}; give the "
            "program an absolute path, or one relative to this folder"
        )
    if source.elsewhere:
        notes.append(f"imported from where it is edited, not from a copy in the run: {', '.join(source.elsewhere)}")
        notes.append(f"to have the run copy it as well: run.snapshot_folders=[{','.join(source.elsewhere)}]")
    return notes


# --- the copy and its comparison ---

# Documents, which no run reads.
_DOCUMENTS = frozenset({".md", ".rst", ".ipynb", ".png", ".jpg", ".jpeg", ".svg", ".pdf"})
# What programs write beside their code, and what is not imported.
_WRITTEN = frozenset(
    {".json", ".jsonl", ".yaml", ".yml", ".csv", ".tsv", ".txt", ".log", ".out", ".err", ".parquet"}
    | {".pt", ".pth", ".ckpt", ".bin", ".npy", ".npz", ".pkl", ".pickle", ".safetensors", ".h5", ".db"}
)
_OWN_PACKAGE = ("slurm_train/", "conf/", "sbatch_templates/")
_LONGEST_COMPARED = 1 << 20
_WRITE_BITS = 0o222
_MODULE_SUFFIXES = (".py", ".pyc", ".so")
# The file system has no hard links, or the file belongs to another user.
_NO_HARD_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
MOST_CHANGES_SHOWN = 12

Locate = Callable[[str], Path]
"""Returns the path of a file of the code by its name."""


@dataclass(frozen=True, slots=True)
class Code:
    """One side of a comparison of code."""

    index: Mapping[str, str]
    """Hashes of the files by name."""
    locate: Locate

    def lines(self, name: str) -> list[str] | None:
        """Returns a file's lines, [] for one that is not in the index, None for one that cannot be compared."""
        if name not in self.index:
            return []
        try:
            data = self.locate(name).read_bytes()
            if len(data) > _LONGEST_COMPARED or xxhash.xxh3_128_hexdigest(data) != self.index[name]:
                return None
            return data.decode().splitlines()
        except (OSError, UnicodeDecodeError):
            return None


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file that differs."""

    name: str
    added: int | None = None
    """Number of lines; None if it is not known (no text, too long, or the old file has another hash than recorded)."""
    removed: int | None = None
    what: str = "changed"
    """Or "new" or "gone", if only one side has it."""

    def __str__(self) -> str:
        lines = "changed" if self.added is None else f"+{self.added} -{self.removed}"
        if self.what == "changed":
            return f"{self.name}: {lines}"
        return f"{self.name}: {self.what}, {lines}"


def write_snapshot(source: Source, target: Path, *, index: Path, keep: Path | None = None) -> list[str]:
    """Copies the code into a fresh folder, puts it in place of an older snapshot, and records its hashes.

    Args:
        source: the code.
        target: the snapshot.
        index: the file for the hashes; it also records the original folders, which the job's imports need.
        keep: a folder for the files of the older snapshot; None: they are removed.

    Returns:
        What was renamed, see `_put_in_place`.

    Raises:
        ConfigError: a file has gone since the files were listed.
    """
    fresh = _make_tree(target, source.files)
    # In a shared run the group may read the files that it may read in the submitting folder.
    readable_bits = 0o750 if is_shared(target.parent) else 0o700
    for name, path in source.files.items():
        try:
            shutil.copy2(path, fresh / name)
        except FileNotFoundError as err:
            # Without it the job might run other code than its index says.
            remove_tree(fresh)
            raise ConfigError(
                f"{path} has gone while the code was copied into the run",
                hint="type it again when nothing changes the folder; what programs write belongs outside of the code, "
                "or into .gitignore",
            ) from err
        os.chmod(fresh / name, os.stat(fresh / name).st_mode & readable_bits & ~_WRITE_BITS)  # noqa: PTH101, PTH116  # as above
    files = index_code(fresh.joinpath, source.files)
    set_aside = _put_in_place(fresh, target, before=_read_hashes(index) or {}, files=files, keep=keep)
    folders = {place: str(folder) for place, folder in source.folders.items()}
    facts = {"folders": folders, "roots": list(source.roots), "files": files}
    write_atomic(index, json.dumps(facts, indent=1) + "\n", durable=False)
    return set_aside


def share_snapshot(run: RunDirectory, shared: Path, index: Path, *, keep: Path | None = None) -> list[str]:
    """Gives a run the snapshot of a sweep or of another run: by links, which `own_snapshot` replaces at the start.

    Args:
        run: the run.
        shared: the snapshot.
        index: its hashes.
        keep: as for `write_snapshot`.

    Returns:
        What was renamed, see `_put_in_place`.
    """
    set_aside: list[str] = []
    if run.code.is_dir() and not run.code.is_symlink():
        files = _read_hashes(index) or {}
        before = read_index(run) or {}
        if files != before:
            fresh = _link_files(run.code, shared, files)
            set_aside = _put_in_place(fresh, run.code, before=before, files=files, keep=keep)
    else:
        link_file(run.code, shared)
    link_file(run.code_index, index)
    return set_aside


def own_snapshot(run: RunDirectory) -> None:
    """Gives a run that shares a snapshot a folder of its own with hard links to the files of that one.

    A program may write beside its own file, where only its own run reads it. Called before each attempt: thousands of
    folders at the submission of a sweep would take minutes.
    """
    has_own_folder = run.code.is_dir() and not run.code.is_symlink()
    if has_own_folder or not run.code_index.is_symlink():
        return
    # Not by the link `code`, which an attempt that was killed at this point has removed already.
    index = run.code_index.resolve()
    shared = index.with_name(index.name.partition(".")[0])
    files = _read_hashes(index) or {}
    fresh = _link_files(run.code, shared, files)
    _put_in_place(fresh, run.code, before={}, files=files)


def link_file(link: Path, target: Path) -> None:
    """Makes a link, also in place of an older one; relative, so that the root may be moved."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    rename(fresh, link)


def _make_tree(target: Path, names: Iterable[str]) -> Path:
    """Makes a folder beside the target, with the folders of these files, and returns it."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    remove_tree(fresh)
    fresh.mkdir(mode=0o700)
    # str in, str out: paths cost 10x here.
    for folder in sorted({os.path.dirname(name) for name in names}):  # noqa: PTH120  # as above
        os.makedirs(fresh / folder, mode=0o700, exist_ok=True)  # noqa: PTH103  # as above
    for folder, _, _ in os.walk(fresh) if is_shared(fresh.parent) else ():
        share_folder(Path(folder))
    return fresh


def _link_files(target: Path, shared: Path, names: Iterable[str]) -> Path:
    """Makes a folder beside the target with hard links to the files of a shared snapshot, and returns it."""
    fresh = _make_tree(target, names)
    for name in names:
        path = f"{shared}/{name}"
        # Who may write to a read-only file, as root may, would change it for every run that has a link to it.
        is_protected = not os.access(path, os.W_OK)
        try:
            if is_protected:
                os.link(path, f"{fresh}/{name}")
        except OSError as err:
            if err.errno not in _NO_HARD_LINK:
                raise
            is_protected = False
        if not is_protected:
            shutil.copy2(path, f"{fresh}/{name}")
    return fresh


def _put_in_place(
    fresh: Path, target: Path, *, before: Mapping[str, str], files: Mapping[str, str], keep: Path | None = None
) -> list[str]:
    """Puts the files of a fresh folder into a snapshot, in place of the older files.

    What a program has written beside the older files stays. It gets another name, NAME.aside, if a new file has its
    name, or if Python might import it in place of other code.

    Args:
        fresh: the folder; it is gone afterwards.
        target: the snapshot.
        before: hashes of the files that it was made of.
        files: hashes of the new files; those that are there already, after a start that was killed here, are replaced.
        keep: a folder for the files of the older snapshot; None: they are removed.

    Returns:
        The new names, relative to the target.
    """
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        rename(fresh, target)
        return []
    present = index_code(target.joinpath, (name for name in _walk_snapshot(target)[0] if name in {**before, **files}))
    for name, content in present.items():
        if content not in (before.get(name), files.get(name)):
            continue
        if keep is None or name not in before:
            (target / name).unlink()
        else:
            (keep / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            rename(target / name, keep / name)
    set_aside = [_set_aside(target, name) for name in _new_modules(target, files)]
    for folder, subfolders, names in os.walk(fresh):
        place = os.path.relpath(folder, fresh)
        for name in subfolders:
            path = target / place / name
            if not path.is_dir() or path.is_symlink():
                if os.path.lexists(path):
                    set_aside.append(_set_aside(target, os.path.normpath(f"{place}/{name}")))
                path.mkdir(mode=0o700)
        for name in names:
            if os.path.lexists(target / place / name):
                set_aside.append(_set_aside(target, os.path.normpath(f"{place}/{name}")))
            os.rename(f"{folder}/{name}", target / place / name)  # noqa: PTH104  # paths cost 10x
    remove_tree(fresh)
    return set_aside


def _set_aside(target: Path, name: str) -> str:
    new_name = f"{name}.aside"
    number = 1
    while os.path.lexists(target / new_name):
        number += 1
        new_name = f"{name}.aside-{number}"
    rename(target / name, target / new_name)
    return new_name


def index_code(locate: Locate, names: Iterable[str]) -> dict[str, str]:
    """Returns the hashes of files by name; unreadable files are missing in it."""
    hashes: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(OSError):
            hashes[name] = xxhash.xxh3_128_hexdigest(locate(name).read_bytes())
    return hashes


def read_index(run: RunDirectory) -> dict[str, str] | None:
    """Returns the recorded hashes of a run's snapshot, None if there are none."""
    return _read_hashes(run.code_index)


def _read_hashes(index: Path) -> dict[str, str] | None:
    files = (read_json(index) or {}).get("files")
    return files if isinstance(files, dict) else None


def live_code(run: RunDirectory, folders: Mapping[str, Path | str]) -> Code:
    """Returns the present state of a snapshot's files in their original folders.

    Args:
        run: the run.
        folders: each copied folder by its place in the snapshot.
    """

    def locate(name: str) -> Path:
        for place, folder in folders.items():
            if place and name.startswith(f"{place}/"):
                return Path(folder) / name.removeprefix(f"{place}/")
        return Path(folders[""]) / name

    return Code(index_code(locate, read_index(run) or {}), locate)


def digest_code(index: Mapping[str, str], *, is_own_code: bool) -> str:
    """Returns one hash of the files that can affect a run, see `matters`."""
    files = sorted(item for item in index.items() if matters(item[0], is_own_code=is_own_code))
    return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())


def matters(name: str, *, is_own_code: bool) -> bool:
    """Returns whether a file can affect a run: it is no document and, without own code, a file of this package."""
    return Path(name).suffix not in _DOCUMENTS and (is_own_code or name.startswith(_OWN_PACKAGE))


def without_written_files(run: RunDirectory, source: Source) -> tuple[Source, list[str]]:
    """Returns the code with which a run in progress continues, and the new files that are left out of it.

    A program may write results beside its code, since relative paths are those of the submitting folder. Where such
    files are all that is new, the code has not changed. Where anything else differs, nothing is left out.

    Args:
        run: the run.
        source: its code as it is now.
    """
    old = read_index(run) or {}
    new = sorted(name for name in source.files if name not in old)
    if not old or not new or not all(may_be_written(name) or Path(name).suffix in _DOCUMENTS for name in new):
        return source, []
    kept = replace(source, files={name: path for name, path in source.files.items() if name in old})
    is_same = digest_code(kept.code().index, is_own_code=True) == digest_code(old, is_own_code=True)
    return (kept, new) if is_same else (source, [])


def may_be_written(name: str) -> bool:
    """Returns whether a file may be one that the program itself writes, by its suffix."""
    return Path(name).suffix in _WRITTEN


def require_sealed(run: RunDirectory) -> None:
    """Refuses a run whose snapshot differs from the submitted one.

    Files of the program beside its code count only where Python might import them in place of other code.

    Raises:
        RunError: files of it were changed or removed, or modules were added; the first of them are named.
    """
    index = read_index(run)
    if index is None:
        return
    added = _new_modules(run.code, index)
    present = index_code(run.code.joinpath, [*index, *added])
    changes = compare_code(Code(index, run.code.joinpath), Code(present, run.code.joinpath))
    changes += [FileChange(name, what="new") for name in added if name not in present]
    if changes:
        raise RunError(
            f"the code snapshot {run.code} is not what was submitted: {shorten(map(str, changes), MOST_CHANGES_SHOWN)}",
            hint=f"edit your own files and take them with `resume {run.run_id} --accept code`, which also replaces "
            "a snapshot that was damaged and renames what was added; a program that changes files of its own code "
            "must write them elsewhere, e.g. into $SLURM_TRAIN_RUN_DIR",
        )


def _new_modules(code: Path, index: Mapping[str, str]) -> list[str]:
    """Returns what Python might import in place of other code: modules and packages in folders that have modules.

    Python reads a .pth file in folders of installed packages only; here it is a checkpoint. A module in a new folder
    without `__init__.py`, such as a program's backup of its sources, takes the place of no other. A folder with a
    dot in its name, such as one that was set aside, is imported by no name.
    """
    places = {""}
    for name in index:
        folder = os.path.dirname(name) if name.endswith(_MODULE_SUFFIXES) else ""  # noqa: PTH120  # paths cost 10x
        while folder not in places:
            places.add(folder)
            folder = os.path.dirname(folder)  # noqa: PTH120  # as above
    files, links = _walk_snapshot(code)
    modules = []
    for name in files:
        folder, base = os.path.split(name)
        is_package = base.startswith("__init__.") and os.path.dirname(folder) in places  # noqa: PTH120  # as above
        if name not in index and name.endswith(_MODULE_SUFFIXES) and (folder in places or is_package):
            modules.append(name)
    top = os.path.realpath(code)
    for name in links:
        if not os.path.basename(name).isidentifier():  # noqa: PTH119  # as above
            continue
        leads_out = not is_below(os.path.realpath(f"{code}/{name}"), top)
        # Python imports nothing from a folder that it cannot read.
        with contextlib.suppress(OSError):
            if leads_out and os.path.dirname(name) in places and packages_in(f"{code}/{name}"):  # noqa: PTH120  # as above
                modules.append(name)
    return sorted(modules)


def _walk_snapshot(code: Path) -> tuple[list[str], list[str]]:
    """Returns the files of a snapshot without Python's caches, and its links to folders."""
    files: list[str] = []
    links: list[str] = []
    for folder, subfolders, names in os.walk(code):
        place = os.path.relpath(folder, code)
        for name in subfolders:
            if os.path.islink(f"{folder}/{name}"):  # noqa: PTH114  # paths cost 10x
                links.append(os.path.normpath(f"{place}/{name}"))
        if not place.endswith("__pycache__"):
            files += [os.path.normpath(f"{place}/{name}") for name in names]
    return files, links


def compare_code(old: Code, new: Code) -> list[FileChange]:
    """Returns the files that differ, by name."""
    import difflib

    changes = []
    for name in sorted({*old.index, *new.index}):
        if old.index.get(name) == new.index.get(name):
            continue
        if name not in old.index:
            change = FileChange(name, what="new")
        elif name not in new.index:
            change = FileChange(name, what="gone")
        else:
            change = FileChange(name)
        old_lines = old.lines(name)
        new_lines = new.lines(name)
        if old_lines is not None and new_lines is not None:
            # The first two lines name the files.
            lines = list(difflib.unified_diff(old_lines, new_lines, n=0, lineterm=""))[2:]
            signs = [line[0] for line in lines]
            change = replace(change, added=signs.count("+"), removed=signs.count("-"))
        changes.append(change)
    return changes
