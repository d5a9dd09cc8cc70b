"""Text to token ids and back: bytes as they are, or a tokenizer file of the tokenizers library.

Bytes are the default: 256 ids, exact for any file, and no vocabulary to agree on. Id `vocab_size - 1` is the end of a
document in both cases. Torch-free.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slurm_train.data.shards import Tokens
from slurm_train.errors import DataError

BYTES = "bytes"
_NUM_BYTE_VALUES = 256


class Encoding(Protocol):
    """A way from text to token ids.

    Attributes:
        vocab_size: number of ids, the end of a document included.
    """

    vocab_size: int

    def encode(self, data: bytes) -> Tokens:
        """Returns the ids of a document, without the end of the document."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids; an end of a document becomes an empty line."""
        ...


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
        self._tokenizer = _load(path)
        self.vocab_size = int(self._tokenizer.get_vocab_size()) + 1

    def encode(self, data: bytes) -> Tokens:
        """Returns the ids as uint32 (n,); the text is read as UTF-8, what is none is replaced."""
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


def load_encoding(path: Path | None) -> Encoding:
    """Returns the encoding of a tokenizer file, or bytes where there is none."""
    return ByteEncoding() if path is None else FileEncoding(path)


def _load(path: Path) -> Any:
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError as err:
        raise DataError(
            f"the tokenizer {path} needs the tokenizers library, which is not installed",
            hint="pip install 'slurm-train[data]', or leave the tokenizer out to train on bytes",
        ) from err
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as err:  # the library raises bare Exception for every kind of bad file
        raise DataError(f"{path} is not a tokenizer file: {err}", hint="give the library's tokenizer.json") from err
