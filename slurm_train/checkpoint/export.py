"""The model of one checkpoint, read in one process however many ranks wrote it: as tensors, as files, as a hash."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from slurm_train.checkpoint.directory import verify
from slurm_train.checkpoint.load import MODEL, check_owners, load_tensors
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.errors import CheckpointError
from slurm_train.rundir.files import fsync_directory, fsync_file


def read_model(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Gives the manifest and the model's tensors, by parameter name, in host memory.

    Raises:
        CheckpointError: the checkpoint does not verify, belongs to somebody else, or holds no model.
    """
    manifest = verify(path)
    check_owners(path, manifest)
    tensors = _model_shapes(path)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensor of a model", hint="it was not written by the built-in trainer")
    load_tensors(path, tensors)
    return manifest, {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def export_model(path: Path, target: Path) -> int:
    """Writes the model of a checkpoint as one safetensors file and gives the number of its tensors.

    Raises:
        CheckpointError: see `read_model`; or the file exists already, or cannot be written.
    """
    from safetensors.torch import save_file

    def write(temporary: Path) -> int:
        manifest, tensors = read_model(path)
        facts = {name: str(getattr(manifest, name)) for name in ("step", "samples", "config_hash")}
        save_file(tensors, temporary, metadata={"format": "pt", **facts})
        return len(tensors)

    return export_to(target, write)


def export_to(target: Path, write: Callable[[Path], int]) -> int:
    """Gives a file or a directory its name when everything in it is on disk; returns what `write` returns.

    Args:
        target: what to make; another export of the same at this moment is not disturbed.
        write: writes a file, or makes a directory with files in it, at the path that it is given.

    Raises:
        CheckpointError: it exists already, or cannot be written.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already", hint="give another name, or remove it")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        result = write(temporary)
        if temporary.is_dir():
            for path in temporary.iterdir():
                fsync_file(path)
        fsync_file(temporary)
        temporary.rename(target)
        fsync_directory(target.parent)
    except OSError as err:
        raise CheckpointError(
            f"cannot write {target}: {err.strerror}", hint="name a place that you may write to and that has room"
        ) from err
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
    return result


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Gives name and kind of difference for each tensor that is not equal bit for bit, e.g. ("head.weight", "..")."""
    found = [(name, "only in the first") for name in sorted(one.keys() - other.keys())]
    found += [(name, "only in the second") for name in sorted(other.keys() - one.keys())]
    for name in sorted(one.keys() & other.keys()):
        if text := _difference(one[name], other[name]):
            found.append((name, text))
    return found


def _difference(one: Tensor, other: Tensor) -> str:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"
    if one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8)):
        return ""
    gap = (one.double() - other.double()).abs()
    return f"{int((gap != 0).sum())} of {one.numel()} values, at most {gap.max().item():.3g} apart"


def weights_digest(named_parameters: Iterable[tuple[str, Any]]) -> str:
    """Gives the xxh3_128 hash (hexadecimal) over name, type, shape and bytes of each parameter, in name order.

    Args:
        named_parameters: tensors of any shape and type, on any device, or functions that return one; what is sharded
            is gathered, one after the other, so all ranks that hold a part call this together.
    """
    hasher = xxhash.xxh3_128()
    for name, found in sorted(named_parameters, key=lambda item: item[0]):
        parameter = found() if callable(found) else found
        # A line of JSON per parameter, so that no two lists of parameters give the same stream of bytes.
        head = [name, str(parameter.dtype), list(parameter.shape)]
        hasher.update(json.dumps(head).encode() + b"\n")
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        # numpy has no bfloat16, so the bytes are viewed in torch.
        hasher.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return hasher.hexdigest()


def saved_weights(path: Path, names: Iterable[str]) -> list[tuple[str, Callable[[], Tensor]]]:
    """Gives the parameters of a durable checkpoint for `weights_digest`; one at a time is in memory. One process."""
    empty = _model_shapes(path)

    def read(name: str) -> Tensor:
        wanted = {MODEL + name: empty.pop(MODEL + name)}
        load_tensors(path, wanted)
        return wanted[MODEL + name]

    return [(name, partial(read, name)) for name in names]


def _model_shapes(path: Path) -> dict[str, Tensor]:
    from slurm_train.checkpoint.tensors import tensor_shapes

    return {name: empty for name, empty in tensor_shapes(path).items() if name.startswith(MODEL)}
