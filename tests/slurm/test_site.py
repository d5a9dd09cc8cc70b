"""Who preempts whom at a site."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import Association, Qos
from slurm_train.slurm.site import Site, SiteFacts, ask_early, default_qos, preemption_in, site_of
from tests.fakes.slurm_programs import SlurmPrograms
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


def test_a_database_that_does_not_answer_is_waited_for_once(tmp_path: Path) -> None:
    programs = SlurmPrograms(tmp_path / "bin")
    # Each question waits for the other one.
    waits = f'echo asked >> {tmp_path}/asked; until [ "$(wc -l < {tmp_path}/asked)" = 2 ]; do sleep 0.05; done'
    programs.wrap("sacctmgr", f"{waits}; echo 'Connection refused' >&2; exit 1")
    facts = Site(SlurmCommands({"PATH": programs.path}, timeout_s=20.0), user="me").facts()
    assert [subject for subject in facts.unanswered if subject != "partitions"] == ["accounts", "QOS"]


@pytest.mark.parametrize(
    ("words", "is_asked"),
    [
        (["+cluster=1x1"], True),
        (["model=gpt", "cluster.nodes=2"], True),
        (["+cluster=1x1", "launch=local"], False),
        (["+cluster=1x1", "--multirun", "seed=1,2"], False),
        (["script=[train.py,--cluster]"], False),
        (["model=my_cluster"], False),
    ],
)
def test_slurm_is_asked_early_about_a_job_alone(words: list[str], *, is_asked: bool, tmp_path: Path) -> None:
    programs = SlurmPrograms(tmp_path / "bin")
    site = site_of(ask_early(words, {"PATH": programs.path}))
    assert bool(site._answers) is is_asked


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
