"""Checkpoints of files that a program has written itself: all ranks' files in one directory, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.filling import Saved
from slurm_train.checkpoint.manifest import DIRECTORY, CheckpointHeader, FileRecord, Manifest
from slurm_train.checkpoint.verify import newest_verified, verify
from slurm_train.errors import CheckpointError
from slurm_train.rundir.paths import list_checkpoints
from slurm_train.session.saving import DirectorySave
from tests.fakes.thread_peers import ThreadPeers, on_threads

Write = Callable[[Path, int], None]


def header(step: int, attempt: int = 0, ranks: int = 3) -> CheckpointHeader:
    return CheckpointHeader(
        step=step,
        samples=0,
        epoch=0,
        world_size=ranks,
        mesh={"dp_replicate": ranks},
        batch_plan={},
        config_hash="1",
        data_fingerprint="",
        torch_version="",
        attempt=attempt,
        extra={"kind": DIRECTORY},
    )


_left_open: list[IO[str]] = []


@pytest.fixture(autouse=True)
def _close_files() -> Iterator[None]:
    yield
    while _left_open:
        _left_open.pop().close()


def save(root: Path, step: int, write: Write, *, ranks: int = 3, keep: int = 2) -> list[Saved | Exception]:
    def work(peers: ThreadPeers) -> Saved:
        place = Place(root=root, attempt=0, keep=keep, is_leader=peers.rank() == 0)
        saving = DirectorySave(place, header(step, ranks=ranks), peers)
        with saving.folder() as folder:
            assert not list(folder.iterdir())
            write(folder, peers.rank())
        return saving.end()

    return on_threads(ranks, work)


def write_each(folder: Path, rank: int) -> None:
    (folder / f"own_{rank}.bin").write_bytes(bytes([rank]) * 1000)
    (folder / "parts" / "deep").mkdir(parents=True)
    (folder / "parts" / "deep" / f"{rank}").write_text(str(rank))
    (folder / "same.txt").write_text("what every rank knows")
    (folder / "parts" / f"empty_{rank}").mkdir()


def test_files_of_all_ranks_are_in_one_verified_directory(tmp_path: Path) -> None:
    (saved, *others) = save(tmp_path, 7, write_each)
    assert isinstance(saved, Saved) and others == [saved, saved]
    manifest = verify(saved.path)
    names = sorted(str(path.relative_to(saved.path)) for path in saved.path.rglob("*") if path.is_file())
    own = [*(f"own_{rank}.bin" for rank in range(3)), *(f"parts/deep/{rank}" for rank in range(3)), "same.txt"]
    assert names == sorted(["COMPLETE", "manifest.json", *own]) and sorted(manifest.files) == sorted(own)
    assert manifest.is_directory and manifest.step == 7
    assert sorted(path.name for path in saved.path.glob("parts/empty_*")) == ["empty_0", "empty_1", "empty_2"]
    assert {path.stat().st_mode & 0o777 for path in saved.path.rglob("*") if path.is_file()} == {0o600}
    # A flipped bit in a folder below is seen as well.
    target = saved.path / "parts" / "deep" / "1"
    target.write_text("2")
    with pytest.raises(CheckpointError, match="cannot be trusted: 1: "):
        verify(saved.path)


def fails_on_one(folder: Path, rank: int) -> None:
    write_each(folder, rank)
    if rank == 1:
        raise ValueError("no room in my head")


def writes_other_content(folder: Path, rank: int) -> None:
    (folder / "model.bin").write_text(str(rank == 2))


def links(folder: Path, rank: int) -> None:
    (folder / "link").symlink_to("/etc/passwd")


def writes_nothing(folder: Path, rank: int) -> None:
    pass


def leaves_a_file_open(folder: Path, rank: int) -> None:
    (folder / "deep").mkdir()
    _left_open.append((folder / "deep" / "log.txt").open("w"))
    _left_open[-1].write("x" * 100)


def takes_our_name(folder: Path, rank: int) -> None:
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (fails_on_one, "rank 1 on .*: ValueError: no room in my head"),
        (writes_other_content, r"different files of the same name: model.bin \(ranks 0 and 2\)"),
        (links, "link in a save is a link or a special file"),
        (leaves_a_file_open, "still open for writing: deep/log.txt"),
        (writes_nothing, "no rank has written a file"),
        (takes_our_name, "'manifest.json', which is not a plain file name"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    tmp_path: Path, write: Write, words: str
) -> None:
    save(tmp_path, 5, write_each)
    outcomes = save(tmp_path, 9, write)
    if write is fails_on_one:
        # This rank keeps its own error, with the lines of the program.
        assert isinstance(outcomes.pop(1), ValueError)
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        with pytest.raises(CheckpointError, match=words):
            raise outcome
    found = newest_verified(tmp_path).newest
    assert found is not None and found[1].step == 5
    assert list(tmp_path.iterdir()) == [found[0]]


def test_the_newest_stay_and_a_save_whose_files_would_be_thrown_away_is_none(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, write_each)
    assert [verify(path).step for path in list_checkpoints(tmp_path)] == [3, 2]
    before = list_checkpoints(tmp_path)

    def other(folder: Path, rank: int) -> None:
        (folder / f"other_{rank}").write_text("")

    for outcome in save(tmp_path, 3, other):
        assert isinstance(outcome, CheckpointError) and "has a checkpoint of step 3 already" in outcome.message
    assert list_checkpoints(tmp_path) == before
    assert sorted(tmp_path.iterdir()) == sorted(before)


@pytest.mark.parametrize("name", ["../out", "/out", "a//b", "a/./b", "a/../../b", "a\\b", "manifest.json", "a\nb", ""])
def test_a_forged_name_leads_nowhere(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Manifest.of(header(1), {name: FileRecord(0, "0" * 32)})
