"""Text to token shards: what `python -m slurm_train prepare` and the embedded data set both do.

The shards are written into a directory beside the wanted one and renamed into place as a whole, so a reader finds all
of them or none, and any number of processes may prepare the same text at once: the first rename wins, the others use
it. The same command a second time reads nothing but the list of files. Torch-free.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from slurm_train.data.corpus import Document, find_documents, split_documents
from slurm_train.data.encoding import BYTES, Encoding, load_encoding
from slurm_train.data.shard_writer import ShardWriter
from slurm_train.data.shards import (
    FORMAT,
    INDEX,
    Shard,
    ShardIndex,
    Split,
    SplitIndex,
    hash_file,
    read_index,
    write_index,
)
from slurm_train.errors import DataError
from slurm_train.rundir.files import fsync_directory

TOKENIZER = "tokenizer.json"


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
    if _is_taken(out):
        return _existing(out, digest)
    with _directory_beside(out) as directory:
        index = _write_shards(documents, directory, options=options, source=source, digest=digest)
        if _rename_into_place(directory, out):
            return index
    return _existing(out, digest)


def _write_shards(
    documents: Sequence[Document], directory: Path, *, options: PrepareOptions, source: str, digest: str
) -> ShardIndex:
    encoding = load_encoding(options.tokenizer)
    if options.tokenizer is not None:
        shutil.copyfile(options.tokenizer, directory / TOKENIZER)
    halves = dict(zip(("train", "heldout"), split_documents(documents, held_out=options.held_out), strict=True))
    index = ShardIndex(
        source=source,
        input_digest=digest,
        tokenizer=BYTES if options.tokenizer is None else TOKENIZER,
        dtype="<u2" if encoding.vocab_size <= 2**16 else "<u4",
        vocab_size=encoding.vocab_size,
        end_of_document=encoding.vocab_size - 1,
        splits={},
    )
    for split, half in halves.items():
        with _writer(directory, split, index=index, max_targets=options.max_targets) as writer:
            index.splits[split] = _write_split(half, writer, encoding=encoding)
    write_index(directory, index)
    return index


def _writer(directory: Path, split: str, *, index: ShardIndex, max_targets: int) -> ShardWriter:
    name: Split = "train" if split == "train" else "heldout"
    return ShardWriter(directory, name, dtype=index.dtype, max_targets=max_targets, first=index.end_of_document)


def _write_split(documents: Sequence[Document], writer: ShardWriter, *, encoding: Encoding) -> SplitIndex:
    end = np.array([encoding.vocab_size - 1], dtype="<u4")
    for document in documents:
        writer.append(encoding.encode(document.read()))
        writer.append(end)
    shards: tuple[Shard, ...] = writer.finish()
    num_bytes = sum(document.num_bytes for document in documents)
    return SplitIndex(documents=len(documents), bytes=num_bytes, targets=writer.num_targets, shards=shards)


def _input_digest(documents: Sequence[Document], options: PrepareOptions) -> str:
    """Tells this input and these options from others by names, sizes and times, without reading the text."""
    tokenizer = BYTES if options.tokenizer is None else hash_file(options.tokenizer)
    hasher = xxhash.xxh3_128(f"{FORMAT} {options.held_out} {options.max_targets} {tokenizer}\n".encode())
    for document in documents:
        line = f"{document.name}\0{document.start}\0{document.stop}\0{document.modified_ns}\n"
        hasher.update(line.encode(errors="surrogateescape"))
    return hasher.hexdigest()


def _is_taken(out: Path) -> bool:
    if not out.exists():
        return False
    if not out.is_dir():
        raise DataError(f"{out} is a file", hint="name a directory that does not exist yet")
    return any(out.iterdir())


def _existing(out: Path, digest: str) -> ShardIndex:
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


@contextmanager
def _directory_beside(out: Path) -> Iterator[Path]:
    """A fresh directory on the same file system, gone afterwards unless it was renamed."""
    directory = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        directory.mkdir(parents=True)
    except OSError as err:
        raise DataError(f"{out.parent} cannot be written: {err.strerror}", hint="name another directory") from err
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _rename_into_place(directory: Path, out: Path) -> bool:
    """Says whether this process's directory became `out`; not where another one's already had."""
    try:
        os.rename(directory, out)  # noqa: PTH104  (Path.replace would do the same and say less)
    except OSError as err:
        if out.is_dir() and any(out.iterdir()):
            return False
        raise DataError(f"{out} cannot be made: {err.strerror}", hint="name another directory") from err
    fsync_directory(out.parent)
    return True
