"""Whose limit decides, and which jobs would never start: as tried on Slurm 22.05.8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_train.slurm.job_limits import (
    Demand,
    Limit,
    Owner,
    demand_of,
    limits_of,
    limits_unknown,
    longest_limit_min,
    obstacles,
    partitions_that_are_down,
)
from slurm_train.slurm.policy import Association, Qos, parse_sinfo
from slurm_train.slurm.site import SiteFacts

DEV = Association(cluster="c", account="dev", is_default=True, qos=("normal", "short"), default_qos="normal")
SHORT = Qos(name="short", max_time_min=30)
FACTS = SiteFacts(
    settings={"AccountingStorageEnforce": "associations,limits,qos"},
    records=[
        {"PartitionName": "main", "MaxTime": "1-00:00:00", "DefaultTime": "01:00:00", "MaxNodes": "UNLIMITED"},
        {"PartitionName": "partqos", "MaxTime": "7-00:00:00", "DefaultTime": "NONE", "QoS": "part_gpu"},
        {"PartitionName": "big", "MaxTime": "UNLIMITED", "MinNodes": "2", "MaxNodes": "3"},
        {"PartitionName": "down", "MaxTime": "UNLIMITED", "State": "DOWN"},
        {"PartitionName": "dbg", "MaxTime": "UNLIMITED", "AllowQos": "urgent"},
        {"PartitionName": "acc", "MaxTime": "UNLIMITED", "AllowAccounts": "other"},
        {"PartitionName": "den", "MaxTime": "UNLIMITED", "AllowQos": "ALL", "DenyQos": "normal"},
    ],
    associations=[DEV],
    qos=[
        Qos(name="normal"),
        Qos(name="part_gpu", max_time_min=60),
        SHORT,
        Qos(name="over", max_time_min=20, flags=("OverPartQOS",)),
        Qos(name="long", max_time_min=4000, flags=("PartitionTimeLimit",)),
        Qos(name="factor", max_time_min=20, flags=("UsageFactorSafe",)),
        Qos(name="pairs", least={"gres/gpu": 2}),
        Qos(name="tiny", most={"user": {"gres/gpu": 1}}),
        Qos(name="wide", flags=("PartitionMinNodes", "PartitionMaxNodes")),
        Qos(name="closed", most={"user": {"job": 0}}),
        Qos(name="alone", most={"user": {"submit": 1}}),
        Qos(name="typed", most={"job": {"gres/gpu:a100": 2}}),
    ],
)


def request(**flags: str) -> Demand:
    return demand_of({name.replace("_", "-"): value for name, value in flags.items()})


# The flags of a job, and what is said of it; "" where it starts.
JOBS: list[tuple[dict[str, str], str]] = [
    ({"partition": "main", "time": "1440"}, ""),
    ({"partition": "main", "time": "1-00:01:00"}, "is more than partition main allows (1440)"),
    ({"partition": "partqos", "time": "240"}, "is more than QOS part_gpu of partition partqos allows (60)"),
    # The partition's QOS comes first, and it is not the smallest that decides.
    ({"partition": "partqos", "qos": "short", "time": "45"}, ""),
    ({"partition": "partqos", "qos": "over", "time": "45"}, "is more than QOS over allows (20)"),
    ({"partition": "main", "qos": "short", "time": "240"}, "is more than QOS short allows (30)"),
    ({"partition": "main", "qos": "short"}, "names no time limit gets 60 min in partition main, more than QOS short"),
    ({"partition": "main", "qos": "short", "time": "240", "time-min": "10"}, ""),
    ({"partition": "main", "qos": "long", "time": "3000"}, ""),
    ({"partition": "main", "qos": "factor", "time": "60"}, ""),
    ({"partition": "partqos,main", "time": "240"}, ""),
    ({"partition": "partqos,nowhere", "time": "240"}, "QOS part_gpu"),
    ({"partition": "nowhere", "time": "240"}, ""),
    ({"partition": "big", "nodes": "1"}, "1 nodes are fewer than partition big wants of a job (2)"),
    ({"partition": "big", "nodes": "1-2"}, ""),
    ({"partition": "big", "nodes": "4"}, "4 nodes are more than partition big allows (3)"),
    ({"partition": "big", "nodes": "2-4"}, "4 nodes are more than partition big allows (3)"),
    ({"partition": "big", "nodes": "4", "qos": "wide"}, ""),
    ({"partition": "dbg"}, "partition dbg is for QOS urgent alone, and not for normal"),
    ({"partition": "dbg", "qos": "urgent"}, ""),
    ({"partition": "acc"}, "partition acc is for account other alone, and not for dev"),
    ({"partition": "den"}, "partition den is not for QOS normal"),
    ({"partition": "main", "qos": "pairs", "gpus-per-node": "1"}, "1 GPUs are fewer than QOS pairs wants of a job (2)"),
    ({"partition": "main", "qos": "pairs", "nodes": "2", "gpus-per-node": "1"}, ""),
    (
        {"partition": "main", "qos": "tiny", "gres": "gpu:2"},
        "2 GPUs are more than QOS tiny allows for all jobs of a user",
    ),
    ({"partition": "main", "qos": "tiny", "gpus": "1"}, ""),
    ({"partition": "main", "qos": "tiny", "gpus": "a100:1,h100:1"}, "2 GPUs are more than QOS tiny"),
    ({"partition": "main", "qos": "pairs"}, "0 GPUs are fewer than QOS pairs wants of a job (2)"),
    ({"partition": "main", "qos": "pairs", "gres": "nvme:1"}, "0 GPUs are fewer than QOS pairs"),
    ({"partition": "main", "qos": "pairs", "tres-per-task": "gres/gpu:2"}, ""),
    ({"partition": "main", "qos": "tiny", "ntasks": "2", "gpus-per-task": "1"}, "2 GPUs are more than QOS tiny"),
    ({"partition": "main", "qos": "typed", "gpus-per-node": "a100:4"}, "4 gres/gpu:a100 are more than QOS typed"),
    ({"partition": "main", "qos": "typed", "gpus-per-node": "4"}, ""),
    ({"partition": "main", "qos": "closed"}, "QOS closed lets no job run (its limit is 0)"),
    ({"partition": "main", "qos": "unknown", "time": "60"}, ""),
    ({"partition": "main", "qos": "short,normal", "time": "60"}, ""),
    ({"partition": "main", "qos": "short,over", "time": "60"}, "QOS short allows (30)"),
]


@pytest.mark.parametrize(("flags", "said"), JOBS)
def test_a_job_that_would_never_start_is_told_with_the_owner_of_the_limit(flags: dict[str, str], said: str) -> None:
    found = obstacles(FACTS, demand_of(flags))
    assert [bool(obstacle.todo) for obstacle in found] == [True] * len(found)
    assert bool(found) == bool(said)
    assert said in "; ".join(obstacle.what for obstacle in found)


def with_association(**limits: Any) -> SiteFacts:
    return replace(FACTS, associations=[replace(DEV, **limits)])


def test_an_association_decides_where_no_qos_does() -> None:
    facts = with_association(max_time_min=50, most={"job": {"node": 3}})
    assert limits_of(facts, "main").time_min == Limit(50, Owner("account dev", "cluster.account or cluster.qos"))
    assert obstacles(facts, request(partition="main", nodes="2-4", time="5")) == [], "Slurm gives it three"
    assert limits_of(facts, "partqos").time_min == Limit(
        60, Owner("QOS part_gpu of partition partqos", "cluster.partition")
    )
    assert obstacles(facts, request(partition="main", nodes="4", time="5"))[0].what == (
        "4 nodes are more than account dev allows (3)"
    )
    assert obstacles(facts, request(partition="main", nodes="4", time="5", qos="hidden")) == []
    # Slurm multiplies what an association allows by the factor of a QOS.
    more = replace(facts, qos=[Qos(name="normal", has_limit_factor=True)])
    assert obstacles(more, request(partition="main", nodes="4", time="5")) == []


@pytest.mark.parametrize(
    ("version", "parents", "is_barred"),
    [
        ("22.05.8", {"dev": "other", "other": "root"}, True),
        # Since 23.02 an account stands for those below it.
        ("23.02.1", {"dev": "other", "other": "root"}, False),
        ("23.02.1", {"dev": "physics", "physics": "root"}, True),
        # What is above may be hidden.
        ("23.02.1", {"dev": "physics"}, False),
        ("23.02.1", {}, False),
        ("", {}, True),
    ],
)
def test_an_account_may_be_admitted_by_the_one_above(version: str, parents: dict[str, str], is_barred: bool) -> None:
    settings = {**FACTS.settings, "SLURM_VERSION": version}
    facts = replace(FACTS, settings=settings, parents=parents)
    assert bool(obstacles(facts, request(partition="acc"))) is is_barred


@pytest.mark.parametrize("setting", ["associations,qos", "none", "", "(null)"])
def test_limits_that_slurm_does_not_enforce_stop_no_job(setting: str) -> None:
    facts = replace(FACTS, settings={"AccountingStorageEnforce": setting}, unanswered={"QOS": "no answer"})
    assert obstacles(facts, request(partition="partqos", qos="short", time="240")) == []
    assert obstacles(facts, request(partition="main", time="1441")), "the partition's own limit holds"
    assert limits_unknown(facts) == ""


def test_what_is_not_shown_is_not_unlimited() -> None:
    hidden = replace(
        FACTS, qos=[], unanswered={"QOS": "`sacctmgr show qos` ended with exit code 1: Connection refused"}
    )
    assert limits_unknown(hidden) == "QOS: Connection refused"
    slow = replace(FACTS, qos=[], unanswered={"accounts": "`sacctmgr show user` did not answer in 15 s"})
    assert limits_unknown(slow) == "accounts: did not answer in 15 s"
    assert limits_unknown(FACTS) == ""


def test_a_partition_counts_as_down_if_none_of_a_jobs_partitions_is_up() -> None:
    assert partitions_that_are_down(FACTS, request(partition="down")) == {"down": "DOWN"}
    assert partitions_that_are_down(FACTS, request(partition="down,main")) == {}
    assert partitions_that_are_down(FACTS, request(partition="nowhere")) == {}


def test_the_limit_of_a_job_that_names_none() -> None:
    assert longest_limit_min(FACTS, request(partition="main")) == 60
    assert longest_limit_min(FACTS, request(partition="partqos")) == 60
    assert longest_limit_min(FACTS, request(partition="main,big")) is None
    assert longest_limit_min(FACTS, request(partition="main", time="1:30:00")) == 90


def test_a_reservation_may_bring_another_partition_than_the_default() -> None:
    (main,) = parse_sinfo("main|main*|up|4|1-infinite|1-00:00:00|1:00:00|gpu:8|64|1|512000|idle\n")
    facts = replace(FACTS, partitions=[main])
    assert obstacles(facts, request(time="1441")) != []
    assert obstacles(facts, request(time="1441", reservation="mine")) == []


def test_a_queue_for_one_job_is_told() -> None:
    assert "QOS alone lets one job of a user into the queue" in limits_of(FACTS, "main", qos="alone").lone_job
    assert limits_of(FACTS, "main", qos="tiny").lone_job == ""
