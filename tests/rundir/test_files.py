from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurm_train.rundir import files
from slurm_train.rundir.files import (
    append_line,
    append_shared,
    change_times,
    for_each,
    last_lines,
    listed,
    read_json,
    read_lines,
    read_record,
    read_shared,
    size_of,
    to_record,
    write_atomic,
    write_durable,
    write_record,
)
from tests.support import nfs_mounts
from tests.support.nfs_mounts import Client, clients

on_nfs = pytest.mark.skipif(bool(nfs_mounts.missing()), reason=f"needs {nfs_mounts.missing()}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, "old")
    write_atomic(path, "new", mode=0o700)
    assert path.read_text() == "new"
    assert names(tmp_path) == ["plan.json"]


@pytest.mark.faults
@pytest.mark.parametrize("call", ["fsync", "fdopen"])
def test_a_failed_write_leaves_the_old_file_whole(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.json"
    write_atomic(path, "old")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["job.json"]


@pytest.mark.faults
def test_a_reader_never_sees_half_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    texts = {"a" * 100_000, "b" * 150_000}
    write_atomic(path, "a" * 100_000)
    done = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        for text in sorted(texts):
            write_atomic(path, text, durable=False)
    done.set()
    reader.join()
    assert seen <= texts


def test_write_durable_refuses_to_overwrite(tmp_path: Path) -> None:
    write_durable(tmp_path / "once", "first")
    with pytest.raises(FileExistsError):
        write_durable(tmp_path / "once", "second")
    assert (tmp_path / "once").read_text() == "first"


@pytest.mark.parametrize("torn", ['{"step": 1', '{"step": 1, "loss": 0.', '"just a text', "\ufffd"])
def test_a_torn_line_costs_itself_and_nothing_after_it(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"step": 0})
    with path.open("a") as file:
        file.write(torn)
    assert list(read_lines(path)) == [{"step": 0}]
    append_line(path, {"step": 2})
    append_line(path, {"step": 3})
    assert list(read_lines(path)) == [{"step": 0}, {"step": 2}, {"step": 3}]


def test_lines_of_many_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"

    def write(writer: int) -> None:
        for step in range(100):
            append_line(path, {"writer": writer, "step": step, "pad": "x" * 200})

    in_threads(write, 4)
    lines = list(read_lines(path))
    assert len(lines) == 400
    assert [line["step"] for line in lines if line["writer"] == 2] == list(range(100))


def test_a_file_system_that_takes_a_line_in_parts_gets_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:7]))
    append_line(tmp_path / "lines", {"step": 1, "loss": 0.5})
    assert list(read_lines(tmp_path / "lines")) == [{"step": 1, "loss": 0.5}]


def test_a_file_system_that_becomes_full_within_a_line_is_an_error(tmp_path: Path) -> None:
    line = {"pad": "x" * 100}
    append_line(tmp_path / "lines", line)
    size = (tmp_path / "lines").stat().st_size
    child = os.fork()
    if child == 0:
        # A limit of the file's size cuts a write short, and refuses the next one, as a full disk does.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        try:
            append_line(tmp_path / "lines", line)
        except OSError as err:
            os._exit(err.errno or 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EFBIG
    append_line(tmp_path / "lines", line)
    assert list(read_lines(tmp_path / "lines")) == [line, line]


def test_each_node_appends_to_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    for host, time_unix_s in (("node2", 5), ("node1", 1), ("node2", 3), ("node1", 4), ("node1", 9)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        append_shared(path, {"host": host, "time_unix_s": time_unix_s})
    path.write_text('{"no": "time"}\n')
    assert sorted(part.name for part in tmp_path.iterdir()) == [
        "events.jsonl",
        "events@node1.jsonl",
        "events@node2.jsonl",
    ]
    found = [(line.get("host"), line.get("time_unix_s")) for line in read_shared(path)]
    assert found == [(None, None), ("node1", 1), ("node1", 4), ("node2", 5), ("node2", 3), ("node1", 9)]


def in_threads(target: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=target, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("text", "expected"), [('{"a": 1}', {"a": 1}), ('{"a": ', None), ("[1]", None), ("", None)])
def test_read_json_gives_whole_objects_only(text: str, expected: object, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read_json(tmp_path / "x.json") == expected


class Point(NamedTuple):
    x: float
    name: str


@dataclass(frozen=True)
class Record:
    points: tuple[Point, ...]
    counts: dict[int, int]
    note: str | None = None


WHOLE = {"points": [[1, "a"], [2.5, "b"]], "counts": {"3": 4}}


def test_a_record_is_read_as_it_was_written_and_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    record = Record((Point(1.0, "a"), Point(2.5, "b")), {3: 4})
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json", Record) == record == to_record(Record, WHOLE | {"later": 1})


@pytest.mark.parametrize(
    "change",
    [{"points": [[1]]}, {"points": [["1", "a"]]}, {"points": [[float("nan"), "a"]]}, {"counts": 3}, {"note": 1}],
)
def test_a_value_of_another_type_makes_no_record(change: dict[str, Any]) -> None:
    assert to_record(Record, WHOLE | change) is None and to_record(Record, {"counts": {}}) is None


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_json(tmp_path / "nothing") is None
    assert list(read_lines(tmp_path / "nothing")) == []


def test_what_is_gone_by_the_time_it_is_looked_at_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("text")
    found = sorted(listed(tmp_path))
    found[0].unlink()
    assert list(change_times([*found, found[1] / "below a file"])) == [found[1]]
    assert (size_of(found[0]), size_of(found[1])) == (0, 4)
    assert listed(tmp_path / "absent") == listed(found[1]) == []


@pytest.mark.parametrize("number", [0, 3, 64, 1000])
def test_file_operations_keep_their_order_and_of_many_several_run_together(number: int) -> None:
    threads = set[str]()
    together = threading.Barrier(16)

    def work(item: int) -> int:
        if number == 1000 and (name := threading.current_thread().name) not in threads:
            threads.add(name)
            together.wait(30)
        return 2 * item

    assert for_each(work, iter(range(number))) == list(range(0, 2 * number, 2))


@pytest.mark.parametrize("number", [3, 1000])
def test_what_one_of_many_file_operations_raises_is_raised(number: int) -> None:
    def work(item: int) -> None:
        if item == number - 1:
            raise OSError(errno.ESTALE, "stale")

    with pytest.raises(OSError, match="stale"):
        for_each(work, range(number))


@pytest.mark.parametrize("write", [write_atomic, write_durable])
def test_the_error_of_a_full_disk_has_the_path(
    write: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "x", "text")
    assert caught.value.filename == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("number", "is_passed_over"),
    [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.ENOSYS, True), (errno.EIO, False), (errno.ENOSPC, False)],
)
def test_only_an_fsync_that_a_file_system_does_not_have_for_folders_is_passed_over(
    number: int, is_passed_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112  # a link to an open folder
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if is_passed_over:
        write_atomic(tmp_path / "x", "text")
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            write_atomic(tmp_path / "x", "text")


@pytest.mark.parametrize("num_threads", [0, 3])
def test_where_no_more_threads_can_be_started_those_that_there_are_do_it(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `ulimit -u`."""
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert for_each(lambda item: 2 * item, range(1000)) == list(range(0, 2000, 2))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Client, Client]]:
    with clients(tmp_path) as (first, second):
        yield first, second


@pytest.mark.full
@on_nfs
@pytest.mark.parametrize("read", [read_json, last_lines])
@pytest.mark.parametrize("times", [1, 3])
def test_a_file_that_another_client_replaces_while_it_is_open_is_read_anew(
    two: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any], times: int
) -> None:
    writer, reader = (client.path / "file" for client in two)
    write_atomic(writer, '{"number": 0}\n')
    open_path = os.open
    opened = []

    def open_and_replace(path: Path, *args: Any, **kwargs: Any) -> int:
        file = open_path(path, *args, **kwargs)
        if path == reader:
            opened.append(file)
            if len(opened) <= times:
                write_atomic(writer, f'{{"number": {len(opened)}}}\n')
        return file

    monkeypatch.setattr(os, "open", open_and_replace)
    found = read(reader)
    assert found in ({"number": times}, [{"number": times}]) and len(opened) == times + 1


@pytest.mark.full
@on_nfs
def test_a_file_that_stays_stale_is_an_error(two: tuple[Client, Client]) -> None:
    path = two[0].path / "file"
    path.write_text("{}")
    with two[0].having(stale=1.0), pytest.raises(OSError) as caught:
        read_json(path)
    assert caught.value.errno == errno.ESTALE
