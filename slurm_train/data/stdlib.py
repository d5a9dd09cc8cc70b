"""The embedded data set: the Python standard library's own source, real text that every machine has.

It goes through the same code as a user's text, once, into a directory that later runs find again. Tests, tables of
character codes and packages that Debian ships apart are left out: about 8 MB of 3.11 remain.
"""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from slurm_train.data.documents import find_documents
from slurm_train.data.prepare import PrepareOptions, prepare_documents
from slurm_train.data.shards import INDEX, Split, default_path, read_index
from slurm_train.data.text import TokenSource

_SKIPPED = (
    *("__pycache__", "dist-packages", "site-packages", "idle_test", "test", "tests"),
    *("distutils", "encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
)
# 0.3 MB: enough for two digits of bits per byte, and a few seconds of evaluation on two cores.
_HELD_OUT = 0.05


def build(
    *, context: int = 256, path: str | None = None, document_mask: bool = False, split: Split = "train"
) -> TokenSource:
    """Returns a split of the standard library's source as windows of `context` tokens.

    Any number of processes may call it at once.

    Args:
        context: tokens of a window.
        path: directory of the shards, made there if it does not exist; on a cluster one that all nodes see. None
            takes `default_path()`.
        document_mask: as for `data.text.build`.
        split: "train" or "heldout".

    Raises:
        DataError: there is no standard library source here, or the directory cannot be written.
    """
    directory = Path(path).expanduser() if path else default_path()
    if (directory / INDEX).exists():
        index = read_index(directory)
    else:
        documents = find_documents([Path(sysconfig.get_path("stdlib"))], suffixes=[".py"], skipped=_SKIPPED)
        source = f"source of the Python {platform.python_version()} standard library"
        index = prepare_documents(documents, out=directory, options=PrepareOptions(held_out=_HELD_OUT), source=source)
    return TokenSource(directory, index=index, context=context, split=split, document_mask=document_mask)
