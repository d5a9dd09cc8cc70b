"""Where text comes from: files of text, and rows of JSON, CSV and Parquet files and of saved Hugging Face data sets.

A text file is one document; in the other files each row is one, its text in a column that is named. What is held out
depends on names and row numbers alone, not on the order of a listing, on the machine, or on which other files there
are. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from slurm_train.data.file_kind import FileKind, kind_of, num_rows, readable, rows_of, text_of
from slurm_train.data.order import mix64
from slurm_train.errors import DataError
from slurm_train.formatting import shorten
from slurm_train.rundir.files import read_json

_SAVED_DATASET = "state.json"
_SAVED_DICT = "dataset_dict.json"
# By the names that Hugging Face's data sets go by.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_ABOUT_DATA = ("readme", "license", "licence", "citation", "changelog")
_TEXT = FileKind(form="text", compression="", encoding="utf-8")
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, at most."""
_COLUMN_HINT = "name the column of the text: data.text_column=NAME, of `prepare` --text-column NAME"


@dataclass(frozen=True, slots=True)
class Document:
    """A file that holds text, or a part of a text file.

    Attributes:
        name: path below the folder that was given, e.g. "asyncio/events.py"; decides what is held out.
        path: where it is.
        start: first byte of the part.
        stop: byte after the last one.
        modified_ns: the file's modification time.
        kind: what the file holds.
        is_part: whether it is only a part of the text.
    """

    name: str
    path: Path
    start: int
    stop: int
    modified_ns: int
    kind: FileKind = _TEXT
    is_part: bool = False

    @property
    def num_bytes(self) -> int:
        """Length of the part."""
        return self.stop - self.start

    @property
    def has_rows(self) -> bool:
        """Whether each row is a document of its own."""
        return self.kind.has_rows

    def count(self) -> int:
        """Returns the number of its documents: 1 for a text file, else its rows.

        Raises:
            DataError: the file cannot be read.
        """
        return num_rows(self.path, self.kind) if self.has_rows else 1

    def split(self, held_out: float) -> tuple[Document, Document]:
        """Returns the beginning of a text file, and its end that is held out; no UTF-8 character is cut.

        Raises:
            DataError: the file cannot be read.
        """
        converted = text_of(self.path, self.kind) if self.kind.is_converted else None
        size = self.num_bytes if converted is None else len(converted)
        border = max(1, round(size * (1 - held_out)))
        if converted is None:
            with readable(self.path), self.path.open("rb") as file:
                file.seek(border)
                following = file.read(_LONGEST_CHARACTER - 1)
        else:
            following = converted[border : border + _LONGEST_CHARACTER - 1]
        border += _num_continuation_bytes(following)
        return replace(self, stop=border, is_part=True), replace(self, start=border, stop=size, is_part=True)

    def texts(self, rows: NDArray[np.bool_], *, column: str) -> Iterator[bytes]:
        """Yields the text of those documents of it that are asked for, in order, as UTF-8 or as the file has it.

        Args:
            rows: bool (`count()`,): which ones.
            column: of the text, where it has rows.

        Raises:
            DataError: the file cannot be read, has become shorter, is no text, or lacks the column.
        """
        if not self.has_rows:
            if rows[0]:
                yield self._read()
            return
        for number, (text, is_wanted) in enumerate(zip(rows_of(self.path, self.kind, column), rows, strict=True)):
            if not is_wanted:
                continue
            if text is not None and not isinstance(text, str):
                raise DataError(
                    f"{self.path}, row {number}: column {column!r} holds {type(text).__name__}, not text",
                    hint=_COLUMN_HINT,
                )
            yield (text or "").encode(errors="replace")

    def require_column(self, column: str) -> None:
        """Looks at the first row alone.

        Raises:
            DataError: the file cannot be read, or lacks the column.
        """
        if self.has_rows:
            next(rows_of(self.path, self.kind, column), None)

    def _read(self) -> bytes:
        if self.kind.is_converted:
            data = text_of(self.path, self.kind)
            data = data[self.start : self.stop] if self.is_part else data
        else:
            with readable(self.path), self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.num_bytes)
            if len(data) != self.num_bytes:
                raise DataError(
                    f"{self.path} became shorter while it was read", hint="prepare again when it is at rest"
                )
        if b"\0" in data:
            raise DataError(
                f"{self.path} is not text: it holds zero bytes",
                hint="of folders take text files only, e.g. --suffix .txt; files with rows are known by .jsonl, .json, "
                ".csv, .tsv, .parquet and .arrow; convert UTF-16 without a mark at its beginning with iconv",
            )
        return data


def _num_continuation_bytes(data: bytes) -> int:
    """Returns how many bytes at the beginning of UTF-8 text belong to a character that begins before it."""
    count = 0
    for byte in data:
        if byte & 0b11000000 != 0b10000000:
            break
        count += 1
    return count


def find_documents(
    inputs: Sequence[Path], *, suffixes: Collection[str] = (), skipped: Collection[str] = ()
) -> list[Document]:
    """Returns the files that are not empty, by name.

    Args:
        inputs: files, taken as they are, and folders, searched for files; names that begin with a dot are left out. Of
            a folder in which Hugging Face's `save_to_disk` has put a data set, the files that it names are taken.
            Of one with files of rows, a README and the like are left out. Links are followed; what several names lead
            to is taken once.
        suffixes: endings that a file in a folder must have, e.g. {".txt"}; empty takes all.
        skipped: names of folders that are not entered, and of links that may lead nowhere.

    Raises:
        DataError: an input does not exist or cannot be read, a link leads nowhere, a file is a pointer to one that was
            not downloaded, a folder has files of rows to train on and others to test on, or there is no text at all.
    """
    documents: list[Document] = []
    entered: set[str] = set()
    for given in inputs:
        begin = len(documents)
        paths = _files_below(given, tuple(suffixes), skipped, entered) if given.is_dir() else [given]
        for path in paths:
            name = given.name if path == given else path.relative_to(given).as_posix()
            if not os.path.lexists(path):
                raise DataError(
                    f"{path} cannot be read: No such file or directory",
                    hint="check the path; a data set of the Hub is downloaded first: `hf download org/name --repo-type "
                    "dataset --local-dir DIR`",
                )
            with readable(path):
                state = path.stat()
            kind = kind_of(path) if state.st_size else _TEXT
            documents.append(Document(name, path, 0, state.st_size, state.st_mtime_ns, kind))
        documents[begin:] = sorted(documents[begin:], key=_by_name)
        if given.is_dir():
            documents[begin:] = _rows_alone(given, documents[begin:])
    by_place: dict[str, Document] = {}
    for document in documents:
        by_place.setdefault(os.path.realpath(document.path), document)
    documents = sorted((document for document in by_place.values() if document.num_bytes), key=_by_name)
    if not documents:
        filters = f" with the suffixes {', '.join(sorted(suffixes))}" if suffixes else ""
        raise DataError(
            f"there is no text in {', '.join(map(str, inputs)) or 'no input'}: no file{filters} that is not empty",
            hint="give files, or folders and the --suffix of the files in them",
        )
    return documents


Half = list[tuple[Document, NDArray[np.bool_]]]
"""Documents, and which rows of each belong to one half: bool (`count()`,)."""


def split_documents(documents: Sequence[Document], *, held_out: float) -> tuple[Half, Half]:
    """Returns the train and the held-out half.

    Whole files and rows are held out, those whose hash is low. A single text file cannot be split so: its last part is
    held out. Where no hash falls into a half, the one nearest to it does, so both halves have text.

    Args:
        documents: at least one.
        held_out: fraction of files and rows to hold out, 0 <= held_out < 1; 0 holds out nothing.

    Raises:
        DataError: a file whose rows must be counted cannot be read, or there is neither a row nor a text.
    """
    counts = [document.count() for document in documents]
    if not sum(counts):
        names = shorten(str(document.path) for document in documents)
        raise DataError(f"there is no text in {names}: no row", hint="give files with rows below their header")
    if held_out and sum(counts) == 1 and not documents[0].has_rows:
        whole = documents[0]
        row = np.array([True])
        beginning, tail = whole.split(held_out)
        return [(beginning, row)], [(tail, row)] if tail.num_bytes else []
    hashes = [_row_hashes(document, count) for document, count in zip(documents, counts, strict=True)]
    held: list[NDArray[np.bool_]] = [of_rows < held_out for of_rows in hashes]
    if sum(counts) == 1:
        held = [np.zeros_like(rows) for rows in held]
    elif held_out:
        least = min(range(len(hashes)), key=lambda number: hashes[number].min(initial=1))
        greatest = max(range(len(hashes)), key=lambda number: hashes[number].max(initial=-1))
        held[least][np.argmin(hashes[least])] = True
        held[greatest][np.argmax(hashes[greatest])] = False
    train: Half = []
    heldout: Half = []
    for document, rows in zip(documents, held, strict=True):
        if not rows.all():
            train.append((document, ~rows))
        if rows.any():
            heldout.append((document, rows))
    return train, heldout


def hash_name(name: str) -> float:
    """Returns a number in [0, 1) that depends on the name alone."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogateescape")) / 2**64


def _row_hashes(document: Document, count: int) -> NDArray[np.float64]:
    """Returns a number in [0, 1) for each document of a file."""
    if not document.has_rows:
        return np.array([hash_name(document.name)])
    key = xxhash.xxh3_64_intdigest(document.name.encode(errors="surrogateescape"))
    return mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key)) / 2.0**64


def _by_name(document: Document) -> tuple[str, Path]:
    return document.name, document.path


def _rows_alone(folder: Path, documents: Sequence[Document]) -> list[Document]:
    """Returns what of a folder's documents is to be trained on; beside files of rows nothing that describes them.

    Raises:
        DataError: by their names some of these files are to train on and others are not.
    """
    rows = [document for document in documents if document.has_rows]
    if not rows:
        return list(documents)
    splits: dict[str, str] = {}
    for document in rows:
        words = set(re.findall("[a-z]+", document.name.lower()))
        named = [split for split, names in _SPLITS.items() if words & names]
        if len(named) == 1:
            splits.setdefault(named[0], document.name)
    if len(splits) > 1:
        raise DataError(
            f"{folder} holds several splits of a data set: {', '.join(sorted(splits.values()))}",
            hint="name the files of one of them, or a folder that holds no others",
        )
    return [document for document in documents if document.has_rows or document.path.stem.lower() not in _ABOUT_DATA]


def _files_below(
    folder: Path, suffixes: tuple[str, ...], skipped: Collection[str], entered: set[str]
) -> Iterator[Path]:
    """Yields the files below a folder; a link to a folder is entered after the folders that are none.

    Args:
        folder: where to begin.
        suffixes: endings that a file must have; empty takes all.
        skipped: names of folders that are not entered, and of links that may lead nowhere.
        entered: where the folders lie that were searched, without links; grows.
    """

    def refuse(err: OSError) -> None:
        raise DataError(f"{err.filename} cannot be read: {err.strerror}", hint="check its permissions") from err

    waiting = [folder]
    while waiting:
        links: list[Path] = []
        for parent, folders, files in os.walk(waiting.pop(0), onerror=refuse):
            place = os.path.realpath(parent)
            if place in entered:
                folders.clear()
                continue
            entered.add(place)
            files = _names_in(Path(parent), folders, files)
            folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
            links += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
            for name in files:
                path = Path(parent, name)
                if name.startswith(".") or (path.is_file() and suffixes and not name.endswith(suffixes)):
                    continue
                if path.is_file():
                    yield path
                elif name not in skipped:
                    _require_there(path, suffixes)
        # A link to a folder above the first one would add files that were not asked for.
        begin = Path(os.path.realpath(folder))
        waiting += sorted(link for link in links if Path(os.path.realpath(link)) not in begin.parents)


def _names_in(parent: Path, folders: list[str], files: list[str]) -> list[str]:
    """Returns the files of a folder that are to be looked at; of a saved data set, those that it names alone.

    Raises:
        DataError: there are several saved data sets below the folder.
    """
    if _SAVED_DICT in files:
        raise DataError(
            f"{parent} holds several saved data sets: {', '.join(sorted(folders))}",
            hint=f"name one of them, e.g. {parent / min(folders, default='train')}",
        )
    if _SAVED_DATASET not in files:
        return files
    folders.clear()
    saved = read_json(parent / _SAVED_DATASET) or {}
    names = [str(file["filename"]) for file in saved.get("_data_files", ())]
    for name in names:
        if not os.path.lexists(parent / name):
            raise DataError(
                f"{parent / name} belongs to the data set that is saved there, and is not there",
                hint="copy the data set again, whole",
            )
    return names


def _require_there(path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuses a link to nothing where text was meant: training would go on without it.

    Raises:
        DataError: it leads nowhere, and has one of the suffixes, or none as a folder.
    """
    is_wanted = not suffixes or path.name.endswith(suffixes) or not path.suffix
    if path.is_symlink() and not path.exists() and is_wanted:
        raise DataError(
            f"{path} is a link to {path.readlink()}, which is not there",
            hint="get what it stands for (e.g. `git annex get`, `dvc pull`), or remove the link",
        )
