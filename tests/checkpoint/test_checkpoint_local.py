"""The nodes' own disks: private, claimed and pruned; what they hold together is copied into the run directory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.copies import keepers
from slurm_train.checkpoint.local import (
    Held,
    NodePlace,
    Reachable,
    choose_reachable,
    held_here,
    newest_reachable,
    removed_step,
)
from slurm_train.checkpoint.manifest import Manifest, write_file
from slurm_train.checkpoint.verify import verify
from slurm_train.errors import CheckpointError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns import two_users
from tests.campaigns.record import Tally
from tests.support.crash_points import NEW, OLD, copy_from_node, prepare_on_node
from tests.support.ledgers import close_attempt
from tests.support.small_checkpoints import checkpoint_of, make_checkpoint, make_header, steps_in

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def anything(_: Manifest) -> bool:
    return True


@pytest.fixture
def node(root: Any) -> NodePlace:
    """A node with a newer checkpoint than the run directory."""
    prepare_on_node(root)
    return NodePlace(root=root.parent / "node", node=0, keep=2, attempt=2)


def test_the_copy_is_the_same_checkpoint(root: Any, node: NodePlace) -> None:
    saved = copy_from_node(root)
    assert verify(saved.path) == verify(checkpoint_of(node.root, NEW))
    assert list(root.iterdir()) == [saved.path]
    assert copy_from_node(root).num_bytes == 0, "it is there already"


@pytest.mark.parametrize("name", ["rank_00000.pt", "__0_0.distcp", "__1_0.distcp"])
def test_bytes_that_changed_on_the_node_are_not_copied(root: Any, node: NodePlace, name: str) -> None:
    path = checkpoint_of(node.root, NEW) / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="differs from its manifest, so it was not copied"):
        copy_from_node(root)
    assert list(root.iterdir()) == [checkpoint_of(root, OLD)]


def test_one_without_its_marker_does_not_count(node: NodePlace) -> None:
    assert newest_reachable(node, anything, group=None) is not None
    (checkpoint_of(node.root, NEW) / "COMPLETE").unlink()
    assert newest_reachable(node, anything, group=None) is None


def test_of_several_the_newest_that_is_wanted_is_chosen(node: NodePlace) -> None:
    for step in (NEW + 1, NEW + 2):
        make_checkpoint(node.root, step)
    newest = newest_reachable(node, anything, group=None)
    wanted = newest_reachable(node, lambda manifest: manifest.step < NEW + 2, group=None)
    assert newest is not None and newest.manifest.step == NEW + 2
    assert wanted is not None and wanted.manifest.step == NEW + 1


@pytest.mark.parametrize(
    "end",
    [
        {"action": "requeue", "last_committed": 8},
        # Its supervisor was lost with it; the next one has written this line, with what it found.
        {"action": "lost", "last_committed": 4},
    ],
)
def test_a_step_that_was_taken_out_between_two_attempts_is_noticed(tmp_path: Path, end: dict[str, Any]) -> None:
    run = RunDirectory(tmp_path)
    start = Start(job_id="12", restart_count=0, nodes=("node1",), world_size=1, first_committed=8)
    close_attempt(run, open_attempt(run, start), {"reason": "failed", **end})
    make_checkpoint(run.checkpoints, 4)
    assert removed_step(run, open_attempt(run, replace(start, first_committed=4))) == 8
    make_checkpoint(run.checkpoints, 8)
    assert removed_step(run, 1) is None, "it is there, and may be damaged"


def test_nodes_hold_a_checkpoint_together_or_not_at_all(fast_path: Any) -> None:
    """Each has its own rank's files and the manifest of all; ranks of a node share the copying."""
    nodes = [NodePlace(root=fast_path / f"node{number}", node=number, attempt=2) for number in (0, 1)]
    names = [["__1_0.distcp", "rank_00000.pt"], ["rank_00001.pt"]]
    stagings = [node.open_staging(NEW) for node in nodes]
    pairs = zip(stagings, names, strict=True)
    files = {name: write_file(staging / name, os.urandom(24)) for staging, own in pairs for name in own}
    manifest = Manifest.of(make_header(NEW, world_size=2), files)
    texts: list[dict[Held, str]] = [{}, {}]
    held = []
    for number, node in enumerate(nodes):
        node.commit(stagings[number], manifest, here=names[number])
        held.append(held_here(node, anything, texts[number]))

    def chosen(*of_ranks: int) -> Reachable | None:
        return choose_reachable([held[n] for n in of_ranks], lambda one, rank: texts[of_ranks[rank]][one])

    first, second = names[0]
    assert chosen(0, 1) == Reachable(manifest, {first: (0,), second: (0,), "rank_00001.pt": (1,)})
    assert chosen(0, 0, 1) == Reachable(manifest, {first: (0, 1), second: (1, 0), "rank_00001.pt": (2,)})
    assert chosen(1, 0) is not None, "ranks may be on other nodes now"
    assert chosen(0) is None, "one node is gone"


def test_each_rank_has_a_keeper_on_the_next_node() -> None:
    assert keepers([0, 1, 2]) == {0: 1, 1: 2, 2: 0}
    assert keepers([0, 0, 0, 1, 1]) == {0: 3, 1: 4, 2: 3, 3: 0, 4: 1}, "uneven nodes"
    assert keepers([0, 0]) == {} == keepers([None, None])


def test_a_node_keeps_its_newest_and_what_is_being_copied(node: NodePlace) -> None:
    first, *_, newest = (make_checkpoint(node.root, step) for step in (1, 3, 4))
    assert node.prune(newest, protect={first.name, ""}).problems == []
    assert steps_in(node.root) == [4, 3, 1]
    node.discard_from(4)
    assert steps_in(node.root) == [3, 1]
    make_checkpoint(node.root, 5, attempt=3)
    node.discard_from(0)
    assert steps_in(node.root) == [5], "a later attempt's"


def test_what_a_node_saves_again_takes_the_place_of_what_the_run_has_left(node: NodePlace) -> None:
    """The steps were reached before, but not all nodes came back with their disks."""
    for step in (1, 2, 2, 3):
        make_checkpoint(node.root, step)
    newest = make_checkpoint(node.root, 2)
    assert node.prune(newest).problems == []
    assert steps_in(node.root) == [2, 1] and newest.is_dir()


def test_only_the_leader_of_a_node_claims(node: NodePlace) -> None:
    replace(node, is_leader=False).claim_all()
    assert checkpoint_of(node.root, NEW).name.split("_")[3] == "0001"
    node.claim_all()
    assert checkpoint_of(node.root, NEW).name.split("_")[3] == "0002"


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be several users")
def test_two_users_of_a_node_and_a_stranger(tmp_path: Any) -> None:
    tally = Tally()
    two_users.run(tally, seed=1, trials=len(two_users.OBSTACLES), folder=tmp_path)
    assert tally.problems == [] and tally.trials == len(two_users.OBSTACLES)
