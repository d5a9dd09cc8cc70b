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
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

from slurm_train.checkpoint.agreement import as_agreed, rank_in, shared_out, size_of
from slurm_train.checkpoint.manifest import FileRecord, NewFile, check_hash, text_of_tensor, write_file
from slurm_train.checkpoint.metadata import METADATA_FILE, read_metadata
from slurm_train.checkpoint.state import require_loadable
from slurm_train.checkpoint.verify import read_manifest
from slurm_train.errors import CheckpointError


class TensorPlan:
    """What this rank writes of the tensors of one save, as the ranks have planned it together.

    Rank 0 plans in a time by the number of tensors times ranks, so a plan serves until a rank holds something else than
    at the save before: other names, shapes, number types or shards. (torch's own `enable_plan_caching` takes a tensor
    of another number type for the same, mixes up the plans of several groups, and in older versions writes an empty
    checkpoint after a save that failed while it was planned.)

    Args:
        tensors: nested dictionary of tensors and plain values.
        group: a gloo group of all ranks; None for one process.
    """

    def __init__(self, tensors: dict[str, Any], *, group: ProcessGroup | None) -> None:
        self._group = group
        self._place = (rank_in(group), size_of(group))
        self._planner = DefaultSavePlanner()
        self._structure = _structure_of(tensors)
        self._share = _Share()
        if _kept is not None and (_kept.place, _kept.structure) == (self._place, self._structure):
            self._local = _kept.local
            self._share = _kept.share
            self._planner.state_dict = dict(_leaves_of(tensors, self._structure))
        else:
            self._planner.set_up_planner(tensors, is_coordinator=self.rank == 0)
            self._local = self._planner.create_local_plan()
            if _kept is not None and (_kept.place, _kept.local) == (self._place, self._local):
                self._share = _kept.share

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._place[0]

    @property
    def number(self) -> str:
        """Drawn at random for each plan, "" before there is one: ranks with the same one have shares of the same."""
        return self._share.number

    @property
    def items(self) -> Sequence[WriteItem]:
        """What this rank writes, in the order of its file."""
        return self._share.items

    @property
    def described(self) -> Mapping[str, str]:
        """On rank 0 number type and shape of each tensor that the ranks write together, by full name."""
        return self._share.described

    def settle(self, numbers: Sequence[str]) -> None:
        """Plans anew unless all ranks have a share of the same plan; collective then, in two exchanges.

        Args:
            numbers: of each rank.

        Raises:
            CheckpointError: on every rank: what the ranks hold does not fit together.
        """
        global _kept  # saves of a process come one after the other
        _kept = None
        if set(numbers) != {self.number} or not self.number:
            self._share = shared_out(self._group, self._local, share_out)
        _kept = _Kept(self._place, self._structure, self._local, self._share)

    def data_of(self, item: WriteItem) -> Tensor | io.BytesIO:
        """Returns what is written for an item.

        Raises:
            CheckpointError: no load could read it, which would be found when it is too late.
        """
        data = self._planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            require_loadable(data, item.index.fqn)
        return data

    def metadata(self, folder: Path, lengths: Sequence[Sequence[int]]) -> Metadata:
        """Returns torch's description of what the ranks have written; on rank 0."""
        metadata, parts_of_ranks = pickle.loads(self._share.packed)  # this process has made it
        places = {}
        for rank, (parts, of_rank) in enumerate(zip(parts_of_ranks, lengths, strict=True)):
            begin = 0
            for (name, number), length in zip(parts, of_rank, strict=True):
                entry = metadata.state_dict_metadata[name]
                offsets = None if number is None else entry.chunks[number].offsets
                places[MetadataIndex(name, offsets, number)] = _StorageInfo(_file_of(rank), begin, length)
                begin += length
        metadata.storage_data = places
        metadata.storage_meta = StorageMeta(checkpoint_id=folder, save_id=uuid.uuid4().hex)
        return metadata  # type: ignore[no-any-return]  # unpickled: it has no type


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's share of a plan."""

    number: str = ""
    items: Sequence[WriteItem] = ()
    packed: bytes = b""
    """On rank 0: the description without the places in files, and name and part's number of what each rank writes.
    Pickled: a fraction of the memory, nothing for the collector of garbage."""
    described: Mapping[str, str] = field(default_factory=dict)


class _Kept(NamedTuple):
    """A rank's share of the plan of its last save, and what it is a plan of."""

    place: tuple[int, int]
    """Rank, and number of ranks."""
    structure: Any
    """See `_structure_of`."""
    local: SavePlan
    """What the rank holds."""
    share: _Share


def _structure_of(value: Any) -> Any:
    """Returns what is equal where torch would plan the same: it takes 20 ms for a thousand names, and this 1 ms."""
    kind = type(value)
    if isinstance(value, Tensor):
        # Asking a tensor for what it lacks takes longer than all the rest.
        cut = None if kind in (Tensor, nn.Parameter) else getattr(value, "_spec", id(value))
        return kind, value.shape, value.dtype, value.requires_grad, cut
    if isinstance(value, Mapping):
        return {key: _structure_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_structure_of(item) for item in value]
        # A list of plain values is one itself.
        return kind if all(isinstance(item, type) for item in items) else items
    return kind


def _leaves_of(value: Any, structure: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what torch plans, by its full name."""
    if not isinstance(structure, (dict, list)):
        yield name, value
        return
    for key, item in value.items() if isinstance(structure, dict) else enumerate(value):
        yield from _leaves_of(item, structure[key], f"{name}.{key}" if name else str(key))


_kept: _Kept | None = None


def write_tensors(folder: Path, plan: TensorPlan) -> tuple[dict[str, FileRecord], list[int]]:
    """Writes this rank's tensors into a fresh directory, durable; returns their file's record, and each one's length.

    Raises:
        OSError: the file system refuses.
        CheckpointError: see `TensorPlan.data_of`.
    """
    name = _file_of(plan.rank)
    lengths = []
    try:
        with NewFile(folder / name) as file:
            for item in plan.items:
                begin = file.num_bytes
                _write_one(file, plan.data_of(item))
                lengths.append(file.num_bytes - begin)
            return {name: file.seal()}, lengths
    except Exception as err:
        # The archive in the file answers a full disk with an error of its own.
        link: BaseException | None = err
        while link is not None and not isinstance(link, OSError):
            link = link.__cause__ or link.__context__
        raise (link or err) from err


def describe_tensors(folder: Path, plan: TensorPlan, lengths: Sequence[Sequence[int]]) -> dict[str, FileRecord]:
    """Writes torch's description of what all ranks have written, on rank 0; returns its record.

    Args:
        folder: where.
        plan: of this save.
        lengths: of each rank, see `write_tensors`.
    """
    return {METADATA_FILE: write_file(folder / METADATA_FILE, pickle.dumps(plan.metadata(folder, lengths)))}


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


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
        reader = _FilesOfKnownMetadata(path, described)
        if near is not None:
            reader.fs = _NearFiles(near)
        load(tensors, storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=group is None)


def tensor_shapes(path: Path, *, described: Metadata | None = None) -> dict[str, Tensor]:
    """Returns an empty tensor for each that was written, by its flat name, e.g. "model.head.weight"."""
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


def _write_one(file: NewFile, data: Tensor | io.BytesIO) -> None:
    """Writes a value, or a tensor as `torch.load` reads it."""
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if type(tensor) is Tensor and tensor.dtype in _NAMED_STORAGES:
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        archive = _archive_around(tensor.dtype, tensor.shape)
        # These let other threads run while they sum up and write.
        checksum = zlib.crc32(content).to_bytes(4, "little")
        file.write(archive.begin)
        file.write(content)
        file.write(checksum.join(archive.end))
        return
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # else torch.save writes all that the memory holds
    torch.save(tensor, file)  # type: ignore[arg-type]  # it writes and flushes


class _Archive(NamedTuple):
    """What torch.save writes around the bytes of a tensor: a zip archive."""

    begin: bytes
    end: tuple[bytes, bytes, bytes]
    """Between these is the checksum of the bytes, twice."""


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
            strides.insert(0, strides[0] * max(size, 1))
        stride = tuple(strides) if self.shape else ()
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (self.storage, 0, self.shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", _NAMED_STORAGES[value.dtype], "0", "cpu", value.numel
        return None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Described(_Storage(dtype, math.prod(shape)), shape))
    return file.getvalue()


class _Pieces(list[bytes]):
    """What was written to a file without a position: there a record's checksum comes after the record."""

    def write(self, piece: bytes) -> int:
        self.append(piece)
        return len(piece)

    def flush(self) -> None:
        """Does nothing."""


@functools.lru_cache(maxsize=4096)
def _archive_around(dtype: torch.dtype, shape: torch.Size) -> _Archive:
    """Returns the archive of tensors, made once for each shape.

    For each tensor anew it took most of the Python of a save. torch.save also keeps the interpreter from all other
    threads while it sums up and copies a tensor: beside a save of 1.6 GB a step of GPT-2 took 1.9 times as long on an
    H200.
    """
    name = "archive/data/0"
    zeros = bytes(shape.numel() * dtype.itemsize)  # pages of zeros that are only read take no memory
    records = {
        "archive/data.pkl": _pickled(dtype, tuple(shape)),
        "archive/byteorder": sys.byteorder.encode(),
        name: zeros,
        "archive/version": b"3\n",
    }
    pieces: Any = _Pieces()
    with zipfile.ZipFile(pieces, "w") as archive:
        for key, record in records.items():
            archive.writestr(zipfile.ZipInfo(key), record)
    place = next(number for number, piece in enumerate(pieces) if piece is zeros)
    end = b"".join(pieces[place + 1 :])
    # The checksum comes after a signature, and again in the list at the end of the archive, before the name.
    again = end.rindex(name.encode()) - 30
    return _Archive(b"".join(pieces[:place]), (end[:4], end[8:again], end[again + 4 :]))


class _FilesOfKnownMetadata(FileSystemReader):
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


def share_out(all_plans: list[SavePlan]) -> list[_Share]:
    """Returns each rank's share of what all ranks hold.

    Raises:
        CheckpointError: what they hold under one name differs.
        ValueError: parts of a tensor overlap, or are missing.
    """
    _require_one_kind(all_plans)
    plans, metadata = _plan_grids(all_plans) or DefaultSavePlanner().create_global_plan(all_plans)
    # Values first: who loads needs all of them.
    items = [sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO) for plan in plans]
    names = {name: name for name in metadata.state_dict_metadata}  # a text that is one object is pickled once
    parts = [[(names[item.index.fqn], item.index.index) for item in of_rank] for of_rank in items]
    packed = pickle.dumps((metadata, parts))
    number = uuid.uuid4().hex
    described = {
        name: text_of_tensor(str(entry.properties.dtype), entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    shares = [_Share(number, of_rank) for of_rank in items]
    shares[0] = replace(shares[0], packed=packed, described=described)
    return shares


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
