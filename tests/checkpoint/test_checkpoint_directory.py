from __future__ import annotations

import os
import threading
import time

import pytest

from slurm_train.checkpoint.directory import (
    checkpoint_name,
    list_checkpoints,
    newest_verified,
    staging_attempt,
    staging_name,
    step_of,
    verify,
    wait_until_visible,
)
from slurm_train.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint_0001000", 1000),
        ("checkpoint_12345678", 12345678),
        ("checkpoint_00001000", None),
        ("checkpoint_1000", None),
        ("checkpoint_0001000.tmp-1-1", None),
        (".trash-checkpoint_0001000-ab", None),
        ("checkpoint_0001000\n", None),
    ],
)
def test_step_of_reads_exactly_the_names_that_are_written(name, step):
    assert step_of(name) == step
    assert step is None or checkpoint_name(step) == name


def test_staging_names_carry_job_and_attempt():
    name = staging_name(1000, job="123_4", attempt=2)
    assert name == "checkpoint_0001000.tmp-123_4-2"
    assert (staging_attempt(name), staging_attempt(name + ".3"), staging_attempt("x.tmp-1-1")) == (2, 2, None)


def test_list_is_newest_step_first_and_only_real_directories(root, kit):
    for step in (2, 10_000_000, 30):
        kit.make(root, step)
    (root / "checkpoint_0000099").write_text("a file")
    (root / "checkpoint_0000098").symlink_to(root / "checkpoint_0000002")
    assert [path.name for path in list_checkpoints(root)] == [
        "checkpoint_10000000",
        "checkpoint_0000030",
        "checkpoint_0000002",
    ]
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
        ("COMPLETE", remove, "COMPLETE: missing, its save did not finish"),
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
    path = kit.make(root, 5).rename(root / checkpoint_name(9))
    with pytest.raises(CheckpointError, match=r"manifest\.json: is of step 5"):
        verify(path)


def test_newest_that_verifies_wins_and_the_others_are_reported(root, kit):
    good, damaged, unfinished = (kit.make(root, step) for step in (1, 2, 3))
    (damaged / "__1_0.distcp").write_bytes(b"x" * 24)
    (unfinished / "COMPLETE").unlink()
    search = newest_verified(root)
    assert search.found is not None and search.found[0] == good
    assert [(item.path, item.was_complete) for item in search.passed_over] == [(unfinished, False), (damaged, True)]
    assert "__1_0.distcp: 24 bytes with hash" in search.passed_over[1].reason


def test_skipped_names_and_file_times_do_not_count(root, kit):
    old, new = kit.make(root, 1), kit.make(root, 2)
    os.utime(new, (0, 0))
    assert newest_verified(root).found[0] == new
    assert newest_verified(root, skip={new.name}).found[0] == old


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
