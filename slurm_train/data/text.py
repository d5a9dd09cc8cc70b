"""A user's own text, as `python -m slurm_train prepare` made it. Torch-free until `build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.data.shards import Split, read_index

if TYPE_CHECKING:
    from slurm_train.data.tokens import TokenSource


def build(*, path: str, context: int = 256, split: Split = "train") -> TokenSource | None:
    """Returns a split of prepared text as windows of `context` tokens; None for a held-out split that is empty.

    Args:
        path: directory of the shards.
        context: tokens of a window.
        split: "train" or "heldout".

    Raises:
        DataError: there are no whole shards in the directory.
    """
    from slurm_train.data.tokens import TokenSource

    directory = Path(path).expanduser()
    index = read_index(directory)
    if split == "heldout" and not index.splits[split].targets:
        return None
    return TokenSource(directory, index=index, context=context, split=split)
