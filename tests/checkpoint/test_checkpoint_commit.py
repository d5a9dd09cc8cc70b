from __future__ import annotations

import pytest

from slurm_train.checkpoint.commit import commit, open_staging
from slurm_train.checkpoint.directory import newest_verified, verify
from slurm_train.checkpoint.manifest import FileRecord, Manifest
from slurm_train.errors import CheckpointError, RunError


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_commit_leaves_one_verified_directory(root, kit):
    staging, manifest = kit.stage(root, kit.header(3))
    final = commit(staging, root / "checkpoint_0000003", manifest)
    assert verify(final) == manifest
    assert names(root) == ["checkpoint_0000003"]


def test_staging_is_always_fresh(root, kit):
    first, second = open_staging(root, kit.header(3, job="9_1")), open_staging(root, kit.header(3, job="9_1"))
    assert (first.name, second.name) == ("checkpoint_0000003.tmp-9_1-1", "checkpoint_0000003.tmp-9_1-1.1")


def test_a_step_that_is_saved_and_verifies_is_kept(root, kit):
    final = kit.make(root, 3)
    before = (final / "manifest.json").read_bytes()
    staging, manifest = kit.stage(root, kit.header(3))
    assert commit(staging, final, manifest) == final
    assert (final / "manifest.json").read_bytes() == before
    assert names(root) == ["checkpoint_0000003"]


def test_a_step_that_does_not_verify_gives_way(root, kit):
    final = kit.make(root, 3)
    (final / "__1_0.distcp").write_bytes(b"damaged")
    staging, manifest = kit.stage(root, kit.header(3))
    commit(staging, final, manifest)
    assert verify(final) == manifest
    assert [name.startswith(".trash-checkpoint_0000003-") for name in names(root)] == [True, False]


def test_the_fence_is_asked_right_before_the_rename(root, kit):
    staging, manifest = kit.stage(root, kit.header(3))
    seen = []

    def fence():
        seen.extend(path.name for path in root.iterdir())
        raise RunError("attempt 2 has taken over")

    with pytest.raises(RunError, match="taken over"):
        commit(staging, root / "checkpoint_0000003", manifest, fence=fence)
    assert seen == [staging.name]
    assert (staging / "manifest.json").exists()
    assert newest_verified(root).found is None


@pytest.mark.parametrize("overtaken_at", [2, 3])
def test_a_commit_that_is_overtaken_half_way_is_taken_back(root, kit, overtaken_at):
    """As when the process is stopped after the rename, or after COMPLETE, and goes on beside its successor."""
    older = kit.make(root, 2)
    staging, manifest = kit.stage(root, kit.header(3))
    calls = iter(range(1, 9))

    def fence():
        if next(calls) >= overtaken_at:
            raise RunError("attempt 2 has taken over")

    with pytest.raises(RunError, match="taken over"):
        commit(staging, root / "checkpoint_0000003", manifest, fence=fence)
    assert names(root) == [older.name]


def test_a_successors_checkpoint_of_the_same_step_is_left_alone(root, kit):
    """The successor commits while this process is stopped between its first look and its rename."""
    staging, manifest = kit.stage(root, kit.header(3))
    made = []
    commit(
        staging,
        root / "checkpoint_0000003",
        manifest,
        fence=lambda: made.append((kit.make(root, 3) / "COMPLETE").stat()) if not made else None,
    )
    assert (root / "checkpoint_0000003" / "COMPLETE").stat() == made[0]
    assert names(root) == ["checkpoint_0000003"]


@pytest.mark.parametrize("size", [23, None])
def test_a_file_that_rank_zero_does_not_see_whole_stops_the_commit(root, kit, size):
    staging, manifest = kit.stage(root, kit.header(3))
    record = FileRecord(bytes=size or 5, xxh3_128="0" * 32)
    files = dict(manifest.files) | {"__0_0.distcp" if size else "__1_0.distcp": record}
    with pytest.raises(CheckpointError, match=r"distcp"):
        commit(staging, root / "checkpoint_0000003", Manifest.of(kit.header(3), files))
    assert not (root / "checkpoint_0000003").exists()
