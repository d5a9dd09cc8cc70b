"""The embedded data set: the Python standard library's own source, real text that every machine has.

It goes through the same code as a user's text, once, into a directory that later runs find again. Tests, tables of
character codes and packages that Debian ships apart are left out: about 8 MB of 3.11 remain. Torch-free until `build`.
"""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.data.corpus import find_documents
from slurm_train.data.prepare import PrepareOptions, prepare_documents
from slurm_train.data.shards import INDEX, ShardIndex, Split, read_index

if TYPE_CHECKING:
    from slurm_train.data.tokens import TokenSource

_NOT_LIBRARY = ("__pycache__", "dist-packages", "site-packages", "idle_test", "test", "tests")
_LEFT_OUT = ("distutils", "encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo")
# 0.3 MB: enough for two digits of bits per byte, and a few seconds of evaluation on two cores.
_HELD_OUT = 0.05


def default_path() -> Path:
    """Returns where the shards lie unless told otherwise, e.g. ~/.cache/slurm_train/stdlib-3.11.2."""
    return Path("~/.cache/slurm_train").expanduser() / f"stdlib-{platform.python_version()}"


def prepare_stdlib(path: Path) -> ShardIndex:
    """Makes the shards in `path`, or finds them made; any number of processes may call it at once.

    Raises:
        DataError: there is no standard library source here, or the directory cannot be written.
    """
    if (path / INDEX).exists():
        return read_index(path)
    library = Path(sysconfig.get_path("stdlib"))
    documents = find_documents([library], suffixes=[".py"], skipped=_NOT_LIBRARY + _LEFT_OUT)
    source = f"source of the Python {platform.python_version()} standard library"
    return prepare_documents(documents, out=path, options=PrepareOptions(held_out=_HELD_OUT), source=source)


def build(*, context: int = 256, path: str | None = None, split: Split = "train") -> TokenSource:
    """Returns a split of the standard library's source as windows of `context` tokens.

    Args:
        context: tokens of a window.
        path: directory of the shards, made there if it does not exist; on a cluster one that all nodes see. None
            takes `default_path()`.
        split: "train" or "heldout".
    """
    from slurm_train.data.tokens import TokenSource

    directory = Path(path).expanduser() if path else default_path()
    return TokenSource(directory, index=prepare_stdlib(directory), context=context, split=split)
