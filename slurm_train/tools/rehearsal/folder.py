"""The folder that a rehearsed run works in: a copy of the person's, and which files the run has written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.formatting import byte_size

_LARGE_BYTES = 16 << 20
_MOST_BYTES = 4 << 30
_MOST_FILES = 20_000
_MOST_IN_FOLDER = 2_000
"""A folder with more files holds data: it is linked as it is."""
_TEXTS = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")
_LONGEST_TEXT_BYTES = 1 << 20
_BESIDE = re.compile(rb"""(?:^|[\s'"=(])\.\./([\w.-]*\w)""")
_WEIGHTS = (
    *(".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pkl", ".npz", ".npy", ".distcp", ".tar", ".h5", ".zip"),
    *(".msgpack", ".model", ".orbax", ".state"),
)
_NAMED_CHECKPOINT = re.compile(r"ckpt|checkpoint|(?:^|/)(?:last|latest|best|state|model|optim)[^/]*$", re.IGNORECASE)
_NUMBERED = re.compile(r"(?:ckpt|checkpoint|step|epoch)\D?\d", re.IGNORECASE)
_NO_CHECKPOINT = (".log", ".txt", ".csv", ".jsonl", ".py", ".pyc", ".yaml", ".yml", ".html", ".png", ".lock", ".sh")
_TIME = re.compile(
    r"(?<!\d)(?:19|20)\d{2}[-_.]?\d{2}[-_.]?\d{2}(?:[-_.T ]*\d{2}[-_.:h]?\d{2}(?:[-_.:m]?\d{2})?)?(?!\d)"
    r"|(?<!\d)\d{2}[-_.:]\d{2}[-_.:]\d{2}(?!\d)|(?<!\d)1[5-9]\d{8}(?!\d)"
)
"""Dates and times in names: 20261129-003521, 2026-11-29/00-35-21, seconds since 1970."""
_RANDOM = re.compile(
    r"(?<![0-9a-zA-Z])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,40})(?![0-9a-zA-Z])"
)
"""A UUID, or hexadecimal digits, of which a word has none: 3f9a1c07."""


def copy_folder(source: Path, target: Path, *, without: Collection[Path]) -> None:
    """Copies a folder so that what a run writes there leaves the original alone.

    Large files and folders with thousands of files are data, which are linked; what looks like a checkpoint is copied
    whatever its size, since a program may write it again in its place. Git's folder and virtual environments are left
    out or linked. What its code names as `../data` is copied beside it in the same way.

    Args:
        source: the person's folder.
        target: a folder that is made, alone in its parent.
        without: folders in it that are left out, such as the root of the runs.

    Raises:
        RunError: it holds more checkpoints than can be copied.
    """
    copy = _Copy(source, {path.resolve() for path in without})
    copy.copy(source, target)
    for name in sorted(copy.beside - {source.name}):
        if (source.parent / name).exists():
            copy.copy_entry(source.parent / name, target.parent / name)


class _Copy:
    def __init__(self, source: Path, without: Collection[Path]) -> None:
        self._source = source
        self._without = without
        self._num_bytes = 0
        self._num_files = 0
        self.beside: set[str] = set()
        """Names in the folder's parent that its code has."""

    def copy(self, source: Path, target: Path) -> None:
        target.mkdir()
        for path in sorted(source.iterdir()):
            self.copy_entry(path, target / path.name)

    def copy_entry(self, path: Path, place: Path) -> None:
        if path.name in (".git", "__pycache__") or path.resolve() in self._without:
            return
        if path.is_symlink():
            place.symlink_to(path.resolve())
        elif path.is_dir():
            if self._is_data(path):
                place.symlink_to(path.resolve())
            else:
                self.copy(path, place)
        elif path.is_file():
            self._copy_file(path, place, path.stat().st_size)

    def _is_data(self, folder: Path) -> bool:
        names = {path.name for path in folder.iterdir()}
        is_environment = "pyvenv.cfg" in names or "conda-meta" in names
        return is_environment or len(names) > _MOST_IN_FOLDER or self._num_files > _MOST_FILES

    def _copy_file(self, path: Path, place: Path, size: int) -> None:
        self._num_files += 1
        if path.suffix in _TEXTS and size < _LONGEST_TEXT_BYTES:
            self.beside |= {os.fsdecode(name) for name in _BESIDE.findall(path.read_bytes())}
        if size > _LARGE_BYTES and not is_checkpoint(os.path.relpath(path, self._source)):
            place.symlink_to(path.resolve())
            return
        self._num_bytes += size
        if self._num_bytes > _MOST_BYTES:
            raise RunError(
                f"{self._source} holds more than {byte_size(_MOST_BYTES)} of checkpoints and other files, which a "
                "rehearsal copies",
                hint="rehearse in a folder with the program alone, with absolute paths to its data",
            )
        shutil.copy2(path, place)


def is_checkpoint(name: str) -> bool:
    """Returns whether a file is a checkpoint by its name, e.g. "out/last.pt"."""
    suffix = Path(name).suffix.lower()
    return suffix in _WEIGHTS or (suffix not in _NO_CHECKPOINT and _NAMED_CHECKPOINT.search(name) is not None)


def in_folders(names: Iterable[str]) -> list[str]:
    """Returns names with one in place of all files of a checkpoint's folder, e.g. "out/checkpoint-10/"."""
    return sorted({_folder_of(name) or name for name in names})


def _folder_of(name: str) -> str:
    """Returns the outermost folder in the path of a file that is named as a checkpoint, "" for none."""
    parts = name.split("/")[:-1]
    end = next((index for index, part in enumerate(parts) if _NUMBERED.search(part)), None)
    return "" if end is None else "/".join(parts[: end + 1]) + "/"


Files = Mapping[str, tuple[int, int]]
"""Relative path -> size and time of its last change, in ns."""


def files_in(folder: Path, *, without: Iterable[str] = ()) -> dict[str, tuple[int, int]]:
    """Returns the files below a folder; links are not followed.

    Args:
        folder: names are relative to it.
        without: names of files and folders directly below it that are left out.
    """
    left_out = set(without)
    files: dict[str, tuple[int, int]] = {}
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        with contextlib.suppress(OSError):
            for entry in os.scandir(here):
                if here == folder and entry.name in left_out:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        files[str(Path(entry.path).relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return files


def unfinished_in(error: str, files: Files, expected: Files) -> str:
    """Returns the checkpoint folder that an error names and that was not written to its end, "" for none.

    Another one of its kind, e.g. "out/checkpoint-10/" of "out/checkpoint-20/", has a file that it lacks, or a much
    larger one.

    Args:
        error: a line with a path.
        files: all that were there.
        expected: those of a run that was not disturbed.
    """
    sizes = {name: size for name, (size, _) in (*expected.items(), *files.items()) if is_checkpoint(name)}
    folders = [name.rstrip("/") for name in in_folders(sizes) if name.endswith("/")]
    for folder in folders:
        if not re.search(re.escape(folder) + r"(?!\w)", error):
            continue
        present = _inside(folder, files)
        others = [other for other in folders if _without_numbers(other) == _without_numbers(folder)]
        for other in others:
            for name in _inside(other, sizes):
                size = files[f"{folder}/{name}"][0] if name in present else -1
                if size < sizes[f"{other}/{name}"] / 2:
                    return f"{folder}/"
    return ""


def changed(before: Files, after: Files) -> set[str]:
    """Returns the files that are new or have changed."""
    return {name for name, status in after.items() if before.get(name) != status}


def without_times(name: str) -> str:
    """Returns a path with its dates, times and random numbers replaced, e.g. "out/<time>/last.pt"."""
    return _RANDOM.sub("<id>", _TIME.sub("<time>", name))


def renamed_folder(first: Iterable[str], second: Iterable[str]) -> str | None:
    """Returns where two starts have written into folders of other names, None if they have not.

    If the first start has written checkpoints, their folders count, else all: a log by time costs nothing. A folder
    counts if the second start has left it alone, and has written into one that differs by a time or a number, or that
    holds a file of the same name.

    Args:
        first: names that the first start has written.
        second: those of the second.

    Returns:
        Such a name, e.g. "out/<time>/last.pt", "logs/version_<n>/", "out/<name>/last.pt".
    """
    written, again = set(first), set(second)
    saved = set(filter(is_checkpoint, written))
    left_alone = _folders(saved or written) - _folders(again) | (saved - again)
    new = sorted((_folders(again) - _folders(written)) | (again - written))
    for name in sorted(saved or written):
        forms = {without_times(place): place for place in (name, *_folders([name])) if place in left_alone}
        for place in new:
            form = without_times(place)
            if form in forms and form != forms[form]:
                return without_times(name)
    numbered = {_without_numbers(folder) for folder in left_alone - saved if not _NUMBERED.search(folder)}
    new_folders = [folder for folder in new if folder not in again]
    for folder in new_folders:
        form = _without_numbers(folder)
        if form in numbered and form != folder:
            return f"{form}/"
    for folder in new_folders:
        for other in sorted(left_alone - saved):
            common = _inside(folder, again) & _inside(other, written)
            if Path(folder).parent == Path(other).parent and common and not _NUMBERED.search(other):
                return str(Path(other).with_name("<name>") / min(common))
    return None


def _inside(folder: str, names: Iterable[str]) -> set[str]:
    return {name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")}


def _folders(names: Iterable[str]) -> set[str]:
    return {str(folder) for name in names for folder in Path(name).parents}


def _without_numbers(folder: str) -> str:
    """Returns a folder with the numbers of its last part replaced, e.g. "logs/version_<n>"."""
    path = Path(folder)
    return str(path.with_name(re.sub(r"\d+", "<n>", path.name))) if path.name else folder
