"""Text to token shards: what `python -m slurm_train prepare` and the embedded data set both do.

Documents are split into a train and a held-out half by a hash of a file's relative path: it does not depend on the
order of a listing, on the machine, or on which other files there are. Text becomes bytes, 256 ids, exact for any file,
and no vocabulary to agree on; or what a tokenizer file of the tokenizers library makes of it. Id `vocab_size - 1` is
the end of a document in both cases.

The shards are written into a directory next to the wanted one and renamed into place as a whole, so a reader finds all
of them or none, and any number of processes may prepare the same text at once: the first rename wins, the others use
it. The same command a second time reads nothing but the list of files. Torch-free.
"""

from __future__ import annotations

import importlib
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from slurm_train.data.shards import (
    FORMAT,
    INDEX,
    ShardIndex,
    SplitIndex,
    Tokens,
    read_index,
    write_index,
    write_shards,
)
from slurm_train.errors import DataError
from slurm_train.rundir.files import fsync_directory

TOKENIZER = "tokenizer.json"
BYTES = "bytes"
_NUM_BYTE_VALUES = 256


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How text becomes shards.

    Attributes:
        held_out: fraction of the files to hold out, 0 <= held_out < 1.
        suffixes: endings that files in folders must have; empty takes all.
        tokenizer: a tokenizer.json of the tokenizers library; None encodes bytes.
        max_targets: tokens of a full shard; 64 Mi are 128 MiB on disk.

    Raises:
        DataError: the fraction is not below 1.
    """

    held_out: float = 0.1
    suffixes: tuple[str, ...] = ()
    tokenizer: Path | None = None
    max_targets: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise DataError(
                f"the held-out fraction is {self.held_out}, it must be at least 0 and below 1",
                hint="0.1 holds out one file in ten; 0 holds out none",
            )


def prepare(inputs: Sequence[Path], *, out: Path, options: PrepareOptions) -> ShardIndex:
    """Makes the shards of files and folders, or finds them made.

    Args:
        inputs: files and folders of text.
        out: the directory of the shards; must not exist, be empty, or hold the shards of this same input.
        options: how to do it.

    Returns:
        The index of the shards in `out`.

    Raises:
        DataError: the input cannot be read or has no text, or `out` holds something else.
    """
    documents = find_documents(inputs, suffixes=options.suffixes)
    source = ", ".join(str(given) for given in inputs)
    return prepare_documents(documents, out=out, options=options, source=source)


def prepare_documents(documents: Sequence[Document], *, out: Path, options: PrepareOptions, source: str) -> ShardIndex:
    """Makes the shards of documents, or finds them made; see `prepare`."""
    digest = _input_digest(documents, options)
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file", hint="name a directory that does not exist yet")
    if not _is_filled(out):
        directory = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
        try:
            directory.mkdir(parents=True)
            index = _write_shards(documents, directory, options=options, source=source, digest=digest)
            directory.rename(out)
            fsync_directory(out.parent)
            return index
        except OSError as err:
            if not _is_filled(out):  # else another process was faster
                raise DataError(f"{out} cannot be made: {err.strerror}", hint="name another directory") from err
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    if not (out / INDEX).exists():
        raise DataError(
            f"{out} is not empty and holds no token shards", hint="name a directory that does not exist yet"
        )
    index = read_index(out)
    if index.input_digest != digest:
        raise DataError(
            f"{out} holds the shards of another input or other options (made from {index.source})",
            hint=f"name another directory, or remove {out} first",
        )
    return index


def _is_filled(out: Path) -> bool:
    return out.is_dir() and any(out.iterdir())


def _write_shards(
    documents: Sequence[Document], directory: Path, *, options: PrepareOptions, source: str, digest: str
) -> ShardIndex:
    encoding = load_encoding(options.tokenizer)
    if options.tokenizer is not None:
        shutil.copyfile(options.tokenizer, directory / TOKENIZER)
    end_of_document = encoding.vocab_size - 1
    index = ShardIndex(
        source=source,
        input_digest=digest,
        tokenizer=BYTES if options.tokenizer is None else TOKENIZER,
        dtype="<u2" if encoding.vocab_size <= 2**16 else "<u4",
        vocab_size=encoding.vocab_size,
        end_of_document=end_of_document,
        splits={},
    )

    def pieces(half: Sequence[Document]) -> Iterator[Tokens]:
        for document in half:
            yield encoding.encode(document.read())
            yield np.array([end_of_document], dtype="<u4")

    halves = split_documents(documents, held_out=options.held_out)
    for split, half in zip(("train", "heldout"), halves, strict=True):
        shards = write_shards(
            directory, split, pieces(half), dtype=index.dtype, max_targets=options.max_targets, first=end_of_document
        )
        index.splits[split] = SplitIndex(
            documents=len(half),
            bytes=sum(document.num_bytes for document in half),
            targets=sum(shard.tokens - 1 for shard in shards),
            shards=shards,
        )
    write_index(directory, index)
    return index


def _input_digest(documents: Sequence[Document], options: PrepareOptions) -> str:
    """Tells this input and these options from others by names, sizes and times, without reading the text."""
    tokenizer = options.tokenizer
    made_by = BYTES if tokenizer is None else xxhash.xxh3_128_hexdigest(tokenizer.read_bytes())
    hasher = xxhash.xxh3_128(f"{FORMAT} {options.held_out} {options.max_targets} {made_by}\n".encode())
    for document in documents:
        line = f"{document.name}\0{document.start}\0{document.stop}\0{document.modified_ns}\n"
        hasher.update(line.encode(errors="surrogateescape"))
    return hasher.hexdigest()


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
        paths = _files_below(given, tuple(suffixes), skipped) if given.is_dir() else [given]
        for path in paths:
            name = given.name if path == given else path.relative_to(given).as_posix()
            try:
                state = path.stat()
            except OSError as err:
                hint = "check the path and its permissions"
                raise DataError(f"{path} cannot be read: {err.strerror}", hint=hint) from err
            documents.append(Document(name, path, 0, state.st_size, state.st_mtime_ns))
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
        whole = documents[0]
        border = max(1, round(whole.num_bytes * (1 - held_out)))
        tail = replace(whole, start=border)
        return [replace(whole, stop=border)], [tail] if tail.num_bytes else []
    ranked = sorted(documents, key=lambda document: (hash_name(document.name), document.name))
    num_held_out = sum(hash_name(document.name) < held_out for document in ranked)
    chosen = set(ranked[: min(max(num_held_out, 1), len(ranked) - 1)])
    return [d for d in documents if d not in chosen], [d for d in documents if d in chosen]


def hash_name(name: str) -> float:
    """Returns a number in [0, 1) that depends on the name alone."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogateescape")) / 2**64


def _files_below(folder: Path, suffixes: tuple[str, ...], skipped: Collection[str]) -> Iterable[Path]:
    def refuse(err: OSError) -> None:
        raise DataError(f"{err.filename} cannot be read: {err.strerror}", hint="check its permissions") from err

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and (not suffixes or name.endswith(suffixes)):
                path = Path(parent, name)
                if path.is_file():
                    yield path


class ByteEncoding:
    """Each byte is its own id; 256 ends a document."""

    vocab_size = _NUM_BYTE_VALUES + 1

    def encode(self, data: bytes) -> Tokens:
        """Returns the bytes as uint16 (n,)."""
        return np.frombuffer(data, dtype=np.uint8).astype("<u2")

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text; bytes that are no UTF-8 become the replacement character."""
        pieces = (b"\n\n" if token == _NUM_BYTE_VALUES else bytes([token]) for token in tokens)
        return b"".join(pieces).decode(errors="replace")


class FileEncoding:
    """A `tokenizer.json` of the tokenizers library, with one id more for the end of a document.

    Args:
        path: the file.

    Raises:
        DataError: the library is missing, or the file is none of its own.
    """

    def __init__(self, path: Path) -> None:
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError as err:
            raise DataError(
                f"the tokenizer {path} needs the tokenizers library, which is not installed",
                hint="pip install 'slurm-train[data]', or leave the tokenizer out to train on bytes",
            ) from err
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as err:  # the library raises bare Exception for every kind of bad file
            raise DataError(f"{path} is not a tokenizer file: {err}", hint="give the library's tokenizer.json") from err
        self.vocab_size = int(self._tokenizer.get_vocab_size()) + 1

    def encode(self, data: bytes) -> Tokens:
        """Returns the ids as uint32 (n,); what is no UTF-8 is replaced."""
        ids = self._tokenizer.encode(data.decode(errors="replace"), add_special_tokens=False).ids
        return np.array(ids, dtype="<u4")

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text, document by document."""
        documents: list[list[int]] = [[]]
        for token in tokens:
            if token == self.vocab_size - 1:
                documents.append([])
            else:
                documents[-1].append(token)
        return "\n\n".join(str(self._tokenizer.decode(document)) for document in documents)


Encoding = ByteEncoding | FileEncoding
"""A way from text to token ids; `vocab_size` is the number of ids, the end of a document included."""


def load_encoding(path: Path | None) -> Encoding:
    """Returns the encoding of a tokenizer file, or bytes where there is none."""
    return ByteEncoding() if path is None else FileEncoding(path)
