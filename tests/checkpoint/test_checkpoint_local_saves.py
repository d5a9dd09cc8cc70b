"""Two ranks on two nodes with disks of their own: killed and relaunched, with and without what lay on the disks."""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.local import LocalSaves, NodePlace, expand
from slurm_train.checkpoint.verify import read_manifest
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.lineage import Origin, record_origin
from slurm_train.rundir.paths import RunDirectory, existing_attempts, list_checkpoints, name_of
from tests.support.ledgers import close_attempt
from tests.support.small_checkpoints import checkpoint_of, make_checkpoint
from tests.support.waiting import wait_for
from tests.support.warm_ranks import WarmRank
from tests.train import small_runs

START = Start(job_id=None, restart_count=0, nodes=("n0", "n1"), world_size=2)


def config_of(**checkpoint: Any) -> dict[str, Any]:
    local = {"every_steps": 3, "local_dir": "$NODE_DISK", "copy_every": 2, **checkpoint}
    return small_runs.config_of(model={"step_s": 0.05}, train={"max_steps": 30}, checkpoint=local)


def start(run: RunDirectory, config: dict[str, Any], disks: Path) -> list[WarmRank]:
    """Starts one rank per node, each with a disk of its own."""
    run.path.mkdir(parents=True, exist_ok=True)
    attempt = open_attempt(run, START)
    return small_runs.start(run.path, config, attempt=attempt, fault={"own_disks": True}, disks=disks)


def finish(ranks: list[WarmRank]) -> str:
    codes, text = small_runs.finish(ranks)
    assert codes == [0, 0], text
    return text


def steps_on(disk: Path) -> list[int]:
    """Returns the steps that are complete on a node, newest first."""
    steps = []
    for root in disk.glob("slurm_train-*/*/*"):
        for path in list_checkpoints(root):
            with contextlib.suppress(CheckpointError):  # not marked yet, or on its way out
                steps.append(read_manifest(path).step)
    return steps


def kill_when_ahead(run: RunDirectory, ranks: list[WarmRank], disks: Path) -> int:
    """Kills both ranks when the nodes hold a newer checkpoint than the run directory; returns the newest copied."""

    def ahead() -> bool:
        copied = list_checkpoints(run.checkpoints)
        on_nodes = [max(steps_on(disks / f"node{rank}"), default=0) for rank in range(2)]
        return bool(copied) and min(on_nodes) > name_of(copied[0]).step

    wait_for(ahead, within_s=90, what="a checkpoint that only the nodes have", poll_s=0.01)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate(timeout=30)
    assert len(steps_on(disks / "node0")) <= 4, "a node keeps two, what is being copied, and what is about to go"
    return name_of(list_checkpoints(run.checkpoints)[0]).step


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same training without a fast tier and without a stop."""
    folder: Path = tmp_path_factory.mktemp("golden")
    config = config_of(local_dir=None, every_steps=None)
    config["model"]["step_s"] = 0.0
    finish(start(RunDirectory(folder / "run"), config, folder / "disks"))
    return small_runs.digest_of(folder / "run")


@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize("lost", [None, "node1"])
def test_killed_ranks_come_back_from_their_disks_or_from_the_run_directory(
    tmp_path: Path, golden: str, lost: str | None
) -> None:
    run, disks = RunDirectory(tmp_path / "run"), tmp_path / "disks"
    copied = kill_when_ahead(run, start(run, config_of(), disks), disks)
    on_nodes = min(max(steps_on(disks / f"node{rank}")) for rank in range(2))
    if lost is not None:
        shutil.rmtree(disks / lost)
    text = finish(start(run, config_of(), disks))
    if lost is None:
        assert f"step {on_nodes} was on the nodes only; copied into the run directory" in text
        assert f"resuming from checkpoint_{on_nodes:07d}" in text
    else:
        assert f"resuming from checkpoint_{copied:07d}" in text and "on the nodes only" not in text
    assert small_runs.digest_of(run.path) == golden
    assert [line["step"] for line in small_runs.steps_of(run.path)] == list(range(1, 31))
    assert not steps_on(disks / "node0"), "a finished run leaves nothing on the nodes"


def test_every_kth_is_copied_and_the_last_one_goes_to_the_run_directory(tmp_path: Path) -> None:
    run, disks = RunDirectory(tmp_path / "run"), tmp_path / "disks"
    finish(start(run, config_of(keep=20, local_keep=20), disks))
    copied = sorted(name_of(path).step for path in list_checkpoints(run.checkpoints))
    assert copied[0] == 6 and copied[-1] == 30 and len(copied) >= 3
    assert not {3} & set(copied) and all(later - sooner >= 6 for sooner, later in pairwise(copied[:-1]))
    assert not list(disks.rglob("checkpoint_*"))


class Past:
    """A run on one node: attempt 0 has copied step 2 into the run directory and has left steps 4 and 6 on its disk."""

    def __init__(self, folder: Path, *, is_older: bool = False) -> None:
        self.run, self.disk = RunDirectory(folder / "run"), folder / "disk"
        self.run.path.mkdir()
        self.is_older = is_older
        self.begin()
        self.base = make_checkpoint(self.run.checkpoints, 2, attempt=0)
        self.step_from(Origin())
        for step in (4, 6):
            make_checkpoint(self.disk, step, attempt=0)
        self.end(first=0)

    @property
    def base_id(self) -> str:
        return name_of(self.base).save_id

    def begin(self, *, first_committed: int | None = None) -> int:
        return open_attempt(self.run, replace(START, first_committed=first_committed))

    def step_from(self, origin: Origin, *, attempt: int = 0) -> None:
        if not self.is_older:
            record_origin(self.run, attempt, origin)

    def end(self, *, first: int) -> None:
        """Closes the newest attempt as a supervisor did that took the largest step in the log for its own."""
        close_attempt(self.run, existing_attempts(self.run)[-1], {"first_step": first, "last_step": 6})

    def goes_back_to_the_base(self) -> int:
        """Opens an attempt that does not see the disk, takes a step from step 2 and ends; returns its number."""
        attempt = self.begin()
        (path,) = list_checkpoints(self.run.checkpoints)
        Place(root=self.run.checkpoints, attempt=attempt).claim_checkpoint(path)
        self.step_from(Origin(step=2, save_id=self.base_id), attempt=attempt)
        self.end(first=6)
        return attempt

    def choice(
        self, *, reason_against: Any = lambda _: "", first_committed: int | None = None
    ) -> tuple[int, list[str]]:
        """Returns the step that the next attempt goes on from, and its notes for the user."""
        attempt = self.begin(first_committed=first_committed)
        place = NodePlace(root=self.disk, node=0, attempt=attempt, keep=2)
        target = Place(root=self.run.checkpoints, attempt=attempt, keep=2)
        local = LocalSaves(
            run=self.run,
            place=place,
            target=target,
            copy_every=9,
            peers=dist.group.WORLD,
            group=dist.group.WORLD,
            thread=ThreadPoolExecutor(1),
        )
        choose = partial(choose_checkpoint, target.root, group=dist.group.WORLD, attempt=attempt)
        choice, notes = local.choose(lambda copied: choose(copied=copied), reason_against=reason_against)
        assert choice is not None
        return choice.manifest.step, notes


def test_a_past_that_the_run_has_left_does_not_come_back(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    attempt = past.goes_back_to_the_base()
    make_checkpoint(past.run.checkpoints, 3, attempt=attempt, parent=past.base_id)
    assert past.choice() == (3, []), "steps 4 and 6 have other weights"


def test_nor_where_nothing_newer_was_saved(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    past.goes_back_to_the_base()
    assert past.choice() == (2, [])


def test_the_newest_local_one_of_the_present_counts_not_the_highest_step(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    attempt = past.goes_back_to_the_base()
    make_checkpoint(past.disk, 3, attempt=attempt, parent=past.base_id)
    step, (note,) = past.choice()
    assert step == 3 and "step 3 was on the nodes only" in note


def test_an_attempt_that_takes_no_step_leaves_nothing_behind(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    past.begin()
    past.end(first=6)
    assert past.choice()[0] == 6
    assert past.choice() == (6, []), "it is in the run directory now"


def test_what_the_run_went_on_from_is_still_found_where_its_copy_is_damaged(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    assert past.choice()[0] == 6
    copy = checkpoint_of(past.run.checkpoints, 6)
    past.step_from(Origin(step=6, save_id=name_of(copy).save_id), attempt=1)
    (copy / "__1_0.distcp").write_bytes(b"x" * 24)
    step, notes = past.choice()
    assert step == 6 and any("was on the nodes only" in note for note in notes)
    (checkpoint_of(past.disk, 6) / "COMPLETE").unlink()
    (checkpoint_of(past.run.checkpoints, 6) / "COMPLETE").unlink()
    assert past.choice()[0] == 4, "what it came from before that"


def test_a_person_who_takes_the_newest_out_goes_back_on_the_nodes_too(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    close_attempt(past.run, 0, {"last_committed": 2})
    shutil.move(past.base, tmp_path)
    make_checkpoint(past.run.checkpoints, 1, attempt=0)
    step, notes = past.choice(first_committed=1)
    assert step == 1 and notes == ["step 2 was taken out of the run directory, so nothing is taken from the nodes"]


def test_a_damaged_newest_is_not_taken_for_one_that_was_taken_out(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    close_attempt(past.run, 0, {"last_committed": 2})
    make_checkpoint(past.run.checkpoints, 1, attempt=0)
    (past.base / "COMPLETE").unlink()
    assert past.choice(first_committed=1)[0] == 6


def test_steps_from_before_an_accepted_change_are_left(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path)
    step, notes = past.choice(reason_against=lambda manifest: "optim.lr was changed" if manifest.step > 2 else "")
    assert step == 2 and len(notes) == 2 and all("optim.lr was changed" in note for note in notes)


def test_of_an_older_version_what_the_owner_of_the_newest_has_saved_counts(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path, is_older=True)
    assert past.choice()[0] == 6


def test_and_what_an_attempt_before_the_owner_has_saved_does_not(tmp_path: Path, group_of_one: None) -> None:
    past = Past(tmp_path, is_older=True)
    past.goes_back_to_the_base()
    assert past.choice()[0] == 2


def test_a_folder_is_named_by_each_nodes_own_variables() -> None:
    assert expand("${NODE_DISK}/x", {"NODE_DISK": "/fast"}) == "/fast/x"
    with pytest.raises(ConfigError, match="names a variable that is not set on this node"):
        expand("$SLURM_TMPDIR", {})
