"""Writes the tokens of one split into shards of a limited length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from slurm_train.data.shards import Shard, Split, Tokens


class ShardWriter:
    """Appends tokens to `<split>_00000.bin`, `<split>_00001.bin`, ...

    Every shard begins with one token of context, so that the tokens after it are all targets.

    Args:
        directory: where the files go; they must not exist.
        split: "train" or "heldout".
        dtype: "<u2" or "<u4".
        max_targets: targets of a full shard.
        first: the token of context of the first shard: the end of a document.
    """

    def __init__(self, directory: Path, split: Split, *, dtype: str, max_targets: int, first: int) -> None:
        self.num_targets = 0
        self._directory = directory
        self._split = split
        self._max_targets = max_targets
        self._context = np.array([first], dtype=dtype)
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._hasher = xxhash.xxh3_128()
        self._in_shard = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, tokens: Tokens) -> None:
        """Adds tokens, (n,), opening as many shards as they need."""
        tokens = tokens.astype(self._context.dtype, copy=False)
        self.num_targets += len(tokens)
        while len(tokens):
            if self._file is None:
                self._open()
            room = self._max_targets - self._in_shard
            self._write(tokens[:room])
            self._in_shard += min(room, len(tokens))
            if self._in_shard == self._max_targets:
                self._close()
            tokens = tokens[room:]

    def finish(self) -> tuple[Shard, ...]:
        """Makes the last shard durable and returns all of them."""
        self._close()
        return tuple(self._shards)

    def _name(self) -> str:
        return f"{self._split}_{len(self._shards):05d}.bin"

    def _open(self) -> None:
        self._file = (self._directory / self._name()).open("xb")
        self._hasher = xxhash.xxh3_128()
        self._write(self._context)
        self._in_shard = 0

    def _write(self, tokens: Tokens) -> None:
        assert self._file is not None
        data = tokens.tobytes()
        self._file.write(data)
        self._hasher.update(data)
        self._context = tokens[-1:].copy()

    def _close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._shards.append(Shard(self._name(), self._in_shard + 1, self._hasher.hexdigest()))
