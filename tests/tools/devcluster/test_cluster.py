"""What `up` refuses to build over and `down` to remove: nothing that somebody else made is touched."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster import cluster, system
from slurm_train.tools.devcluster.cluster import (
    APT_LINE,
    ClusterStatus,
    bring_up,
    cluster_status,
    daemon_names,
    missing_packages,
    require_free_place,
    require_own,
    tear_down,
)
from slurm_train.tools.devcluster.plan import ClusterPlan

_PLAN = ClusterPlan(nodes=2, gpus=1, state_dir=Path("/nowhere/state"))


@pytest.fixture
def free_machine(tmp_path, monkeypatch):
    """A machine on which nothing is in the way; the test puts one thing there."""
    monkeypatch.setattr(cluster, "SYSTEM_SLURM_CONF", tmp_path / "slurm.conf")
    monkeypatch.setattr(system, "namespaces", set)
    monkeypatch.setattr(system, "links", set)
    monkeypatch.setattr(system, "overlapping_route", lambda _: "")
    monkeypatch.setattr(system, "read_hosts", lambda: "127.0.0.1 localhost\n")
    return monkeypatch


def refusal(plan: ClusterPlan = _PLAN) -> str:
    with pytest.raises(ClusterError) as caught:
        require_free_place(plan)
    return str(caught.value)


def test_missing_packages_are_named_with_the_apt_line(monkeypatch, tmp_path):
    assert sorted(missing_packages(str(tmp_path))) == sorted(APT_LINE.split()[3:])
    monkeypatch.setattr(cluster, "missing_packages", lambda: ["slurmdbd", "munge"])
    with pytest.raises(ClusterError) as caught:
        bring_up(_PLAN)
    assert str(caught.value) == f"devcluster up needs packages that are not here: slurmdbd, munge\nhint: {APT_LINE}"


def test_a_free_place_and_a_link_of_our_own_are_accepted(free_machine, tmp_path):
    require_free_place(_PLAN)
    (tmp_path / "slurm.conf").symlink_to(_PLAN.slurm_conf)
    require_free_place(_PLAN)


def test_a_slurm_conf_of_somebody_else_is_respected(free_machine, tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=real\n")
    assert "slurm.conf exists and is not ours" in refusal()


def test_names_in_use_are_listed(free_machine):
    free_machine.setattr(system, "namespaces", lambda: {"node2", "other"})
    free_machine.setattr(system, "read_hosts", lambda: "10.1.1.1 node1\n")
    assert refusal().startswith("names in use on this machine: node1, node2\n")


def test_a_second_cluster_is_refused_with_the_way_out(free_machine):
    free_machine.setattr(system, "read_hosts", lambda: "10.1.1.1 node1 # slurm-train-devcluster /tmp/other\n")
    assert refusal() == (
        "a cluster with its state in /tmp/other is up; one machine holds one\n"
        "hint: python -m slurm_train devcluster down --state /tmp/other"
    )


def test_a_network_in_use_is_refused(free_machine):
    free_machine.setattr(system, "overlapping_route", lambda _: "10.98.0.0/16 dev eth1")
    assert "the network 10.98.76.0/24 is in use on this machine: 10.98.0.0/16 dev eth1" in refusal()


def test_unusable_directories_are_refused(free_machine):
    assert refusal(ClusterPlan(2, 1, Path("/etc"))).startswith("/etc exists and is not a cluster's state")
    with TemporaryDirectory(dir="/tmp") as closed:
        assert refusal(ClusterPlan(2, 1, Path(closed) / "state")).startswith(f"other users cannot enter {closed}, so")


def test_a_state_directory_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    require_own(tmp_path)
    for mode in (0o775, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(ClusterError, match="others could write"):
            require_own(tmp_path)
    tmp_path.chmod(0o700)


def test_a_linked_state_directory_and_that_of_another_user_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ClusterError, match="others could write"):
        require_own(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(ClusterError, match="uid 12345"):
            require_own(tmp_path)


def test_down_removes_nothing_that_is_not_a_clusters_state(tmp_path):
    assert tear_down(tmp_path / "never") is False
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ClusterError, match="is not the state of a cluster; nothing removed"):
        tear_down(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


_SMALL = ClusterPlan(nodes=2, gpus=1)


def status(*, dead: str = "", nodes: dict[str, str] | None = None, is_complete: bool = True) -> ClusterStatus:
    daemons = {name: name != dead for name in daemon_names(_SMALL)}
    return ClusterStatus(_SMALL, is_complete, daemons, {"node1": "idle", "node2": "mixed"} if nodes is None else nodes)


@pytest.mark.parametrize(
    ("found", "is_healthy"),
    [
        (status(), True),
        (status(dead="munged"), False),
        (status(dead="slurmd-node2"), False),
        (status(nodes={}), False),
        (status(nodes={"node1": "idle"}), False),
        (status(nodes={"node1": "idle", "node2": "idle*"}), False),
        (status(nodes={"node1": "drained", "node2": "idle"}), False),
        (status(is_complete=False), False),
    ],
)
def test_healthy_means_all_daemons_and_all_nodes(found, is_healthy):
    assert found.is_healthy is is_healthy


def test_describe_shows_daemons_and_nodes():
    assert status(dead="slurmd-node2", nodes={"node1": "idle", "node2": "down*"}).describe() == (
        "2 nodes x 1 GPU, NOT healthy; state in /var/lib/slurm-train-devcluster\n"
        "  munged         alive\n"
        "  mariadbd       alive\n"
        "  slurmdbd       alive\n"
        "  slurmctld      alive\n"
        "  slurmd-node1   alive  node idle\n"
        "  slurmd-node2   DEAD   node down*"
    )


def test_a_plan_alone_is_half_built(tmp_path):
    assert cluster_status(tmp_path) is None
    (tmp_path / "plan.json").write_text(_SMALL.json_text())
    found = cluster_status(tmp_path)
    assert found is not None and not found.is_complete
    assert found.describe().startswith("2 nodes x 1 GPU, half built")
