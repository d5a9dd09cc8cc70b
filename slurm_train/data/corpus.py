"""From files and folders to documents, and from documents to a train and a held-out half.

The split is by file and by a hash of the file's relative path: it does not depend on the order of a listing, on the
machine, or on which other files there are. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from slurm_train.errors import DataError


@dataclass(frozen=True, slots=True)
class Document:
    """A file of text, or a part of one.

    Attributes:
        name: path below the folder that was given, e.g. "asyncio/events.py"; decides the split.
        path: where it is.
        start: first byte of the part.
        stop: byte after the last one.
        modified_ns: the file's modification time.
    """

    name: str
    path: Path
    start: int
    stop: int
    modified_ns: int

    @property
    def num_bytes(self) -> int:
        """Length of the part."""
        return self.stop - self.start

    def read(self) -> bytes:
        """Returns the bytes of the part.

        Raises:
            DataError: the file cannot be read or has become shorter.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.num_bytes)
        except OSError as err:
            raise DataError(f"{self.path} cannot be read: {err.strerror}", hint="check its permissions") from err
        if len(data) != self.num_bytes:
            raise DataError(f"{self.path} became shorter while it was read", hint="prepare again when it is at rest")
        return data


def find_documents(
    inputs: Sequence[Path], *, suffixes: Collection[str] = (), skipped: Collection[str] = ()
) -> list[Document]:
    """Returns the files that are not empty, by name.

    Args:
        inputs: files, taken as they are, and folders, searched for files; names that begin with a dot are left out.
        suffixes: endings that a file in a folder must have, e.g. {".txt"}; empty takes all.
        skipped: names of folders that are not entered.

    Raises:
        DataError: an input does not exist or cannot be read, or there is no text in all of them.
    """
    documents: list[Document] = []
    for given in inputs:
        if given.is_dir():
            paths = _files_below(given, suffixes=tuple(suffixes), skipped=skipped)
            documents += [_document(path, path.relative_to(given).as_posix()) for path in paths]
        else:
            documents.append(_document(given, given.name))
    documents = sorted((found for found in documents if found.num_bytes), key=lambda found: (found.name, found.path))
    if not documents:
        filters = f" with the suffixes {', '.join(sorted(suffixes))}" if suffixes else ""
        raise DataError(
            f"there is no text in {', '.join(map(str, inputs)) or 'no input'}: no file{filters} that is not empty",
            hint="give files, or folders and the --suffix of the files in them",
        )
    return documents


def split_documents(documents: Sequence[Document], *, held_out: float) -> tuple[list[Document], list[Document]]:
    """Returns the train and the held-out documents.

    A single file cannot be split by file: its last part is held out. Where no hash falls into the held-out part, the
    file with the lowest one does, and likewise for the train part; so both halves have text.

    Args:
        documents: at least one.
        held_out: fraction of the files to hold out, 0 <= held_out < 1; 0 holds out nothing.
    """
    if held_out == 0:
        return list(documents), []
    if len(documents) == 1:
        return _cut(documents[0], held_out=held_out)
    ranked = sorted(documents, key=lambda document: (hash_name(document.name), document.name))
    num_held_out = sum(hash_name(document.name) < held_out for document in ranked)
    chosen = set(ranked[: min(max(num_held_out, 1), len(ranked) - 1)])
    return [d for d in documents if d not in chosen], [d for d in documents if d in chosen]


def hash_name(name: str) -> float:
    """Returns a number in [0, 1) that depends on the name alone."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogateescape")) / 2**64


def _files_below(folder: Path, *, suffixes: tuple[str, ...], skipped: Collection[str]) -> Iterable[Path]:
    def refuse(err: OSError) -> None:
        raise DataError(f"{err.filename} cannot be read: {err.strerror}", hint="check its permissions") from err

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and (not suffixes or name.endswith(suffixes)):
                path = Path(parent, name)
                if path.is_file():
                    yield path


def _document(path: Path, name: str) -> Document:
    try:
        state = path.stat()
    except OSError as err:
        raise DataError(f"{path} cannot be read: {err.strerror}", hint="check the path and its permissions") from err
    return Document(name=name, path=path, start=0, stop=state.st_size, modified_ns=state.st_mtime_ns)


def _cut(document: Document, *, held_out: float) -> tuple[list[Document], list[Document]]:
    border = max(1, round(document.num_bytes * (1 - held_out)))
    parts = [(0, border), (border, document.stop)]
    train, tail = (Document(document.name, document.path, start, stop, document.modified_ns) for start, stop in parts)
    return [train], [tail] if tail.num_bytes else []
