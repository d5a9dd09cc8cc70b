from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster import hosts, network, requirements
from slurm_train.tools.devcluster.plan import ClusterPlan
from slurm_train.tools.devcluster.requirements import (
    missing_packages,
    require_free_place,
    require_packages,
    require_root,
)

_APT = "apt-get install --no-install-recommends slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2"


@pytest.fixture
def free_machine(tmp_path, monkeypatch):
    """A machine on which nothing is in the way; the test puts one thing there."""
    monkeypatch.setattr(requirements, "SYSTEM_SLURM_CONF", tmp_path / "slurm.conf")
    monkeypatch.setattr(network, "list_namespaces", set)
    monkeypatch.setattr(network, "has_link", lambda _: False)
    monkeypatch.setattr(network, "overlapping_route", lambda _: "")
    monkeypatch.setattr(hosts, "read_hosts", lambda: "127.0.0.1 localhost\n")
    return monkeypatch


_PLAN = ClusterPlan(nodes=2, gpus=1, state_dir=Path("/nowhere/state"))


def refusal(plan: ClusterPlan) -> str:
    with pytest.raises(ClusterError) as caught:
        require_free_place(plan)
    return str(caught.value)


def test_without_root_the_error_says_so_and_gives_the_apt_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"devcluster up needs root .* this is uid 1000") as caught:
        require_root("up")
    assert _APT in caught.value.hint
    assert caught.value.exit_code == 2


def test_missing_packages_are_named_with_the_apt_line(monkeypatch):
    monkeypatch.setattr(requirements, "missing_packages", lambda: ["slurmdbd", "munge"])
    with pytest.raises(ClusterError) as caught:
        require_packages()
    assert str(caught.value) == f"devcluster up needs packages that are not here: slurmdbd, munge\nhint: {_APT}"


def test_an_empty_search_path_lacks_every_package(tmp_path):
    assert sorted(missing_packages(str(tmp_path))) == sorted(_APT.split()[3:])


def test_a_free_place_is_accepted(free_machine):
    require_free_place(_PLAN)


def test_a_foreign_slurm_conf_is_respected(free_machine, tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=real\n")
    assert "slurm.conf is there and is not ours" in refusal(_PLAN)


def test_a_link_into_our_state_is_ours(free_machine, tmp_path):
    (tmp_path / "slurm.conf").symlink_to(_PLAN.slurm_conf)
    require_free_place(_PLAN)


def test_names_in_use_are_listed(free_machine):
    free_machine.setattr(network, "list_namespaces", lambda: {"node2", "other"})
    free_machine.setattr(hosts, "read_hosts", lambda: "10.1.1.1 node1\n")
    assert refusal(_PLAN).startswith("names in use on this machine: node2, node1\n")


def test_a_second_cluster_is_refused_with_the_way_out(free_machine):
    free_machine.setattr(hosts, "read_hosts", lambda: "10.1.1.1 node1 # slurm-train-devcluster /tmp/other\n")
    assert refusal(_PLAN) == (
        "a cluster with its state in /tmp/other is up; one machine holds one\n"
        "hint: python -m slurm_train devcluster down --state /tmp/other"
    )


def test_a_network_in_use_is_refused(free_machine):
    free_machine.setattr(network, "overlapping_route", lambda _: "10.98.0.0/16 dev eth1")
    message, hint = refusal(_PLAN).split("\n")
    assert message == "the network 10.98.76.0/24 is in use here: 10.98.0.0/16 dev eth1"
    assert hint.startswith("hint: take that network down")


def test_somebody_elses_directory_is_not_taken(free_machine):
    assert refusal(ClusterPlan(2, 1, Path("/etc"))).startswith("/etc is there and is not a cluster's state")


def test_a_directory_that_users_cannot_enter_is_refused(free_machine):
    with TemporaryDirectory(dir="/tmp") as closed:
        assert refusal(ClusterPlan(2, 1, Path(closed) / "state")).startswith(f"other users cannot enter {closed}, so")
