"""A user's own text, as `python -m slurm_train prepare` made it: windows of tokens over memory-mapped shards.

Shapes: B windows, T tokens of context. A window is T + 1 tokens at stride T, so every token is a target at most once.
Training takes whole windows; evaluation also the last, shorter one of each shard, padded with targets that the loss
passes over, so each held-out token counts exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurm_train.data.order import Int64Array
from slurm_train.data.prepare import BYTES, TOKENIZER, ByteEncoding, Encoding, FileEncoding, Packing
from slurm_train.data.shards import ShardIndex, Split, Tokens, fingerprint_of, map_shard, map_tokens, read_index
from slurm_train.data.source import IGNORED, Description
from slurm_train.errors import DataError


class TokenSource:
    """The windows of one split.

    Args:
        directory: where the shards lie.
        index: what `read_index(directory)` gave.
        context: T, tokens of a window.
        split: "train" or "heldout".
        document_mask: batches say where each token is in its document, so that attention stays within it.

    Raises:
        DataError: no shard is as long as one window.
    """

    def __init__(
        self, directory: Path, *, index: ShardIndex, context: int, split: Split, document_mask: bool = False
    ) -> None:
        self.index = index
        self.context = context
        self.split = split
        self.document_mask = document_mask
        self._directory = directory
        self._shards = index.splits[split].shards
        up = context - 1 if split == "heldout" else 0  # a last, shorter window counts as one
        counts = [(shard.tokens - 1 + up) // context for shard in self._shards]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        if len(self) == 0:
            raise DataError(
                f"{directory} has no {split} window of {context} tokens: {index.splits[split].targets} tokens in all",
                hint="lower data.context, or prepare more text",
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def num_targets(self) -> int:
        """Predicted tokens of the whole split."""
        return self.index.splits[self.split].targets

    @property
    def bytes_per_target(self) -> float:
        """Bytes of text per predicted token: loss in nats / ln 2 / this = bits per byte."""
        return self.index.splits[self.split].bytes / self.num_targets

    def describe(self) -> Description:
        """Returns what is known of the text."""
        return Description(
            context=self.context,
            bytes_per_target=self.bytes_per_target,
            num_targets=self.num_targets,
            encoding=self.encoding,
            shards=self.shards,
        )

    def encoding(self) -> Encoding:
        """Returns the encoding the shards were made with, to decode what a model writes."""
        if self.index.tokenizer == BYTES:
            return ByteEncoding()
        return FileEncoding(
            self._directory / TOKENIZER,
            end_of_document=self.index.end_of_document,
            begin_of_document=self.index.begin_of_document,
        )

    def shards(self) -> Iterator[Tokens]:
        """Yields the memory-mapped shards; in each, all tokens but the first are targets."""
        return map_tokens(self._directory, self.index, self.split)

    def fingerprint(self) -> str:
        """Returns a hash over the shards' hashes, the window's length, and whether documents are kept apart."""
        hashes = (shard.xxh3_128 for shard in self.index.splits[self.split].shards)
        return fingerprint_of(hashes, context=self.context, document_mask=self.document_mask)

    def batch(self, indices: Int64Array) -> tuple[Tensor, ...]:
        """Returns the windows with these numbers: inputs and targets, each int64 (B, T).

        Targets that pad a short window are IGNORED; the inputs at these positions are 0. With `document_mask` a third
        tensor has the position of each input in its document.
        """
        inputs_BT, targets_BT = self._windows(indices)
        if not self.document_mask:
            return inputs_BT, targets_BT
        return inputs_BT, targets_BT, self._position_ids(inputs_BT)

    def _position_ids(self, inputs_BT: Tensor) -> Tensor:
        """Returns where each token is in its document, int64 (B, T); a window begins one, too.

        A document begins with its own first tokens where the encoding has such; else with the end of the one before it,
        from which its first token is predicted.
        """
        is_first_BT = inputs_BT == self.index.end_of_document
        if self.index.begin_of_document:
            is_first_BT = is_first_BT.roll(1, dims=1)
        order_T = torch.arange(inputs_BT.shape[1])
        is_first_BT[:, 0] = True
        first_BT = torch.where(is_first_BT, order_T, 0).cummax(dim=1).values
        return order_T - first_BT

    def _windows(self, indices: Int64Array) -> tuple[Tensor, Tensor]:
        if len(self._shards) == 1:
            return self._gather(0, indices)
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        inputs_BT = torch.empty(len(indices), self.context, dtype=torch.int64)
        targets_BT = torch.empty_like(inputs_BT)
        for shard in np.unique(shard_of):
            rows = np.flatnonzero(shard_of == shard)
            inputs_BT[rows], targets_BT[rows] = self._gather(int(shard), indices[rows] - self._starts[shard])
        return inputs_BT, targets_BT

    def _gather(self, shard: int, numbers: Int64Array) -> tuple[Tensor, Tensor]:
        tokens = map_shard(self._directory, self.index.dtype, self._shards[shard])
        whole = _whole_windows(tokens, self.context)
        short = numbers >= len(whole)
        if not short.any():
            return _as_tensors(whole[numbers].astype(np.int64))
        windows = np.full((len(numbers), self.context + 1), IGNORED, dtype=np.int64)
        windows[~short] = whole[numbers[~short]]
        tail = tokens[len(whole) * self.context :]
        windows[short, : len(tail)] = tail
        inputs_BT, targets_BT = _as_tensors(windows)
        return inputs_BT.clamp_(min=0), targets_BT


def _whole_windows(tokens: Tokens, context: int) -> Tokens:
    """Returns a view (windows, T + 1) of a shard; neighbours share one token."""
    count = (len(tokens) - 1) // context
    stride = tokens.strides[0]
    # numpy's as_strided takes 15 us, as long as a small batch.
    shape = (count, context + 1)
    strides = (context * stride, stride)
    windows: Tokens = np.ndarray(shape, tokens.dtype, buffer=tokens, strides=strides)
    return windows


def _as_tensors(windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def build(*, path: str, context: int = 256, document_mask: bool = False, split: Split = "train") -> TokenSource | None:
    """Returns a split of prepared text as windows of `context` tokens; None for a held-out split that is empty.

    Args:
        path: directory of the shards.
        context: tokens of a window.
        document_mask: whether attention stays within each document, with positions of its own.
        split: "train" or "heldout".

    Raises:
        DataError: there are no whole shards in the directory.
    """
    directory = Path(path).expanduser()
    index = read_index(directory)
    if split == "heldout" and not index.splits[split].targets:
        return None
    return TokenSource(directory, index=index, context=context, split=split, document_mask=document_mask)


def build_packed(
    *,
    path: str | Sequence[str],
    context: int = 256,
    text_column: str = "text",
    tokenizer: str | None = None,
    held_out: float = 0.1,
    cache: str | None = None,
    document_mask: bool = False,
    split: Split = "train",
) -> TokenSource | None:
    """Returns a split of text files as windows of `context` tokens; None for a held-out split that is empty.

    The text is encoded and packed when it is used for the first time: documents follow each other, an end after each,
    and the windows are cut from that.

    Args:
        path: Parquet, JSON, CSV and text files, folders of them, and data sets of Hugging Face that `save_to_disk` has
            written; one or several.
        context: tokens of a window.
        text_column: column of the text, in files with rows.
        tokenizer: a tokenizer.json of the tokenizers library, or a directory that has one; None encodes bytes.
        held_out: fraction of files and rows to hold out.
        cache: where the tokens are kept, on a cluster a directory that all nodes see.
        document_mask: as for `build`.
        split: "train" or "heldout".

    Raises:
        DataError: the text cannot be read, or the tokens cannot be written.
    """
    packing = Packing(path, text_column=text_column, tokenizer=tokenizer, held_out=held_out, cache=cache)
    return build(path=str(packing.make()), context=context, document_mask=document_mask, split=split)
