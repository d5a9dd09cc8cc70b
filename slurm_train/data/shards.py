"""The form of prepared tokens on disk: raw shards and an `index.json`.

A directory holds `train_00000.bin`, `heldout_00000.bin`, ...: little-endian unsigned integers, nothing else. Every
shard begins with one token of context - the end-of-document token, or the last token of the shard before it - so each
token after it is a target exactly once and no reader ever looks into two shards. The index is written last and names
every file with its length and hash. numpy, which takes 70 ms to import, is imported only where tokens are read or
written: a login node looks at the index before each submission.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from slurm_train.errors import DataError
from slurm_train.rundir.files import fsync_directory, listed, read_json, size_of, write_durable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Split = Literal["train", "heldout"]
INDEX = "index.json"
FORMAT = 1
DTYPES = ("<u2", "<u4")
"""Target of text that `prepare` has made."""
# Each map holds a descriptor, and there may be more shards than a process may open files.
_MOST_MAPS = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 1 << 14)
_LEAST_CHECKED = 64
Tokens: TypeAlias = "NDArray[np.unsignedinteger[Any]]"


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
        empty: rows and files without text, which are passed over.
        replaced: places that are no UTF-8, which a tokenizer gets as U+FFFD.
        unknown: tokens that stand for text which the tokenizer does not know.
        lost: characters of its first documents that are in no token; white space does not count.
    """

    documents: int
    bytes: int
    targets: int
    shards: tuple[Shard, ...]
    empty: int = 0
    replaced: int = 0
    unknown: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The content of `index.json`.

    Attributes:
        source: what the tokens were made from, in words.
        input_digest: hash over the text, names, sizes and times of the input and the options; tells a repeated command.
        tokenizer: "bytes", or the hash of the tokenizer's file.
        dtype: "<u2" or "<u4".
        vocab_size: number of token ids, the end of a document included.
        end_of_document: the token id after each document.
        splits: "train" and "heldout".
        begin_of_document: the token ids before each document; none in shards of earlier versions.
    """

    source: str
    input_digest: str
    tokenizer: str
    dtype: str
    vocab_size: int
    end_of_document: int
    splits: dict[str, SplitIndex]
    begin_of_document: tuple[int, ...] = ()

    @property
    def shards(self) -> list[Shard]:
        """The files of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]


def write_shards(
    directory: Path, split: str, pieces: Iterable[Tokens], *, dtype: str, max_targets: int, first: int
) -> tuple[Shard, ...]:
    """Writes tokens into `<split>_00000.bin`, `<split>_00001.bin`, ..., durable, and returns what was written.

    Args:
        directory: where the files go; they must not exist.
        split: "train" or "heldout".
        pieces: the tokens, arrays (n,).
        dtype: "<u2" or "<u4".
        max_targets: targets of a full shard.
        first: the token of context of the first shard: the end of a document.
    """
    import numpy as np
    import xxhash

    shards: list[Shard] = []
    data = np.array([first], dtype=dtype).tobytes()
    nothing = np.empty(0, dtype=dtype)
    filled = (piece.astype(dtype, copy=False) for piece in pieces if len(piece))
    tokens = next(filled, nothing)
    while len(tokens):
        name = f"{split}_{len(shards):05d}.bin"
        num_tokens = 1
        hasher = xxhash.xxh3_128()
        with (directory / name).open("xb") as file:
            data = data[-nothing.itemsize :]
            file.write(data)
            hasher.update(data)
            while len(tokens) and num_tokens <= max_targets:
                part = tokens[: max_targets + 1 - num_tokens]
                data = part.tobytes()
                file.write(data)
                hasher.update(data)
                num_tokens += len(part)
                tokens = tokens[len(part) :] if len(part) < len(tokens) else next(filled, nothing)
            file.flush()
            os.fsync(file.fileno())
        shards.append(Shard(name, num_tokens, hasher.hexdigest()))
    return tuple(shards)


def write_index(directory: Path, index: ShardIndex) -> None:
    """Writes `index.json` and makes it and the directory durable."""
    content = {"format": FORMAT, **dataclasses.asdict(index)}
    if not index.begin_of_document:
        # Earlier versions know no such key.
        del content["begin_of_document"]
    write_durable(directory / INDEX, json.dumps(content, indent=2) + "\n")
    fsync_directory(directory)


def read_index(directory: Path) -> ShardIndex:
    """Returns the index of a directory of shards after checking that every file is there.

    Raises:
        DataError: there is no index, it has another format, or a shard is missing.
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
        splits = {
            name: SplitIndex(**{**value, "shards": tuple(Shard(**shard) for shard in value["shards"])})
            for name, value in text.pop("splits").items()
        }
        begin = tuple(text.pop("begin_of_document", ()))
        index = ShardIndex(splits=splits, begin_of_document=begin, **text)
    except (AttributeError, KeyError, TypeError) as err:
        raise DataError(f"{directory / INDEX} is not a shard index: {err}", hint="prepare the text again") from err
    if index.dtype not in DTYPES:
        raise DataError(f"{directory / INDEX} has dtype {index.dtype!r}", hint=f"it must be one of {DTYPES}")
    there = {path.name for path in listed(directory)}
    for shard in index.shards:
        if shard.file not in there:
            raise _unlike(directory, shard, "is missing")
    return index


def check_sizes(directory: Path, index: ShardIndex, *, node: int = 0, nodes: int = 1) -> None:
    """Checks that the shards have the lengths that the index says; of very many shards each node looks at some.

    `read_index` looks at no file: thousands of ranks times thousands of shards are more than a file system bears. A
    shard's length is looked at again when it is opened.

    Args:
        directory: where they lie.
        index: what `read_index(directory)` gave.
        node: number of this node among those that share the work.
        nodes: how many they are.

    Raises:
        DataError: one has another length.
    """
    step = min(nodes, len(index.shards) // _LEAST_CHECKED + 1)
    for shard in index.shards[node % step :: step]:
        num_bytes = size_of(directory / shard.file)
        expected = shard.tokens * int(index.dtype[-1])
        if num_bytes != expected:
            raise _unlike(directory, shard, f"has {num_bytes} bytes, the index says {expected} bytes")


def _unlike(directory: Path, shard: Shard, state: str) -> DataError:
    return DataError(f"{directory / shard.file} {state}", hint=f"remove {directory} and prepare the text again")


@functools.lru_cache(maxsize=_MOST_MAPS)
def map_shard(directory: Path, dtype: str, shard: Shard) -> Tokens:
    """Returns a shard as a memory-mapped array (shard.tokens,), which takes a descriptor while it is kept.

    Raises:
        DataError: the file is missing or has another length.
    """
    import numpy as np

    try:
        # A Path would be resolved, with a look at each folder above it.
        memory = np.memmap(str(directory / shard.file), dtype=dtype, mode="r")
    except (FileNotFoundError, ValueError) as err:
        raise _unlike(directory, shard, f"cannot be read: {err}") from err
    if len(memory) != shard.tokens:
        raise _unlike(directory, shard, f"has {len(memory)} tokens, the index says {shard.tokens} tokens")
    # A plain array over the same memory: slicing a memmap object costs four times as much.
    return cast("Tokens", np.asarray(memory))


def map_tokens(directory: Path, index: ShardIndex, split: Split) -> Iterator[Tokens]:
    """Yields the shards of a split as memory-mapped arrays, in order."""
    return (map_shard(directory, index.dtype, shard) for shard in index.splits[split].shards)


def default_path() -> Path:
    """Returns where the shards of the embedded data set lie by default, e.g. ~/.cache/slurm_train/stdlib-3.11.2."""
    return Path("~/.cache/slurm_train").expanduser() / f"stdlib-{platform.python_version()}"


def fingerprint_of(hashes: Iterable[str], *, context: int, document_mask: bool = False) -> str:
    """Returns the fingerprint of prepared text: its shards' hashes and the form of a window, 32 hex digits."""
    import xxhash

    form = f"{context} by document" if document_mask else f"{context}"
    return xxhash.xxh3_128_hexdigest(f"{form} {' '.join(hashes)}".encode())
