"""Checkpoints of which it is not known whether they are whole: of another version, or unreadable on this machine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE, digest_of, read_record
from slurm_train.checkpoint.metadata import METADATA_FILE

UNREADABLE = (errno.EIO, errno.EACCES, errno.ESTALE, errno.EPERM, errno.ENOMEM)
"""What a node answers about files that are whole on others."""


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Writes a manifest as another version would have written it, with the marker that fits."""
    facts = json.loads((path / MANIFEST_FILE).read_text()) | changes
    text = json.dumps(facts, indent=1, sort_keys=True).encode() + b"\n"
    (path / MANIFEST_FILE).write_bytes(text)
    (path / COMPLETE_FILE).write_bytes(digest_of(text))


def use_newer_torch(path: Path) -> None:
    """Adds a description of tensors that asks for a class of a newer torch."""
    # A pickle of nothing but that class.
    (path / METADATA_FILE).write_bytes(b"\x80\x02ctorch.distributed.checkpoint.metadata\nShardingOfNextYear\n.")
    record = read_record(path / METADATA_FILE)
    facts = json.loads((path / MANIFEST_FILE).read_text())
    files = facts["files"] | {METADATA_FILE: {"bytes": record.bytes, "xxh3_128": record.xxh3_128}}
    rewrite_manifest(path, files=files, torch_version="9.1.0")


@contextlib.contextmanager
def unreadable(path: Path, number: int) -> Iterator[None]:
    """Lets this process fail to open any file of a checkpoint, whatever name its directory gets."""
    save_id = path.name[-8:]
    open_file = os.open

    def refuse(file: Any, *arguments: Any, **options: Any) -> int:
        if save_id in os.fspath(file):
            raise OSError(number, os.strerror(number), os.fspath(file))
        return open_file(file, *arguments, **options)

    with mock.patch("os.open", refuse):
        yield
