"""Habits of sites as changes of the configuration; that a run lives with them is tried by the campaigns `sites-*`."""

from __future__ import annotations

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.cluster import daemon_names
from slurm_train.tools.devcluster.plan import HABITS, ClusterPlan, combined, configuration, load_plan
from tests.support.command_line import REPOSITORY


def of(*site: str) -> dict[str, str]:
    return configuration(ClusterPlan(nodes=2, gpus=2, site=site))


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_changes_something_and_is_in_the_documentation(name):
    plan, usual = ClusterPlan(nodes=2, gpus=2, site=(name,)), ClusterPlan(nodes=2, gpus=2)
    facts = [(configuration(one), daemon_names(one), one.hosts) for one in (plan, usual)]
    assert facts[0] != facts[1]
    page = (REPOSITORY / "docs/devcluster.md").read_text()
    assert f"| `{name}` | {HABITS[name].about} |" in page


def test_habits_are_combined_and_stored(tmp_path):
    plan = ClusterPlan(nodes=2, gpus=1, state_dir=tmp_path, site=("no-accounting", "partition-cancel"))
    plan.plan_file.write_text(plan.json_text())
    assert load_plan(tmp_path) == plan
    conf = configuration(plan)["slurm.conf"]
    assert "PreemptMode=CANCEL" in conf and "accounting_storage/none" in conf and "QOS" not in conf
    assert daemon_names(plan) == ["munged", "slurmctld", "slurmd-node1", "slurmd-node2"]


@pytest.mark.parametrize("key", ["PreemptType", "MinJobAge", "GresTypes"])
def test_no_key_is_given_twice(key):
    conf = of("partition-suspend", "min-job-age", "no-gres")["slurm.conf"]
    assert sum(line.startswith(f"{key}=") for line in conf.splitlines()) == (key != "GresTypes")


def test_names_of_one_node_differ():
    plan = ClusterPlan(nodes=2, gpus=0, site=("other-names",))
    assert "NodeName=n001 NodeHostname=blade1 NodeAddr=10.98.76.11 " in configuration(plan)["slurm.conf"]
    assert plan.hosts["gpu1.cluster.example"] == "10.98.76.11" and plan.node_names == ("node1", "node2")


def test_nodes_that_are_not_there_are_known_and_down():
    lines = of("many-nodes", "partition-requeue")["slurm.conf"].splitlines()
    nodes = [line for line in lines if line.startswith("NodeName=")]
    assert len(nodes) == 3 and nodes[2].startswith("NodeName=rack1-n[003-200] ") and nodes[2].endswith(" State=DOWN")
    assert " NodeAddr=192.0.2.[3-200] " in nodes[2]
    assert [line.split()[1] for line in lines if line.startswith("PartitionName=")] == ["Nodes=rack1-n[001-200]"] * 2


def test_an_unknown_habit_is_refused_with_those_that_there_are():
    with pytest.raises(ClusterError, match="--site no-grace: no such habit") as caught:
        combined(["no-grace"])
    assert caught.value.hint is not None and "no-accounting, slurmdbd-away" in caught.value.hint
    with pytest.raises(ClusterError, match="--site fqdn,no-dns: two of them change names"):
        combined(["fqdn", "no-dns"])
