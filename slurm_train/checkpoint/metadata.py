"""Reads torch's `.metadata` without running what it says: a pickle may call anything, this reader calls a short list.

torch.distributed.checkpoint 2.13 reads the file with `pickle.load`, and each plain value with
`torch.load(weights_only=False)`: whoever can write the directory runs code as the reader, since a forged checkpoint
comes with forged hashes. The classes below hold numbers, texts and shapes; none of them acts.

`check_metadata` reads by the same list with stand-ins for torch's classes: no torch, and no checkpoint counts as
verified whose description could not be loaded. The one enum in the list is pickled by name with `getattr` by Python
3.11.0 to 3.11.3, and by value by all others; both are read.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

from slurm_train import __version__
from slurm_train.checkpoint.manifest import (
    DAMAGED_HINT,
    Manifest,
    check_file_name,
    open_plain,
    read_failure,
    require_tensors,
    text_of_tensor,
)
from slurm_train.errors import CheckpointError, OtherVersionError

METADATA_FILE = ".metadata"
_ENUM = "_MEM_FORMAT_ENCODING"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        _ENUM,
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
_DTYPE = re.compile(r"(?:bfloat|bits|complex|float|q?u?int)\d+\w*|bool")


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows the classes of torch's metadata and the names of number types."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name in _CLASSES.get(module, ()) or (module == "torch" and _DTYPE.fullmatch(name)):
            return self._find_known(module, name)
        if module.startswith("torch.distributed.checkpoint.") and "." not in name:
            raise OtherVersionError(
                f"{METADATA_FILE} asks for {module}.{name}, which slurm_train {__version__} does not know",
                hint="use the versions of slurm_train and torch that its manifest names; do not load a checkpoint of "
                "another person: this one may have been made to run code",
            )
        raise CheckpointError(
            f"{METADATA_FILE} asks for {module}.{name}, which no checkpoint needs",
            hint="do not load this checkpoint: it was made to run code as whoever loads it",
        )

    def _find_known(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)
        if module == "torch" and name != "Size":
            import torch

            if not isinstance(value, torch.dtype):
                raise CheckpointError(f"{METADATA_FILE} asks for torch.{name} as a number type", hint=DAMAGED_HINT)
        return value


class _DryReader(_MetadataUnpickler):
    """The same with a stand-in for each of torch's classes, which keeps what it is given."""

    def _find_known(self, module: str, name: str) -> Any:
        is_torch = module.partition(".")[0] == "torch"
        return type(name, (_StandIn,), {}) if is_torch else super()._find_known(module, name)


class _StandIn:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _enum_member(owner: Any, name: Any) -> Any:
    """Replaces `getattr` in a pickle: returns a member of the one enum that torch's metadata has, nothing else."""
    if isinstance(owner, type) and owner.__name__ == _ENUM and isinstance(name, str):
        if issubclass(owner, _StandIn):
            return owner(name)
        members = getattr(owner, "__members__", {})
        if name in members:
            return members[name]
    raise CheckpointError(
        f"{METADATA_FILE} asks for builtins.getattr({owner!r}, {name!r}), which no checkpoint needs",
        hint="do not load this checkpoint: it was made to run code as whoever loads it",
    )


def read_metadata(path: Path) -> Any:
    """Returns torch's `Metadata` of a checkpoint directory.

    Raises:
        CheckpointError: the file asks for anything but what torch writes, is damaged, or points outside the directory.
    """
    return _read(path, _MetadataUnpickler)


def check_metadata(path: Path, manifest: Manifest) -> None:
    """Checks without torch that `read_metadata` will read the file, and that it describes what the manifest lists.

    Args:
        path: the checkpoint directory.
        manifest: its files, and the parameters and buffers of its model.

    Raises:
        CheckpointError: as `read_metadata`; or a part of a tensor lies in no file of the checkpoint, or beyond its end;
            or a parameter or a buffer of the model is missing, in whole or in part.
    """
    metadata = _read(path, _DryReader)
    files = manifest.files
    if manifest.weights:
        require_tensors(manifest.tensors, _stored_tensors(metadata))
    for part in metadata.storage_data.values():
        record = files.get(str(part.relative_path))
        end = part.offset + part.length
        if record is None or not 0 <= part.offset <= end <= record.bytes:
            raise CheckpointError(
                f"{METADATA_FILE} describes bytes {part.offset} to {end} of {part.relative_path}, which the checkpoint "
                "does not have",
                hint=DAMAGED_HINT,
            )


def _stored_tensors(metadata: Any) -> dict[str, str]:
    """Returns number type and shape of each tensor whose parts are all in some file, read by `_DryReader`.

    Raises:
        CheckpointError: the description is not that of tensors.
    """
    try:
        stored = {(index.fqn, _numbers(index.offset)) for index in metadata.storage_data if hasattr(index, "offset")}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            chunks = getattr(entry, "chunks", ())
            are_stored = all((name, _numbers(chunk.offsets)) in stored for chunk in chunks)
            num_values = sum(math.prod(_numbers(chunk.sizes)) for chunk in chunks)
            if chunks and are_stored and num_values == math.prod(_numbers(entry.size)):
                tensors[name] = text_of_tensor(entry.properties.state[0].__name__, _numbers(entry.size))
    except (AttributeError, IndexError, TypeError) as err:
        raise CheckpointError(f"{METADATA_FILE} does not describe tensors: {err}", hint=DAMAGED_HINT) from err
    return tensors


def _numbers(size: Any) -> tuple[int, ...]:
    """Returns the numbers of a torch.Size, read by `_DryReader`."""
    numbers: tuple[int, ...] = tuple(size.arguments[0]) if size.arguments else ()
    return numbers


def _read(path: Path, reader: type[_MetadataUnpickler]) -> Any:
    try:
        with open_plain(path / METADATA_FILE) as file:
            data = file.read()
    except OSError as err:
        raise read_failure(path / METADATA_FILE, err) from err
    try:
        metadata = reader(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as err:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path / METADATA_FILE} cannot be read: {err}", hint=DAMAGED_HINT) from err
    _check_shape(metadata)
    return metadata


def _check_shape(metadata: Any) -> None:
    """Refuses what is of another shape, and file names that lead out of the directory."""
    if type(metadata).__name__ != "Metadata" or not isinstance(getattr(metadata, "storage_data", None), dict):
        raise CheckpointError(
            f"{METADATA_FILE} holds a {type(metadata).__name__}, not torch's metadata", hint=DAMAGED_HINT
        )
    for part in metadata.storage_data.values():
        is_plain = type(part).__name__ == "_StorageInfo" and not getattr(part, "transform_descriptors", None)
        if not is_plain or type(part.offset) is not int or type(part.length) is not int:
            raise CheckpointError(f"{METADATA_FILE} describes a part of a tensor by {part!r}", hint=DAMAGED_HINT)
        check_file_name(str(part.relative_path))
