"""The model of one checkpoint, read in one process whatever the number of ranks that wrote it; and as one file."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.checkpoint.directory import verify
from slurm_train.checkpoint.load import check_owners
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.tensors import read_tensors, tensor_shapes
from slurm_train.errors import CheckpointError
from slurm_train.rundir.files import fsync_directory

if TYPE_CHECKING:
    from torch import Tensor

_MODEL = "model."


def read_model(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Gives the manifest and the model's tensors, by parameter name, in host memory.

    Raises:
        CheckpointError: the checkpoint does not verify, belongs to somebody else, or holds no model.
    """
    manifest = verify(path)
    check_owners(path, manifest)
    tensors = {name: empty for name, empty in tensor_shapes(path).items() if name.startswith(_MODEL)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensor of a model", hint="it was not written by the built-in trainer")
    read_tensors(path, tensors, group=None)
    return manifest, {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}


def export_model(path: Path, target: Path) -> int:
    """Writes the model of a checkpoint as one safetensors file and gives the number of its tensors.

    Raises:
        CheckpointError: see `read_model`; or the file exists already, or cannot be written.
    """
    from safetensors.torch import save_file

    if target.exists():
        raise CheckpointError(f"{target} exists already", hint="name another file, or remove it")
    manifest, tensors = read_model(path)
    facts = {
        "format": "pt",
        "step": str(manifest.step),
        "samples": str(manifest.samples),
        "config_hash": manifest.config_hash,
    }
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        save_file(tensors, temporary, metadata=facts)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.rename(target)
        fsync_directory(target.parent)
    except OSError as err:
        raise CheckpointError(
            f"cannot write {target}: {err.strerror}", hint="name a place that you may write to and that has room"
        ) from err
    finally:
        temporary.unlink(missing_ok=True)
    return len(tensors)


def export_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Has a directory written and gives it its name when everything in it is on disk.

    Args:
        target: the directory to make.
        write: writes the files into a directory that it is given.

    Raises:
        CheckpointError: it exists already, or cannot be written.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already", hint="name another directory, or remove it")
    # Of its own name: another export of the same at this moment must not be removed below.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        temporary.mkdir()
        write(temporary)
        for path in temporary.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        fsync_directory(temporary)
        temporary.rename(target)
        fsync_directory(target.parent)
    except OSError as err:
        raise CheckpointError(
            f"cannot write {target}: {err.strerror}", hint="name a place that you may write to and that has room"
        ) from err
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Gives name and kind of difference for each tensor that is not equal bit for bit, e.g. ("head.weight", "..")."""
    found = [(name, "only in the first") for name in sorted(one.keys() - other.keys())]
    found += [(name, "only in the second") for name in sorted(other.keys() - one.keys())]
    for name in sorted(one.keys() & other.keys()):
        if text := _difference(one[name], other[name]):
            found.append((name, text))
    return found


def _difference(one: Tensor, other: Tensor) -> str:
    import torch

    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"
    if one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8)):
        return ""
    gap = (one.double() - other.double()).abs()
    return f"{int((gap != 0).sum())} of {one.numel()} values, at most {gap.max().item():.3g} apart"
