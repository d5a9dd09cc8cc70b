"""The file system that stands for NFS in tests and in the campaign `nfs` does what an NFS client does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support import nfs_mounts
from tests.support.nfs_mounts import Client, clients
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.skipif(bool(nfs_mounts.missing()), reason=f"needs {nfs_mounts.missing()}"), pytest.mark.full]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Client, Client]]:
    with clients(tmp_path) as (first, second):
        yield first, second


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def lock_errno(file: IO[str]) -> int:
    """Tries to lock a file exclusively, and returns 0 or the errno of the refusal."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        return err.errno or 0
    return 0


def errno_of(call: Callable[[], object]) -> int:
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno or 0


def test_a_name_that_was_absent_stays_absent_until_the_folder_is_opened(two: tuple[Client, Client]) -> None:
    here, there = two[0].path, two[1].path
    assert not (there / "new").exists()
    (here / "new").write_text("x")
    assert not (there / "new").exists()
    assert names_in(there) == ["new"]
    assert (there / "new").read_text() == "x"


def test_absent_names_are_looked_up_again_when_their_time_is_over(tmp_path: Path) -> None:
    with clients(tmp_path, acdirmin=2.0) as (first, second):
        assert not (second.path / "new").exists()
        (first.path / "new").write_text("x")
        assert not (second.path / "new").exists()
        wait_for((second.path / "new").exists, within_s=60.0, what="the name")


def test_attributes_are_old_until_open(two: tuple[Client, Client]) -> None:
    here, there = two[0].path / "file", two[1].path / "file"
    here.write_text("short")
    assert there.stat().st_size == 5
    here.write_text("somewhat longer")
    assert there.stat().st_size == 5
    assert there.read_text() == "somewhat longer"


def test_without_close_to_open_content_is_old(tmp_path: Path) -> None:
    with clients(tmp_path, cto=0.0) as (first, second):
        for text in (b"old", b"new"):
            (first.path / "file").write_bytes(text)
            # Not read_bytes: its fstat would ask for the access time, which a read has made old, as on NFS.
            descriptor = os.open(second.path / "file", os.O_RDONLY)
            assert os.read(descriptor, 3) == b"old"
            os.close(descriptor)


def test_what_was_not_sent_is_lost_with_the_node(two: tuple[Client, Client]) -> None:
    descriptor = os.open(two[0].path / "file", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"text")
    two[0].crash()
    with pytest.raises(OSError, match=r"not connected|abort"):
        os.fsync(descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)
    assert (two[1].export / "file").read_bytes() == b""


def test_a_quota_is_reported_by_fsync_and_close_not_by_write(two: tuple[Client, Client]) -> None:
    with two[0].having(room=4):
        descriptor = os.open(two[0].path / "file", os.O_CREAT | os.O_WRONLY)
        assert os.write(descriptor, b"too much") == 8
        assert errno_of(lambda: os.fsync(descriptor)) == errno.EDQUOT
        os.fsync(descriptor)  # said once, as Linux does
        os.write(descriptor, b"more")
        assert errno_of(lambda: os.close(descriptor)) == errno.EDQUOT
        assert errno_of((two[0].path / "other").touch) == errno.EDQUOT


def test_a_file_that_another_client_removed_is_stale(two: tuple[Client, Client]) -> None:
    (two[0].path / "file").write_text("text")
    descriptor = os.open(two[1].path / "file", os.O_RDONLY)
    (two[0].path / "file").unlink()
    assert errno_of(lambda: os.pread(descriptor, 4, 0)) == errno.ESTALE
    os.close(descriptor)
    folder = two[0].path / "folder"
    folder.mkdir()
    (two[1].path / "folder").stat()
    folder.rmdir()
    assert errno_of((two[1].path / "folder" / "file").touch) in (errno.ESTALE, errno.ENOENT)


def test_an_open_file_that_is_removed_keeps_its_folder(two: tuple[Client, Client]) -> None:
    folder = two[0].path / "folder"
    folder.mkdir()
    with (folder / "file").open("w") as file:
        (folder / "file").unlink()
        assert [name[:4] for name in names_in(folder)] == [".nfs"]
        assert errno_of(folder.rmdir) == errno.ENOTEMPTY
        file.write("still written")
    folder.rmdir()


def test_a_lost_reply_makes_the_request_fail_that_was_carried_out(two: tuple[Client, Client]) -> None:
    root, server = two[0].path, two[0].export
    (root / "file").write_text("x")
    with two[0].having(lost=1.0):
        assert errno_of(lambda: (root / "file").rename(root / "renamed")) == errno.ENOENT
        assert (server / "renamed").read_text() == "x"
        assert errno_of(lambda: os.link(root / "renamed", root / "linked")) == errno.EEXIST
        assert (root / "linked").samefile(root / "renamed")
        assert errno_of((root / "folder").mkdir) == errno.EEXIST
        assert errno_of((root / "linked").unlink) == errno.ENOENT
        os.close(os.open(root / "exclusive", os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def test_calls_wait_for_a_server_that_is_away_and_a_kill_ends_them(two: tuple[Client, Client]) -> None:
    (two[0].path / "file").write_text("x")
    two[0].set(away=1.0)
    reader = subprocess.Popen([sys.executable, "-c", f"open({str(two[0].path / 'other')!r}, 'w')"])
    waiting = threading.Thread(target=names_in, args=(two[0].path,))
    waiting.start()
    time.sleep(0.4)
    assert waiting.is_alive() and reader.poll() is None
    reader.send_signal(signal.SIGKILL)
    assert reader.wait(timeout=60) == -signal.SIGKILL
    two[0].set(away=0.0)
    waiting.join(timeout=60)
    assert not waiting.is_alive()


def test_times_are_the_servers(two: tuple[Client, Client]) -> None:
    with two[0].having(clock=30.0):
        (two[0].path / "file").write_text("x")
        assert 25 < (two[0].path / "file").stat().st_mtime - time.time() < 35
        os.utime(two[0].path / "file", (1000, 1000))
        assert (two[0].path / "file").stat().st_mtime == 1000


def test_root_is_nobody(two: tuple[Client, Client]) -> None:
    two[0].export.chmod(0o755)
    with two[0].having(squash=1.0):
        assert errno_of((two[0].path / "file").touch) == errno.EACCES
        two[0].export.chmod(0o777)
        (two[0].path / "file").touch()
        assert (two[0].export / "file").stat().st_uid == 65534
        assert errno_of(lambda: os.chown(two[0].path / "file", 0, 0)) == errno.EPERM


@pytest.mark.parametrize(("mode", "expected"), [("server", errno.EAGAIN), ("local", 0), ("none", errno.ENOLCK)])
def test_locks_are_the_servers_or_local_or_none(tmp_path: Path, mode: str, expected: int) -> None:
    with clients(tmp_path, locks=mode) as (first, second):
        with (first.path / "lock").open("w") as one, (second.path / "lock").open("r+") as other:
            assert lock_errno(one) == (expected if mode == "none" else 0)
            assert lock_errno(other) == expected
        if mode == "server":
            with (second.path / "lock").open("r+") as other:
                # The kernel tells the server of a closed file after the close has returned.
                wait_for(
                    lambda: lock_errno(other) == 0,
                    within_s=30,
                    what="the lock of the closed file",
                    poll_s=0.01,
                )
