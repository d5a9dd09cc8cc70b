"""Saving and loading over two gloo ranks; all scenes share one start of the processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint.directory import verify
from slurm_train.checkpoint.load import choose_checkpoint, load_rank_state, load_tensors
from tests.support.small_checkpoints import checkpoint_of
from tests.support.warm_ranks import start_rank

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("two_ranks.py")
SCENES = ("resume", "failure", "choose", "shard", "staged")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    env = dict(os.environ) | {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start_rank(WORKER, str(rank), "2", str(folder), *SCENES, env=env) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return folder


@pytest.fixture
def results(folder):
    return lambda scene: [json.loads((folder / f"{scene}_{rank}.json").read_text()) for rank in range(2)]


def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(results):
    of_ranks = results("resume")
    digests = {of_rank[key] for of_rank in of_ranks for key in ("digest", "resumed_digest")}
    assert len(digests) == 1
    assert of_ranks[0]["names"] == ["0.bias", "0.weight", "1.bias", "1.weight", "2.bias", "2.weight"]


def test_each_rank_gets_its_own_state_and_all_hear_the_same(results):
    assert [of_rank["rank"] for of_rank in results("resume")] == [0, 1]
    for of_rank in results("resume"):
        assert of_rank["missing"] is None
        assert (of_rank["path"], of_rank["world_size"]) == (3, 2)


def test_saving_a_saved_step_again_writes_nothing(results):
    assert [of_rank["bytes"] for of_rank in results("resume")] == [[True, 0], [True, 0]]


def test_every_file_is_recorded_and_private(folder):
    path = checkpoint_of(folder / "resume", 3)
    manifest = verify(path)
    assert set(manifest.files) == {".metadata", "__0_0.distcp", "__1_0.distcp", "rank_00000.pt", "rank_00001.pt"}
    assert {file.name for file in path.iterdir()} == {*manifest.files, "manifest.json", "COMPLETE"}
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


def test_replicated_tensors_are_written_once_and_shared_out(folder):
    files = verify(checkpoint_of(folder / "failure", 1)).files
    shares = [files[f"__{rank}_0.distcp"].bytes for rank in range(2)]
    assert all(4 * 4096 < share < 1.2 * 4 * 4096 for share in shares)


@pytest.mark.parametrize("scene", ["tensors", "rank"])
def test_one_rank_that_cannot_write_is_named_on_all(results, scene):
    for of_rank in results("failure"):
        error = of_rank["errors"][scene]
        assert error["kind"] == "CheckpointError"
        assert "rank 1" in error["message"]
        assert "[Errno 27] File too large" in error["message"]
        assert "Traceback" not in error["message"]


def test_a_node_that_does_not_see_the_directory_stops_all(results):
    for of_rank in results("failure"):
        error = of_rank["errors"]["invisible"]
        assert "rank 1: " in error["message"] and "is not visible on this node" in error["message"]
        assert "every node mounts at the same path" in error["hint"]


def test_a_state_that_could_not_be_loaded_again_is_refused_on_all(results):
    for of_rank in results("failure"):
        assert "rank state could not be loaded again" in of_rank["errors"]["unsafe"]["message"]
        assert "tensors, numbers, strings" in of_rank["errors"]["unsafe"]["hint"]


def test_the_fence_of_rank_zero_is_raised_on_all_as_what_it_is(results):
    for of_rank in results("failure"):
        error = of_rank["errors"]["fence"]
        assert (error["kind"], error["hint"]) == ("RunError", "exit")
        assert error["message"].endswith("attempt 2 has taken over")


def test_failed_saves_leave_the_previous_checkpoint_and_nothing_else(results, folder):
    assert [of_rank["left"] for of_rank in results("failure")] == [[1]] * 2
    assert verify(checkpoint_of(folder / "failure", 1)).step == 1


def test_all_ranks_load_what_rank_zero_chose(results):
    for of_rank in results("choose"):
        assert of_rank["empty"] is None
        assert of_rank["chosen"] == [1, [2]]


def test_nothing_but_damaged_checkpoints_is_an_error_and_not_a_fresh_start(results):
    for of_rank in results("choose"):
        assert of_rank["none"]["kind"] == "CheckpointError"
        assert "none of the 2 checkpoints" in of_rank["none"]["message"]
        assert "start from the beginning" in of_rank["none"]["hint"]


def test_shards_load_along_another_dimension_and_in_one_process(results, folder):
    assert [of_rank["equal"] for of_rank in results("shard")] == [True, True]
    choice = choose_checkpoint(folder / "shard", group=None, attempt=1)
    assert choice is not None
    tensors = {"weights": torch.zeros(6, 4), "step": 0}
    load_tensors(choice.path, tensors)
    assert tensors["weights"].equal(torch.arange(24.0).reshape(6, 4))
    assert tensors["step"] == 5
    state = load_rank_state(choice.path, 1)
    assert state is not None and state["rank"] == 1


def test_a_wrong_shape_and_a_missing_key_are_named(results):
    for of_rank in results("shard"):
        assert of_rank["wrong"]["kind"] == of_rank["missing"]["kind"] == "CheckpointError"
        assert "ize mismatch" in of_rank["wrong"]["message"]
        assert "x" in of_rank["missing"]["message"]


def test_each_rank_copies_its_own_part_and_the_checkpoint_is_whole(results):
    assert [of_rank["own"] for of_rank in results("staged")] == [["sharded", "two"], ["one", "sharded"]]
    assert [of_rank["equal"] for of_rank in results("staged")] == [True, True]
