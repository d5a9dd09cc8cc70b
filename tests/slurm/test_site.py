"""Who preempts whom at a site."""

from __future__ import annotations

import pytest

from slurm_train.slurm.site import preemption_in
from tests.tools.site.sites import facts_of


@pytest.mark.parametrize(
    ("site", "qos", "partition", "outcome", "grace_s"),
    [
        ("devcluster", "normal", "main", "requeued", 15),
        ("devcluster", "urgent", "main", "never", 0),
        ("devcluster", "", "main", "requeued", 0),
        ("typed", "normal", "a100", "never", 0),
        ("typed", "normal", "scavenge", "requeued", 120),
        ("gres_only", "", "short", "never", 0),
        ("gres_only", "", "long", "suspended", 0),
        ("mixed_nodes", "free", "gpu", "cancelled", 300),
        ("mixed_nodes", "normal", "gpu", "never", 0),
        ("no_accounting", "", "batch", "never", 0),
    ],
)
def test_who_gives_way_and_how(site: str, qos: str, partition: str, outcome: str, grace_s: float) -> None:
    found = preemption_in(facts_of(site), qos, partition)
    assert (found.outcome, found.grace_s) == (outcome, grace_s)
