"""`init` on a real Slurm, and a job that asks for what it found."""

from __future__ import annotations

import os

import pytest

from slurm_train.request.acceptance import slurm_verdict
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.site import Site
from slurm_train.tools.devcluster.plan import ClusterPlan
from slurm_train.tools.site import build_profile, try_site

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def test_a_real_cluster_is_read_and_takes_what_was_found(slurm_cluster: ClusterPlan) -> None:
    commands = SlurmCommands(os.environ)
    facts = Site(commands).facts()
    assert facts.problems == []
    site = build_profile(facts, {})
    assert (site.cluster["partition"], site.cluster["gpu_flag"], site.cluster["qos"]) == (
        "main",
        "gpus-per-node",
        "normal",
    )
    main = site.partitions["main"]
    assert (main.num_nodes, main.gpus_per_node) == (slurm_cluster.nodes, slurm_cluster.gpus)
    assert (main.preemption, main.grace_s, site.qos["normal"].preempted_by[0]) == ("requeued", 15.0, "urgent")
    tried, problems = try_site(
        site, {one.name: one for one in facts.partitions}, lambda script: slurm_verdict(script, commands)
    )
    assert (tried, problems) == (site, [])
