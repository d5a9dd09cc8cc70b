"""The manifest of a checkpoint, and its single files: written once, made durable, measured.

The manifest is the trust anchor: COMPLETE holds the hash of its bytes, and it holds size and hash of everything else.
It is plain JSON, so a login node reads it without torch. Reading is strict, and has three outcomes: whole, damaged, or
not known. What another version wrote, or what cannot be read here, is not known (`UnknownCheckpointError`).

A failed fsync or close is never tried again: after it the kernel may have dropped the dirty pages, and a second call
would report success for bytes that are gone. The attempt to save is over; the next one uses a fresh directory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import xxhash

from slurm_train import __version__, trust
from slurm_train.errors import CheckpointError, OtherVersionError, UnknownCheckpointError
from slurm_train.formatting import shorten
from slurm_train.rundir.files import for_each, is_shared, open_file, write_all

FORMAT_VERSION = 2
"""Rises with each key that is added; all versions from 1 are read."""
MODEL = "model."
"""Begin of the full names of the model's tensors in a training state."""
# What to do about a checkpoint that is not as it was written; its loader and `verify` look for an older one themselves.
DAMAGED_HINT = "`checkpoint verify RUN` shows which checkpoints are whole; take another one, or restore this one"
_HEADER_HINT = "pass the facts of a checkpoint as CheckpointHeader describes them"
DIRECTORY = "directory"
"""The kind, in `extra`, of a checkpoint that a user's own program has filled with its files."""
PROGRAM = "program"
"""The kind of a checkpoint with the model and optimizer of a user's own program."""
MANIFEST_FILE = "manifest.json"
COMPLETE_FILE = "COMPLETE"
# Keys that came later, as manifests from before them are read.
_LATER_KEYS: dict[str, Any] = {"parent": "", "weights": {}, "written_by_version": ""}
# What these say of a file is a fact about what lies there; any other refusal may end, or be this node's alone.
_DAMAGED_ERRNOS = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR}
# Plain reads, not mmap: a page that cannot be read would end the process with SIGBUS instead of an error.
_CHUNK_BYTES = 8 << 20
# Of a file that is written, and what is hashed before it is written.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash of one file.

    Args:
        bytes: exact size.
        xxh3_128: 32 lower-case hexadecimal digits.
    """

    bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        """Refuses what is no size and no hash."""
        is_size = type(self.bytes) is int and self.bytes >= 0
        if not is_size or not re.fullmatch("[0-9a-f]{32}", str(self.xxh3_128)):
            raise CheckpointError(f"no file record: {self.bytes} bytes, hash {self.xxh3_128!r}", hint=DAMAGED_HINT)


@lru_cache
def _types_of(kind: type) -> dict[str, Any]:
    # Each save makes a header, and to read annotations takes as long as all the rest of it.
    return get_type_hints(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHeader:
    """The facts of the moment a checkpoint was taken. Wide because each is a key of the manifest.

    Args:
        step: optimizer steps done.
        samples: global samples that those steps consumed.
        epoch: epoch of the next sample.
        world_size: number of ranks that wrote.
        mesh: degree per mesh axis, for example {"dp_replicate": 32}.
        batch_plan: the batch arithmetic as JSON values.
        config_hash: identity of the frozen configuration, as in plan.json.
        data_fingerprint: identity of the data set.
        torch_version: torch that wrote the tensors.
        attempt: attempt of the run that saved it, counted over the whole run.
        job: Slurm job id in the form that names a file, for example "123_4", or "local".
        written_by: free text for people, for example "n01 pid 4711".
        written_by_version: version of slurm_train that saved it; "" in manifests from before this key.
        parent: save id of the checkpoint that the training was loaded from; "" where it began anew, and in manifests
            from before this key.
        weights: number type and shape of each parameter and buffer of the whole model, for example
            {"head.weight": "float32[3,16]"}; empty where it is not known, and in manifests of earlier versions.
        extra: further JSON values of the trainer, for example a learning-rate retune or a tracker's run id.
    """

    step: int
    samples: int
    epoch: int
    world_size: int
    mesh: dict[str, int]
    batch_plan: dict[str, Any]
    config_hash: str
    data_fingerprint: str
    torch_version: str
    attempt: int
    job: str = "local"
    written_by: str = ""
    written_by_version: str = __version__
    parent: str = ""
    weights: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_directory(self) -> bool:
        """Whether it holds files of a user's own program, in folders perhaps, of which nothing but bytes is known."""
        return self.extra.get("kind") == DIRECTORY

    @property
    def is_program(self) -> bool:
        """Whether it has the model and the optimizer of a user's own program."""
        return self.extra.get("kind") == PROGRAM

    @property
    def tensors(self) -> dict[str, str]:
        """The `weights` by their full names, for example "model.head.weight"."""
        return {MODEL + name: kind for name, kind in self.weights.items()}

    def __post_init__(self) -> None:
        """Refuses values of another type and negative counts."""
        for name, kind in _types_of(type(self)).items():  # type: ignore[arg-type]  # a class can be hashed
            value = getattr(self, name)
            expected = get_origin(kind) or kind
            if not isinstance(value, expected) or isinstance(value, bool):
                raise CheckpointError(
                    f"checkpoint {name}={value!r} is not of type {expected.__name__}", hint=_HEADER_HINT
                )
            if isinstance(value, int) and value < 0:
                raise CheckpointError(f"checkpoint {name}={value} is negative", hint=_HEADER_HINT)
        if not re.fullmatch("[0-9A-Za-z_]+", self.job):
            raise CheckpointError(
                f"checkpoint job={self.job!r} cannot be part of a file name",
                hint="use letters, digits and underscores only",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(CheckpointHeader):
    """A header together with the record of every file, by plain file name, or by path below its directory."""

    files: dict[str, FileRecord]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Refuses file names that lead elsewhere, and names that the directory itself uses."""
        CheckpointHeader.__post_init__(self)
        for name in self.files:
            check_file_name(name, below=self.is_directory)

    @classmethod
    def of(cls, header: CheckpointHeader, files: dict[str, FileRecord]) -> Manifest:
        """Returns the manifest of a header and its files, in name order."""
        facts = {item.name: getattr(header, item.name) for item in fields(CheckpointHeader)}
        return cls(**facts, files=dict(sorted(files.items())))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> str:
        """Returns the text of manifest.json; equal manifests give equal text."""
        try:
            return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n"
        except (TypeError, ValueError) as err:
            raise CheckpointError(
                f"checkpoint of step {self.step}: header holds what JSON cannot: {err}", hint=_HEADER_HINT
            ) from err

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Reads the content of manifest.json.

        Raises:
            OtherVersionError: it has a format version or keys that this version does not read.
            CheckpointError: not JSON, or a type other than expected.
        """
        try:
            facts = json.loads(text)
        except ValueError as err:
            raise CheckpointError(f"{MANIFEST_FILE} is not JSON: {err}", hint=DAMAGED_HINT) from err
        version = facts.get("format_version") if isinstance(facts, dict) else None
        if type(version) is not int:
            raise CheckpointError(f"{MANIFEST_FILE} has the format version {version!r}", hint=DAMAGED_HINT)
        expected = {item.name for item in fields(cls)}
        unknown = sorted(set(facts) - expected)
        if unknown or not 1 <= version <= FORMAT_VERSION:
            raise OtherVersionError(
                f"{MANIFEST_FILE} has format version {version} with the unknown keys {unknown}, written by slurm_train "
                f"{facts.get('written_by_version', '(not recorded)')}; this is slurm_train {__version__}, which reads "
                f"format versions 1 to {FORMAT_VERSION}",
                hint="use the version of slurm_train that wrote it, or move this checkpoint away to go on from an "
                "older one",
            )
        facts = _LATER_KEYS | facts
        if expected - set(facts):
            raise CheckpointError(f"{MANIFEST_FILE} lacks the keys {sorted(expected - set(facts))}", hint=DAMAGED_HINT)
        try:
            files = {name: FileRecord(**value) for name, value in facts.pop("files").items()}
        except (AttributeError, TypeError) as err:
            raise CheckpointError(f"{MANIFEST_FILE} lacks sizes and hashes: {err}", hint=DAMAGED_HINT) from err
        return cls(**facts, files=files)


def text_of_tensor(dtype: str, shape: Iterable[int]) -> str:
    """Returns what `weights` say of a tensor.

    Args:
        dtype: its number type, with or without "torch.".
        shape: of the whole tensor.
    """
    return f"{dtype.removeprefix('torch.')}[{','.join(map(str, shape))}]"


def require_tensors(expected: Mapping[str, str], described: Mapping[str, str]) -> None:
    """Checks that the files of a checkpoint hold every tensor that they should.

    Args:
        expected: number type and shape of each tensor, by full name, for example "model.head.weight".
        described: the same of those that are in the files.

    Raises:
        CheckpointError: naming those that are missing or of another type or shape.
    """
    wrong = sorted(name for name, kind in expected.items() if described.get(name) != kind)
    if wrong:
        shown = shorten(f"{name} {expected[name]} (found: {described.get(name)})" for name in wrong)
        raise CheckpointError(
            f"{len(wrong)} of {len(expected)} tensors are not in the files as they should be: {shown}",
            hint=DAMAGED_HINT,
        )


def digest_of(data: bytes) -> bytes:
    """Returns the content of COMPLETE for the bytes of a manifest.json, for example b"xxh3_128:0a1b..."."""
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}".encode()


def check_file_name(name: str, *, below: bool = False) -> None:
    """Refuses names that are not plain names inside a checkpoint directory.

    Args:
        name: e.g. "rank_00000.pt".
        below: names of files in folders are allowed, too, e.g. "optimizer/__0_0.distcp".

    Raises:
        CheckpointError: the name holds a separator or a control character, is "", "." or "..", or is reserved.
    """
    parts = name.split("/") if below else [name]
    is_plain = all(part not in {"", ".", ".."} and "/" not in part for part in parts)
    if not is_plain or name in {MANIFEST_FILE, COMPLETE_FILE} or "\\" in name or not name.isprintable():
        raise CheckpointError(
            f"{MANIFEST_FILE} names the file {name!r}, which is not a plain file name of a checkpoint",
            hint="do not load this checkpoint: its manifest was not written by slurm_train",
        )


def read_failure(name: str | Path, err: OSError) -> CheckpointError:
    """Returns the error for a file of a checkpoint that could not be read: damage, or not known."""
    if err.errno in _DAMAGED_ERRNOS:
        reason = "missing" if isinstance(err, FileNotFoundError) else err.strerror
        return CheckpointError(f"{name}: {reason}", hint=DAMAGED_HINT)
    return UnknownCheckpointError(
        f"{name} cannot be read on {socket.gethostname()}: {err.strerror}",
        hint="look at the file system and its mount on this node; nothing was passed over or removed. To go on from an "
        "older checkpoint, move this one away",
    )


def open_plain(path: Path) -> FileIO:
    """Opens a file to be read without a buffer; a link in its place is refused, see `trust.open_plain`.

    Raises:
        OSError: there is no such file, it is a link, or it cannot be read.
    """
    return os.fdopen(trust.open_plain(path), "rb", buffering=0)


class NewFile:
    """A new private file that is measured while it is written, so that nobody reads it again to hash it.

    Args:
        path: where to; nothing may be there.

    Raises:
        OSError: the file exists, or the file system refuses.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._hasher = xxhash.xxh3_128()
        self._waiting = bytearray()
        self.num_bytes = 0
        """Written so far."""

    def write(self, data: bytes | memoryview) -> int:
        """Appends bytes; small ones wait for each other."""
        size = len(data)
        self.num_bytes += size
        if size <= _SMALL_BYTES:
            self._hasher.update(data)
            self._waiting += data
            if len(self._waiting) > _SMALL_BYTES:
                self._write_waiting()
            return size
        self._write_waiting()
        # What was just hashed is still in the processor's cache when it is written.
        for at in range(0, size, _SMALL_BYTES):
            part = data[at : at + _SMALL_BYTES]
            self._hasher.update(part)
            write_all(self._descriptor, part)
        return size

    def flush(self) -> None:
        """Does nothing: what is written is there once `seal` has returned."""

    def seal(self) -> FileRecord:
        """Makes all that was written durable, and gives the file's record."""
        self._write_waiting()
        os.fsync(self._descriptor)
        return FileRecord(self.num_bytes, self._hasher.hexdigest())

    def _write_waiting(self) -> None:
        write_all(self._descriptor, bytes(self._waiting))
        self._waiting.clear()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; what came after `seal` may be lost."""
        os.close(self._descriptor)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Does what `receive_file` does, with the whole content."""
    return receive_file(path, [data])


def seal_file(path: Path) -> FileRecord:
    """Makes a file that a program wrote as private as its folder, and durable, and gives its record."""
    with open_plain(path) as file:
        os.fchmod(file.fileno(), 0o640 if is_shared(path.parent) else 0o600)
        os.fsync(file.fileno())
        return _measure(file)


def copy_file(source: Path, target: Path, expected: FileRecord) -> None:
    """Copies a file, makes the copy durable, reads it back, and compares both with the record.

    Raises:
        CheckpointError: the source is not what was recorded, or the copy is not what was read.
        OSError: the copy exists, or the file system refuses.
    """
    with open_plain(source) as file:
        if receive_file(target, iter(lambda: file.read(_CHUNK_BYTES), b"")) != expected:
            raise CheckpointError(f"{source} differs from its manifest, so it was not copied", hint=DAMAGED_HINT)
    check_hash(target, expected)


def receive_file(target: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Writes a new private file from parts that arrive one after the other, makes it durable, and gives its record.

    Raises:
        OSError: the file exists, or the file system refuses; the parts that are left are not taken.
    """
    with NewFile(target) as file:
        for data in parts:
            file.write(data)
        return file.seal()


def read_record(path: Path) -> FileRecord:
    """Returns the record of a file as it is on disk now."""
    with open_plain(path) as file:
        return _measure(file)


def check_sizes_in(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Does what `check_size` does for all of some files of a folder."""
    for_each(lambda name: check_size(folder / name, files[name]), files)


def check_size(path: Path, expected: FileRecord) -> None:
    """Checks that a regular file of the recorded size is there, without reading it.

    Raises:
        CheckpointError: it is missing, not a regular file, or of another size; the text names the file.
    """
    try:
        status = path.lstat()
    except OSError as err:
        raise read_failure(path.name, err) from err
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path.name}: not a regular file", hint=DAMAGED_HINT)
    if status.st_size != expected.bytes:
        raise CheckpointError(
            f"{path.name}: {status.st_size} bytes, the manifest says {expected.bytes}", hint=DAMAGED_HINT
        )


def check_hash(path: Path, expected: FileRecord) -> None:
    """Checks that a file has exactly the recorded content.

    Raises:
        CheckpointError: size or hash differ, or it cannot be read; the text names the file.
    """
    try:
        record = read_record(path)
    except OSError as err:
        raise read_failure(path.name, err) from err
    if record != expected:
        raise CheckpointError(
            f"{path.name}: {record.bytes} bytes with hash {record.xxh3_128}, "
            f"the manifest says {expected.bytes} and {expected.xxh3_128}",
            hint=DAMAGED_HINT,
        )


def _measure(file: FileIO) -> FileRecord:
    """Reads a file to its end; it does not depend on a size that may change meanwhile."""
    hasher = xxhash.xxh3_128()
    num_bytes = 0
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, os.fstat(file.fileno()).st_size + 1)))
    while count := file.readinto(buffer):
        hasher.update(buffer[:count])
        num_bytes += count
    return FileRecord(num_bytes, hasher.hexdigest())
