"""Names have one owner: what a commit, a claim and a removal do, at once or arbitrarily late."""

from __future__ import annotations

import shutil

import pytest

from slurm_train.checkpoint.commit import claim, commit, committed_path, discard, open_staging, own_saved, take
from slurm_train.checkpoint.directory import newest_verified, verify
from slurm_train.checkpoint.manifest import FileRecord, Manifest
from slurm_train.errors import CheckpointError, RunError
from slurm_train.rundir.layout import CheckpointName, list_checkpoints, name_of


def names(root):
    return sorted(path.name for path in root.iterdir())


def owners(root):
    return [(name_of(path).step, name_of(path).attempt) for path in list_checkpoints(root)]


def test_commit_leaves_one_verified_directory(root, kit):
    staging, manifest = kit.stage(root, kit.header(3))
    final = commit(staging, manifest)
    assert verify(final) == manifest
    assert names(root) == [final.name] == [staging.name.removesuffix(".tmp")]


def test_staging_is_always_fresh(root):
    first, second = (open_staging(root, step=3, attempt=1) for _ in range(2))
    assert first != second
    assert name_of(committed_path(first))[:2] == (3, 1)


def test_a_step_that_is_saved_and_verifies_is_found(root, kit):
    final = kit.make(root, 3)
    assert own_saved(root, step=3, attempt=1) == final
    assert own_saved(root, step=3, attempt=2) is None, "another attempt's"
    (final / "__1_0.distcp").write_bytes(b"damaged")
    assert own_saved(root, step=3, attempt=1) is None


def test_the_fence_is_checked_right_before_the_rename(root, kit):
    staging, manifest = kit.stage(root, kit.header(3))
    seen = []

    def fence():
        seen.extend(path.name for path in root.iterdir())
        raise RunError("attempt 2 has taken over")

    with pytest.raises(RunError, match="taken over"):
        commit(staging, manifest, fence=fence)
    assert seen == [staging.name]
    assert (staging / "COMPLETE").exists()
    assert newest_verified(root).found is None


@pytest.mark.parametrize("size", [23, None])
def test_a_file_that_rank_zero_does_not_see_whole_stops_the_commit(root, kit, size):
    staging, manifest = kit.stage(root, kit.header(3))
    record = FileRecord(bytes=size or 5, xxh3_128="0" * 32)
    files = dict(manifest.files) | {"__0_0.distcp" if size else "__1_0.distcp": record}
    with pytest.raises(CheckpointError, match=r"distcp"):
        commit(staging, Manifest.of(kit.header(3), files))
    assert list_checkpoints(root) == []


def test_a_claim_renames_what_holds_and_leaves_what_does_not(root, kit):
    old, older, damaged = kit.make(root, 2), kit.make(root, 1), kit.make(root, 3)
    (damaged / "__1_0.distcp").write_bytes(b"x" * 24)
    kit.stage(root, kit.header(4))
    search = claim(root, attempt=7)
    assert search.found is not None
    assert search.found[0] == old.with_name(str(name_of(old)._replace(attempt=7)))
    assert [passed.path for passed in search.passed_over] == [damaged]
    assert owners(root) == [(3, 1), (2, 7), (1, 7)]
    assert not list(root.glob("*.tmp")), "an earlier attempt's staging directory is in the trash"
    assert not older.exists()
    assert claim(root, attempt=7).found == search.found, "its own are not renamed again"


def test_a_late_commit_of_an_earlier_attempt_finds_its_staging_directory_gone(root, kit):
    kit.make(root, 1)
    staging, manifest = kit.stage(root, kit.header(3))
    with pytest.raises(FileNotFoundError):
        commit(staging, manifest, fence=lambda: claim(root, attempt=2) and None)
    assert owners(root) == [(1, 2)]


def test_a_late_removal_of_an_earlier_attempt_finds_nothing(root, kit):
    path = kit.make(root, 3)
    assert not discard(path, fence=lambda: claim(root, attempt=2) and None)
    found = newest_verified(root).found
    assert found is not None and name_of(found[0]).attempt == 2


def test_what_a_later_attempt_owns_is_not_claimed(root, kit):
    path = kit.make(root, 3, attempt=5)
    with pytest.raises(CheckpointError, match=r"belongs to attempt 5, so attempt 4 cannot go on from it"):
        claim(root, attempt=4)
    assert list_checkpoints(root) == [path]


def test_a_checkpoint_that_an_earlier_attempt_claims_late_is_followed(root, kit):
    """Attempt 2 was stopped in its own claim, and carries it out between attempt 3's look and rename."""
    path = kit.make(root, 3)
    late = iter([lambda: take(path, attempt=2)])
    found = claim(root, attempt=3, fence=lambda: next(late, lambda: None)() and None).found
    assert found is not None
    assert owners(root) == [(3, 3)]


def test_a_checkpoint_that_is_removed_during_the_claim_gives_way_to_the_one_before(root, kit):
    kit.make(root, 1)
    path = kit.make(root, 3)
    found = claim(root, attempt=2, fence=lambda: shutil.rmtree(path, ignore_errors=True)).found
    assert found is not None and found[1].step == 1


def test_names_say_step_attempt_and_save(root):
    name = CheckpointName(1000, 2, "3f9a1c07")
    assert str(name) == "checkpoint_0001000_attempt_0002_3f9a1c07"
    assert str(CheckpointName(12345678, 12345, "00000000")) == "checkpoint_12345678_attempt_12345_00000000"
