"""Reads torch's `.metadata` without running what it says: a pickle may call anything, this reader calls a short list.

torch.distributed.checkpoint 2.13 reads the file with `pickle.load`, and each plain value with
`torch.load(weights_only=False)`: whoever can write the directory runs code as the reader, since a forged checkpoint
comes with forged hashes. The classes below hold numbers, texts and shapes; none of them acts. No torch here.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

from slurm_train.checkpoint.manifest import DAMAGED_HINT, check_file_name
from slurm_train.errors import CheckpointError

METADATA_FILE = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows the classes of torch's metadata and the names of number types."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA_FILE} asks for {module}.{name}, which no checkpoint needs",
            hint="do not load this checkpoint: it was made to run code as whoever loads it",
        )


def read_metadata(path: Path) -> Any:
    """Returns torch's `Metadata` of a checkpoint directory.

    Raises:
        CheckpointError: the file asks for anything but what torch writes, is damaged, or points outside the directory.
    """
    try:
        descriptor = os.open(path / METADATA_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read()
    except OSError as err:
        raise CheckpointError(f"{path / METADATA_FILE}: {err.strerror}", hint=DAMAGED_HINT) from err
    try:
        metadata = _Reader(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as err:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path / METADATA_FILE} cannot be read: {err}", hint=DAMAGED_HINT) from err
    _check(metadata)
    return metadata


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def _check(metadata: Any) -> None:
    """Refuses what is of another shape, and file names that lead out of the directory."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata

    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(
            f"{METADATA_FILE} holds a {type(metadata).__name__}, not torch's metadata", hint=DAMAGED_HINT
        )
    for entry in metadata.storage_data.values():
        if not isinstance(entry, _StorageInfo) or getattr(entry, "transform_descriptors", None):
            raise CheckpointError(f"{METADATA_FILE} describes a part of a tensor by {entry!r}", hint=DAMAGED_HINT)
        check_file_name(str(entry.relative_path))
