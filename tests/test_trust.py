"""Whose files are read, and whose folders and links may be on the way to a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.trust import enter_folder, open_plain, read_bytes, trusted_owners
from tests.support.users import ME, STRANGER, as_user, needs_root

pytestmark = needs_root
GROUP = 65530


@pytest.fixture
def site() -> Iterator[Path]:
    """A folder in which everybody makes files, as in /tmp, with a folder of mine and one of a stranger's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        for uid, owner in ((ME, "mine"), (STRANGER, "theirs")):
            (folder / owner).mkdir(mode=0o755)
            os.chown(folder / owner, uid, uid)
        yield folder


def _file(path: Path, uid: int, mode: int = 0o644) -> None:
    path.write_bytes(b"text")
    path.chmod(mode)
    os.chown(path, uid, uid)


def _link(path: Path, uid: int, target: Path) -> None:
    path.symlink_to(target)
    os.lchown(path, uid, uid)


def _link_of(link_uid: int, file_uid: int, path: Path) -> None:
    _file(path.with_name("target"), file_uid)
    _link(path, link_uid, path.with_name("target"))


def _pipe(uid: int, path: Path) -> None:
    os.mkfifo(path, 0o666)
    os.chown(path, uid, uid)


def _huge(uid: int, path: Path) -> None:
    _file(path, uid)
    os.truncate(path, 1 << 40)


READ = {
    "mine": (".", lambda path: _file(path, ME), True),
    "root's": (".", lambda path: _file(path, 0), True),
    "my link to a file of mine": (".", partial(_link_of, ME, ME), True),
    "what a stranger says of a run of theirs": ("theirs", lambda path: _file(path, STRANGER), True),
    "a link of theirs to a file of theirs": ("theirs", partial(_link_of, STRANGER, STRANGER), True),
    "a stranger's": (".", lambda path: _file(path, STRANGER), False),
    "a stranger's in my folder": ("mine", lambda path: _file(path, STRANGER), False),
    "a stranger's link to a file of mine": (".", partial(_link_of, STRANGER, ME), False),
    "a link of theirs to a file of mine": ("theirs", partial(_link_of, STRANGER, ME), False),
    "a link of mine to a file of theirs": (".", partial(_link_of, ME, STRANGER), False),
    "a named pipe": (".", partial(_pipe, ME), False),
    "a named pipe of theirs": ("theirs", partial(_pipe, STRANGER), False),
    "a folder": (".", lambda path: path.mkdir(mode=0o755), False),
    "theirs, closed": ("theirs", lambda path: _file(path, STRANGER, 0o000), False),
    "theirs, without end": ("theirs", partial(_huge, STRANGER), False),
}


@pytest.mark.parametrize("case", READ)
def test_a_file_counts_if_its_writer_may_say_it(case: str, site: Path) -> None:
    place, make, counts = READ[case]
    path = site / place / "file"
    make(path)

    def read() -> str:
        try:
            return read_bytes(path).decode()
        except FileNotFoundError:
            return "absent"

    assert as_user(ME, read) == ("text" if counts else "absent")


def test_of_my_own_runs_only_trusted_writers_count_and_checkpoints_have_no_links(site: Path) -> None:
    for uid, name in ((ME, "own"), (STRANGER, "theirs/file")):
        _file(site / name, uid)
    _link(site / "link", ME, site / "own")

    def read() -> None:
        assert read_bytes(site / "own", writers=trusted_owners()) == b"text"
        with pytest.raises(FileNotFoundError):
            read_bytes(site / "theirs" / "file", writers=trusted_owners())
        with pytest.raises(OSError, match="symbolic links"):
            open_plain(site / "link")

    as_user(ME, read)


def _set_up(path: Path, uid: int, mode: int, gid: int | None = None) -> Path:
    path.mkdir()
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "mine": (lambda way: _set_up(way, ME, 0o755), ""),
    "root's": (lambda way: _set_up(way, 0, 0o755), ""),
    "the site's": (lambda way: _set_up(way, 999, 0o755), ""),
    "somebody's for a group of mine": (lambda way: _set_up(way, STRANGER, 0o2770, GROUP), ""),
    "sticky": (lambda way: _set_up(way, 0, 0o1777), ""),
    "my link": (lambda way: _link(way, ME, way.with_name("mine")), ""),
    "a stranger's": (lambda way: _set_up(way, STRANGER, 0o755), "its owner could replace your files"),
    "a stranger's for another group": (lambda way: _set_up(way, STRANGER, 0o2775, STRANGER), "its owner could"),
    "a stranger's link": (lambda way: _link(way, STRANGER, way.with_name("mine")), f"is a link of uid {STRANGER}"),
    "my link through a stranger's": (
        lambda way: (
            _link(way.with_name("next"), STRANGER, way.with_name("mine")),
            _link(way, ME, way.with_name("next")),
        ),
        f"is a link of uid {STRANGER}",
    ),
    "my link to a stranger's": (lambda way: _link(way, ME, Path("theirs")), "its owner could replace your files"),
    "anybody's": (lambda way: _set_up(way, 0, 0o777), "anybody could replace your files"),
}


@pytest.mark.parametrize("case", WAYS)
def test_nobody_else_can_lead_the_way_to_a_folder_elsewhere(case: str, site: Path) -> None:
    make, problem = WAYS[case]
    make(site / "way")
    end = (site / "way").resolve() / "end"
    end.mkdir(mode=0o700)
    os.chown(end, ME, ME)

    def enter() -> str:
        try:
            descriptor = enter_folder(site / "way" / "end")
        except RunError as err:
            return err.message
        assert os.path.samestat(os.fstat(descriptor), end.stat())
        return ""

    message = as_user(ME, enter, groups=[GROUP])
    assert problem in message if problem else not message


def test_links_in_a_circle_and_steps_up_end(site: Path) -> None:
    _link(site / "a", ME, Path("b"))
    _link(site / "b", ME, Path("./a"))
    _link(site / "up", ME, Path("mine/../mine"))

    def enter() -> None:
        os.close(enter_folder(site / "up"))
        with pytest.raises(OSError, match="symbolic links"):
            enter_folder(site / "a")
        with pytest.raises(FileNotFoundError):
            enter_folder(site / "absent")

    as_user(ME, enter)
