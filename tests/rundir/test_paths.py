"""Run directories are their user's alone, and one that is not is refused before anything in it is obeyed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.files import append_line, create_empty, make_private, write_atomic, write_durable
from slurm_train.rundir.jobs import clear_dead, complete_stop, take_lock, this_process
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, require_private, require_room

SOMEBODY = 12345


@pytest.fixture
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with code, script and configuration, as its user left it."""
    run = RunDirectory(tmp_path / "project" / "runs" / "gpt" / "3f9a1c07")
    (tmp_path / "project").mkdir(mode=0o755)
    for folder in (run.path, run.code, run.logs, run.checkpoints, run.epochs, run.compile_cache):
        make_private(folder)
    for file in (run.config, run.plan, run.submit_script):
        write_atomic(file, "x", durable=False)
    return run


def open_bits(root: Path) -> list[str]:
    """Returns what lies below a folder and can be read or written by others."""
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.lstat().st_mode & 0o077]


@pytest.mark.usefixtures("_open_umask")
def test_everything_a_run_writes_is_private_whatever_the_umask(tmp_path: Path, run: RunDirectory) -> None:
    start = Start(job_id="1", restart_count=0, nodes=("n",), world_size=1)
    attempt = open_attempt(run, start)
    take_lock(run.lock, this_process(), is_alive=lambda _: True)
    append_line(run.events, {"a": 1})
    write_durable(run.path / "d", "x")
    create_empty(run.rank_log(attempt, 0))
    leave_mark(run, attempt, FailureMark(rank=0, host="n", exit_code=1, message="x"))
    assert open_bits(tmp_path / "project") == []
    assert stat.S_IMODE((tmp_path / "project" / "runs").stat().st_mode) == 0o700


@pytest.fixture
def shared(run: RunDirectory) -> Path:
    """A snapshot that the run shares with others of its root."""
    shared = run.path.parent.parent / "sweep" / "code" / "000"
    make_private(shared)
    run.code.rmdir()
    run.code.symlink_to(os.path.relpath(shared, run.path))
    return shared


@pytest.mark.parametrize("depth", [0, 2])
def test_a_shared_snapshot_that_others_may_change_is_refused(run: RunDirectory, shared: Path, depth: int) -> None:
    require_private(run)
    place = [shared, *shared.parents][depth]
    place.chmod(0o777)
    with pytest.raises(RunError, match=f"{place} belongs to"):
        require_private(run)


@pytest.mark.parametrize("name", ["code", "submit_script"])
def test_a_link_to_elsewhere_in_place_of_snapshot_or_script_is_refused(
    name: str, run: RunDirectory, tmp_path: Path
) -> None:
    place = getattr(run, name)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{place} belongs to"):
        require_private(run)


@pytest.mark.parametrize("name", ["../..", "..", ".", "code", "config.yaml", "submit.sh", "epochs", "compiled"])
def test_what_others_may_write_or_own_is_refused(run: RunDirectory, name: str) -> None:
    require_private(run)
    place = Path(os.path.normpath(run.path / name))
    mode = stat.S_IMODE(place.stat().st_mode)
    place.chmod(0o707)
    with pytest.raises(RunError, match="another user could") as caught:
        require_private(run)
    assert str(place) in caught.value.message
    if os.geteuid() == 0:  # only root gives files away
        place.chmod(mode)
        os.chown(place, SOMEBODY, SOMEBODY)
        with pytest.raises(RunError, match=f"{place} belongs to uid {SOMEBODY}"):
            require_private(run)


def test_a_place_above_is_refused_where_anybody_may_write_and_is_not_sticky(run: RunDirectory) -> None:
    root = run.path.parent.parent
    root.chmod(0o1777)
    root.parent.chmod(0o775)
    require_private(run)
    root.parent.chmod(0o777)
    with pytest.raises(RunError, match="anybody could"):
        require_private(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_group_that_is_not_the_users_own_may_not_write(run: RunDirectory) -> None:
    os.chown(run.path, 0, SOMEBODY)
    run.path.chmod(0o770)
    with pytest.raises(RunError, match="another user could"):
        require_private(run)


def test_no_write_follows_a_planted_link(run: RunDirectory, tmp_path: Path) -> None:
    target = tmp_path / "victim"
    link = run.path / "link"
    link.symlink_to(target)
    for write in (create_empty, lambda path: append_line(path, {}), lambda path: write_durable(path, "x")):
        with pytest.raises(OSError, match=r"symbolic links|File exists"):
            write(link)
    write_atomic(link, "x")
    (run.path / f".link.{os.getpid()}.tmp").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomic(link, "y")
    assert not target.exists()
    assert not link.is_symlink() and link.read_text() == "x"
    target.write_text("precious")
    run.stop_file.symlink_to(target)
    complete_stop(run, "1", newest_job=lambda: None)
    # The file that keeps two starters from removing a dead one's lock at the same moment.
    take_lock(run.lock, this_process(), is_alive=lambda _: True)
    run.lock.with_name(".lock.guard").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic links"):
        clear_dead(run.lock, is_alive=lambda _: False)
    assert target.read_text() == "precious" and not (tmp_path / "made").exists()


def test_a_path_that_leaves_no_room_for_the_files_is_refused(tmp_path: Path) -> None:
    require_room(RunDirectory(tmp_path / "a" / "b"))
    with pytest.raises(RunError, match=r"the path of the run has \d+ bytes, at most 3840 can be used"):
        require_room(RunDirectory(tmp_path.joinpath(*["x" * 200] * 20) / "a" / "b"))
    with pytest.raises(RunError, match=r"a name in the run's path has 256 bytes, at most 255 can be used"):
        require_room(RunDirectory(tmp_path / ("x" * 256) / "b"))


def test_a_run_knows_its_place_and_its_root_and_an_evaluation_its_run() -> None:
    alone, shared = RunDirectory(Path("/runs/gpt/3f9a")), RunDirectory(Path("/runs/@me/gpt/3f9a"))
    assert (alone.place, alone.root) == (Path("/runs"), Path("/runs"))
    assert (shared.place, shared.root) == (Path("/runs/@me"), Path("/runs"))
    assert RunDirectory(shared.path / "evaluations" / "7d43").evaluated == shared
    assert RunDirectory.of_checkpoint(shared.checkpoints / "checkpoint_0000004_attempt_0000_3b70f31d") == shared
