"""The form of prepared tokens on disk: raw shards and an `index.json` beside them.

A directory holds `train_00000.bin`, `heldout_00000.bin`, ...: little-endian unsigned integers, nothing else. Every
shard begins with one token of context - the end-of-document token, or the last token of the shard before it - so each
token after it is a target exactly once and no reader ever looks into two shards. The index is written last and names
every file with its length and hash. Only numpy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from slurm_train.errors import DataError
from slurm_train.rundir.files import fsync_directory, read_json, write_durable

Split = Literal["train", "heldout"]
INDEX = "index.json"
FORMAT = 1
DTYPES = ("<u2", "<u4")
Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens.

    Attributes:
        file: its name in the directory, e.g. "train_00000.bin".
        tokens: how many it holds, the leading token of context included.
        xxh3_128: hash of its bytes, 32 hex digits.
    """

    file: str
    tokens: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """One of the two halves of a corpus.

    Attributes:
        documents: files, or parts of files, it is made of.
        bytes: their bytes before encoding.
        targets: tokens that a model predicts: all but one token of context per shard.
        shards: the files, in order.
    """

    documents: int
    bytes: int
    targets: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What `index.json` says.

    Attributes:
        source: what the tokens were made from, in words.
        input_digest: hash over the names, sizes and times of the input and over the options; tells a repeated command.
        tokenizer: "bytes", or the hash of the tokenizer's file.
        dtype: "<u2" or "<u4".
        vocab_size: number of token ids, the end of a document included.
        end_of_document: the token id after each document.
        splits: "train" and "heldout".
    """

    source: str
    input_digest: str
    tokenizer: str
    dtype: str
    vocab_size: int
    end_of_document: int
    splits: dict[str, SplitIndex]


def write_index(directory: Path, index: ShardIndex) -> None:
    """Writes `index.json` and makes it and the directory durable."""
    write_durable(directory / INDEX, json.dumps({"format": FORMAT, **dataclasses.asdict(index)}, indent=2) + "\n")
    fsync_directory(directory)


def read_index(directory: Path) -> ShardIndex:
    """Returns the index of a directory of shards after checking that every file has its length.

    Raises:
        DataError: there is no index, it has another format, or a shard is missing or cut short.
    """
    text = read_json(directory / INDEX)
    if text is None:
        raise DataError(
            f"{directory} holds no token shards: {INDEX} is missing or broken",
            hint=f"make them with: python -m slurm_train prepare TEXT_FILES --out {directory}",
        )
    if text.pop("format", None) != FORMAT:
        raise DataError(f"{directory / INDEX} has another format than {FORMAT}", hint="prepare the text again")
    try:
        splits = {name: _split_from(value) for name, value in text.pop("splits").items()}
        index = ShardIndex(splits=splits, **text)
    except (AttributeError, KeyError, TypeError) as err:
        raise DataError(f"{directory / INDEX} is not a shard index: {err}", hint="prepare the text again") from err
    _check_lengths(directory, index)
    return index


def map_tokens(directory: Path, index: ShardIndex, split: Split) -> list[Tokens]:
    """Returns the shards of a split as memory-mapped arrays, in order."""
    maps = []
    for shard in index.splits[split].shards:
        mapped = np.memmap(directory / shard.file, dtype=index.dtype, mode="r")
        # A plain array over the same memory: slicing a memmap object costs four times as much.
        maps.append(cast("Tokens", np.asarray(mapped)))
    return maps


def verify_hashes(directory: Path, index: ShardIndex) -> None:
    """Reads every shard and compares its hash.

    Raises:
        DataError: a shard's content has changed since it was prepared.
    """
    for split in index.splits.values():
        for shard in split.shards:
            found = hash_file(directory / shard.file)
            if found != shard.xxh3_128:
                raise DataError(
                    f"{directory / shard.file} has hash {found}, the index says {shard.xxh3_128}",
                    hint=f"remove {directory} and prepare the text again",
                )


def hash_file(path: Path) -> str:
    """Returns the xxh3_128 of a file's bytes, 32 hex digits."""
    hasher = xxhash.xxh3_128()
    for block in _blocks(path):
        hasher.update(block)
    return hasher.hexdigest()


def _blocks(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(size):
            yield block


def _split_from(value: dict[str, Any]) -> SplitIndex:
    return SplitIndex(**{**value, "shards": tuple(Shard(**shard) for shard in value["shards"])})


def _check_lengths(directory: Path, index: ShardIndex) -> None:
    if index.dtype not in DTYPES:
        raise DataError(f"{directory / INDEX} says dtype {index.dtype!r}", hint=f"it must be one of {DTYPES}")
    width = np.dtype(index.dtype).itemsize
    for split in index.splits.values():
        for shard in split.shards:
            path = directory / shard.file
            found = path.stat().st_size if path.is_file() else -1
            if found != shard.tokens * width:
                state = "is missing" if found < 0 else f"has {found} bytes"
                raise DataError(
                    f"{path} {state}, the index says {shard.tokens * width} bytes",
                    hint=f"remove {directory} and prepare the text again",
                )
