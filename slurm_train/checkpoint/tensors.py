"""The tensors of a checkpoint in torch's own sharded format; the one module that calls torch.distributed.checkpoint.

It is imported inside the functions: about 0.7 s on its own, 0.1 s once an optimizer exists (they share most of it).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.checkpoint.agreement import failure_of
from slurm_train.checkpoint.directory import wait_until_visible
from slurm_train.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

_METADATA_FILE = ".metadata"
_VISIBLE_TIMEOUT_S = 120.0


def write_tensors(path: Path, tensors: dict[str, Any], *, group: ProcessGroup | None) -> None:
    """Writes a nested dictionary into a fresh directory; what is replicated is written once, shared out. Collective.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with _agreed_errors(f"cannot write {path}", is_alone=group is None):
        save(tensors, storage_writer=_build_writer(path), process_group=group, no_dist=group is None)


def read_tensors(path: Path, tensors: dict[str, Any], *, group: ProcessGroup | None) -> None:
    """Fills a nested dictionary in place; its metadata file is a pickle, so verify before. Collective.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _agreed_errors(f"cannot load {path}", is_alone=group is None):
        load(tensors, storage_reader=FileSystemReader(path), process_group=group, no_dist=group is None)


def load_writer() -> None:
    """Imports what a save needs; 0.1 s or more, so better before the first save than in it."""
    import torch.distributed.checkpoint.filesystem
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.checkpoint.state_dict_saver  # noqa: F401


def tensor_shapes(path: Path) -> dict[str, Tensor]:
    """Gives an empty tensor for each that was written, by its flat name, e.g. "model.head.weight".

    The metadata is a pickle: verify the checkpoint and check its owner before.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}


def tensor_files(path: Path, *, rank: int) -> list[Path]:
    """Lists the files that write_tensors wrote on this rank."""
    metadata = [path / _METADATA_FILE] if rank == 0 else []
    return sorted(path.glob(f"__{rank}_*.distcp")) + metadata


def _build_writer(path: Path) -> FileSystemWriter:
    """Builds a writer that waits for the directory and reports the system's own error.

    torch's zip writer answers a full disk with "unexpected pos 704 vs 598"; its cause does not travel to other ranks.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Writer(FileSystemWriter):
        def prepare_local_plan(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
            # Raised here, a node that does not see the directory stops all ranks; torch would make it locally.
            wait_until_visible(path, timeout_s=_VISIBLE_TIMEOUT_S)
            return super().prepare_local_plan(plan, *args, **kwargs)

        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except Exception as err:
                raise _first_system_error(err) from err

    return Writer(path, overwrite=False)


def _first_system_error(err: Exception) -> Exception:
    """Gives the OSError during whose handling the error came up, else the error itself."""
    link: BaseException | None = err
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link or err


@contextlib.contextmanager
def _agreed_errors(task: str, *, is_alone: bool) -> Iterator[None]:
    """Turns torch's error, which all ranks get, into one line per failed rank without the stack traces."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with _quiet() if is_alone else contextlib.nullcontext():
            yield
    except CheckpointException as err:  # derives from BaseException
        failures = [failure_of(rank, wrapped[0]) for rank, wrapped in sorted(err.failures.items())]
        text = "; ".join(f"rank {failure.rank}: {failure.message}" for failure in failures)
        hint = next((failure.hint for failure in failures if failure.hint), "")
        raise CheckpointError(f"{task}: {text}", hint=hint) from err


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch where it takes "one process" (no_dist), said on purpose, for a mistake.

    Not around a background save: the filters belong to the process, not to the thread.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
