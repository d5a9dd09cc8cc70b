"""In a root that several users share, each has a place of their own, and none can take another's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.lookup import find_run, list_runs
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.places import own_places, run_place
from slurm_train.rundir.sweep import SweepDirectory, list_sweeps, sweep_place, write_table
from tests.support.users import ME, STRANGER, as_user, needs_root, shared_root

pytestmark = needs_root
RUN_ID = "26bbda317045"
GROUP = 65530


@pytest.fixture
def root() -> Iterator[Path]:
    """A root in which a group may make folders and nobody may rename those of others."""
    with shared_root(0o3770, group=GROUP) as root:
        yield root


def start(root: Path) -> str:
    """Makes the run of the same words; returns where it is."""
    run = run_place(root, "gpt", RUN_ID)
    run.path.mkdir(mode=0o700, parents=True)
    run.config.write_text("{}\n")
    require_private(run)
    return str(run.path)


def test_the_same_words_of_two_users_are_two_runs_and_two_sweeps(root: Path) -> None:
    def sweep() -> str:
        directory = sweep_place(root, "9b1c44e0")
        directory.path.mkdir(parents=True)
        write_table(directory, [])
        return str(directory.path)

    for uid in (ME, STRANGER):
        place = root / f"@{uid}"
        assert as_user(uid, lambda: start(root), groups=[GROUP]) == f"{place}/gpt/{RUN_ID}"
        assert as_user(uid, sweep, groups=[GROUP]) == f"{place}/sweeps/9b1c44e0"
        assert as_user(uid, lambda: str(find_run(root, "gpt").path), groups=[GROUP]) == f"{place}/gpt/{RUN_ID}"
        assert as_user(uid, lambda: len(list_sweeps(root)), groups=[GROUP]) == 1
    assert len(list_runs(root)) == 2, "an administrator sees both"


@pytest.mark.parametrize("squat", ["folder", "file", "link"])
def test_a_stranger_who_takes_the_name_keeps_nobody_out(root: Path, squat: str) -> None:
    def take() -> None:
        path = root / f"@{ME}"
        {"folder": path.mkdir, "file": path.touch, "link": lambda: path.symlink_to(root)}[squat]()

    as_user(STRANGER, take, groups=[GROUP])
    for _ in range(2):
        assert (
            as_user(ME, lambda: str(run_place(root, "gpt", RUN_ID).path), groups=[GROUP])
            == f"{root}/@{ME}.1/gpt/{RUN_ID}"
        )
    assert as_user(ME, lambda: start(root), groups=[GROUP]) == f"{root}/@{ME}.1/gpt/{RUN_ID}"
    assert as_user(ME, lambda: [str(run.path) for run in list_runs(root)], groups=[GROUP]) == [
        f"{root}/@{ME}.1/gpt/{RUN_ID}"
    ]


def test_what_lies_in_the_root_itself_is_found_and_continues_there(root: Path) -> None:
    before = RunDirectory(root / "gpt" / RUN_ID)
    before.path.mkdir(parents=True)
    before.config.write_text("{}\n")
    sweep = root / "sweeps" / "9b1c44e0"
    sweep.mkdir(parents=True)
    for path in (before.path.parent, before.path, before.config, sweep.parent, sweep):
        os.chown(path, ME, ME)

    def look() -> list[str]:
        assert find_run(root, "gpt") == before
        return [str(run_place(root, "gpt", RUN_ID).path), str(sweep_place(root, "9b1c44e0").path)]

    assert as_user(ME, look, groups=[GROUP]) == [str(before.path), str(sweep)]
    assert as_user(STRANGER, lambda: start(root), groups=[GROUP]) == f"{root}/@{STRANGER}/gpt/{RUN_ID}"


def test_a_root_of_ones_own_has_no_places_until_it_is_shared(root: Path) -> None:
    os.chown(root, ME, GROUP)
    root.chmod(0o2750)
    assert as_user(ME, lambda: start(root), groups=[GROUP]) == f"{root}/gpt/{RUN_ID}"
    root.chmod(0o3770)
    assert as_user(ME, lambda: list(map(str, own_places(root))), groups=[GROUP]) == [str(root), f"{root}/@{ME}"]
    as_user(ME, lambda: (root / f"@{ME}").mkdir(mode=0o700), groups=[GROUP])
    root.chmod(0o700)
    assert as_user(ME, lambda: str(run_place(root, "cnn", RUN_ID).path)) == f"{root}/@{ME}/cnn/{RUN_ID}"


def test_a_shared_root_in_which_others_may_rename_is_refused(root: Path) -> None:
    root.chmod(0o2770)

    def refuse() -> None:
        with pytest.raises(RunError, match=f"{root} belongs to"):
            start(root)

    as_user(ME, refuse, groups=[GROUP])


def test_a_sweep_lies_with_its_runs(root: Path) -> None:
    assert as_user(ME, lambda: str(SweepDirectory(sweep_place(root, "9b1c44e0").path).place)) == f"{root}/@{ME}"
