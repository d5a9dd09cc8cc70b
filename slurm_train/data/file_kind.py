"""What kind of file text comes from, and its rows: plain text, JSON, CSV, Parquet, Arrow; compressed or not.

Compression, Parquet, Arrow and the encoding are told by a file's first bytes. An ending tells rows from text where
bytes cannot: .jsonl, .json, .csv, .tsv. What is none of these is text. pyarrow is imported where it is needed.
Torch-free.
"""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from slurm_train.errors import DataError

_ROWS_AT_ONCE = 1024
_HEAD_BYTES = 4096
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_OTHERS = {
    b"PK\x03\x04": "a zip archive (or a document in one)",
    b"%PDF": "a PDF document",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x89HDF": "an HDF5 file",
}
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get FILE"),
}
# The longer mark first: UTF-32's begins like UTF-16's.
_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_PARQUET_MARK = b"PAR1"
_ARROW_FILE_MARK = b"ARROW1"
_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_TABLES = ("parquet", "arrow")
_COLUMN_HINT = "name the column of the text: data.text_column=NAME, of `prepare` --text-column NAME"
_ENCODING_HINT = "convert it, e.g. iconv -f latin1 -t utf-8 FILE"
_DELIMITERS = (",", ";", "\t", "|")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """What a file holds."""

    form: str
    """text, jsonl, json, csv, tsv, parquet or arrow."""
    compression: str
    """gzip, bz2, xz, zstd, or ""."""
    encoding: str
    """utf-8, or what a mark at the beginning says."""

    @property
    def has_rows(self) -> bool:
        """Whether each row is a document of its own."""
        return self.form != "text"

    @property
    def is_converted(self) -> bool:
        """Whether the text is not the bytes of the file."""
        return bool(self.compression) or self.encoding != "utf-8"


def kind_of(path: Path) -> FileKind:
    """Returns what a file holds.

    Raises:
        DataError: it cannot be read, is an archive, a document of another program, or a pointer to a file.
    """
    with readable(path), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(max(0, path.stat().st_size - len(_PARQUET_MARK)))
        tail = file.read()
    _refuse_pointer(path, head)
    compression = next((name for mark, name in _COMPRESSIONS.items() if head.startswith(mark)), "")
    stem = path.name.lower()
    if compression:
        with readable(path), _open(path, compression) as stream:
            head = stream.read(_HEAD_BYTES)
        stem = next((stem.removesuffix(ending) for ending in _COMPRESSED_ENDINGS if stem.endswith(ending)), stem)
    for mark, kind in _OTHERS.items():
        if head.startswith(mark):
            raise DataError(f"{path} is {kind}, not text", hint="unpack it, or convert it to text, JSONL or Parquet")
    form = next((form for ending, form in _ENDINGS.items() if stem.endswith(ending)), "text")
    if head.startswith(_PARQUET_MARK) and tail == _PARQUET_MARK:
        form = "parquet"
    elif head.startswith(_ARROW_FILE_MARK):
        form = "arrow"
    if compression and form in _TABLES:
        raise DataError(
            f"{path} is a compressed file of the kind {form}", hint=f"unpack it; {form} files compress their columns"
        )
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")
    encoding = "utf-8" if form in _TABLES else marked
    if form == "json" and not _begins_array(head, encoding):
        # Rows of JSON, one a line, are often called .json.
        form = "jsonl"
    return FileKind(form=form, compression=compression, encoding=encoding)


def require_content(path: Path) -> None:
    """Refuses a pointer in place of a file that was not downloaded.

    Raises:
        DataError: it is such a pointer, of Git LFS or git-annex, or cannot be read.
    """
    with readable(path), path.open("rb") as file:
        _refuse_pointer(path, file.read(_HEAD_BYTES))


def _refuse_pointer(path: Path, head: bytes) -> None:
    for mark, (program, command) in _POINTERS.items():
        if head.startswith(mark):
            raise DataError(
                f"{path} was not downloaded: it is a pointer of {program}, {len(head)} bytes that stand for the file",
                hint=f"get the file: `{command}` in its repository; from the Hub: `hf download org/name`",
            )


def text_of(path: Path, kind: FileKind) -> bytes:
    """Returns the whole text of a file as UTF-8, or as the file has it where no mark tells its encoding.

    Raises:
        DataError: it cannot be read or unpacked.
    """
    with readable(path), _open(path, kind.compression) as stream:
        data = stream.read()
        return data if kind.encoding == "utf-8" else data.decode(kind.encoding).encode()


def num_rows(path: Path, kind: FileKind) -> int:
    """Returns the number of rows of a file that has them.

    Raises:
        DataError: it cannot be read.
    """
    if kind.form == "parquet":
        return int(_open_table(path, kind).metadata.num_rows)
    if kind.form == "arrow":
        with _table_readable(path):
            return sum(batch.num_rows for batch in _open_table(path, kind))
    if kind.form == "json":
        return len(_array(path, path.stat().st_mtime_ns, kind))
    if kind.form == "jsonl":
        return sum(1 for _ in _lines(path, kind))
    return sum(1 for _ in _table_rows(path, kind, None))


def rows_of(path: Path, kind: FileKind, column: str) -> Iterator[Any]:
    """Yields what a column has in each row; None where a row has nothing.

    Raises:
        DataError: the file cannot be read, or lacks the column.
    """
    if kind.form in _TABLES:
        return _arrow_rows(path, kind, column)
    if kind.form == "json":
        return _array_rows(path, kind, column)
    return _json_rows(path, kind, column) if kind.form == "jsonl" else _table_rows(path, kind, column)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what the system or a decoder says of a file into an error of ours."""
    try:
        yield
    except UnicodeDecodeError as err:
        raise DataError(
            f"{path} is not {err.encoding}: {err.reason} at byte {err.start}",
            hint=_ENCODING_HINT,
        ) from err
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise DataError(
            f"{path} cannot be read: {reason}", hint="check the path and its permissions, and whether it is whole"
        ) from err


def _open(path: Path, compression: str) -> BinaryIO:
    if compression == "zstd":
        arrow = _require_arrow(path)
        return cast("BinaryIO", io.BufferedReader(arrow.input_stream(str(path), compression="zstd")))
    openers: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open, "": Path.open}
    return cast("BinaryIO", openers[compression](path, "rb"))


def _begins_array(head: bytes, encoding: str) -> bool:
    text = head.decode(encoding if encoding != "utf-8" else "utf-8-sig", errors="ignore")
    return text.lstrip().startswith("[")


def _lines(path: Path, kind: FileKind) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers from 1."""
    with readable(path), _open(path, kind.compression) as stream:
        lines: Iterable[bytes] = stream
        if kind.encoding != "utf-8":
            lines = (line.encode() for line in io.TextIOWrapper(stream, encoding=kind.encoding, newline="\n"))
        yield from ((number, line) for number, line in enumerate(lines, start=1) if not line.isspace())


def _json_rows(path: Path, kind: FileKind, column: str) -> Iterator[Any]:
    for number, line in _lines(path, kind):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as err:
            hint = "each line is a JSON object"
            if ".json" in path.suffixes:
                hint = "a .json file has an array of objects, or an object in each line; call others .txt"
            if isinstance(err, UnicodeDecodeError):
                hint = _ENCODING_HINT
            raise DataError(f"{path}:{number} is not JSON: {err}", hint=hint) from err
        yield _value(row, column, where=f"{path}:{number}")


def _array_rows(path: Path, kind: FileKind, column: str) -> Iterator[Any]:
    rows = _array(path, path.stat().st_mtime_ns, kind)
    return (_value(row, column, where=f"{path}, row {number}") for number, row in enumerate(rows))


@functools.lru_cache(maxsize=1)
def _array(path: Path, _modified_ns: int, kind: FileKind) -> list[Any]:
    """Returns the objects of an array; kept, since it is counted first and read for each half."""
    try:
        objects: list[Any] = json.loads(text_of(path, kind))
    except (ValueError, RecursionError) as err:
        raise DataError(f"{path} is not JSON: {err}", hint="it begins as an array of objects does") from err
    return objects


def _value(row: Any, column: str, *, where: str) -> Any:
    if not isinstance(row, dict) or column not in row:
        raise _no_column(where, column, row if isinstance(row, dict) else ())
    return row[column]


def _table_rows(path: Path, kind: FileKind, column: str | None) -> Iterator[str | None]:
    """Yields a column of a file of separated values with a header; without a column a value of each row."""
    encoding = "utf-8-sig" if kind.encoding == "utf-8" else kind.encoding
    csv.field_size_limit(2**31 - 1)
    with readable(path), io.TextIOWrapper(_open(path, kind.compression), encoding=encoding, newline="") as text:
        header = text.readline()
        delimiter = _delimiter_of(header, kind, column)
        names = next(csv.reader([header], delimiter=delimiter), [])
        if column is not None and column not in names:
            raise _no_column(str(path), column, names)
        place = 0 if column is None else names.index(column)
        try:
            for row in csv.reader(text, delimiter=delimiter, strict=True):
                if row:
                    yield row[place] if place < len(row) else None
        except csv.Error as err:
            raise DataError(f"{path} is not a table of separated values: {err}", hint="check its quotes") from err


def _delimiter_of(header: str, kind: FileKind, column: str | None) -> str:
    if kind.form == "tsv":
        return "\t"
    fits = (sign for sign in _DELIMITERS if column in next(csv.reader([header], delimiter=sign), []))
    most = max(_DELIMITERS, key=header.count)
    return next(fits, "," if "," in header else most)


def _arrow_rows(path: Path, kind: FileKind, column: str) -> Iterator[Any]:
    table = _open_table(path, kind)
    names = table.schema_arrow.names if kind.form == "parquet" else table.schema.names
    if column not in names:
        raise _no_column(str(path), column, names)
    batches = table.iter_batches(_ROWS_AT_ONCE, columns=[column]) if kind.form == "parquet" else table
    with _table_readable(path):
        for batch in batches:
            yield from batch.column(batch.schema.get_field_index(column)).to_pylist()


def _open_table(path: Path, kind: FileKind) -> Any:
    """Returns pyarrow's reader of a Parquet file, or of an Arrow file or stream, as Hugging Face saves it."""
    arrow = _require_arrow(path)
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with _table_readable(path):
        if kind.form == "parquet":
            return parquet.ParquetFile(str(path))
        mapped = arrow.memory_map(str(path))
        with path.open("rb") as file:
            is_file = file.read(len(_ARROW_FILE_MARK)) == _ARROW_FILE_MARK
        if is_file:
            return _ArrowBatches(arrow.ipc.open_file(mapped))
        return arrow.ipc.open_stream(mapped)


@contextmanager
def _table_readable(path: Path) -> Iterator[None]:
    """Turns what pyarrow says of a file into an error of ours; a damaged page or a cut end shows as it is read."""
    arrow = _require_arrow(path)
    try:
        yield
    except (OSError, UnicodeDecodeError, arrow.ArrowException) as err:
        raise DataError(f"{path} cannot be read: {err}", hint="is it whole, and what its suffix says?") from err


class _ArrowBatches:
    """The batches of an Arrow file, one after the other, as a stream gives them."""

    def __init__(self, reader: Any) -> None:
        self.schema = reader.schema
        self._reader = reader

    def __iter__(self) -> Iterator[Any]:
        return (self._reader.get_batch(number) for number in range(self._reader.num_record_batches))


def _require_arrow(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as err:
        raise DataError(
            f"{path} needs pyarrow, which is not installed", hint="pip install 'slurm-train[data]'"
        ) from err


def _no_column(where: str, column: str, columns: Iterable[str]) -> DataError:
    return DataError(f"{where} has no column {column!r}, it has {', '.join(columns) or 'none'}", hint=_COLUMN_HINT)
