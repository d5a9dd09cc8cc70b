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


def refuses(plan: ClusterPlan, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        require_free_place(plan)


def test_missing_packages_are_named_with_the_apt_line(monkeypatch, tmp_path):
    assert sorted(missing_packages(str(tmp_path))) == sorted(APT_LINE.split()[3:])
    monkeypatch.setattr(cluster, "missing_packages", lambda: ["slurmdbd", "munge"])
    with pytest.raises(ClusterError, match="needs packages that are not here: slurmdbd, munge\nhint: apt-get"):
        bring_up(_PLAN)


def test_a_slurm_conf_of_somebody_else_is_respected_and_a_link_of_our_own_is_none(free_machine, tmp_path):
    (tmp_path / "slurm.conf").symlink_to(_PLAN.slurm_conf)
    require_free_place(_PLAN)
    (tmp_path / "slurm.conf").unlink()
    (tmp_path / "slurm.conf").write_text("ClusterName=real\n")
    refuses(_PLAN, "slurm.conf exists and is not ours")


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("namespaces", {"node2", "other"}, "names in use on this machine: node2\n"),
        ("read_hosts", "10.1.1.1 node1\n", "names in use on this machine: node1\n"),
        ("read_hosts", "10.1.1.1 node1 # slurm-train-devcluster /tmp/other\n", "its state in /tmp/other is up; one"),
        (
            "overlapping_route",
            "10.98.0.0/16 dev eth1",
            "10.98.76.0/24 is in use on this machine: 10.98.0.0/16 dev eth1",
        ),
    ],
)
def test_what_is_in_the_way_is_named(free_machine, name, found, message):
    free_machine.setattr(system, name, lambda *_: found)
    refuses(_PLAN, message)


def test_unusable_directories_are_refused(free_machine):
    refuses(ClusterPlan(2, 1, Path("/etc")), "/etc exists and is not a cluster's state")
    with TemporaryDirectory(dir="/tmp") as closed:
        refuses(ClusterPlan(2, 1, Path(closed) / "state"), f"other users cannot enter {closed}, so")


def test_a_state_directory_that_others_may_write_or_own_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    require_own(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for mode, path in ((0o755, tmp_path / "link"), (0o775, tmp_path), (0o1777, tmp_path)):
        tmp_path.chmod(mode)
        with pytest.raises(ClusterError, match="others could write"):
            require_own(path)
    tmp_path.chmod(0o700)
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


def status(dead: str = "", node2: str = "mixed", *, is_complete: bool = True) -> ClusterStatus:
    daemons = {name: name != dead for name in daemon_names(_PLAN)}
    return ClusterStatus(_PLAN, is_complete, daemons, {"node1": "idle"} | ({"node2": node2} if node2 else {}))


@pytest.mark.parametrize(
    "found",
    [status("munged"), status(node2=""), status(node2="idle*"), status(node2="drained"), status(is_complete=False)],
)
def test_healthy_means_all_daemons_and_all_nodes(found):
    assert status().is_healthy and not found.is_healthy


def test_a_plan_is_half_built(tmp_path):
    assert cluster_status(tmp_path) is None
    (tmp_path / "plan.json").write_text(_PLAN.json_text())
    found = cluster_status(tmp_path)
    assert found is not None and not found.is_complete
    assert found.describe().startswith("2 nodes x 1 GPU, half built")
