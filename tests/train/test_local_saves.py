"""Two ranks on two nodes with disks of their own: killed and relaunched, with and without what lay on the disks."""

from __future__ import annotations

import contextlib
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.local import recent_attempts
from slurm_train.checkpoint.verify import read_manifest
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.rundir.attempts import AttemptStart, close_attempt, open_attempt
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.train.build import expand
from tests.support.waiting import wait_for
from tests.support.warm_ranks import WarmRank
from tests.train import small_runs

START = AttemptStart(job_id=None, restart_count=0, nodes=("n0", "n1"), world_size=2)


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


def test_only_attempts_since_the_last_one_with_steps_are_of_the_present(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for first, last in ((0, 9), (9, 20), (20, 20), (20, 20)):
        close_attempt(run, open_attempt(run, START), {"first_step": first, "last_step": last})
    assert recent_attempts(run, open_attempt(run, START)) == {1, 2, 3, 4}
    assert recent_attempts(run, open_attempt(run, START)) == {4, 5}, "attempt 4 has no end: nobody knows its steps"


def test_a_folder_is_named_by_each_nodes_own_variables() -> None:
    assert expand("${NODE_DISK}/x", {"NODE_DISK": "/fast"}) == "/fast/x"
    with pytest.raises(ConfigError, match="names a variable that is not set on this node"):
        expand("$SLURM_TMPDIR", {})
