"""Two users on one node with the same `checkpoint.local_dir`, and a stranger who makes their names first. As root.

Each user is a process with a uid of its own. Both save and resume at the same time in one sticky folder. Whatever the
stranger has put in their way, each finds its own checkpoint again, and nobody else can reach it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.local import NodePlace, copy_to_run, newest_reachable
from slurm_train.checkpoint.verify import verify
from slurm_train.rundir.node_disk import open_private
from tests.campaigns.checkpoint_faults import in_memory
from tests.campaigns.record import Tally
from tests.support.small_checkpoints import make_header, stage
from tests.support.users import STRANGER, UserWork

USERS = (65531, 65532)


def _open_folder(path: Path, _: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _link_to_the_other(path: Path, _: Path) -> None:
    other = next(uid for uid in USERS if not path.name.endswith(str(uid)))
    path.symlink_to(path.with_name(f"slurm_train-{other}"))


OBSTACLES: dict[str, Callable[[Path, Path], None]] = {
    "nothing": lambda *_: None,
    "a private folder": lambda path, _: path.mkdir(mode=0o700),
    "an open folder": _open_folder,
    "a file": lambda path, _: path.touch(mode=0o666),
    "a named pipe": lambda path, _: os.mkfifo(path, 0o666),
    "a link to a folder of the stranger": lambda path, trap: path.symlink_to(trap),
    "a link to the other user's folder": _link_to_the_other,
}


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials: the obstacles in turn, in the way of one user or of both."""
    assert os.geteuid() == 0, "it takes root to be several users"
    chance = random.Random(seed)
    for number in range(trials):
        words = list(OBSTACLES)[number % len(OBSTACLES)]
        victims = chance.choice([USERS[:1], USERS[1:], USERS])
        with in_memory(folder) as memory:
            memory.chmod(0o755)
            tally.add(f"{words}, in the way of {victims}", try_once(memory, OBSTACLES[words], victims))
    return {}


def try_once(memory: Path, obstacle: Callable[[Path, Path], None], victims: tuple[int, ...]) -> list[str]:
    """Returns what is wrong when two users save and resume with an obstacle in the way of some of them."""
    base, trap = memory / "tmp", memory / "trap"
    base.mkdir()
    base.chmod(0o1777)
    for uid, path in ((STRANGER, trap), *((uid, memory / f"home-{uid}") for uid in USERS)):
        path.mkdir(mode=0o700)
        os.chown(path, uid, uid)
    trap.chmod(0o777)

    def obstruct() -> None:
        for uid in victims:
            obstacle(base / f"slurm_train-{uid}", trap)

    problems = _at_once({STRANGER: obstruct})
    for attempt in (0, 1):
        problems += _at_once({uid: partial(_save_and_resume, base, memory, uid, attempt) for uid in USERS})
    for uid in (*USERS, STRANGER):
        others = [other for other in USERS if other != uid]
        problems += _at_once({uid: partial(_reach, base, others)})
    if left := [str(path) for path in trap.rglob("*")]:
        problems.append(f"the stranger's folder holds {left}")
    return problems


def _save_and_resume(base: Path, memory: Path, uid: int, attempt: int) -> None:
    """One attempt of a user: it resumes what the one before has saved, and saves."""
    root, home = open_private(base, f"run-{uid}", "node", key="base"), memory / f"home-{uid}" / "checkpoints"
    tier = NodePlace(root=root, node=0, keep=2, attempt=attempt)
    tier.claim_all()
    run = Place(root=home, attempt=attempt)
    run.claim()
    if attempt:
        found = newest_reachable(tier, lambda held: held.attempt == attempt - 1, group=None)
        assert found is not None, f"uid {uid} does not find what it has saved, in {root}"
        saved = copy_to_run(tier, run, found, group=None)
        assert verify(saved.path).written_by == str(uid)
    staging, manifest = stage(root, make_header(1 + attempt, attempt=attempt, written_by=str(uid)))
    tier.prune(tier.commit(staging, manifest))


def _reach(base: Path, others: list[int]) -> None:
    """Fails if any checkpoint of others can be seen by the calling user."""
    for path in base.iterdir():
        status = path.lstat()
        if status.st_uid in others:
            assert not status.st_mode & 0o077, f"{path} is open"
            try:
                seen = os.listdir(path)  # noqa: PTH208  # names alone
            except PermissionError:
                continue
            raise AssertionError(f"uid {os.geteuid()} sees {seen} in {path}")


def _at_once(works: dict[int, Callable[[], Any]]) -> list[str]:
    """Runs each piece of work in a process of that user, at the same time; returns what went wrong."""
    processes = [UserWork(uid, work) for uid, work in works.items()]
    problems = []
    for process in processes:
        try:
            process.result()
        except (AssertionError, TimeoutError) as err:
            problems.append(str(err))
    return problems
