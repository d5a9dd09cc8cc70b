"""In a root that several users share, what others make there neither steers nor holds up this user's commands."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.lookup import find_run, find_runs, find_sweep, list_runs, root_of
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.sweep import Element, SweepDirectory, choosing_runs, read_table, wait_for_sweeps
from slurm_train.status.selection import build_surveyor
from tests.support.users import ME, STRANGER, as_user, needs_root, shared_root

pytestmark = needs_root
RUN_ID = "26bbda317045"


@pytest.fixture
def root() -> Iterator[Path]:
    """A root in which everybody may make folders, with a run of mine."""
    with shared_root(0o1777) as root:
        as_user(ME, lambda: make_run(root / "gpt" / RUN_ID, mode=0o700))
        yield root


def make_run(path: Path, *, mode: int = 0o755, **files: Any) -> None:
    path.mkdir(parents=True)
    for name, value in {"config.yaml": {}, "plan.json": {"path": str(path)}, **files}.items():
        (path / name.replace("_", ".")).write_text(value if isinstance(value, str) else json.dumps(value) + "\n")
    path.parent.chmod(mode)
    path.chmod(mode)


def test_the_spelling_of_a_root_comes_from_own_plans(root: Path) -> None:
    spelled = root.with_name("link")

    def write(path: Path) -> None:
        make_run(root / "aaa" / "0123456789ab", plan_json={"path": str(path / "aaa" / "0123456789ab")})

    spelled.symlink_to(root)
    as_user(STRANGER, lambda: write(spelled))
    assert as_user(ME, lambda: str(find_run(root, "gpt").path)) == f"{root}/gpt/{RUN_ID}"
    plan = root / "gpt" / RUN_ID / "plan.json"
    plan.write_text(json.dumps({"path": f"{spelled}/gpt/{RUN_ID}"}))
    assert as_user(ME, lambda: str(find_run(root, "gpt").path)) == f"{spelled}/gpt/{RUN_ID}"
    os.lchown(spelled, STRANGER, STRANGER)

    def enter() -> None:
        with pytest.raises(RunError, match=f"{spelled} is a link of uid {STRANGER}"):
            require_private(find_run(root, "gpt"))

    as_user(ME, enter)


def _run(root: Path) -> None:
    make_run(root / "gpt2" / RUN_ID, job_json={"job_ids": ["12"]})


def _alias(root: Path) -> None:
    (root / "zzz").symlink_to(root / "gpt")


def _alias_in_a_folder(root: Path) -> None:
    (root / "zzz").mkdir()
    (root / "zzz" / RUN_ID).symlink_to(root / "gpt" / RUN_ID)


def _sweep(root: Path) -> None:
    sweep = root / "sweeps" / RUN_ID
    sweep.mkdir(parents=True)
    (sweep / "sweep.jsonl").write_text(json.dumps({"run": f"gpt/{RUN_ID}", "index": 0}) + "\n")
    root.joinpath("sweeps").chmod(0o755)


def _closed_sweep(root: Path) -> None:
    (root / "sweeps" / RUN_ID).mkdir(parents=True)
    root.joinpath("sweeps").chmod(0o755)
    (root / "sweeps" / RUN_ID).chmod(0o000)


PLANTED = [_run, _alias, _alias_in_a_folder, _sweep, _closed_sweep]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("word", ["gpt", RUN_ID, RUN_ID[:6], "12"])
def test_a_word_that_names_a_run_of_mine_names_nothing_else(
    root: Path, plant: Callable[[Path], None], word: str
) -> None:
    (root / "gpt" / RUN_ID / "job.json").write_text(json.dumps({"job_ids": ["12"], "submit_time_unix_s": 1.0}))
    os.chown(root / "gpt" / RUN_ID / "job.json", ME, ME)
    as_user(STRANGER, lambda: plant(root))

    def look() -> None:
        env = {"HOME": "/", "XDG_STATE_HOME": str(root.parent / "state")}
        assert find_sweep(root, word) is None
        assert find_runs(root, [word]) == [RunDirectory(root / "gpt" / RUN_ID)]
        assert root_of(RUN_ID, root, env) == root

    as_user(ME, look)


def test_a_strangers_sweep_has_only_their_own_runs(root: Path) -> None:
    as_user(STRANGER, lambda: _sweep(root))
    assert as_user(ME, lambda: read_table(SweepDirectory(root / "sweeps" / RUN_ID))) == []


GARBAGE: dict[str, dict[str, Any]] = {
    "words": {"attempts_jsonl": '{"attempt": "x"}\n', "metrics_jsonl": '{"step": "x", "loss": []}\n'},
    "no numbers": {"metrics_jsonl": '{"loss": 1, "step": {}}\n', "plan_json": {"max_steps": "many"}},
    "a list": {"attempts_jsonl": '{"attempt": 0, "end_time_unix_s": [], "action": "stop"}\n', "job_json": []},
}


@pytest.mark.parametrize("files", GARBAGE.values(), ids=GARBAGE)
def test_runs_of_others_that_make_no_sense_do_not_hide_mine(root: Path, files: dict[str, Any]) -> None:
    as_user(STRANGER, lambda: make_run(root / "bad" / "bbbb0000", **files))

    def look() -> list[str]:
        runs = [Element(run=run) for run in list_runs(root)]
        statuses = build_surveyor({"PATH": "/none"}).look(runs).statuses
        return sorted(status.as_json()["run"] for status in statuses)

    assert as_user(ME, look) == ["bad/bbbb0000", f"gpt/{RUN_ID}"]


def test_a_file_that_a_stranger_keeps_locked_holds_no_submission_up(root: Path) -> None:
    run = RunDirectory(root / "gpt" / RUN_ID)
    folder = root / ".submitting_sweeps"
    folder.mkdir()
    folder.chmod(0o777)
    held = []
    for name in ("lock", "theirs"):
        (folder / name).write_text("")
        (folder / name).chmod(0o666)
        held.append((folder / name).open("rb+"))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    os.chown(folder, STRANGER, STRANGER)

    def submit() -> None:
        wait_for_sweeps(run, wait_s=0.0)
        with choosing_runs(SweepDirectory(root / "sweeps" / "0000"), [run], wait_s=0.0, say=print):
            pass

    as_user(ME, submit, within_s=20.0)
    for file in held:
        file.close()
