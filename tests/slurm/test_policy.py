"""What a cluster has and allows; sbatch's texts are those of 22.05.8."""

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
    Refusal,
    TestVerdict,
    expedites_requeues,
    parse_associations,
    parse_qos,
    parse_sinfo,
    read_preemption,
    read_verdict,
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
        max_nodes=3,
        max_time_min=None,
        default_time_min=None,
        groups=(group(2, 4, "a100", 64, 64000, "down~"), group(4, 8, "", 16, 64000, "idle~")),
    )
    assert (closed.state, closed.max_time_min) == ("down", 60)


def test_nodes_that_differ_within_a_line_count_as_the_smallest() -> None:
    (partition,) = parse_sinfo("p|p|up|9|1-infinite|infinite|n/a|gpu:2|32+|1+|64000+|idle\n")
    assert partition.groups == (group(9, 2, "", 32, 64000, "idle"),)


def test_lines_of_a_site_are_left_out_and_nothing_but_such_lines_is_an_error(recorded: Callable[[str], str]) -> None:
    text = recorded("sinfo_mixed")
    assert parse_sinfo(f"Welcome to the lab\n{text}a|b\n") == parse_sinfo(text)
    with pytest.raises(ClusterError, match=r"sinfo printed no partition, but 'main\|up'"):
        parse_sinfo("main|up\n")


def test_associations_of_a_user() -> None:
    text = "dev|devcluster|dev||normal,urgent|normal\ndev|devcluster|root|main||\n"
    assert parse_associations(text) == [
        Association(
            cluster="devcluster", account="dev", is_default=True, qos=("normal", "urgent"), default_qos="normal"
        ),
        Association(cluster="devcluster", account="root", is_default=False, partition="main"),
    ]


def test_qos_with_limits_and_victims() -> None:
    text = "normal|0|00:00:15||requeue|\nurgent|1000|00:00:00|normal,free|cluster|1-00:00:00\n"
    assert parse_qos(text) == [
        Qos(name="normal", grace_s=15.0, preempt_mode="requeue"),
        Qos(name="urgent", priority=1000, preempts=("normal", "free"), preempt_mode="cluster", max_time_min=1440),
    ]


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


def test_an_accepted_script_has_an_estimated_start() -> None:
    text = "sbatch: Job 5 to start at 2026-11-20T09:38:00 using 4 processors on nodes node[1-4] in partition main\n"
    start = "2026-11-20T09:38:00"
    assert read_verdict(0, text) == TestVerdict(is_accepted=True, start=start, nodelist="node[1-4]", partition="main")
    heterogeneous = f"sbatch: Job 34 to start at {start} using 6 processors on node2\n"
    assert read_verdict(0, heterogeneous) == TestVerdict(is_accepted=True, start=start, nodelist="node2")
    newer = text.replace(" using", " a using")
    assert read_verdict(0, newer) == read_verdict(0, text), "as 26.05 prints it"
    assert read_verdict(0, f"{text}\nsbatch:   Preempts: 12,13\n").preempts and not read_verdict(0, text).preempts
    assert read_verdict(0, "") == TestVerdict(is_accepted=True)
    wrapped = read_verdict(0, "", f"Welcome to the lab\n{text}")
    assert wrapped == read_verdict(0, text), "a wrapper has put both streams into one"


def test_a_wrapper_that_loses_the_exit_code_makes_no_yes_of_a_no() -> None:
    verdict = read_verdict(0, "", "allocation failure: Invalid qos specification\n")
    assert (verdict.is_accepted, verdict.refusal) == (False, Refusal.QOS)


@pytest.mark.parametrize(
    ("text", "refusal", "message"),
    [
        (
            "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
            Refusal.PARTITION,
            "invalid partition specified: nope; Invalid partition name specified",
        ),
        ("allocation failure: Invalid qos specification\n", Refusal.QOS, "Invalid qos specification"),
        (
            "allocation failure: Invalid account or account/partition combination specified\n",
            Refusal.ACCOUNT,
            "Invalid account or account/partition combination specified",
        ),
        (
            "allocation failure: Requested node configuration is not available\n",
            Refusal.RESOURCES,
            "Requested node configuration is not available",
        ),
        (
            "sbatch: error: Invalid generic resource (gres) specification\n",
            Refusal.RESOURCES,
            "Invalid generic resource (gres) specification",
        ),
        ("allocation failure: Invalid node name specified\n", Refusal.NODE_NAME, "Invalid node name specified"),
        ("allocation failure: Invalid feature specification\n", Refusal.FEATURE, "Invalid feature specification"),
        (
            "allocation failure: Requested reservation is invalid\n",
            Refusal.RESERVATION,
            "Requested reservation is invalid",
        ),
        (
            "allocation failure: Requested time limit is invalid\n",
            Refusal.TIME_LIMIT,
            "Requested time limit is invalid",
        ),
        ("sbatch: error: Invalid --time specification\n", Refusal.TIME_LIMIT, "Invalid --time specification"),
        (
            "sbatch: unrecognized option '--bogus=3'\nTry \"sbatch --help\" for more information\n",
            Refusal.OPTION,
            "unrecognized option '--bogus=3'",
        ),
        (
            "allocation failure: Job violates accounting/QOS policy (user's size and/or time limits)\n",
            Refusal.POLICY,
            "Job violates accounting/QOS policy (user's size and/or time limits)",
        ),
        (
            "    [*] Too many simultaneous jobs in queue.\n        --> Max job limits for normal =  50 jobs\n",
            Refusal.POLICY,
            "[*] Too many simultaneous jobs in queue.; --> Max job limits for normal =  50 jobs",
        ),
        ("sbatch: error: the site says no\n", Refusal.OTHER, "the site says no"),
        ("", Refusal.OTHER, "sbatch gave no reason"),
    ],
)
def test_refusals_are_told_apart(text: str, refusal: Refusal, message: str) -> None:
    verdict = TestVerdict(is_accepted=False, refusal=refusal, message=message, advice=refusal.value)
    assert read_verdict(1, text) == verdict


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("You may use several accounts.\nName one:\n  lab-one, lab-two\nUse --account=NAME.", "cluster.account"),
        ("Please choose a QoS", "cluster.qos"),
        ("Wall time must not exceed 24 h", "cluster.time_limit_min"),
        ("You must request at least 1 GPU in this partition", "cluster.gpu_type"),
        ("memory per core is limited to 4 GB", "cluster.memory_gb_per_gpu"),
        ("use -C / --constraint to choose nodes", "cluster.constraint"),
        ("Reservation maint starts soon", "cluster.sbatch.reservation"),
        ("Licenses are missing", "cluster.sbatch.licenses"),
        ("Jobs must name a --wckey=PROJECT", "cluster.sbatch.wckey"),
        ("too many nodes", "cluster.nodes"),
        ("Use --nodes=1", "cluster.nodes"),
        ("Use -A <name>", "cluster.account"),
        ("add -C h100 to your command", "cluster.constraint"),
        ("a wckey is required", "cluster.sbatch.wckey"),
        ("Your budget is used up", "cluster.account"),
        ("You must specify --mem-per-cpu, max 3968 MB", "cluster.sbatch.mem-per-cpu"),
        ("a comment is required", "cluster.sbatch.comment"),
    ],
)
def test_words_of_a_site_point_at_settings(words: str, settings: str) -> None:
    for stdout, stderr in ((words, ""), ("", words)):
        error = f"{stderr}\nsbatch: error: Batch job submission failed: Unspecified error\n"
        verdict = read_verdict(1, error, stdout)
        assert settings in verdict.advice
        assert all(line.strip() in verdict.message for line in words.splitlines())


def test_options_that_exclude_each_other_do_not_point_at_whole_nodes() -> None:
    words = "sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.\n"
    advice = read_verdict(1, words).advice
    assert "cluster.memory_gb_per_gpu" in advice and "cluster.sbatch.mem-per-gpu" in advice
    assert "cluster.sbatch.exclusive" not in advice


def test_words_about_nothing_point_at_no_setting() -> None:
    assert read_verdict(1, "sbatch: error: come back tomorrow\n").advice == Refusal.OTHER.value


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
