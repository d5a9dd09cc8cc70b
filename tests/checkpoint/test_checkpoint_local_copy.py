"""The copy from the nodes into the run directory: who copies what, what counts, and a kill or refusal at any call."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.checkpoint.commit import Fence, claim, commit, no_fence, open_staging
from slurm_train.checkpoint.directory import newest_verified, verify
from slurm_train.checkpoint.local import LocalTier, claim_local, discard_local, open_private, prune_local
from slurm_train.checkpoint.local_copy import (
    Reachable,
    choose_reachable,
    copy_to_run,
    held_by_all,
    held_here,
    newest_reachable,
)
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.retention import prune
from slurm_train.errors import CheckpointError
from tests.campaigns import two_users
from tests.support.faulty_files import FaultyFiles, PowerCut, count_calls, run_failing, run_killed
from tests.support.small_checkpoints import checkpoint_of, steps_in

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
OLD, NEW = 1, 2


def tier_in(path: Any, *, node: int = 0, attempt: int = 2, fence: Fence = no_fence) -> LocalTier:
    path.mkdir(parents=True, exist_ok=True)
    return LocalTier(root=path, node=node, is_leader=True, keep=2, attempt=attempt, fence=fence)


def copy_new(tier: LocalTier, root: Any) -> Any:
    found = newest_reachable(tier, group=None, attempts={1}, above=OLD)
    assert found is not None
    return copy_to_run(tier, root, found, group=None, keep=2)


@pytest.fixture
def scene(fast_path: Any, kit: SimpleNamespace) -> SimpleNamespace:
    """An old checkpoint in the run directory, a newer one on the node."""
    tier = tier_in(fast_path / "node")
    kit.make(tier.root, NEW)
    template, root = fast_path / "template", fast_path / "checkpoints"
    kit.make(template, OLD)

    def fresh() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)

    fresh()
    return SimpleNamespace(tier=tier, root=root, fresh=fresh, work=lambda: copy_new(tier, root))


def found_step(root: Any) -> int | None:
    found = newest_verified(root).found
    return None if found is None else found[1].step


def assert_recovers(scene: SimpleNamespace) -> None:
    """The next attempt copies, and leaves nothing behind."""
    tier = replace(scene.tier, attempt=3)
    claim_local(tier)
    claim(scene.root, attempt=3)
    copied = copy_new(tier, scene.root).path
    prune(scene.root, newest=copied, keep=1, attempt=3)
    assert list(scene.root.iterdir()) == [copied]
    assert found_step(scene.root) == NEW


def test_the_copy_is_the_same_checkpoint(scene: SimpleNamespace) -> None:
    saved = scene.work()
    assert verify(saved.path) == verify(checkpoint_of(scene.tier.root, NEW))
    assert steps_in(scene.root) == [NEW, OLD] and len(list(scene.root.iterdir())) == 2
    assert scene.work().num_bytes == 0, "it is there already"


@pytest.mark.faults
def test_killed_at_any_call_of_the_copy(scene: SimpleNamespace, kit: SimpleNamespace) -> None:
    num_calls = count_calls(scene.work)
    assert num_calls > 15
    for at in range(1, num_calls + 1):
        for when in ("before", "after"):
            scene.fresh()
            assert run_killed(scene.work, at=at, when=when)
            assert found_step(scene.root) in {OLD, NEW}, f"call {at}, {when}"
            assert verify(checkpoint_of(scene.tier.root, NEW)).step == NEW, "the node's own is only read"
            assert_recovers(scene)


@pytest.mark.faults
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_refused_at_any_call_of_the_copy(scene: SimpleNamespace, kit: SimpleNamespace, number: int) -> None:
    num_calls = count_calls(scene.work)
    for at in range(1, num_calls + 1):
        scene.fresh()
        result, error = run_failing(scene.work, at=at, number=number)
        told = error is not None or (result is not None and result.problems)
        assert told or found_step(scene.root) == NEW, f"call {at} failed and nobody was told"
        assert found_step(scene.root) in {OLD, NEW}, f"call {at}"
        assert_recovers(scene)


@pytest.mark.faults
def test_power_lost_after_any_call_of_the_copy(scene: SimpleNamespace, kit: SimpleNamespace) -> None:
    cut = PowerCut(scene.root)
    folders: list[Any] = []

    def watch(name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open" and str(args[0]).startswith(str(scene.tier.root)):
            return
        cut.watch(name, args, result)
        for durable_names_only in (True, False):
            folders.append(scene.root.with_name(f"after_{len(folders)}"))
            cut.rebuild(scene.root, folders[-1], durable_names_only=durable_names_only)

    with FaultyFiles().installed(watch=watch):
        scene.work()
    steps = [found_step(folder) for folder in folders]
    assert len(steps) > 20 and set(steps) <= {OLD, NEW} and steps[-2:] == [NEW, NEW]


@pytest.mark.parametrize("name", ["rank_00000.pt", "__0_0.distcp", "__1_0.distcp"])
def test_bytes_that_changed_on_the_node_are_not_copied(scene: SimpleNamespace, name: str) -> None:
    path = checkpoint_of(scene.tier.root, NEW) / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="is not what its manifest says, so it was not copied"):
        scene.work()
    assert list(scene.root.iterdir()) == [checkpoint_of(scene.root, OLD)]


def test_a_newer_attempt_stops_the_copy(scene: SimpleNamespace) -> None:
    def overtaken() -> None:
        raise CheckpointError("overtaken")

    with pytest.raises(CheckpointError, match="overtaken"):
        copy_new(replace(scene.tier, fence=overtaken), scene.root)
    assert list(scene.root.iterdir()) == [checkpoint_of(scene.root, OLD)]


def test_only_present_attempts_and_later_steps_count(scene: SimpleNamespace) -> None:
    def found(**changes: Any) -> Reachable | None:
        return newest_reachable(scene.tier, group=None, **{"attempts": {1}, "above": OLD, **changes})

    assert found() is not None
    assert found(above=NEW) is None
    assert found(attempts={0, 2}) is None
    (checkpoint_of(scene.tier.root, NEW) / "COMPLETE").unlink()
    assert found() is None


def split_over_two_nodes(fast_path: Any, kit: SimpleNamespace) -> tuple[list[LocalTier], Manifest]:
    """One checkpoint of two nodes: each has its own rank's files and the manifest of all."""
    tiers = [tier_in(fast_path / f"node{number}", node=number) for number in (0, 1)]
    names = [["rank_00000.pt", "__1_0.distcp"], ["rank_00001.pt"]]
    header = kit.header(NEW, world_size=2)
    stagings = [open_staging(tier.root, step=NEW, attempt=1) for tier in tiers]
    from slurm_train.checkpoint.shards import write_file

    files = {
        name: write_file(staging / name, os.urandom(24))
        for staging, own in zip(stagings, names, strict=True)
        for name in own
    }
    manifest = Manifest.of(header, files)
    for staging, own in zip(stagings, names, strict=True):
        commit(staging, manifest, here=own)
    return tiers, manifest


def test_nodes_hold_a_checkpoint_together_or_not_at_all(fast_path: Any, kit: SimpleNamespace) -> None:
    tiers, manifest = split_over_two_nodes(fast_path, kit)
    held = [held_here(tier) for tier in tiers]
    found = choose_reachable(held, attempts={1}, above=OLD)
    assert found == Reachable(manifest, {"__1_0.distcp": 0, "rank_00000.pt": 0, "rank_00001.pt": 1})
    assert choose_reachable(held[::-1], attempts={1}, above=OLD) is not None, "ranks may be on other nodes now"
    assert choose_reachable(held[:1], attempts={1}, above=OLD) is None, "one node is gone"
    assert held_by_all(tiers[0], manifest, group=None) is None


def test_ranks_of_a_node_share_the_work(fast_path: Any, kit: SimpleNamespace) -> None:
    tier = tier_in(fast_path / "node")
    kit.make(tier.root, NEW)
    found = choose_reachable([held_here(tier), held_here(tier)], attempts={1}, above=OLD)
    assert found is not None and sorted(found.holders.values()) == [0, 0, 1]


def test_a_node_keeps_its_newest_and_what_is_being_copied(fast_path: Any, kit: SimpleNamespace) -> None:
    tier = tier_in(fast_path / "node")
    paths = [kit.make(tier.root, step) for step in (1, 2, 3, 4)]
    assert prune_local(tier, newest=paths[3], protect={paths[0].name, ""}) == []
    assert steps_in(tier.root) == [4, 3, 1]
    discard_local(tier, step=4)
    assert steps_in(tier.root) == [3, 1]
    kit.make(tier.root, 5, attempt=3)
    discard_local(tier, step=0)
    assert steps_in(tier.root) == [5], "a later attempt's"


def test_what_a_node_saves_again_takes_the_place_of_what_the_run_has_left(fast_path: Any, kit: SimpleNamespace) -> None:
    """The steps were reached before, but not all nodes came back with their disks."""
    tier = tier_in(fast_path / "node", attempt=1)
    for step in (1, 2, 2, 2, 3):
        kit.make(tier.root, step)
    newest = kit.make(tier.root, 2)
    assert prune_local(tier, newest=newest) == []
    assert steps_in(tier.root) == [2, 1] and newest.is_dir()


def test_the_users_folder_is_private_and_found_again(tmp_path: Any) -> None:
    own = open_private(tmp_path, "run", "node")
    assert own == tmp_path / f"slurm_train-{os.geteuid()}" / "run" / "node" and own.stat().st_mode & 0o077 == 0
    assert open_private(tmp_path, "run", "node") == own
    own.chmod(0o777)
    with pytest.raises(CheckpointError, match="must be a folder that only you can enter"):
        open_private(tmp_path, "run", "node")
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="must be a folder that only you can enter"):
        open_private(tmp_path, "run", "node")
    with pytest.raises(CheckpointError, match="is not a folder on this node"):
        open_private(tmp_path / "absent", "run")


@pytest.mark.parametrize("make", ["a link", "a file", "an open folder"])
def test_a_name_that_is_taken_keeps_nobody_out(tmp_path: Any, make: str) -> None:
    taken = tmp_path / f"slurm_train-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if make == "a link":
        taken.symlink_to(tmp_path / "elsewhere")
    elif make == "a file":
        taken.touch()
    else:
        taken.mkdir()
        taken.chmod(0o777)
    own = open_private(tmp_path, "run", "node")
    assert own.parent.parent.name.startswith(f"{taken.name}.")
    assert open_private(tmp_path, "run", "node") == own, "it is found again"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_where_anybody_may_exchange_ours_is_refused(tmp_path: Any) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CheckpointError, match="anybody may put a folder in the place of yours"):
        open_private(tmp_path, "run", "node")
    tmp_path.chmod(0o1777)
    assert open_private(tmp_path, "run", "node").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be several users")
def test_two_users_of_a_node_and_a_stranger(tmp_path: Any) -> None:
    found = two_users.run(seed=1, trials=len(two_users.OBSTACLES), folder=tmp_path)
    assert found.problems == () and found.is_kept
