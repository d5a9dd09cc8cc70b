"""A run in folders of other habits: an NFS mount with `noac`, root squash or a quota, a full home, a group's folder."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.timing import last_step
from tests.support import nfs_mounts
from tests.support.command_line import TINY, Done, Person, new_project
from tests.support.nfs_mounts import NOAC, clients
from tests.support.waiting import wait_for
from tests.support.warm_commands import WarmPerson

WORDS = (*TINY, "train.threads=1", "run.name=here")
pytestmark = pytest.mark.slow
on_nfs = pytest.mark.skipif(bool(nfs_mounts.missing()), reason=f"needs {nfs_mounts.missing()}")


def finished(done: Done) -> None:
    assert done.code == 0 and "finished step 12" in done.err, done.out + done.err


@on_nfs
@pytest.mark.parametrize("settings", [NOAC, {"squash": 1.0}], ids=["noac", "root squash"])
@pytest.mark.campaign
def test_a_mount_that_caches_nothing_or_takes_root_for_nobody(settings: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    if "squash" in settings:
        shutil.chown(tmp_path / "server", "nobody")
    with clients(tmp_path, 1, **settings) as (client,):
        finished(Person(new_project(client.path / "project")).types(*WORDS))


@pytest.mark.full
@on_nfs
def test_a_quota_ends_the_attempt_and_the_run_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with clients(tmp_path, 1) as (client,):
        person = WarmPerson(new_project(client.path / "project"))
        with client.having(room=40_000.0):
            done = person.types(*WORDS)
        assert done.code == 1 and "Disk quota exceeded" in done.err, done.out + done.err
        finished(person.types(*WORDS))


def run_in(folder: Path) -> RunDirectory | None:
    return next(map(RunDirectory, folder.glob("runs/here/*")), None)


@pytest.mark.full
@on_nfs
def test_stale_handles_while_it_trains_cost_no_step(tmp_path: Path) -> None:
    golden = WarmPerson(new_project(tmp_path / "golden"))
    assert golden.types(*WORDS, "train.max_steps=40").code == 0
    # Slower, so that there is time for faults.
    words = (*WORDS, "train.max_steps=40", "model.step_s=0.1")
    with clients(tmp_path, 1) as (client,):
        person = WarmPerson(new_project(client.path / "project"))

        def has_steps(number: int) -> bool:
            run = run_in(person.folder)
            return typed.done() or (run is not None and last_step(run) >= number)

        with ThreadPoolExecutor(1) as pool:
            typed = pool.submit(person.types, *words)
            for number in (3, 10, 18):
                wait_for(partial(has_steps, number), within_s=60, what=f"step {number}")
                # All reads, writes and looks of the ranks and of their supervisor.
                with client.having(stale=1.0):
                    time.sleep(1.0)
            done = typed.result()
        assert "Stale file handle" in done.err, "no process met a stale handle"
        runs = [run for folder in (client.export / "project", golden.folder) if (run := run_in(folder)) is not None]
        saved = max((name_of(path).step for path in list_checkpoints(runs[0].checkpoints)), default=0)
        if done.code != 0:
            done = person.types(*words)
            assert done.code == 0 and (f"(step {saved})" in done.err or saved == 0), done.out + done.err
        digests = {(read_json(run.result) or {})["weights_digest"] for run in runs}
        assert len(digests) == 1, "the run has not been trained as the other"


@pytest.mark.full
@on_nfs
def test_a_home_without_room_is_not_needed(tmp_path: Path) -> None:
    with clients(tmp_path, 1, room=0.0) as (client,):
        finished(Person(new_project(tmp_path / "project")).types(*WORDS, env={"HOME": str(client.path)}))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to any group")
@pytest.mark.campaign
def test_in_a_groups_setgid_folder_a_run_is_its_owners(tmp_path: Path) -> None:
    folder = new_project(tmp_path / "project")
    shutil.chown(folder, group="users")
    folder.chmod(0o2775)
    finished(Person(folder).types(*WORDS))
    (run,) = folder.glob("runs/here/*")
    assert run.group() == "users" and run.stat().st_mode & 0o7777 == 0o2700


def test_a_run_that_is_moved_between_attempts_goes_on_where_it_lies(tmp_path: Path) -> None:
    person = WarmPerson(new_project(tmp_path / "project"))
    finished(person.types(*WORDS))
    (run,) = person.folder.glob("runs/here/*")
    moved = RunDirectory(tmp_path / "elsewhere" / run.name)
    moved.path.parent.mkdir()
    run.rename(moved.path)
    done = person.types("resume", str(moved.path), "train.max_steps=14", "--accept", "train.max_steps")
    assert done.code == 0 and "(step 12)" in done.err and "finished step 14" in done.err, done.out + done.err
    assert not run.exists()
