"""Killed, refused or without power at any file-system call: a verified checkpoint is found, and the next save works."""

from __future__ import annotations

import errno
import shutil

import pytest

from slurm_train.checkpoint.commit import commit
from slurm_train.checkpoint.directory import newest_verified
from slurm_train.checkpoint.retention import prune
from slurm_train.checkpoint.shards import write_file
from slurm_train.rundir.files import fsync_directory

pytestmark = [
    pytest.mark.faults,
    # The child of the fork touches files only; it starts no thread and takes no lock.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
OLD, NEW = 1, 2


def prepare_first(root, kit):
    """One verified checkpoint, and a save to come."""
    kit.make(root, OLD)


def prepare_damaged(root, kit):
    """A damaged checkpoint stands where the new one goes."""
    prepare_first(root, kit)
    (kit.make(root, NEW) / ".metadata").write_bytes(b"damaged")


def prepare_saved(root, kit):
    """The same step is saved already."""
    prepare_first(root, kit)
    kit.make(root, NEW)


def prepare_many(root, kit):
    """Something of everything that retention takes away."""
    kit.make(root, 0)
    (kit.make(root, 3) / "COMPLETE").unlink()
    prepare_saved(root, kit)
    kit.stage(root, kit.header(9, attempt=0))
    (root / ".trash-x").mkdir()


def save_new(root, kit):
    staging, manifest = kit.stage(root, kit.header(NEW))
    commit(staging, root / "checkpoint_0000002", manifest)


def prune_all(root, kit):
    return prune(root, keep=1, attempt=1, epoch_fence=1)


SCENES = [
    pytest.param(prepare_first, save_new, id="commit"),
    pytest.param(prepare_damaged, save_new, id="commit-over-damaged"),
    pytest.param(prepare_saved, save_new, id="commit-of-saved"),
    pytest.param(prepare_many, prune_all, id="prune"),
]


def found_step(root):
    found = newest_verified(root).found
    return None if found is None else found[1].step


def fresh(template, root):
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)


def assert_recovers(root, kit):
    """The next attempt saves, prunes, and leaves nothing behind."""
    staging, manifest = kit.stage(root, kit.header(4, attempt=2, epoch_fence=2))
    commit(staging, root / "checkpoint_0000004", manifest)
    pruned = prune(root, keep=1, attempt=2, epoch_fence=2)
    assert pruned.problems == ()
    left = {path.name for path in root.iterdir()} - {path.name for path in pruned.untrusted}
    assert left == {"checkpoint_0000004"}


@pytest.fixture
def scene(request, fast_path, kit):
    prepare, work = request.param
    template, root = fast_path / "template", fast_path / "checkpoints"
    prepare(template, kit)
    fresh(template, root)
    return template, root, lambda: work(root, kit)


in_every_scene = pytest.mark.parametrize(
    "scene", [pytest.param(part.values, id=part.id) for part in SCENES], indirect=True
)


@in_every_scene
def test_killed_at_any_call(scene, kit):
    template, root, work = scene
    num_calls = kit.count_calls(work)
    assert num_calls > 10
    for at in range(1, num_calls + 1):
        for when in ("before", "after"):
            fresh(template, root)
            assert kit.run_killed(work, at=at, when=when)
            assert found_step(root) in {OLD, NEW}, f"call {at}, {when}"
            assert_recovers(root, kit)


@in_every_scene
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_refused_at_any_call(scene, kit, number):
    template, root, work = scene
    num_calls = kit.count_calls(work)
    for at in range(1, num_calls + 1):
        fresh(template, root)
        result, error = kit.run_failing(work, at=at, number=number)
        surfaced = error is not None or (result is not None and (result.problems or result.untrusted))
        assert surfaced or found_step(root) == NEW, f"call {at} failed and nobody was told"
        assert found_step(root) in {OLD, NEW}, f"call {at}"
        assert_recovers(root, kit)


def lose_power_everywhere(root, work, kit):
    """Gives the step found after a cut after each call, by call and by what is durable (see PowerCut.rebuild)."""
    cut = kit.PowerCut(root)
    folders = []

    def watch(name, args, result):
        cut.watch(name, args, result)
        for durable_names_only in (True, False):
            folders.append(root.with_name(f"after_{len(folders)}"))
            cut.rebuild(root, folders[-1], durable_names_only=durable_names_only)

    with kit.FaultyFiles().installed(watch=watch):
        work()
    steps = [found_step(folder) for folder in folders]
    for folder in folders:
        shutil.rmtree(folder)
    return list(zip(steps[::2], steps[1::2], strict=True))


@in_every_scene
def test_power_lost_after_any_call(scene, kit):
    _, root, work = scene
    found = lose_power_everywhere(root, work, kit)
    assert len(found) > 10
    assert {step for steps in found for step in steps} <= {OLD, NEW}
    # The work has returned after its last call, so from then on the new checkpoint must be there.
    assert found[-1] == (NEW, NEW)


def careless_save(root, kit):
    """Replaces the only checkpoint before the new one is durable."""
    staging, manifest = kit.stage(root, kit.header(NEW))
    write_file(staging / "manifest.json", manifest.to_json().encode())
    (staging / "COMPLETE").write_text(manifest.digest())
    (root / "checkpoint_0000001" / "COMPLETE").unlink()
    fsync_directory(root / "checkpoint_0000001")
    staging.rename(root / "checkpoint_0000002")


def test_this_check_can_fail(fast_path, kit):
    template, root = fast_path / "template", fast_path / "checkpoints"
    prepare_first(template, kit)

    def work():
        careless_save(root, kit)

    fresh(template, root)
    assert None in {step for steps in lose_power_everywhere(root, work, kit) for step in steps}
    fresh(template, root)
    files = kit.FaultyFiles()
    with files.installed():
        work()
    fresh(template, root)
    assert kit.run_killed(work, at=files.names.index("unlink") + 1, when="after")
    assert found_step(root) is None
