"""The configuration files, whole, against golden files: `golden/` is what a person reviews."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.tools.devcluster.plan import ClusterPlan
from slurm_train.tools.devcluster.render import (
    render_gres_conf,
    render_hosts,
    render_mariadb_conf,
    render_nsswitch_conf,
    render_slurm_conf,
    render_slurmdbd_conf,
)

_GOLDEN = Path(__file__).parent / "golden"
_PLAN = ClusterPlan(nodes=4, gpus=8)


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("slurm.conf", render_slurm_conf),
        ("gres.conf", render_gres_conf),
        ("slurmdbd.conf", render_slurmdbd_conf),
        ("mariadb.cnf", render_mariadb_conf),
    ],
)
def test_configuration_matches_its_golden_file(name, render):
    assert render(_PLAN) == (_GOLDEN / name).read_text(encoding="utf-8")


def test_without_gpus_no_node_claims_any():
    plan = ClusterPlan(nodes=2, gpus=0)
    assert "Gres=" not in render_slurm_conf(plan)
    assert "Name=gpu" not in render_gres_conf(plan)


def test_one_gpu_is_one_file():
    assert "File=/var/lib/slurm-train-devcluster/devices/gpu0\n" in render_gres_conf(ClusterPlan(nodes=1, gpus=1))


def test_hosts_name_the_controller_and_every_node():
    assert render_hosts(ClusterPlan(nodes=2, gpus=1)) == {
        "devcluster-controller": "10.98.76.1",
        "node1": "10.98.76.11",
        "node2": "10.98.76.12",
    }


def test_every_line_is_a_setting_of_its_own():
    lines = [line for line in render_slurm_conf(_PLAN).splitlines() if line and not line.startswith("#")]
    keys = [line.partition("=")[0] for line in lines if not line.startswith(("NodeName", "PartitionName"))]
    assert len(keys) == len(set(keys))
    assert all("=" in line for line in lines)


def test_nodes_look_names_up_in_the_hosts_file_alone() -> None:
    text = render_nsswitch_conf("passwd: files systemd\nhosts: files mdns4_minimal dns\n")
    assert text == "passwd: files systemd\nhosts: files\n"
