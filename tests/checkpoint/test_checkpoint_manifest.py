"""What a reader trusts: the manifest, the names, and which checkpoint is the newest."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace

import pytest

from slurm_train import __version__
from slurm_train.checkpoint import verify as verify_module
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.manifest import FileRecord, Manifest
from slurm_train.checkpoint.verify import newest_committed_step, newest_verified, read_manifest, survey, verify
from slurm_train.errors import CheckpointError, OtherVersionError, UnknownCheckpointError
from slurm_train.rundir.paths import CheckpointName, list_checkpoints, name_of, parse_name
from tests.support.small_checkpoints import make_checkpoint, make_header
from tests.support.unknown_checkpoints import UNREADABLE

RECORD = FileRecord(bytes=3, xxh3_128="0123456789abcdef" * 2)


@pytest.fixture
def manifest():
    return Manifest.of(make_header(7, weights={"w": "int64[]"}, extra={"scale": 0.1}), {"b.pt": RECORD, "a.pt": RECORD})


def changed(manifest, **changes):
    return json.dumps(json.loads(manifest.to_json()) | changes)


def test_text_and_back_gives_an_equal_manifest(manifest):
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest and again.to_json() == manifest.to_json() and manifest.num_bytes == 6
    with pytest.raises(CheckpointError, match="what JSON cannot"):
        Manifest.of(make_header(7, extra={"loss": float("nan")}), {}).to_json()


def test_a_manifest_from_before_keys_that_came_later_is_read(manifest):
    facts = json.loads(manifest.to_json())
    del facts["parent"], facts["weights"], facts["written_by_version"]
    facts["format_version"] = 1
    read = Manifest.from_json(json.dumps(facts))
    assert read == replace(manifest, weights={}, written_by_version="", format_version=1) and read.parent == ""


@pytest.mark.parametrize("text", ["", "[]", b"\xff", '{"format_version": true}', '{"format_version": 1}'])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": 0},
        {"format_version": 2.0},
        {"weights": ["head"]},
        {"step": "7"},
        {"step": True},
        {"step": -1},
        {"mesh": []},
        {"unknown": 1},
        {"files": {"a.pt": {"bytes": 1}}},
        {"files": {"a.pt": {"bytes": -1, "xxh3_128": "0" * 32}}},
        {"files": {"a.pt": {"bytes": 1, "xxh3_128": "G" * 32}}},
        {"job": "1/../2"},
    ],
)
def test_wrong_types_and_unknown_keys_are_refused(manifest, changes):
    with pytest.raises(CheckpointError):
        Manifest.from_json(changed(manifest, **changes))


def test_a_manifest_of_another_version_names_both_versions(manifest):
    text = changed(manifest, format_version=3, compression="zstd", written_by_version="9.1")
    with pytest.raises(OtherVersionError) as caught:
        Manifest.from_json(text)
    assert all(word in caught.value.message for word in ("format version 3", "compression", "9.1", __version__))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\nb", "a\0b", "manifest.json", "COMPLETE"]
)
def test_file_names_that_lead_elsewhere_are_refused(manifest, name):
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Manifest.of(make_header(7), {name: RECORD})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Manifest.from_json(changed(manifest, files={name: {"bytes": 3, "xxh3_128": "0" * 32}}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("checkpoint_0001000_attempt_0002_3f9a1c07", (1000, 2, "3f9a1c07")),
        ("checkpoint_00001000_attempt_0002_3f9a1c07", None),
        ("checkpoint_0001000_attempt_00002_3f9a1c07", None),
        ("checkpoint_0001000_attempt_0002_3F9A1C07", None),
        ("checkpoint_0001000", None),
        ("checkpoint_0001000_attempt_0002_3f9a1c07.tmp", None),
        (".trash-checkpoint_0001000_attempt_0002_3f9a1c07-00", None),
    ],
)
def test_only_exact_names_are_checkpoints(name, expected):
    assert parse_name(name) == expected
    assert expected is None or str(CheckpointName(*expected)) == name


def test_listing_is_by_step_and_attempt_and_takes_real_directories(root):
    ages = ((2, 9), (10_000_000, 1), (30, 1), (30, 10))
    made = [make_checkpoint(root, step, attempt=attempt) for step, attempt in ages]
    (root / "checkpoint_0000099_attempt_0001_00000000").write_text("a file")
    (root / "checkpoint_0000098_attempt_0001_00000000").symlink_to(made[0])
    assert list_checkpoints(root) == [made[1], made[3], made[2], made[0]]
    assert list_checkpoints(root / "absent") == []


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def append(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("COMPLETE", os.remove, "COMPLETE: missing"),
        ("COMPLETE", append, "COMPLETE: not the hash of manifest.json"),
        ("COMPLETE", link, "COMPLETE: Too many levels of symbolic links"),
        ("manifest.json", os.remove, "manifest.json: missing"),
        ("manifest.json", append, "COMPLETE: not the hash of manifest.json"),
        ("rank_00000.pt", os.remove, "rank_00000.pt: missing"),
        ("rank_00000.pt", append, "rank_00000.pt: 25 bytes, the manifest says 24"),
        ("__0_0.distcp", link, "__0_0.distcp: not a regular file"),
    ],
)
def test_verify_names_directory_file_and_reason(root, file, damage, reason):
    path = make_checkpoint(root, 5)
    damage(path / file)
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert caught.value.message == f"checkpoint {path} cannot be trusted: {reason}"


def test_a_directory_under_another_step_is_not_trusted(root):
    path = make_checkpoint(root, 5)
    path = path.rename(path.with_name(str(name_of(path)._replace(step=9))))
    with pytest.raises(CheckpointError, match=r"manifest\.json: is of step 5"):
        verify(path)


def test_newest_that_verifies_wins_and_the_others_are_reported(root):
    good, damaged, unmarked = (make_checkpoint(root, step) for step in (1, 2, 3))
    (damaged / "__1_0.distcp").write_bytes(b"x" * 24)
    (unmarked / "COMPLETE").unlink()
    os.utime(good, (0, 0))
    search = newest_verified(root)
    assert search.newest is not None and search.newest[0] == good
    assert [item.path for item in search.passed_over] == [unmarked, damaged]
    assert "__1_0.distcp: 24 bytes with hash" in search.passed_over[1].reason
    assert newest_committed_step(root) == 2, "bytes are not read"
    assert newest_committed_step(root / "absent") == -1


@pytest.mark.parametrize("file", ["COMPLETE", "manifest.json", "__1_0.distcp"])
@pytest.mark.parametrize("number", UNREADABLE)
def test_what_cannot_be_read_here_is_not_passed_over(root, monkeypatch, file, number):
    make_checkpoint(root, 1)
    newest = make_checkpoint(root, 2)
    open_file = os.open

    def refuse(path, *arguments, **options):
        if os.fspath(path) == str(newest / file):
            raise OSError(number, os.strerror(number), path)
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnknownCheckpointError, match=f"{file} cannot be read on"):
        newest_verified(root)


@pytest.mark.parametrize(("change", "expected"), [("claim", [(2, 4), (1, 4)]), ("removal", [(1, 1)])])
def test_one_that_is_renamed_or_removed_while_it_is_read(root, change, expected):
    make_checkpoint(root, 1)
    newest = make_checkpoint(root, 2)

    def check(path):
        if path == newest and change == "claim":
            Place(root=root, attempt=4).claim()
        elif path == newest:
            shutil.rmtree(path)
        return read_manifest(path)

    found = [(name_of(path), outcome) for path, outcome in survey(root, check)]
    assert [name[:2] for name, _ in found] == expected
    assert [outcome.step for _, outcome in found] == [name.step for name, _ in found], "read under the new name"


def test_waiting_for_another_writer_ends_when_it_has_written_or_with_what_to_do(root, monkeypatch):
    writer = threading.Timer(0.05, lambda: (root / "a").mkdir(parents=True))
    writer.start()
    verify_module.wait_until_visible(root / "a")
    writer.join()
    monkeypatch.setattr(verify_module, "VISIBLE_TIMEOUT_S", 0.02)
    with pytest.raises(CheckpointError, match="not visible on this node") as caught:
        verify_module.wait_until_visible(root / "b")
    assert "every node mounts" in caught.value.hint
