"""A run in folders of other habits: an NFS mount with `noac`, root squash or a quota, a full home, a group's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support import nfs_mounts
from tests.support.command_line import TINY, Done, Person, new_project
from tests.support.nfs_mounts import NOAC, clients

WORDS = (*TINY, "train.threads=1", "run.name=here")
pytestmark = pytest.mark.slow
on_nfs = pytest.mark.skipif(bool(nfs_mounts.missing()), reason=f"needs {nfs_mounts.missing()}")


def finished(done: Done) -> None:
    assert done.code == 0 and "finished step 12" in done.err, done.out + done.err


@on_nfs
@pytest.mark.parametrize("settings", [NOAC, {"squash": 1.0}], ids=["noac", "root squash"])
def test_a_mount_that_caches_nothing_or_takes_root_for_nobody(settings: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    if "squash" in settings:
        shutil.chown(tmp_path / "server", "nobody")
    with clients(tmp_path, 1, **settings) as (client,):
        finished(Person(new_project(client.path / "project")).types(*WORDS))


@on_nfs
def test_a_quota_ends_the_attempt_and_the_run_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with clients(tmp_path, 1) as (client,):
        person = Person(new_project(client.path / "project"))
        with client.having(room=40_000.0):
            done = person.types(*WORDS)
        assert done.code == 1 and "Disk quota exceeded" in done.err, done.out + done.err
        finished(person.types(*WORDS))


@on_nfs
def test_a_home_without_room_is_not_needed(tmp_path: Path) -> None:
    with clients(tmp_path, 1, room=0.0) as (client,):
        finished(Person(new_project(tmp_path / "project")).types(*WORDS, env={"HOME": str(client.path)}))


def test_in_a_groups_setgid_folder_a_run_is_its_owners(tmp_path: Path) -> None:
    folder = new_project(tmp_path / "project")
    shutil.chown(folder, group="users")
    folder.chmod(0o2775)
    finished(Person(folder).types(*WORDS))
    (run,) = folder.glob("runs/here/*")
    assert run.group() == "users" and run.stat().st_mode & 0o7777 == 0o2700


def test_a_run_that_is_moved_between_attempts_goes_on_where_it_lies(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    finished(person.types(*WORDS))
    (run,) = person.folder.glob("runs/here/*")
    moved = RunDirectory(tmp_path / "elsewhere" / run.name)
    moved.path.parent.mkdir()
    run.rename(moved.path)
    done = person.types("resume", str(moved.path), "train.max_steps=14", "--accept", "train.max_steps")
    assert done.code == 0 and "(step 12)" in done.err and "finished step 14" in done.err, done.out + done.err
    assert not run.exists()
