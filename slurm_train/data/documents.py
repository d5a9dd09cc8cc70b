"""Where text comes from: files of text, and the rows of JSONL and Parquet files and of saved Hugging Face data sets.

A text file is one document; in the other files each row is one, its text in a column that is named. What is held out
depends on names and row numbers alone, not on the order of a listing, on the machine, or on which other files there
are. pyarrow, which reads Parquet and Arrow, is imported where such a file is read. Torch-free.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from slurm_train.data.order import mix64
from slurm_train.errors import DataError
from slurm_train.frozen_class import frozen_positional
from slurm_train.rundir.files import read_json

_JSONL, _PARQUET, _ARROW = (".jsonl", ".ndjson"), (".parquet",), (".arrow",)
_SAVED_DATASET, _SAVED_DICT = "state.json", "dataset_dict.json"
_ROWS_AT_ONCE = 1024
_COLUMN_HINT = "name the column of the text: data.text_column=NAME, of `prepare` --text-column NAME"


@frozen_positional
class Document:
    """A file that holds text, or a part of a text file.

    Attributes:
        name: path below the folder that was given, e.g. "asyncio/events.py"; decides what is held out.
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

    @property
    def has_rows(self) -> bool:
        """Whether each row is a document of its own."""
        return self.path.name.endswith(_JSONL + _PARQUET + _ARROW)

    def count(self) -> int:
        """Returns the number of its documents: 1 for a text file, else its rows.

        Raises:
            DataError: the file cannot be read.
        """
        if not self.has_rows:
            return 1
        if self.path.name.endswith(_JSONL):
            return sum(1 for _ in self._lines())
        table = _open_table(self.path)
        return int(table.metadata.num_rows) if self.path.name.endswith(_PARQUET) else sum(b.num_rows for b in table)

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
        for number, (text, is_wanted) in enumerate(zip(self._rows(column), rows, strict=True)):
            if not is_wanted or text is None:
                continue
            if not isinstance(text, str):
                raise DataError(
                    f"{self.path}, row {number}: column {column!r} holds {type(text).__name__}, not text",
                    hint=_COLUMN_HINT,
                )
            yield text.encode(errors="replace")

    def require_column(self, column: str) -> None:
        """Looks at the first row alone.

        Raises:
            DataError: the file cannot be read, or lacks the column.
        """
        if self.has_rows:
            next(self._rows(column), None)

    def _rows(self, column: str) -> Iterator[Any]:
        return self._json_rows(column) if self.path.name.endswith(_JSONL) else self._arrow_rows(column)

    def _read(self) -> bytes:
        with _readable(self.path), self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.num_bytes)
        if len(data) != self.num_bytes:
            raise DataError(f"{self.path} became shorter while it was read", hint="prepare again when it is at rest")
        if b"\0" in data:
            raise DataError(
                f"{self.path} is not text: it holds zero bytes",
                hint="of folders take text files only, e.g. --suffix .txt; JSONL and Parquet files are known by "
                ".jsonl and .parquet; convert UTF-16 with iconv",
            )
        return data

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with _readable(self.path), self.path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if not line.isspace())

    def _json_rows(self, column: str) -> Iterator[Any]:
        for number, line in self._lines():
            try:
                row = json.loads(line)
            except ValueError as err:
                raise DataError(f"{self.path}:{number} is not JSON: {err}", hint="each line is a JSON object") from err
            if not isinstance(row, dict) or column not in row:
                raise _no_column(f"{self.path}:{number}", column, row if isinstance(row, dict) else ())
            yield row[column]

    def _arrow_rows(self, column: str) -> Iterator[Any]:
        table, is_parquet = _open_table(self.path), self.path.name.endswith(_PARQUET)
        names = table.schema_arrow.names if is_parquet else table.schema.names
        if column not in names:
            raise _no_column(str(self.path), column, names)
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[column]) if is_parquet else table:
            yield from batch.column(batch.schema.get_field_index(column)).to_pylist()


def find_documents(
    inputs: Sequence[Path], *, suffixes: Collection[str] = (), skipped: Collection[str] = ()
) -> list[Document]:
    """Returns the files that are not empty, by name.

    Args:
        inputs: files, taken as they are, and folders, searched for files; names that begin with a dot are left out. Of
            a folder in which Hugging Face's `save_to_disk` has put a data set, the files that it names are taken.
        suffixes: endings that a file in a folder must have, e.g. {".txt"}; empty takes all.
        skipped: names of folders that are not entered.

    Raises:
        DataError: an input does not exist or cannot be read, or there is no text in all of them.
    """
    documents: list[Document] = []
    for given in inputs:
        paths = _files_below(given, tuple(suffixes), skipped) if given.is_dir() else [given]
        for path in paths:
            name = given.name if path == given else path.relative_to(given).as_posix()
            with _readable(path):
                state = path.stat()
            documents.append(Document(name, path, 0, state.st_size, state.st_mtime_ns))
    documents = sorted((found for found in documents if found.num_bytes), key=lambda found: (found.name, found.path))
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
        DataError: a file whose rows must be counted cannot be read.
    """
    counts = [document.count() for document in documents]
    if held_out and sum(counts) == 1 and not documents[0].has_rows:
        whole, row = documents[0], np.array([True])
        border = max(1, round(whole.num_bytes * (1 - held_out)))
        tail = replace(whole, start=border)
        return [(replace(whole, stop=border), row)], [(tail, row)] if tail.num_bytes else []
    hashes = [_row_hashes(document, count) for document, count in zip(documents, counts, strict=True)]
    held: list[NDArray[np.bool_]] = [of_rows < held_out for of_rows in hashes]
    if sum(counts) == 1:
        held = [np.zeros_like(rows) for rows in held]
    elif held_out:
        least = min((float(of_rows.min(initial=1)), number) for number, of_rows in enumerate(hashes))[1]
        greatest = max((float(of_rows.max(initial=-1)), number) for number, of_rows in enumerate(hashes))[1]
        held[least][np.argmin(hashes[least])] = True
        held[greatest][np.argmax(hashes[greatest])] = False
    pairs = list(zip(documents, held, strict=True))
    return [(document, ~rows) for document, rows in pairs if not rows.all()], [
        (document, rows) for document, rows in pairs if rows.any()
    ]


def hash_name(name: str) -> float:
    """Returns a number in [0, 1) that depends on the name alone."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogateescape")) / 2**64


def _row_hashes(document: Document, count: int) -> NDArray[np.float64]:
    """Returns a number in [0, 1) for each document of a file."""
    if not document.has_rows:
        return np.array([hash_name(document.name)])
    key = xxhash.xxh3_64_intdigest(document.name.encode(errors="surrogateescape"))
    return mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key)) / 2.0**64


def _files_below(folder: Path, suffixes: tuple[str, ...], skipped: Collection[str]) -> Iterable[Path]:
    def refuse(err: OSError) -> None:
        raise DataError(f"{err.filename} cannot be read: {err.strerror}", hint="check its permissions") from err

    for parent, folders, files in os.walk(folder, onerror=refuse):
        if _SAVED_DICT in files:
            raise DataError(
                f"{parent} holds several saved data sets: {', '.join(sorted(folders))}",
                hint=f"name one of them, e.g. {Path(parent) / min(folders, default='train')}",
            )
        if _SAVED_DATASET in files:
            saved = read_json(Path(parent) / _SAVED_DATASET) or {}
            files = [str(one["filename"]) for one in saved.get("_data_files", ())]
            folders.clear()
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and (not suffixes or name.endswith(suffixes)):
                path = Path(parent, name)
                if path.is_file():
                    yield path


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise DataError(f"{path} cannot be read: {err.strerror}", hint="check the path and its permissions") from err


def _open_table(path: Path) -> Any:
    """Returns pyarrow's reader of a Parquet file, or of an Arrow stream as Hugging Face saves it."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as err:
        raise DataError(
            f"{path} needs pyarrow, which is not installed", hint="pip install 'slurm-train[data]'"
        ) from err
    try:
        if path.name.endswith(_PARQUET):
            return parquet.ParquetFile(str(path))
        return arrow.ipc.open_stream(arrow.memory_map(str(path)))
    except (OSError, arrow.ArrowException) as err:
        raise DataError(f"{path} cannot be read: {err}", hint="is it whole, and what its suffix says?") from err


def _no_column(where: str, column: str, found: Iterable[str]) -> DataError:
    return DataError(f"{where} has no column {column!r}, it has {', '.join(found) or 'none'}", hint=_COLUMN_HINT)
