"""Handwritten digits: 1797 grey images of 8 x 8, the real data set that lies inside the scikit-learn package.

The file is read where the package is installed; importing scikit-learn itself would cost a second and is not needed.
One image in five is held out, the same ones everywhere: by a hash of the image's number, digit by digit.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from slurm_train.data.order import Int64Array, mix64
from slurm_train.data.shards import Split
from slurm_train.errors import DataError

_SIDE = 8
_BRIGHTEST = 16.0
_HELD_OUT_ONE_IN = 5


class DigitsSource:
    """One half of the digits, in memory.

    Args:
        images: float32 (N, 1, 8, 8) in [0, 1].
        labels: int64 (N,), 0 to 9.
    """

    def __init__(self, images: Tensor, *, labels: Tensor) -> None:
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Int64Array) -> tuple[Tensor, ...]:
        """Returns images float32 (n, 1, 8, 8) and labels int64 (n,)."""
        numbers = torch.from_numpy(indices)
        return self._images[numbers], self._labels[numbers]

    def fingerprint(self) -> str:
        """Returns the hash of the pixels and labels."""
        hasher = xxhash.xxh3_128(self._images.numpy().tobytes())
        hasher.update(self._labels.numpy().tobytes())
        return hasher.hexdigest()


def build(*, split: Split = "train") -> DigitsSource:
    """Returns the train (1439 images) or the held-out (358 images) half.

    Raises:
        DataError: scikit-learn is not installed, or keeps its data elsewhere.
    """
    rows = read_rows()
    held_out = held_out_rows(rows[:, -1].astype(np.int64))
    chosen = rows[held_out if split == "heldout" else ~held_out]
    images = (chosen[:, :-1] / _BRIGHTEST).astype(np.float32).reshape(-1, 1, _SIDE, _SIDE)
    return DigitsSource(torch.from_numpy(images), labels=torch.from_numpy(chosen[:, -1].astype(np.int64)))


def read_rows() -> NDArray[np.float64]:
    """Returns the table of the package: float64 (1797, 65), 64 pixels from 0 to 16 and the digit.

    Raises:
        DataError: scikit-learn is not installed, or keeps its data elsewhere.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the digits are part of scikit-learn, which is not installed", hint="pip install 'slurm-train[digits]'"
        )
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            return np.loadtxt(file, delimiter=",")
    except (OSError, ValueError) as err:
        raise DataError(f"the digits cannot be read from {path}: {err}", hint="install scikit-learn again") from err


def held_out_rows(labels: Int64Array) -> NDArray[np.bool_]:
    """Returns which rows are held out, bool (n,): of each digit, the fifth of its rows with the lowest hashes."""
    hashes = mix64(np.arange(1, len(labels) + 1, dtype=np.uint64))
    held_out = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        ranked = rows[np.argsort(hashes[rows], kind="stable")]
        held_out[ranked[: round(len(rows) / _HELD_OUT_ONE_IN)]] = True
    return held_out
