"""The tensors of a checkpoint in torch's own sharded format; the one module that calls torch.distributed.checkpoint.

Import it inside a function: it takes about 0.7 s on its own, 0.1 s once an optimizer exists (they share most of it).
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import pickle
import sys
import uuid
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurm_train.checkpoint.agreement import as_agreed, on_every_rank, rank_in, size_of
from slurm_train.checkpoint.manifest import check_hash, text_of_tensor
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.state import require_loadable
from slurm_train.checkpoint.verify import read_manifest, wait_until_visible
from slurm_train.errors import CheckpointError
from slurm_train.rundir.files import rename


def write_tensors(path: Path, tensors: dict[str, Any], *, group: ProcessGroup | None) -> Mapping[str, str]:
    """Writes a nested dictionary into a fresh directory; what is replicated is written once, shared out. Collective.

    Rank 0 plans in a time by the number of tensors times ranks, so a plan serves until a rank holds something else than
    at the save before: other names, shapes, number types or shards.

    Returns:
        On rank 0 number type and shape of each tensor that the ranks have written together, by full name.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
    """
    global _kept  # saves of a process come one after the other
    place = (rank_in(group), size_of(group))
    before = _kept
    _kept = None
    planners: list[_SavePlanner] = []

    def number_if_same() -> str:
        planners.append(_SavePlanner(tensors, is_coordinator=place[0] == 0))
        is_same = before is not None and before.place == place and before.local == planners[0].local
        return before.number if is_same and before is not None else ""

    numbers = set(on_every_rank(group, number_if_same))
    planner = planners[0]
    planner.before = before if len(numbers) == 1 and "" not in numbers else None
    with _agreed_errors(f"cannot write {path}", is_alone=group is None):
        writer = _Writer(path, planner)
        save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    _kept = _Plan(planner.plan.planner_data, place, planner.local, planner.plan, planner.packed, planner.described)
    return planner.described


def read_tensors(
    path: Path,
    tensors: dict[str, Any],
    *,
    group: ProcessGroup | None,
    near: Path | None = None,
    described: Metadata | None = None,
) -> None:
    """Fills a nested dictionary in place; nothing in the files can name code to run. Collective.

    Args:
        path: the checkpoint.
        tensors: what to fill.
        group: a gloo group of all ranks; None for one process.
        near: see `load_tensors`.
        described: see `load_tensors`.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
    """
    with _agreed_errors(f"cannot load {path}", is_alone=group is None):
        reader = _Reader(path, described)
        if near is not None:
            reader.fs = _NearFiles(near)
        load(tensors, storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=group is None)


def tensor_shapes(path: Path, *, described: Metadata | None = None) -> dict[str, Tensor]:
    """Gives an empty tensor for each that was written, by its flat name, e.g. "model.head.weight"."""
    entries = (described or read_metadata(path)).state_dict_metadata
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}


def cuts_of(described: Metadata) -> dict[str, int]:
    """Returns the dimension along which tensors were written in parts, by flat name; of those that were."""
    cuts = {}
    for name, entry in described.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        starts = [{chunk.offsets[dim] for chunk in entry.chunks} for dim in range(len(entry.size))]
        divided = [dim for dim, numbers in enumerate(starts) if len(numbers) > 1]
        if len(divided) == 1:
            cuts[name] = divided[0]
    return cuts


class _Files(FileSystem):
    """Renames as the rest does; torch's own fails where NFS repeats a request."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        rename(Path(path), Path(new_path))


class _NearFiles(FileSystem):
    """Takes a file from this node's own disk if it is there as the manifest says, else from the checkpoint itself."""

    def __init__(self, near: Path) -> None:
        self._near = near
        self._files = {}
        with contextlib.suppress(CheckpointError):  # the checkpoint itself is there, and the other ranks go on
            self._files = dict(read_manifest(near).files)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        try:
            check_hash(self._near / suffix, self._files[suffix])
        except (KeyError, CheckpointError):
            return Path(path) / suffix
        return self._near / suffix


class _Plan(NamedTuple):
    """A rank's part of the plan of its last save, for later saves of the same tensors."""

    number: str
    """Drawn at random for each plan: ranks with the same number hold parts of the same plan."""
    place: tuple[int, int]
    """Rank, and number of ranks."""
    local: SavePlan
    """What the rank holds."""
    final: SavePlan
    """What it writes of that."""
    packed: bytes
    """On rank 0: `.metadata` without the places in files. Pickled: a fraction of the memory, nothing for the collector
    of garbage."""
    described: Mapping[str, str]
    """On rank 0: number type and shape of each tensor in it, by full name."""


_kept: _Plan | None = None


class _Writer(FileSystemWriter):
    """Waits for the directory, writes without holding up the training, and reports the system's own error.

    torch's zip writer answers a full disk with "unexpected pos 704 vs 598"; its cause does not travel to other ranks.
    """

    def __init__(self, path: Path, planner: _SavePlanner) -> None:
        super().__init__(path, overwrite=False)
        self.fs = _Files()
        self._planner = planner

    def prepare_local_plan(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        # Raised here, a node that does not see the directory stops all ranks; torch would make it locally.
        wait_until_visible(Path(self.path))
        return super().prepare_local_plan(plan, *args, **kwargs)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = []
        try:
            with (Path(self.path) / name).open("wb") as file:
                for item in (*values, *tensors):
                    begin = file.tell()
                    _write_one(file, planner.resolve_data(item))
                    place = _StorageInfo(name, begin, file.tell() - begin)
                    results.append(WriteResult(item.index, place.length, place))
                file.flush()
                os.fsync(file.fileno())
        except Exception as err:
            link: BaseException | None = err
            while link is not None and not isinstance(link, OSError):
                link = link.__cause__ or link.__context__
            raise (link or err) from err
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        # torch sends `metadata` to all ranks afterwards, so it is an empty one until here, and stays so.
        del metadata
        super().finish(pickle.loads(self._planner.packed), results)  # this process has made it


# From so many bytes on. torch.save keeps the interpreter from all other threads while it sums up and copies a tensor:
# beside a save of 1.6 GB in the background a step of GPT-2 took 1.9 times as long on an H200.
_LARGE = 1 << 18
# Those that torch keeps under a name of their own in its files.
_NAMED_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


def _write_one(file: BinaryIO, data: Tensor | io.BytesIO) -> None:
    """Writes a value, or a tensor as `torch.load` reads it."""
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if tensor.nbytes >= _LARGE and type(tensor) is Tensor and tensor.dtype in _NAMED_STORAGES:
        _write_large(file, tensor.contiguous())
        return
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # else torch.save writes all that the memory holds
    torch.save(tensor, file)


def _write_large(file: BinaryIO, tensor: Tensor) -> None:
    """Writes what torch.save does, a zip archive of pickle and bytes; other threads run while bytes are summed up."""
    records: dict[str, Any] = {
        "data.pkl": _pickled(tensor.dtype, tuple(tensor.shape)),
        "byteorder": sys.byteorder.encode(),
        "data/0": tensor.reshape(-1).view(torch.uint8).numpy().data,
        "version": b"3\n",
    }
    with zipfile.ZipFile(_FromHere(file), "w") as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)


class _FromHere:
    """A file from its present position on, for an archive in the middle of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, content: bytes) -> int:
        """Writes bytes; an archive asks for no position then."""
        return self._file.write(content)

    def flush(self) -> None:
        """Hands what is written to the system."""
        self._file.flush()

    def close(self) -> None:
        """Does nothing: an archive closes only what it has opened."""


@dataclass(frozen=True)
class _Storage:
    """The memory of a tensor, of which a pickle has only the name."""

    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class _Described:
    """A tensor without its memory; a pickle of it gives the tensor."""

    storage: _Storage
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        strides = [1]
        for size in self.shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        stride = tuple(strides) if self.shape else ()
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (self.storage, 0, self.shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", _NAMED_STORAGES[value.dtype], "0", "cpu", value.numel
        return None


@functools.lru_cache(maxsize=4096)
def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Described(_Storage(dtype, math.prod(shape)), shape))
    return file.getvalue()


class _Reader(FileSystemReader):
    """Takes the metadata for data; torch's own would unpickle it."""

    def __init__(self, path: Path, described: Metadata | None) -> None:
        super().__init__(path)
        self._described = described

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
        metadata = self._described or read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Reads plain values as data; torch's own would unpickle them."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True))


class _SavePlanner(DefaultSavePlanner):
    """Plans as `before` where that is set. Refuses at the save what the load would refuse, when it would be too late.

    torch's own `enable_plan_caching` takes a tensor of another number type for the same, mixes up the plans of several
    groups, and in older versions writes an empty checkpoint after a save that failed while it was planned.
    """

    def __init__(self, tensors: dict[str, Any], *, is_coordinator: bool) -> None:
        super().__init__()
        super().set_up_planner(tensors, is_coordinator=is_coordinator)
        self.local = super().create_local_plan()
        self.before: _Plan | None = None
        """The plan to use again: no rank holds anything else than then."""
        self.packed = b""
        self.described: Mapping[str, str] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Does nothing: it has been done."""

    def create_local_plan(self) -> SavePlan:
        return self.local if self.before is None else SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.before is not None:
            self.packed = self.before.packed
            self.described = self.before.described
            return all_plans, Metadata({})
        _require_one_kind(all_plans)
        plans, metadata = _plan_grids(all_plans) or super().create_global_plan(all_plans)
        self.packed = pickle.dumps(metadata)
        number = uuid.uuid4().hex
        self.described = {
            name: text_of_tensor(str(entry.properties.dtype), entry.size)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        # Instead of names that are in the metadata.
        return [replace(plan, planner_data=number) for plan in plans], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.plan = new_plan if self.before is None else self.before.final
        return self.plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, io.BytesIO):
            require_loadable(data, write_item.index.fqn)
        return data


def _require_one_kind(all_plans: list[SavePlan]) -> None:
    """Checks that what ranks hold under one name is the same kind of thing: torch keeps the first rank's alone.

    Raises:
        CheckpointError: naming it, and two ranks.
    """
    first: dict[str, tuple[int, str]] = {}
    text_of = functools.lru_cache(text_of_tensor)  # a thousand ranks have the same few shapes
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            data = item.tensor_data
            name = item.index.fqn
            kind = "a value" if data is None else text_of(str(data.properties.dtype), data.size)
            where, expected = first.setdefault(name, (rank, kind))
            if kind != expected:
                raise CheckpointError(
                    f"{name} is {expected} on rank {where} and {kind} on rank {rank}",
                    hint="give what differs from rank to rank a name of its own on each",
                )


def _plan_grids(all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata] | None:
    """Returns torch's global plan where the parts of each tensor form a grid, as DTensors' do; else None.

    torch 2.13 makes the same plan, but compares each part with all others of a tensor that is cut along any dimension
    but its longest.
    """
    plans, metadata = create_default_global_save_plan(dedup_save_plans(all_plans))
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata) and not is_grid(entry.size, entry.chunks):
            return None  # torch finds out whether it is wrong
    # Of the same name the first rank's counts.
    names = {name: path for plan in reversed(plans) for name, path in plan.planner_data.items()}
    return plans, replace(metadata, planner_data=names)


def is_grid(size: Sequence[int], parts: Sequence[ChunkStorageMetadata]) -> bool:
    """Returns whether parts that form a grid fill a tensor, each element once; in a time by the number of parts.

    Args:
        size: of the tensor.
        parts: empty ones do not count.
    """
    filled = [tuple(zip(part.offsets, part.sizes, strict=True)) for part in parts if math.prod(part.sizes)]
    num_cells = 1
    for dim, length in enumerate(size):
        intervals = sorted({part[dim] for part in filled})
        end = 0
        for offset, extent in intervals:
            if offset != end:
                return False
            end += extent
        if end != length:
            return False
        num_cells *= len(intervals)
    return len(filled) == len(set(filled)) == num_cells


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
        hints = [error.hint for error in agreed.values() if error.hint]
        hints.append("each rank's log has more: `logs RUN --rank N`; the checkpoint before is untouched")
        text = "; ".join(f"rank {rank}: {error.message}" for rank, error in agreed.items())
        raise CheckpointError(f"{task}: {text}", hint=hints[0]) from err
