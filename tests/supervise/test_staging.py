"""Python's packages on the nodes' own disks: the script that the nodes run, under a fake srun on two nodes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_train.assets import read_template
from slurm_train.supervise.staging import stage_python
from tests.support.command_line import REPOSITORY

NODES = ("node1", "node2")
# Each node has a disk of its own: the folder that is asked for, below the node's name.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
folder=$5
for node in node1 node2; do
  SLURMD_NODENAME=$node "${@:1:4}" "$DISKS/$node" "${@:6}"
done
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Python with one installed package, and two nodes; returns the job's environment."""
    package = tmp_path / "env" / "site-packages" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    (package / "data").symlink_to("__init__.py")
    monkeypatch.setattr(sys, "path", ["", str(package.parent), str(package), str(tmp_path / "gone" / "site-packages")])
    for node in NODES:
        (tmp_path / node).mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    (tmp_path / "runs").mkdir()
    return {"PATH": f"{srun.parent}:/usr/bin:/bin", "DISKS": str(tmp_path)}


def stage(site: dict[str, str]) -> dict[str, str]:
    return stage_python("/disk", Path(site["DISKS"]) / "runs", NODES, site)


def places(site: dict[str, str]) -> list[Path]:
    return [place for node in NODES for place in Path(site["DISKS"]).glob(f"{node}/slurm_train_{os.getuid()}/[!.]*")]


def test_every_node_gets_a_copy_once(site: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = stage(site)
    assert found["SLURM_TRAIN_STAGE"].startswith(f"/disk/slurm_train_{os.getuid()}/")
    assert "on 2 of 2 nodes" in capsys.readouterr().err
    assert len(places(site)) == 2
    for place in places(site):
        copied = Path(f"{place}{site['DISKS']}/env/site-packages/mine")
        assert (copied / "__init__.py").read_text() == "x = 1\n" and (copied / "data").is_symlink()
        (copied / "mark").touch()
    assert stage(site) == found and len(places(site)) == 2, "what is there is used again"
    source = Path(site["DISKS"]) / "env" / "site-packages" / "mine" / "__init__.py"
    times = source.stat()
    source.write_text("x = 2\n")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = stage(site)
    assert changed != found and len(places(site)) == 4, "as long as before, and with the same time"


def test_an_old_copy_goes_unless_a_process_has_mapped_something_of_it(site: dict[str, str]) -> None:
    top = Path(stage(site)["SLURM_TRAIN_STAGE"]).name
    folder = next(place for place in places(site) if place.name == top).parent
    used, unused = folder / "used", folder / "unused"
    for place in (used, unused):
        place.mkdir()
        (place / "library.so").write_bytes(b"x" * 4096)
    with (used / "library.so").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        for place in (used, unused):
            os.utime(place, (0, 0))
        stage(site)
        assert used.is_dir() and not unused.exists()


def is_left(site: dict[str, str], node: str) -> bool:
    """Returns whether a node has the whole package."""
    copies = [place for place in places(site) if f"/{node}/" in str(place)]
    files = [Path(f"{place}{site['DISKS']}/env/site-packages/mine/__init__.py") for place in copies]
    return [file.read_text() for file in files if file.exists()] == ["x = 1\n"]


@pytest.mark.parametrize("lost", ["removed", "emptied", "all"])
def test_a_copy_that_lost_files_is_made_anew(site: dict[str, str], lost: str) -> None:
    stage(site)
    place = next(place for place in places(site) if "node2" in str(place))
    for file in [path for path in place.rglob("*") if path.is_file() or path.is_symlink()]:
        if lost == "emptied" and not file.is_symlink():
            file.write_text("")
        elif lost == "all" or file.name == "__init__.py":
            file.unlink()
    assert stage(site) and is_left(site, "node1") and is_left(site, "node2")
    assert len(places(site)) == 2, "nothing else is left there"


def test_bytecode_may_come_and_go(site: dict[str, str]) -> None:
    stage(site)
    for place in places(site):
        cache = Path(f"{place}{site['DISKS']}/env/site-packages/mine/__pycache__/__init__.cpython-311.pyc")
        cache.parent.mkdir()
        cache.touch()
    before = [place.stat().st_ino for place in places(site)]
    stage(site)
    assert [place.stat().st_ino for place in places(site)] == before


def test_jobs_that_begin_at_the_same_time_make_one_copy(site: dict[str, str]) -> None:
    """They also mend the same copy."""
    stage(site)
    disk, (archive,) = Path(site["DISKS"]) / "node1", [file for file in archives(site) if file.suffix == ".tar"]
    words = [
        "/bin/sh",
        "-c",
        read_template("stage_packages.sh"),
        "sh",
        disk,
        archive.stem,
        archive,
        archive.with_suffix(".list"),
    ]
    for _ in range(3):
        next(disk.rglob("__init__.py")).unlink()
        before = {file.name for file in next(disk.iterdir()).iterdir()}
        env = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "node1"}
        jobs = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(6)]
        assert [job.communicate()[0] for job in jobs] == ["staged node1\n"] * 6
        assert {file.name for file in next(disk.iterdir()).iterdir()} == before and is_left(site, "node1")


def archives(site: dict[str, str]) -> list[Path]:
    return list((Path(site["DISKS"]) / "runs").glob(".environments_*/*"))


@pytest.mark.parametrize("suffix", [".tar", ".list"])
@pytest.mark.parametrize("length", [0, 700])
def test_an_archive_that_is_not_whole_is_written_again(site: dict[str, str], suffix: str, length: int) -> None:
    stage(site)
    (file,) = [file for file in archives(site) if file.suffix == suffix]
    file.write_bytes(file.read_bytes()[:length] or b"")
    for place in places(site):
        place.rename(place.parent.parent / "elsewhere")
    stage(site)
    assert is_left(site, "node1") and is_left(site, "node2")


def test_two_archives_are_kept_and_those_on_their_way(site: dict[str, str]) -> None:
    source = Path(site["DISKS"]) / "env" / "site-packages" / "mine" / "__init__.py"
    for number in range(5):
        source.write_text("x = 1\n" * (number + 1))
        stage(site)
        if number < 3:
            for file in archives(site):
                hours_ago = time.time() - 3600 * (5 - number)
                os.utime(file, (hours_ago, hours_ago))
    assert sorted(file.suffix for file in archives(site)) == [".list", ".list", ".tar", ".tar"]


def test_a_node_that_cannot_unpack_imports_as_before(site: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = stage(site)
    place = next(place for place in places(site) if "node2" in str(place))
    next(place.rglob("__init__.py")).unlink()
    tar = Path(site["DISKS"]) / "bin" / "tar"
    tar.write_text("#!/bin/sh\necho tar: no room >&2\nexit 2\n")
    tar.chmod(0o755)
    assert stage(site) == found, "the other node has its copy"
    assert "node2 (1 of 2) could not unpack" in (said := capsys.readouterr().err) and "tar: no room" in said
    assert [place for place in places(site) if "node2" in str(place)] == [], "nothing half unpacked is left"


@pytest.mark.parametrize("what", ["writable by others", "a link"])
def test_a_folder_that_others_can_fill_is_not_used(
    site: dict[str, str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    top = Path(site["DISKS"]) / "node2" / f"slurm_train_{os.getuid()}"
    if what == "a link":
        (Path(site["DISKS"]) / "theirs").mkdir()
        top.symlink_to(Path(site["DISKS"]) / "theirs")
    else:
        top.mkdir()
        top.chmod(0o777)
    assert stage(site) == {}
    assert "node2 (1 of 2) have a folder of another user" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["node2", "."])
def test_a_folder_whose_names_anybody_may_change_is_not_used(
    site: dict[str, str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(site["DISKS"]) / name
    folder.chmod(0o777)
    assert stage(site) == {}
    nodes = "node2 (1 of 2)" if name == "node2" else "node1, node2 (2 of 2)"
    assert f"{nodes} have a folder in which anybody may put another one" in capsys.readouterr().err
    folder.chmod(0o1777)
    assert stage(site)


def test_an_archive_folder_of_somebody_else_is_not_read(site: dict[str, str]) -> None:
    folder = Path(site["DISKS"]) / "runs" / f".environments_{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert stage(site) == {} and list(folder.iterdir()) == []


RANK = """
import sys
stage, installed = sys.argv[1:]
sys.path.insert(0, installed)
from slurm_train.code.imports import import_from_stage
print(import_from_stage(stage))
import mine.first, mine.second, other
print(mine.__file__, mine.first.__file__, mine.second.__file__, other.__file__)
"""


@pytest.fixture
def copy(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with installed packages, and a node's copy of it that a cleaner has been in."""
    installed, stage = tmp_path / "site-packages", tmp_path / "disk" / "slurm_train_0" / "digest"
    for folder in (installed, Path(f"{stage}{installed}")):
        (folder / "mine").mkdir(parents=True)
        for name in ("mine/__init__.py", "mine/first.py", "mine/second.py", "other.py"):
            (folder / name).touch()
    for folder in (stage, stage.parent):
        folder.chmod(0o700)
    for name in ("mine/second.py", "other.py"):
        Path(f"{stage}{installed}/{name}").unlink()
    return stage, installed


def imported(stage: Path, installed: Path) -> tuple[str, str]:
    """Returns what a rank says of its node's copy, and where it imports from: c of the copy, i of the installed."""
    command = [sys.executable, "-c", RANK, str(stage), str(installed)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    said, files = done.stdout.splitlines()
    return said, "".join("c" if file.startswith(str(stage)) else "i" for file in files.split())


def test_what_a_cleaner_takes_from_a_copy_is_imported_from_where_it_is_installed(copy: tuple[Path, Path]) -> None:
    assert imported(*copy) == ("", "ccii")


@pytest.mark.parametrize(
    ("place", "mode", "said"),
    [
        ("..", 0o777, "not a folder that only you can enter"),
        (".", 0o755, "not a folder that only you can enter"),
        ("../..", 0o777, "anybody may rename"),
    ],
)
def test_a_copy_that_others_can_exchange_is_not_imported(
    copy: tuple[Path, Path], place: str, mode: int, said: str
) -> None:
    """Whoever may rename in the folder above puts a folder of their own there after it was looked at once."""
    (copy[0] / place).chmod(mode)
    words, places = imported(*copy)
    assert said in words and places == "iiii"
