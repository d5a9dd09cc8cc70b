from __future__ import annotations

import os
import shutil
import threading
import time

import pytest

from slurm_train.checkpoint.commit import claim
from slurm_train.checkpoint.directory import (
    newest_committed_step,
    newest_verified,
    read_manifest,
    survey,
    verify,
    wait_until_visible,
)
from slurm_train.errors import CheckpointError
from slurm_train.rundir.layout import list_checkpoints, name_of, parse_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("checkpoint_0001000_attempt_0002_3f9a1c07", (1000, 2, "3f9a1c07")),
        ("checkpoint_12345678_attempt_12345_3f9a1c07", (12345678, 12345, "3f9a1c07")),
        ("checkpoint_00001000_attempt_0002_3f9a1c07", None),
        ("checkpoint_0001000_attempt_00002_3f9a1c07", None),
        ("checkpoint_0001000_attempt_0002_3F9A1C07", None),
        ("checkpoint_0001000", None),
        ("checkpoint_0001000_attempt_0002_3f9a1c07.tmp", None),
        (".trash-checkpoint_0001000_attempt_0002_3f9a1c07-ab", None),
        ("checkpoint_0001000_attempt_0002_3f9a1c07\n", None),
        ("None", None),
    ],
)
def test_exactly_the_names_that_are_written_are_read(name, expected):
    found = parse_name(name)
    assert found == expected
    assert found is None or str(found) == name


def test_list_is_newest_step_then_attempt_first_and_only_real_directories(root, kit):
    made = [kit.make(root, step, attempt=attempt) for step, attempt in ((2, 9), (10_000_000, 1), (30, 1), (30, 10))]
    (root / "checkpoint_0000099_attempt_0001_00000000").write_text("a file")
    (root / "checkpoint_0000098_attempt_0001_00000000").symlink_to(made[0])
    assert list_checkpoints(root) == [made[1], made[3], made[2], made[0]]
    assert list_checkpoints(root / "absent") == []


def test_verify_gives_the_manifest(root, kit):
    path = kit.make(root, 5)
    assert verify(path).step == 5
    assert {entry.name for entry in path.iterdir()} == {
        "rank_00000.pt",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
        "COMPLETE",
    }


def test_everything_is_private_to_the_user(root, kit):
    path = kit.make(root, 5)
    assert root.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


def remove(path):
    path.unlink()


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def append(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("COMPLETE", remove, "COMPLETE: missing"),
        ("COMPLETE", append, "COMPLETE: not the hash of manifest.json"),
        ("COMPLETE", link, "COMPLETE: Too many levels of symbolic links"),
        ("manifest.json", remove, "manifest.json: missing"),
        ("manifest.json", append, "COMPLETE: not the hash of manifest.json"),
        ("rank_00000.pt", remove, "rank_00000.pt: No such file or directory"),
        ("rank_00000.pt", append, "rank_00000.pt: 25 bytes, the manifest says 24"),
        ("__0_0.distcp", link, "__0_0.distcp: not a regular file"),
    ],
)
def test_verify_names_directory_file_and_reason(root, kit, file, damage, reason):
    path = kit.make(root, 5)
    damage(path / file)
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert caught.value.message == f"checkpoint {path} cannot be trusted: {reason}"


def test_a_directory_under_another_step_is_not_trusted(root, kit):
    path = kit.make(root, 5)
    path = path.rename(path.with_name(str(name_of(path)._replace(step=9))))
    with pytest.raises(CheckpointError, match=r"manifest\.json: is of step 5"):
        verify(path)


def test_newest_that_verifies_wins_and_the_others_are_reported(root, kit):
    good, damaged, unmarked = (kit.make(root, step) for step in (1, 2, 3))
    (damaged / "__1_0.distcp").write_bytes(b"x" * 24)
    (unmarked / "COMPLETE").unlink()
    os.utime(good, (0, 0))
    search = newest_verified(root)
    assert search.found is not None and search.found[0] == good
    assert [item.path for item in search.passed_over] == [unmarked, damaged]
    assert "__1_0.distcp: 24 bytes with hash" in search.passed_over[1].reason
    assert newest_committed_step(root) == 2, "bytes are not read"
    assert newest_committed_step(root / "absent") == -1


def test_one_that_is_renamed_while_it_is_read_is_read_under_its_new_name(root, kit):
    kit.make(root, 1)
    kit.make(root, 2)
    checked = []

    def check(path):
        checked.append(path)
        if len(checked) == 1:
            claim(root, attempt=4)
        return read_manifest(path)

    found = [(name_of(path)[:2], outcome.step) for path, outcome in survey(root, check)]
    assert found == [((2, 4), 2), ((1, 4), 1)]


def test_one_that_is_removed_while_it_is_read_is_neither_damaged_nor_there(root, kit):
    kit.make(root, 1)
    gone = kit.make(root, 2)

    def check(path):
        if path == gone and path.exists():
            shutil.rmtree(path)
        return read_manifest(path)

    assert [outcome.step for _, outcome in survey(root, check)] == [1]


def test_wait_until_visible_waits_for_another_writer(root):
    writer = threading.Timer(0.05, lambda: (root / "a").mkdir(parents=True))
    writer.start()
    wait_until_visible(root / "a", timeout_s=10)
    writer.join()


def test_wait_until_visible_gives_up_with_what_to_do(root):
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="not visible on this node") as caught:
        wait_until_visible(root / "a", timeout_s=0.02)
    assert "every node mounts" in caught.value.hint
    assert time.monotonic() - start < 5
