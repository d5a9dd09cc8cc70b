"""The copy from the nodes into the run directory: who copies what, what counts, and a kill or refusal at any call."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.directory import newest_verified, verify
from slurm_train.checkpoint.local import (
    NodePlace,
    Reachable,
    choose_reachable,
    copy_to_run,
    held_here,
    newest_reachable,
    open_private,
)
from slurm_train.checkpoint.manifest import Manifest, write_file
from slurm_train.errors import CheckpointError
from tests.campaigns import two_users
from tests.support.faulty_files import FaultyFiles, PowerCut, count_calls, run_failing, run_killed
from tests.support.small_checkpoints import checkpoint_of, make_checkpoint, make_header, steps_in

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
OLD, NEW = 1, 2


def node_in(path: Any, *, node: int = 0, attempt: int = 2) -> NodePlace:
    path.mkdir(parents=True, exist_ok=True)
    return NodePlace(root=path, node=node, keep=2, attempt=attempt)


def anything(_: Manifest) -> bool:
    return True


def copy_new(node: NodePlace, run: Place) -> Any:
    found = newest_reachable(node, lambda held: held.step > OLD, group=None)
    assert found is not None
    return copy_to_run(node, run, found, group=None)


@pytest.fixture
def scene(fast_path: Any) -> SimpleNamespace:
    """An old checkpoint in the run directory, a newer one on the node."""
    node = node_in(fast_path / "node")
    make_checkpoint(node.root, NEW)
    template, root = fast_path / "template", fast_path / "checkpoints"
    make_checkpoint(template, OLD)
    run = Place(root=root, attempt=2, keep=2)

    def fresh() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)

    fresh()
    return SimpleNamespace(node=node, root=root, run=run, fresh=fresh, work=lambda: copy_new(node, run))


def found_step(root: Any) -> int | None:
    found = newest_verified(root).found
    return None if found is None else found[1].step


def assert_recovers(scene: SimpleNamespace) -> None:
    """The next attempt copies, and leaves nothing behind."""
    node, run = replace(scene.node, attempt=3), replace(scene.run, attempt=3, keep=1)
    node.claim_all()
    run.claim()
    copied = copy_new(node, run).path
    run.prune(copied)
    assert list(scene.root.iterdir()) == [copied]
    assert found_step(scene.root) == NEW


def test_the_copy_is_the_same_checkpoint(scene: SimpleNamespace) -> None:
    saved = scene.work()
    assert verify(saved.path) == verify(checkpoint_of(scene.node.root, NEW))
    assert steps_in(scene.root) == [NEW, OLD] and len(list(scene.root.iterdir())) == 2
    assert scene.work().num_bytes == 0, "it is there already"


@pytest.mark.faults
def test_killed_at_any_call_of_the_copy(scene: SimpleNamespace) -> None:
    num_calls = count_calls(scene.work)
    assert num_calls > 15
    for at in range(1, num_calls + 1):
        for when in ("before", "after"):
            scene.fresh()
            assert run_killed(scene.work, at=at, when=when)
            assert found_step(scene.root) in {OLD, NEW}, f"call {at}, {when}"
            assert verify(checkpoint_of(scene.node.root, NEW)).step == NEW, "the node's own is only read"
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
def test_power_lost_after_any_call_of_the_copy(scene: SimpleNamespace) -> None:
    cut = PowerCut(scene.root)
    folders: list[Any] = []

    def watch(name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open" and str(args[0]).startswith(str(scene.node.root)):
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
    path = checkpoint_of(scene.node.root, NEW) / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="is not what its manifest says, so it was not copied"):
        scene.work()
    assert list(scene.root.iterdir()) == [checkpoint_of(scene.root, OLD)]


def test_a_newer_attempt_stops_the_copy(scene: SimpleNamespace) -> None:
    def overtaken() -> None:
        raise CheckpointError("overtaken")

    with pytest.raises(CheckpointError, match="overtaken"):
        copy_new(scene.node, replace(scene.run, fence=overtaken))
    assert list(scene.root.iterdir()) == [checkpoint_of(scene.root, OLD)]


def test_one_without_its_marker_does_not_count(scene: SimpleNamespace) -> None:
    assert newest_reachable(scene.node, anything, group=None) is not None
    (checkpoint_of(scene.node.root, NEW) / "COMPLETE").unlink()
    assert newest_reachable(scene.node, anything, group=None) is None


def test_nodes_hold_a_checkpoint_together_or_not_at_all(fast_path: Any) -> None:
    """Each has its own rank's files and the manifest of all; ranks of a node share the copying."""
    nodes = [node_in(fast_path / f"node{number}", node=number) for number in (0, 1)]
    names = [["__1_0.distcp", "rank_00000.pt"], ["rank_00001.pt"]]
    stagings = [node.open_staging(NEW) for node in nodes]
    pairs = zip(stagings, names, strict=True)
    files = {name: write_file(staging / name, os.urandom(24)) for staging, own in pairs for name in own}
    manifest = Manifest.of(make_header(NEW, world_size=2), files)
    for node, staging, own in zip(nodes, stagings, names, strict=True):
        node.commit(staging, manifest, here=own)
    held = [held_here(node, anything) for node in nodes]
    first, second = names[0]
    assert choose_reachable(held) == Reachable(manifest, {first: 0, second: 0, "rank_00001.pt": 1})
    assert choose_reachable([held[0], *held]) == Reachable(manifest, {first: 0, second: 1, "rank_00001.pt": 2})
    assert choose_reachable(held[::-1]) is not None, "ranks may be on other nodes now"
    assert choose_reachable(held[:1]) is None, "one node is gone"


def test_a_node_keeps_its_newest_and_what_is_being_copied(fast_path: Any) -> None:
    node = node_in(fast_path / "node")
    paths = [make_checkpoint(node.root, step) for step in (1, 2, 3, 4)]
    assert node.prune(paths[3], protect={paths[0].name, ""}).problems == ()
    assert steps_in(node.root) == [4, 3, 1]
    node.discard_from(4)
    assert steps_in(node.root) == [3, 1]
    make_checkpoint(node.root, 5, attempt=3)
    node.discard_from(0)
    assert steps_in(node.root) == [5], "a later attempt's"


def test_what_a_node_saves_again_takes_the_place_of_what_the_run_has_left(fast_path: Any) -> None:
    """The steps were reached before, but not all nodes came back with their disks."""
    node = node_in(fast_path / "node", attempt=1)
    for step in (1, 2, 2, 2, 3):
        make_checkpoint(node.root, step)
    newest = make_checkpoint(node.root, 2)
    assert node.prune(newest).problems == ()
    assert steps_in(node.root) == [2, 1] and newest.is_dir()


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
