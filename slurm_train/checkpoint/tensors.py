"""The tensors of a checkpoint in torch's own sharded format; the one module that calls torch.distributed.checkpoint.

Import it inside a function: it takes about 0.7 s on its own, 0.1 s once an optimizer exists (they share most of it).
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from slurm_train.checkpoint.agreement import as_agreed
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.state import require_loadable
from slurm_train.checkpoint.verify import wait_until_visible
from slurm_train.errors import CheckpointError
from slurm_train.rundir.files import rename


def write_tensors(path: Path, tensors: dict[str, Any], *, group: ProcessGroup | None) -> None:
    """Writes a nested dictionary into a fresh directory; what is replicated is written once, shared out. Collective.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
    """
    with _agreed_errors(f"cannot write {path}", is_alone=group is None):
        writer = _Writer(path, overwrite=False)
        writer.fs = _Files()
        save(tensors, storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=group is None)


def read_tensors(path: Path, tensors: dict[str, Any], *, group: ProcessGroup | None) -> None:
    """Fills a nested dictionary in place; nothing in the files can name code to run. Collective.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
    """
    with _agreed_errors(f"cannot load {path}", is_alone=group is None):
        reader = _Reader(path)
        load(tensors, storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=group is None)


def tensor_shapes(path: Path) -> dict[str, Tensor]:
    """Gives an empty tensor for each that was written, by its flat name, e.g. "model.head.weight"."""
    found = read_metadata(path).state_dict_metadata
    tensors = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}


class _Files(FileSystem):
    """Renames as the rest does; torch's own fails where NFS repeats a request."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        rename(Path(path), Path(new_path))


class _Writer(FileSystemWriter):
    """Waits for the directory and reports the system's own error.

    torch's zip writer answers a full disk with "unexpected pos 704 vs 598"; its cause does not travel to other ranks.
    """

    def prepare_local_plan(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        # Raised here, a node that does not see the directory stops all ranks; torch would make it locally.
        wait_until_visible(Path(self.path))
        return super().prepare_local_plan(plan, *args, **kwargs)

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as err:
            link: BaseException | None = err
            while link is not None and not isinstance(link, OSError):
                link = link.__cause__ or link.__context__
            raise (link or err) from err


class _Reader(FileSystemReader):
    """Takes the metadata for data; torch's own would unpickle it."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Reads plain values as data; torch's own would unpickle them."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True))


class _SavePlanner(DefaultSavePlanner):
    """Refuses at the save what the load would refuse, when it would be too late."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, io.BytesIO):
            require_loadable(data, write_item.index.fqn)
        return data


@contextlib.contextmanager
def _agreed_errors(task: str, *, is_alone: bool) -> Iterator[None]:
    """Turns torch's error, which all ranks get, into one line per failed rank without the stack traces.

    Silences torch where it takes "one process" (no_dist), asked for on purpose, for a mistake; but not around a
    background save: the filters belong to the process, not to the thread.
    """
    try:
        with warnings.catch_warnings() if is_alone else contextlib.nullcontext():
            if is_alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as err:  # derives from BaseException
        agreed = {rank: as_agreed(wrapped[0]) for rank, wrapped in sorted(err.failures.items())}
        hints = [own.hint for own in agreed.values() if own.hint]
        hints.append("each rank's log has more: `logs RUN --rank N`; the checkpoint before is untouched")
        text = "; ".join(f"rank {rank}: {own.message}" for rank, own in agreed.items())
        raise CheckpointError(f"{task}: {text}", hint=hints[0]) from err
