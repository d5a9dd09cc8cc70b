"""Who preempts whom at a site."""

from __future__ import annotations

import pytest

from slurm_train.slurm.policy import Association, Qos
from slurm_train.slurm.site import SiteFacts, default_qos, preemption_in
from tests.tools.site.sites import facts_of


@pytest.mark.parametrize(
    ("site", "qos", "partition", "outcome", "grace_s"),
    [
        ("devcluster", "urgent", "main", "never", 0),
        ("devcluster", "", "main", "requeued", None),
        ("typed", "normal", "scavenge", "requeued", 120),
        ("gres_only", "", "long", "suspended", 0),
        ("mixed_nodes", "free", "gpu", "cancelled", 300),
        ("no_accounting", "", "batch", "never", 0),
    ],
)
def test_who_gives_way_and_how(site: str, qos: str, partition: str, outcome: str, grace_s: float | None) -> None:
    found = preemption_in(facts_of(site), qos, partition)
    assert (found.outcome, found.grace_s) == (outcome, grace_s)


def association(default_qos: str = "", *qos: str, partition: str = "", account: str = "lab") -> Association:
    return Association(
        cluster="c", account=account, is_default=True, partition=partition, qos=qos, default_qos=default_qos
    )


@pytest.mark.parametrize(
    ("associations", "known", "expected"),
    [
        ([association("high", "normal", "high")], ["normal", "high"], "high"),
        ([association("high"), association("gpu", partition="a100")], ["normal"], "gpu"),
        ([association("", "free")], ["normal", "free"], "free"),
        ([association("", "low", "free")], ["normal", "low", "free"], ""),
        ([association("high", account="other")], ["normal", "high"], "normal"),
        ([association()], ["low"], ""),
    ],
)
def test_the_qos_of_a_job_that_asks_for_none(associations: list[Association], known: list[str], expected: str) -> None:
    facts = SiteFacts(associations=associations, qos=[Qos(name=name) for name in known])
    assert default_qos(facts, "a100", account="lab") == expected
