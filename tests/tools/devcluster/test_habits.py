"""Habits of sites as changes of the configuration; that a run lives with them is tried by the campaigns `sites-*`."""

from __future__ import annotations

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.cluster import daemon_names
from slurm_train.tools.devcluster.plan import ClusterPlan, configuration, load_plan
from tests.support.cluster_habits import HABITS, combined

pytestmark = pytest.mark.full


def of(*site: str) -> dict[str, str]:
    return configuration(ClusterPlan(nodes=2, gpus=2, habit=combined(site)))


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_changes_something(name):
    plan = ClusterPlan(nodes=2, gpus=2, habit=HABITS[name])
    usual = ClusterPlan(nodes=2, gpus=2)
    facts = [(configuration(one), daemon_names(one), one.hosts) for one in (plan, usual)]
    assert facts[0] != facts[1]


def test_habits_are_stored(tmp_path):
    plan = ClusterPlan(
        nodes=2, gpus=1, state_dir=tmp_path, habit=combined(["no-accounting", "partition-cancel", "fqdn"])
    )
    plan.plan_file.write_text(plan.json_text())
    assert load_plan(tmp_path) == plan
    conf = configuration(plan)["slurm.conf"]
    assert "PreemptMode=CANCEL" in conf and "accounting_storage/none" in conf and "QOS" not in conf
    assert "slurmdbd" not in daemon_names(plan)


def test_an_unknown_habit_is_refused_with_those_that_there_are():
    with pytest.raises(ClusterError, match=r"--site no-grace: no such habit\n.*no-accounting, slurmdbd-away"):
        combined(["no-grace"])
    with pytest.raises(ClusterError, match="--site fqdn,no-dns: two of them change names"):
        combined(["fqdn", "no-dns"])


@pytest.mark.parametrize(("num_nodes", "halves"), [(4, ("node[1-2]", "node[3-4]")), (3, ("node[1-2]", "node3"))])
def test_switches_and_blocks_have_half_of_the_nodes_each(num_nodes, halves):
    for habit, key in (("switches", "SwitchName"), ("blocks", "BlockName")):
        text = configuration(ClusterPlan(nodes=num_nodes, gpus=2, habit=HABITS[habit]))["topology.conf"]
        nodes = [line.partition("Nodes=")[2] for line in text.splitlines() if line.startswith(key) and "Nodes=" in line]
        assert nodes == list(halves)
