"""Single files of a checkpoint: written once, made durable, measured.

A failed fsync or close is never tried again: after it the kernel may have dropped the dirty pages, and a second call
would report success for bytes that are gone. The attempt to save is over; the next one uses a fresh directory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import xxhash

from slurm_train.checkpoint.manifest import DAMAGED_HINT, FileRecord
from slurm_train.errors import CheckpointError

# Plain reads, not mmap: a page that cannot be read would end the process with SIGBUS instead of an error.
_CHUNK_BYTES = 8 << 20
FILE_MODE = 0o600


def write_file(path: Path, data: bytes) -> FileRecord:
    """Writes a new private file, makes its content durable, and gives its record.

    Raises:
        OSError: the file exists, or the file system refuses.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def seal_file(path: Path) -> FileRecord:
    """Makes a file that another library wrote private and durable, and gives its record.

    torch 2.13's FileSystemWriter calls fsync before Python's buffer is flushed: .metadata has 0 bytes at that moment.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, FILE_MODE)
        os.fsync(descriptor)
        return _measure(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path, expected: FileRecord) -> None:
    """Copies a file, makes the copy durable, reads it back, and compares both with the record.

    Raises:
        CheckpointError: the source is not what was recorded, or the copy is not what was read.
        OSError: the copy exists, or the file system refuses.
    """
    hasher, num_bytes = xxhash.xxh3_128(), 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        reader = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(reader, "rb", buffering=0) as file:
            while data := file.read(_CHUNK_BYTES):
                hasher.update(data)
                num_bytes += len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if FileRecord(bytes=num_bytes, xxh3_128=hasher.hexdigest()) != expected:
        raise CheckpointError(f"{source} is not what its manifest says, so it was not copied", hint=DAMAGED_HINT)
    check_hash(target, expected)


def read_record(path: Path) -> FileRecord:
    """Gives the record of a file as it is on disk now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _measure(descriptor)
    finally:
        os.close(descriptor)


def check_size(path: Path, expected: FileRecord) -> None:
    """Checks that a regular file of the recorded size is there, without reading it.

    Raises:
        CheckpointError: it is missing, not a regular file, or of another size; the text names the file.
    """
    try:
        status = path.lstat()
    except OSError as err:
        raise CheckpointError(f"{path.name}: {err.strerror}", hint=DAMAGED_HINT) from err
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
        found = read_record(path)
    except OSError as err:
        raise CheckpointError(f"{path.name}: {err.strerror}", hint=DAMAGED_HINT) from err
    if found != expected:
        raise CheckpointError(
            f"{path.name}: {found.bytes} bytes with hash {found.xxh3_128}, "
            f"the manifest says {expected.bytes} and {expected.xxh3_128}",
            hint=DAMAGED_HINT,
        )


def _measure(descriptor: int) -> FileRecord:
    """Reads a file from its start; it does not depend on a size that may change meanwhile."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, os.fstat(descriptor).st_size + 1)))
    num_bytes = 0
    with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            num_bytes += count
    return FileRecord(bytes=num_bytes, xxh3_128=hasher.hexdigest())
