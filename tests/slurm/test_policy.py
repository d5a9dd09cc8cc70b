"""What a cluster has and allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.policy import (
    Association,
    NodeGroup,
    Partition,
    Preemption,
    Qos,
    expedites_requeues,
    parse_associations,
    parse_qos,
    parse_sinfo,
    read_preemption,
    requeue_delay_s,
    return_in_words,
)


def group(num_nodes: int, gpus: int, gpu_type: str, cpus: int, memory_mb: int, state: str) -> NodeGroup:
    return NodeGroup(
        num_nodes=num_nodes,
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        cpus_per_node=cpus,
        threads_per_core=1,
        memory_per_node_mb=memory_mb,
        state=state,
    )


def test_recorded_cluster_of_mixed_nodes(recorded: Callable[[str], str]) -> None:
    main, mixed, closed = parse_sinfo(recorded("sinfo_mixed"))
    assert (main.num_nodes, main.gpus_per_node, main.cpus_per_node, main.is_default) == (4, 8, 16, True)
    assert mixed == Partition(
        name="mixed",
        is_default=False,
        state="up",
        default_time_min=None,
        groups=(group(2, 4, "a100", 64, 64000, "down~"), group(4, 8, "", 16, 64000, "idle~")),
    )
    assert closed.state == "down"


def test_nodes_that_differ_within_a_line_count_as_the_smallest() -> None:
    (partition,) = parse_sinfo("p|p|up|9|1-infinite|infinite|n/a|gpu:2|32+|1+|64000+|idle\n")
    assert partition.groups == (group(9, 2, "", 32, 64000, "idle"),)


def test_lines_of_a_site_are_left_out_and_nothing_but_such_lines_is_an_error(recorded: Callable[[str], str]) -> None:
    text = recorded("sinfo_mixed")
    assert parse_sinfo(f"Welcome to the lab\n{text}a|b\n") == parse_sinfo(text)
    with pytest.raises(ClusterError, match=r"sinfo printed no partition, but 'main\|up'"):
        parse_sinfo("main|up\n")


def test_associations_of_a_user() -> None:
    rows = ("dev|devcluster|dev||normal,urgent|normal|5-00:00:00|node=3||4||8|", "dev|devcluster|root|main|||||||||")
    assert parse_associations("\n".join(rows)) == [
        Association(
            cluster="devcluster",
            account="dev",
            is_default=True,
            qos=("normal", "urgent"),
            default_qos="normal",
            max_time_min=7200,
            most={"job": {"node": 3}, "user": {"job": 4, "submit": 8}},
        ),
        Association(cluster="devcluster", account="root", is_default=False, partition="main"),
    ]


def test_qos_with_limits_and_victims() -> None:
    urgent = (
        "urgent|1000|00:00:00|normal,free|cluster|1-00:00:00|DenyOnLimit,OverPartQOS|node=2|cpu=8,mem=1G|gres/gpu=4|||"
        "1|||2||"
    )
    expected = Qos(
        name="urgent",
        priority=1000,
        preempts=("normal", "free"),
        preempt_mode="cluster",
        max_time_min=1440,
        flags=("DenyOnLimit", "OverPartQOS"),
        least={"node": 2},
        most={"job": {"cpu": 8, "mem": 1024}, "user": {"gres/gpu": 4, "job": 1, "submit": 2}},
    )
    assert parse_qos(f"normal|0|00:00:15||requeue|||||||||||||\n{urgent}\n") == [
        Qos(name="normal", grace_s=15.0, preempt_mode="requeue"),
        expected,
    ]
    # 21.08 and newer have one more field.
    assert parse_qos(f"{urgent}|\n") == [expected]
    assert parse_qos(f"{urgent}|1.500000\n")[0].has_limit_factor


PARTITION = {"GraceTime": "40", "PreemptMode": "CANCEL"}


@pytest.mark.parametrize(
    ("kind", "cluster_mode", "mode", "outcome", "found_mode", "grace_s"),
    [
        ("preempt/qos", "CANCEL", "requeue", "requeued", "REQUEUE", 15.0),
        ("preempt/qos", "CANCEL", "cluster", "cancelled", "CANCEL", 15.0),
        ("preempt/qos", "REQUEUE", "", "requeued", "REQUEUE", 15.0),
        ("preempt/partition_prio", "REQUEUE", "CANCEL", "cancelled", "CANCEL", 40.0),
        ("preempt/partition_prio", "REQUEUE", "OFF", "never", "OFF", 0.0),
        ("preempt/partition_prio", "REQUEUE", "SUSPEND", "suspended", "SUSPEND", 0.0),
        ("preempt/partition_prio", "REQUEUE", "GANG,SUSPEND", "suspended", "GANG,SUSPEND", 40.0),
        ("preempt/none", "OFF", "requeue", "never", "OFF", 0.0),
    ],
)
def test_the_side_that_preempts_decides_what_becomes_of_a_job(
    kind: str, cluster_mode: str, mode: str, outcome: str, found_mode: str, grace_s: float
) -> None:
    settings = {"PreemptType": kind, "PreemptMode": cluster_mode, "KillWait": "30 sec"}
    qos = Qos(name="normal", grace_s=15.0, preempt_mode=mode)
    found = read_preemption(settings, qos=qos, partition=PARTITION | {"PreemptMode": mode})
    assert (found.outcome, found.mode, found.grace_s, found.kill_wait_s) == (outcome, found_mode, grace_s, 30.0)
    unknown, somebody = read_preemption(settings, qos=None, partition={}), kind not in ("preempt/none", "")
    assert (unknown.grace_s, unknown.mode) == ((None, cluster_mode) if somebody else (0.0, "OFF"))


@pytest.mark.parametrize(
    ("mode", "kill_wait_s", "words"),
    [
        ("REQUEUE", 5.0, "preemption requeues here: 15 s grace, then 5 s to end in"),
        ("REQUEUE", None, "preemption requeues here: 15 s grace"),
        (
            "CANCEL",
            30.0,
            "preemption cancels here (15 s grace, then 30 s to end in): requeued within that time, else another job "
            "takes over",
        ),
        ("SUSPEND", 5.0, "preemption suspends here: the run waits in memory and goes on in the same attempt"),
        ("OFF", 30.0, "nobody preempts here; 30 s to end in"),
        ("OFF", None, "nobody preempts here"),
    ],
)
def test_preemption_in_words(mode: str, kill_wait_s: float | None, words: str) -> None:
    assert Preemption(by="qos", mode=mode, grace_s=15.0, kill_wait_s=kill_wait_s).in_words == words


@pytest.mark.parametrize(
    ("version", "parameters", "expedites"),
    [
        ("26.05.5", "enable_expedited_requeue", True),
        ("25.11.0", "cloud_dns,enable_expedited_requeue", True),
        ("25.05.3", "enable_expedited_requeue", False),
        ("26.05.5", "(null)", False),
        ("", "enable_expedited_requeue", False),
    ],
)
def test_a_site_expedites_requeues_where_its_slurm_is_new_enough_and_it_has_enabled_that(
    version: str, parameters: str, expedites: bool
) -> None:
    assert expedites_requeues({"SLURM_VERSION": version, "SlurmctldParameters": parameters}) is expedites


@pytest.mark.parametrize(
    ("settings", "delay_s"),
    [
        ({}, 120.0),
        ({"AuthInfo": "cred_expire=5,socket=/run/munge.socket"}, 5.0),
        ({"AuthInfo": "cred_expire=5", "SchedulerParameters": "bf_interval=30,requeue_delay=7"}, 7.0),
    ],
)
def test_a_requeued_job_waits_for_what_the_site_has_set(settings: dict[str, str], delay_s: float) -> None:
    assert requeue_delay_s(settings) == delay_s


def test_the_words_of_a_return_name_an_expedited_one() -> None:
    assert return_in_words(None, is_expedited=True) == (
        "requeue, same job id, after a lost node at once, before all other jobs (expedited requeue); what happens on "
        "preemption is not known"
    )
