"""Loading of the checkpoint that `choice` has chosen, by every rank.

Nothing in a file can name code to run (`metadata`): hashes detect damage, not malice, since who forges a file forges
its hash as well.

The model alone is read in one process however many ranks wrote it: as tensors, as a file, as a hash.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup

from slurm_train.checkpoint.choice import check_owners
from slurm_train.checkpoint.manifest import MODEL, Manifest, check_hash
from slurm_train.checkpoint.metadata import METADATA_FILE, read_metadata
from slurm_train.checkpoint.save import rank_file
from slurm_train.checkpoint.verify import read_manifest, verify
from slurm_train.errors import CheckpointError, RunError
from slurm_train.formatting import shorten
from slurm_train.rundir.files import fsync_directory, fsync_file, rename
from slurm_train.rundir.removal import remove_tree

_STATE = "optimizer.state."
_AVERAGE = re.compile(r"callbacks\.\d+ \S+?\.average\.(.+)")


def load_tensors(
    path: Path,
    tensors: dict[str, Any],
    *,
    group: ProcessGroup | None = None,
    near: Path | None = None,
    described: Any = None,
) -> None:
    """Fills a nested dictionary of tensors and plain values in place; another world size or mesh is fine. Collective.

    Args:
        path: the directory that choose_checkpoint gave.
        tensors: what to fill, with the keys and the global shapes that were saved; a key that it lacks is not loaded.
        group: a gloo group of all ranks; None for one process without a group.
        near: the same checkpoint on this node's own disk, with some of its files or all; what is whole is read there.
        described: what `read_metadata` has returned for it, where the caller has it: it may have gigabytes.

    Raises:
        CheckpointError: a key is missing there, a shape differs, or a file cannot be read; the text names the rank.
    """
    from slurm_train.checkpoint.tensors import read_tensors

    read_tensors(path, tensors, group=group, near=near, described=described)


def require_fit(
    path: Path,
    model: Mapping[str, Any],
    *,
    kept: Mapping[str, Mapping[str, Any]] | None = None,
    is_stage: bool = False,
    described: Any = None,
) -> Any:
    """Checks that a checkpoint holds the weights that a model has, by name and shape, and what its optimizer keeps.

    Args:
        path: the directory that choose_checkpoint gave.
        model: the model's state dictionary.
        kept: tensors and values that the optimizer keeps, by parameter and name.
        is_stage: it is one stage of a pipeline; what else is saved is the other stages'.
        described: what `read_metadata` has returned for it, where the caller has it.

    Returns:
        What `read_metadata` returns, for `load_tensors`.

    Raises:
        RunError: it does not; the first of them are named.
    """
    from slurm_train.checkpoint.tensors import tensor_shapes

    if described is None:
        described = read_metadata(path)
    stored = {name: tuple(tensor.shape) for name, tensor in tensor_shapes(path, described=described).items()}
    saved = {name.removeprefix(MODEL): shape for name, shape in stored.items() if name.startswith(MODEL)}
    here = {name: tuple(value.shape) for name, value in model.items() if hasattr(value, "shape")}
    names = sorted(name for name in (here if is_stage else {*saved, *here}) if saved.get(name) != here.get(name))
    if names:
        changes = (f"{name} {_shape(saved.get(name))} -> {_shape(here.get(name))}" for name in names)
        raise RunError(
            f"the weights in {path.name} do not fit the model as it is now: {shorten(changes)}",
            hint="take the change of the model back, or start another run with run.name=NAME",
        )
    for parameter, values in (kept or {}).items():
        for key, value in values.items():
            if hasattr(value, "shape") and f"optimizer.state.{parameter}.{key}" not in stored:
                raise RunError(
                    f"the optimizer keeps {key} of {parameter} now, which {path.name} does not have",
                    hint="take the change of `optim` back, or start another run with run.name=NAME",
                )
    return described


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "a number"


def load_rank_state(path: Path, rank: int) -> dict[str, Any] | None:
    """Returns the state that this rank saved, or None where the checkpoint was written by fewer ranks.

    Raises:
        CheckpointError: the file is not the one that the manifest describes, as seen from this node.
    """
    record = read_manifest(path).files.get(rank_file(rank))
    if record is None:
        return None
    check_hash(path / rank_file(rank), record)
    state: dict[str, Any] = torch.load(path / rank_file(rank), weights_only=True, map_location="cpu")
    return state


def read_model(path: Path, *, averaged: bool = False) -> tuple[Manifest, dict[str, Tensor]]:
    """Returns the manifest and the model's tensors, by parameter name, in host memory.

    Args:
        path: the checkpoint.
        averaged: take the average of a parameter, where a callback has kept one.

    Raises:
        CheckpointError: the checkpoint does not verify, belongs to another user, has a program's files, or holds no
            model, or no average.
    """
    manifest = verify(path)
    check_owners(path, manifest.files)
    if manifest.is_directory and METADATA_FILE not in manifest.files:
        raise CheckpointError(
            f"{path} has the files that the program has written: {shorten(sorted(manifest.files))}",
            hint="read them there by what has written them; `run.training` saves weights that are exported",
        )
    described = read_metadata(path)
    tensors = _model_shapes(path, described)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensor of a model", hint="it was not written by the built-in trainer")
    if not manifest.weights:
        _require_trained(path, tensors, described)
    if averaged:
        return manifest, _with_averages(path, tensors, described)
    load_tensors(path, tensors, described=described)
    return manifest, {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def _require_trained(path: Path, tensors: Mapping[str, Tensor], described: Any) -> None:
    """Checks a checkpoint whose manifest lists no weights: what the optimizer trained must be there.

    Before the ranks compared what they hold, callbacks with tensors on some ranks only could leave parameters out.

    Raises:
        CheckpointError: naming parameters that the optimizer has a state of, and that are not there.
    """
    states = (name.removeprefix(_STATE) for name in described.state_dict_metadata if name.startswith(_STATE))
    trained = {MODEL + name.rpartition(".")[0] for name in states}
    missing = sorted(name.removeprefix(MODEL) for name in trained - tensors.keys())
    # Another trainer may number its parameters instead of naming them.
    if missing and trained & tensors.keys():
        raise CheckpointError(
            f"{path} lacks parameters that were trained: {shorten(missing)}",
            hint="an earlier version left them out beside a callback whose tensors only some ranks had; every "
            "checkpoint of that run may lack some: train it again",
        )


def _with_averages(path: Path, tensors: Mapping[str, Tensor], described: Any) -> dict[str, Tensor]:
    from slurm_train.checkpoint.tensors import tensor_shapes

    # By flat name, e.g. "callbacks.0 slurm_train.train.callbacks.EMA.average.head.weight".
    shapes = tensor_shapes(path, described=described)
    matches = {name: _AVERAGE.match(name) for name in shapes}
    stored = {MODEL + match[1]: name for name, match in matches.items() if match is not None}
    if not stored:
        raise CheckpointError(
            f"{path} holds no average of the weights",
            hint="the callback EMA keeps one while a run trains, see docs/callbacks.md",
        )
    wanted = {stored.get(name, name): shapes[stored.get(name, name)] for name in tensors}
    load_tensors(path, wanted, described=described)
    # An average may be of a wider type than its parameter.
    return {
        name.removeprefix(MODEL): wanted[stored.get(name, name)].to(tensor.dtype) for name, tensor in tensors.items()
    }


def export_model(path: Path, target: Path, *, averaged: bool = False) -> int:
    """Writes the model of a checkpoint as one safetensors file and gives the number of its tensors.

    Raises:
        CheckpointError: see `read_model`; or the file exists already, or cannot be written.
    """
    from safetensors.torch import save_file

    def write(temporary: Path) -> int:
        manifest, tensors = read_model(path, averaged=averaged)
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
    from safetensors import SafetensorError

    if target.exists():
        raise CheckpointError(f"{target} exists already", hint="give another name, or remove it")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        result = write(temporary)
        if temporary.is_dir():
            for path in temporary.iterdir():
                fsync_file(path)
        fsync_file(temporary)
        rename(temporary, target)
        fsync_directory(target.parent)
    except (OSError, SafetensorError) as err:
        # The library wraps the system's error in its own.
        reason = err.strerror if isinstance(err, OSError) else err
        raise CheckpointError(
            f"cannot write {target}: {reason}", hint="name a place that you may write to and that has room"
        ) from err
    finally:
        if temporary.is_dir():
            with contextlib.suppress(OSError):
                remove_tree(temporary)
        else:
            temporary.unlink(missing_ok=True)
    return result


def differences(entry: dict[str, Tensor], other: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Returns name and kind of difference for each tensor that is not equal bit for bit, e.g. ("head.weight", "..")."""
    rows = [(name, "only in the first") for name in sorted(entry.keys() - other.keys())]
    rows += [(name, "only in the second") for name in sorted(other.keys() - entry.keys())]
    for name in sorted(entry.keys() & other.keys()):
        text = _difference(entry[name], other[name])
        if text:
            rows.append((name, text))
    return rows


def _difference(tensor: Tensor, other: Tensor) -> str:
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return f"{tuple(tensor.shape)} {tensor.dtype} and {tuple(other.shape)} {other.dtype}"
    if tensor.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8)):
        return ""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    gap = (tensor.to(wide) - other.to(wide)).abs()
    num_unequal = int((gap != 0).sum())
    if num_unequal == 0:
        return "equal values, of which some are 0 and others -0"
    return f"{num_unequal} of {tensor.numel()} values, at most {gap.max().item():.3g} apart"


def weights_digest(named_parameters: Iterable[tuple[str, Any]]) -> str:
    """Returns the xxh3_128 hash (hexadecimal) over name, type, shape and bytes of each parameter, in name order.

    Args:
        named_parameters: tensors of any shape and type, on any device, or functions that return one; what is sharded
            is gathered, one after the other, so all ranks that hold a part call this together.
    """
    hasher = xxhash.xxh3_128()
    for name, source in sorted(named_parameters, key=lambda item: item[0]):
        parameter = source() if callable(source) else source
        # A line of JSON per parameter, so that no two lists of parameters give the same stream of bytes.
        head = [name, str(parameter.dtype), list(parameter.shape)]
        hasher.update(json.dumps(head).encode() + b"\n")
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        # numpy has no bfloat16, so the bytes are viewed in torch.
        hasher.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return hasher.hexdigest()


def saved_weights(path: Path, names: Iterable[str]) -> list[tuple[str, Callable[[], Tensor]]]:
    """Returns the parameters of a durable checkpoint for `weights_digest`; one at a time is in memory. One process."""
    described = read_metadata(path)
    empty = _model_shapes(path, described)

    def read(name: str) -> Tensor:
        wanted = {MODEL + name: empty.pop(MODEL + name)}
        load_tensors(path, wanted, described=described)
        return wanted[MODEL + name]

    return [(name, partial(read, name)) for name in names]


def _model_shapes(path: Path, described: Any) -> dict[str, Tensor]:
    from slurm_train.checkpoint.tensors import tensor_shapes

    shapes = tensor_shapes(path, described=described)
    return {name: empty for name, empty in shapes.items() if name.startswith(MODEL)}
