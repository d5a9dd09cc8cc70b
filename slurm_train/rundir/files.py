"""Durable writes: what is on disk is either the old content or the new, never half of one; JSON lines and records.

Temp file in the same directory, fsync, rename, fsync of the directory (POSIX makes only the rename atomic; the
directory entry itself is durable after its own fsync). Folders are made 0700 and files 0600, whatever the umask; in
a folder that is shared with its group (2750) they are shared as well, unless they are secret.

A record is a dataclass whose fields are the keys of a JSON object. Reading one ignores keys that this version does not
know; a value that is missing or of another type makes the whole record None.
Nothing here knows what a run or a checkpoint is.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import heapq
import itertools
import json
import math
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from slurm_train.trust import open_to_read, read_bytes, read_text

R = TypeVar("R")
T = TypeVar("T")

NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors by which a file system says that it does not have a call at all."""
_MANY_FILES = 64
_NUM_THREADS = 16

# How often a file is opened before a stale handle is an error: enough for a file that is being replaced.
LOOKS_AT_STALE = 4


def fsync_directory(path: Path) -> None:
    """Makes the entries of a directory (creations, renames, removals) durable.

    Where its file system has no such call (CIFS, some of FUSE), they are as durable as it makes them.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as err:
        # What POSIX has for a file that cannot be synchronized, and what Linux has for calls that are not there.
        if err.errno not in NO_SUCH_CALL:
            raise
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Makes the content of a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Renames as one step; on NFS a repeated request may report "no such file" for a rename that was carried out.

    Raises:
        OSError: the file system refuses, or the source is not there.
    """
    moved = source.lstat()
    try:
        source.rename(target)
    except FileNotFoundError:
        ask_server(target.parent)
        try:
            is_done = os.path.samestat(moved, target.lstat())
        except OSError:
            is_done = False
        if not is_done:
            raise


def link(source: Path, target: Path) -> bool:
    """Makes a second name of a file; returns False where the target is another file.

    Raises:
        OSError: the file system refuses.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        # On NFS a repeated request may fail so although the first one made the link.
        with contextlib.suppress(FileNotFoundError):
            return source.samefile(target)
        return False
    return True


def ask_server(folder: Path) -> None:
    """Has an NFS client ask the server for the names in a folder; it keeps them, absent ones too, for up to a minute.

    Opening the folder is what makes it ask (close-to-open); with `nocto` nothing does.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def is_there(path: Path) -> bool:
    """Returns whether a file is there now, also where another node has just made or removed it."""
    ask_server(path.parent)
    return path.exists()


def is_shared(folder: Path) -> bool:
    """Returns whether a folder is one that `share_folder` has prepared: readable by its group and no other user."""
    return folder.stat().st_mode & 0o2077 == 0o2050


def share_folder(folder: Path) -> None:
    """Lets the group of a folder read it and what will be made in it."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o007 | 0o2050)


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Opens a file, no link; in a shared folder the group may read it, whatever the umask."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    if flags & os.O_CREAT and is_shared(path.parent):
        os.fchmod(descriptor, mode | mode >> 3 & 0o050)
    return descriptor


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Gives an error of a descriptor the path: of a full disk one wants to know which."""
    try:
        yield
    except OSError as err:
        if err.filename is None:
            err.filename = str(path)
        raise


def write_durable(path: Path, text: str, *, is_secret: bool = False) -> None:
    """Writes a new file and fsyncs it; the caller makes the directory entry durable."""
    opened = os.open if is_secret else open_file
    descriptor = opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with _naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str | bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replaces a file as one step: a reader sees the old text or the new, never a part.

    Args:
        path: the file to replace or create.
        text: its new content.
        durable: fsync file and directory; False where a lost write costs nothing but a command typed again.
        mode: permission bits of the new file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with _naming(path), os.fdopen(descriptor, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes every byte; the file system may take fewer at once, as it does when it becomes full.

    Raises:
        OSError: the file system refused the rest.
    """
    while data:
        data = data[os.write(descriptor, data) :]


def to_json(value: Any, **layout: Any) -> str:
    """Returns a value as JSON; numbers that JSON does not have (NaN, infinity) are null.

    Args:
        value: what `json.dumps` takes.
        **layout: keywords of `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_without_nan(value), allow_nan=False, **layout)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def append_line(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    """Appends one JSON object as a line, usually with a single write, so that two writers of one node never mix.

    After a torn last line (a killed writer, a full disk) it starts on a line of its own, so that only the torn one is
    lost. For files that several nodes write at the same time there is `append_shared`.

    Raises:
        OSError: the line is not on disk, or only a part of it.
    """
    line = to_json(value, separators=(",", ":")) + "\n"
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        write_all(descriptor, (f"\n{line}" if is_torn else line).encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_path(folder: Path, text: str) -> Path:
    """Returns an absolute path as it was typed: links stay, since they may lead elsewhere on another machine.

    Only where leaving out a ".." would lead to another place, links are followed.

    Args:
        folder: absolute; where a relative path starts.
        text: a path, e.g. "runs", "~/runs" or "/shared/runs".
    """
    joined = folder / Path(text).expanduser()
    plain = os.path.normpath(joined)
    real = os.path.realpath(joined)
    return Path(plain if os.path.realpath(plain) == real else real)


def listed(folder: Path) -> list[Path]:
    """Returns what lies in a folder, in no order; nothing where it is no folder, is gone or may not be read."""
    try:
        return [folder / name for name in os.listdir(folder)]  # noqa: PTH208  # iterdir would be a generator
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def change_times(paths: Iterable[Path]) -> dict[Path, float]:
    """Returns when each file was changed last (Unix time, s); one that is gone, or may not be seen, is left out."""

    def time_of(path: Path) -> float | None:
        try:
            return path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None

    all_paths = list(paths)
    return {path: time for path, time in zip(all_paths, for_each(time_of, all_paths), strict=True) if time is not None}


def size_of(path: Path) -> int:
    """Returns the bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def read_lines(path: Path, *, writers: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file of lines; a torn last line (a killed writer) is passed over.

    Args:
        path: the file.
        writers: see `trust.open_to_read`.
    """
    try:
        descriptor = read_anew_if_stale(lambda: open_to_read(path, writers=writers))
    except FileNotFoundError:
        return
    with open(descriptor, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # a descriptor
        yield from parse_lines(file)


def parse_lines(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects among lines; what is none is passed over."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def append_shared(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    """Appends a line with a "time_unix_s" to this node's part of a file, `events.jsonl` -> `events@node1.jsonl`.

    O_APPEND is atomic within one node only: an NFS client computes the end of the file itself, so lines that two
    nodes append at the same time overwrite each other.

    Raises:
        OSError: as for `append_line`.
    """
    part = path.with_name(f"{path.stem}@{socket.gethostname()}{path.suffix}")
    append_line(part, value, durable=durable)


def read_shared(path: Path, *, writers: Collection[int] | None = None) -> list[dict[str, Any]]:
    """Returns the lines of all nodes' parts of a file, by time; the lines of one node keep their order.

    Args:
        path: without a node in its name.
        writers: see `trust.open_to_read`.
    """

    def timed(part: Path) -> Iterator[tuple[float, dict[str, Any]]]:
        newest = 0.0
        for line in read_lines(part, writers=writers):
            time = line.get("time_unix_s")
            # A clock that was set back does not change the order within a part.
            newest = max(newest, float(time)) if isinstance(time, (int, float)) else newest
            yield newest, line

    parts = [path, *sorted(path.parent.glob(f"{path.stem}@*{path.suffix}"))]
    return [line for _, line in heapq.merge(*map(timed, parts), key=lambda pair: pair[0])]


def read_json(path: Path, *, writers: Collection[int] | None = None) -> dict[str, Any] | None:
    """Returns the JSON object of a file, or None where there is no such file or it is not whole.

    Args:
        path: the file.
        writers: see `trust.open_to_read`.
    """
    try:
        value = json.loads(read_anew_if_stale(lambda: read_text(path, writers=writers)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


_TAIL_BYTES = 65536


def last_lines(path: Path, *, tail_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """Returns the JSON objects at the end of a file of lines, oldest first; whole lines only."""
    # The rest of a line that began before the tail is no JSON.
    return list(parse_lines(read_tail(path, tail_bytes).splitlines()))


def read_tail(path: Path, num_bytes: int) -> str:
    """Returns the end of a file as text, "" where it is gone, or may not be read."""
    return _read_part(path, lambda size: max(0, size - num_bytes), num_bytes)


def read_head(path: Path, num_bytes: int) -> str:
    """Returns the first part of a file as text, "" where it is gone, or may not be read."""
    return _read_part(path, lambda _size: 0, num_bytes)


def _read_part(path: Path, begin: Callable[[int], int], num_bytes: int) -> str:
    def read() -> bytes:
        with open(open_to_read(path), "rb") as file:  # noqa: PTH123  # a descriptor
            file.seek(begin(file.seek(0, os.SEEK_END)))
            return file.read(num_bytes)

    try:
        return read_anew_if_stale(read).decode(errors="replace")
    except (FileNotFoundError, PermissionError):
        return ""


def read_anew_if_stale(read: Callable[[], T]) -> T:
    """Returns what a function reads; it is called again where an open file was replaced on another client.

    An NFS client asks again by name when it opens a file, but not for a file that is open: fstat and read then end with
    ESTALE, although the file's name leads to a whole new file.

    Args:
        read: opens the file itself, by its path.

    Raises:
        OSError: what the last of four attempts has raised.
    """
    for _ in range(LOOKS_AT_STALE - 1):
        try:
            return read()
        except OSError as err:
            if not is_stale(err):
                raise
    return read()


def is_stale(err: BaseException | None) -> bool:
    """Returns whether an error goes back to ESTALE: a server that is back, or a change by another client."""
    while err is not None and getattr(err, "errno", None) != errno.ESTALE:
        err = err.__cause__
    return err is not None


def write_record(path: Path, record: Any, *, durable: bool = False) -> None:
    """Replaces a file by a dataclass as one JSON object, see `write_atomic`."""
    write_atomic(path, json.dumps(asdict(record)) + "\n", durable=durable)


def read_record(path: Path, kind: type[R]) -> R | None:
    """Returns the record in a JSON file, None where there is no such file or it holds something else."""
    return to_record(kind, read_json(path))


def to_record(kind: type[R], value: Any) -> R | None:
    """Returns a JSON value as a dataclass, None where it is no such record; NaN and infinity are no numbers."""
    try:
        record: R = _decode(kind, value)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    return record


def to_records(kind: type[R], values: Iterable[Any]) -> list[R]:
    """Returns those of some JSON values that are such records, see `to_record`."""
    records = (to_record(kind, value) for value in values)
    return [record for record in records if record is not None]


def fields_of(kind: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of a JSON object's values that a dataclass has a field for and that fit it.

    For files that a person or another version may have written: what does not fit keeps its default.
    """
    found = {}
    for name, hint in _hints(kind).items():
        with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError):
            found[name] = _decode(hint, values[name])
    return found


_hints = functools.cache(get_type_hints)


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _decode(kind: Any, value: Any) -> Any:
    if kind is int or kind is str or kind is bool:
        if not isinstance(value, kind):
            raise TypeError(value)
        return value
    origin, of = _parts(kind)
    if origin is UnionType:
        return None if value is None else _decode(of[0], value)
    if origin in (tuple, list):
        if isinstance(value, str):
            raise TypeError(value)
        return origin(_decode(of[0], item) for item in value)
    if origin in (dict, Mapping):
        # The keys of a JSON object are always text.
        return {of[0](key): _decode(of[1], item) for key, item in dict(value).items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _decode(hints[name], value[name]) for name in hints if name in value})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if hasattr(kind, "_fields"):  # a NamedTuple, which JSON has as an array
        return kind(*(_decode(hint, part) for hint, part in zip(_hints(kind).values(), value, strict=True)))
    if kind is float and not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise ValueError(value)
    return value


def make_private(path: Path) -> None:
    """Makes a folder and the missing ones above it, each 0700; one that is there already stays as it is.

    Raises:
        OSError: the file system refuses, or something else is in its place.
    """
    # There is no Path.lexists.
    missing = itertools.takewhile(lambda folder: not os.path.lexists(folder), (path, *path.parents))
    for folder in reversed(list(missing)):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory")


def make_folder(path: Path, *, within: Path) -> None:
    """Makes a folder, and the missing ones above it, as private or as shared as the one that it is in.

    Args:
        path: the folder.
        within: a folder above it, or itself, which must be there: a run directory that was moved is not made anew.

    Raises:
        OSError: the file system refuses, `within` is not there, or something else is in the place of a folder.
    """
    if not within.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(within))
    if path != within and not path.parent.exists():
        make_folder(path.parent, within=within)
    make_private(path)
    if is_shared(path.parent) and not is_shared(path):
        share_folder(path)


def create_empty(path: Path) -> None:
    """Makes an empty file, or leaves the one that is there as it is; a link is refused."""
    os.close(open_file(path, os.O_WRONLY | os.O_CREAT))


def for_each(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Returns what a file operation gives for each item; of many several run at the same time, as each waits.

    Where no more threads can be started (`ulimit -u`, `ulimit -v`), those that there are do the work.

    Raises:
        Exception: what one of them raised.
    """
    values = list(items)
    if len(values) < _MANY_FILES:
        return [work(value) for value in values]
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    # Each position is taken by one thread: `next` on a range is a single step of the interpreter.
    remaining = iter(range(len(values)))

    def work_on() -> None:
        try:
            for position in remaining:
                results[position] = work(values[position])
                if errors:
                    return
        except BaseException as err:
            errors.append(err)

    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):
        for _ in range(_NUM_THREADS - 1):
            thread = threading.Thread(target=work_on, daemon=True)
            thread.start()
            threads.append(thread)
    work_on()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[position] for position in range(len(values))]


# --- a node's file, of which each rank of the node overwrites a part ---

# What a newer record is shorter by stays blank. A file per rank would cost the supervisor of a thousand nodes eight
# times as many look-ups for each look.
_PART_SIZE = 1024


def write_part(file: int, part: int, record: Mapping[str, Any]) -> None:
    """Overwrites one rank's part of its node's file in one write: a reader sees the old record or the new.

    Args:
        file: descriptor of the file.
        part: number of the part, which is the rank's position on the node.
        record: becomes JSON of at most 1,024 bytes.

    Raises:
        OSError: the file system refuses.
    """
    os.pwrite(file, json.dumps(record).encode().ljust(_PART_SIZE), part * _PART_SIZE)


def read_parts(folder: Path, name: str, kind: type[R]) -> list[R]:
    """Returns the records in all nodes' files of a folder; what cannot be read now is left out.

    Args:
        folder: where the files are.
        name: of the files without their number, e.g. "heartbeats".
        kind: of the records.
    """
    records: list[R] = []
    with contextlib.suppress(OSError):
        for path in listed(folder):
            if re.fullmatch(rf"{name}_\d+", path.name):
                with contextlib.suppress(OSError):
                    data = read_bytes(path)
                    parts = (data[at : at + _PART_SIZE] for at in range(0, len(data), _PART_SIZE))
                    records += to_records(kind, parse_lines(parts))
    return records
