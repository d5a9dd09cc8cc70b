"""Which code a run was trained with: size and hash of every file of its snapshot, and what differs from it.

A requeue runs the snapshot again, days later; so nobody may have touched it. The files lose their write permission
(the folders keep it, so that `rm -r` works and Python can cache), and the hashes are compared before each attempt.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from slurm_train.errors import RunError
from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory

# What people read and no run does.
_PAPERS = frozenset({".md", ".rst", ".ipynb", ".png", ".jpg", ".jpeg", ".svg", ".pdf"})
_OWN_PACKAGE = ("slurm_train/", "conf/", "sbatch_templates/")
_LONGEST_COMPARED = 1 << 20
_WRITE_BITS = 0o222
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file that is not what it was."""

    name: str
    added: int | None
    """Lines; None where it cannot be told (no text, too long, or the old one is not what was recorded)."""
    removed: int | None
    what: str = ""
    """"new" or "gone" where it is not on both sides."""

    def __str__(self) -> str:
        lines = "changed" if self.added is None else f"+{self.added} -{self.removed}"
        return f"{self.name}: {self.what + ', ' if self.what else ''}{lines}"


@dataclass(frozen=True, slots=True)
class CodeIndex:
    """The files of a snapshot by name, each with the hash of its bytes."""

    files: Mapping[str, str]

    def digest(self, *, is_own_code: bool) -> str:
        """Returns one hash for the files that a run could notice, see `matters`."""
        files = sorted(item for item in self.files.items() if matters(item[0], is_own_code=is_own_code))
        return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())


Locate = Callable[[str], Path]
"""Gives the place of a file of the code by its name."""


def index_code(locate: Locate, names: Iterable[str]) -> CodeIndex:
    """Returns the hashes of files; one that cannot be read counts as absent."""
    found = {}
    for name in names:
        try:
            found[name] = xxhash.xxh3_128_hexdigest(locate(name).read_bytes())
        except OSError:
            continue
    return CodeIndex(found)


def seal_code(code: Path, names: Sequence[str], *, record: Path, facts: Mapping[str, Any]) -> CodeIndex:
    """Takes a snapshot's write permission away and records its hashes in a file; returns them.

    Args:
        code: the snapshot.
        names: its files.
        record: the file.
        facts: what else it says: where the code came from.
    """
    for name in names:
        path = code / name
        path.chmod(path.stat().st_mode & ~_WRITE_BITS)
    index = index_code(code.joinpath, names)
    write_atomic(record, json.dumps({**facts, "files": index.files}, indent=1) + "\n", durable=False)
    return index


def read_index(run: RunDirectory) -> CodeIndex | None:
    """Returns the recorded hashes of a run's snapshot, None where there are none."""
    record = read_json(run.code_index)
    files = None if record is None else record.get("files")
    return CodeIndex(files) if isinstance(files, dict) else None


def require_sealed(run: RunDirectory) -> None:
    """Does nothing where the snapshot is what was submitted.

    Raises:
        RunError: files of it were changed, removed or added since; the first of them are named.
    """
    index = read_index(run)
    if index is None:
        return
    # Python's cache may lie beside the code.
    names = [name for name in _walk(run.code) if "__pycache__/" not in name]
    changes = compare_code(index, index_code(run.code.joinpath, {*names, *index.files}))
    changes += [FileChange(name, None, None, "new") for name in names if (run.code / name).is_dir()]
    if changes:
        raise RunError(
            f"the code snapshot {run.code} is not what was submitted: {shorten(map(str, changes))}",
            hint=f"edit your own files and take them with `resume {run.run_id} --accept code`, which also replaces "
            "a snapshot that was damaged",
        )


def compare_code(
    old: CodeIndex, new: CodeIndex, *, old_file: Locate | None = None, new_file: Locate | None = None
) -> list[FileChange]:
    """Returns the files that differ, by name.

    Args:
        old: hashes before.
        new: hashes now.
        old_file: where the old files lie, to count lines.
        new_file: where the new ones lie.
    """
    names = sorted(name for name in {*old.files, *new.files} if old.files.get(name) != new.files.get(name))
    found = []
    for name in names:
        before = read_text_lines(old_file, name, old.files.get(name))
        after = read_text_lines(new_file, name, new.files.get(name))
        what = "new" if name not in old.files else "gone" if name not in new.files else ""
        found.append(FileChange(name, *_count(before, after), what))
    return found


def matters(name: str, *, is_own_code: bool) -> bool:
    """Returns whether a run could notice a change of a file: not of papers; without own code, only of this package."""
    return Path(name).suffix not in _PAPERS and (is_own_code or name.startswith(_OWN_PACKAGE))


def shorten(items: Iterable[str]) -> str:
    """Returns a list in one line, cut after a few."""
    texts = list(items)
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def _walk(root: Path) -> list[str]:
    """Returns the files below a folder, and the links to folders: a snapshot has none, and code could come by one."""
    return [
        os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118  # str in, str out: paths cost 10x here
        for folder, subfolders, names in os.walk(root)
        for name in (*names, *(name for name in subfolders if os.path.islink(f"{folder}/{name}")))  # noqa: PTH114  # as above
    ]


def read_text_lines(locate: Locate | None, name: str, recorded: str | None) -> list[str] | None:
    """Returns a file's lines, [] for one that is not recorded, None for one that cannot be compared.

    Args:
        locate: where it lies; None: it cannot be read.
        name: its name in the snapshot.
        recorded: the hash that its bytes must have.
    """
    if recorded is None:
        return []
    if locate is None:
        return None
    try:
        data = locate(name).read_bytes()
        if len(data) > _LONGEST_COMPARED or xxhash.xxh3_128_hexdigest(data) != recorded:
            return None
        return data.decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return None


def _count(before: list[str] | None, after: list[str] | None) -> tuple[int | None, int | None]:
    if before is None or after is None:
        return None, None
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]  # after the two lines with names
    return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)
