from __future__ import annotations

import pytest

from slurm_train.tools.devcluster.daemons import ClusterStatus, cluster_status, daemon_names
from slurm_train.tools.devcluster.plan import ClusterPlan

_PLAN = ClusterPlan(nodes=2, gpus=1)


def status(*, dead: str = "", nodes: dict[str, str] | None = None, is_complete: bool = True) -> ClusterStatus:
    daemons = {name: name != dead for name in daemon_names(_PLAN)}
    return ClusterStatus(_PLAN, is_complete, daemons, {"node1": "idle", "node2": "mixed"} if nodes is None else nodes)


@pytest.mark.parametrize(
    ("found", "is_healthy"),
    [
        (status(), True),
        (status(nodes={"node1": "completing", "node2": "allocated"}), True),
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
    (tmp_path / "plan.json").write_text(_PLAN.json_text())
    found = cluster_status(tmp_path)
    assert found is not None and not found.is_complete
    assert found.describe().startswith("2 nodes x 1 GPU, half built")
