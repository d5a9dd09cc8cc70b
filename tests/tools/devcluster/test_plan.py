from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.plan import ClusterPlan, load_plan


def test_names_and_addresses_follow_from_the_plan():
    plan = ClusterPlan(nodes=3, gpus=2)
    assert plan.node_names == ("node1", "node2", "node3")
    assert plan.nodelist == "node[1-3]"
    assert plan.controller_address == "10.98.76.1"
    assert [plan.node_address(name) for name in plan.node_names] == ["10.98.76.11", "10.98.76.12", "10.98.76.13"]


def test_one_node_is_a_plain_nodelist():
    assert ClusterPlan(nodes=1, gpus=0).nodelist == "node1"


@pytest.mark.parametrize(
    ("nodes", "gpus", "words"),
    [(1, 1, "1 node x 1 GPU"), (4, 8, "4 nodes x 8 GPUs"), (2, 0, "2 nodes x 0 GPUs")],
)
def test_describe_counts_in_words(nodes, gpus, words):
    assert ClusterPlan(nodes, gpus).describe() == words


@pytest.mark.parametrize(
    ("nodes", "gpus", "message"),
    [
        (0, 8, "--nodes 0 cannot be built\nhint: give a number from 1 to 64"),
        (65, 8, "--nodes 65 cannot be built\nhint: give a number from 1 to 64"),
        (4, -1, "--gpus -1 cannot be built\nhint: give a number from 0 to 16"),
        (4, 17, "--gpus 17 cannot be built\nhint: give a number from 0 to 16"),
    ],
)
def test_counts_out_of_range_are_refused(nodes, gpus, message):
    with pytest.raises(ClusterError) as caught:
        ClusterPlan(nodes, gpus)
    assert str(caught.value) == message


@pytest.mark.parametrize("path", ["relative", "/with space", "/line\nbreak", "/a/../b", "/quo'te", "/" + "x" * 71, "/"])
def test_a_directory_that_slurm_could_not_name_is_refused(path):
    with pytest.raises(ClusterError, match="cannot be named"):
        ClusterPlan(1, 1, Path(path))


def test_a_stored_plan_reads_back_equal(tmp_path):
    plan = ClusterPlan(nodes=2, gpus=3, state_dir=Path("/tmp") / "state")
    (tmp_path / "plan.json").write_text(plan.json_text())
    loaded = load_plan(tmp_path)
    assert loaded is not None
    assert loaded.json_text() == plan.json_text()
    assert loaded.state_dir == tmp_path


@pytest.mark.parametrize(
    "text", ["", "{", '{"nodes": 2}', '{"nodes": 2, "gpus": 1, "colour": 3}', '{"nodes": 0, "gpus": 1}']
)
def test_a_plan_that_is_not_whole_counts_as_none(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    assert load_plan(tmp_path) is None


def test_no_plan_is_none(tmp_path):
    assert load_plan(tmp_path) is None
