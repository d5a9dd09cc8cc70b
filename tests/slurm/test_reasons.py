from __future__ import annotations

import pytest

from slurm_train.slurm.records import explain_reason

REASONS = [
    ("", ""),
    ("JobHeldUser", "held by its user; `scontrol release` lets it go (JobHeldUser)"),
    (
        "BeginTime",
        "its earliest start has not come yet; after a requeue Slurm waits, by default for two minutes (BeginTime)",
    ),
    (
        "ReqNodeNotAvail, UnavailableNodes:node[1-2]",
        "a node that it needs is down, drained or reserved (ReqNodeNotAvail, UnavailableNodes:node[1-2])",
    ),
    (
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
        "nodes that it could have are down, drained or kept for other partitions",
    ),
    (
        "launch_failed_requeued_held",
        "could not be started on its nodes, so it is held; `scontrol release` tries again",
    ),
    ("No suitable topology unit found", "waits for enough free nodes on one switch or in one block"),
    ("Required nodes do not fit topology", "nodes that it names are not on one switch or in one block"),
    ("No_suitable_topology_unit_found_for_segment", "waits for enough free nodes on one switch or in one block"),
    ("RaisedSignal:9(Killed)", "was ended by a signal (RaisedSignal:9(Killed))"),
    ("QOSMaxJobsPerUserLimit", "the QOS's limit on running jobs per user is reached (QOSMaxJobsPerUserLimit)"),
    ("AssocGrpGRES", "your account's limit on GPUs of all jobs together is reached (AssocGrpGRES)"),
    (
        "AssocGrpCPURunMinutesLimit",
        "your account's limit on minutes of CPU cores of all jobs together is reached (AssocGrpCPURunMinutesLimit)",
    ),
    (
        "QOSMaxWallDurationPerJobLimit",
        "asks for more run time than the QOS allows for one job, so it will not start as it is "
        "(QOSMaxWallDurationPerJobLimit)",
    ),
    (
        "QOSMaxGRESPerNode",
        "asks for more GPUs than the QOS allows on one node, so it will not start as it is (QOSMaxGRESPerNode)",
    ),
    (
        "QOSMinCpuNotSatisfied",
        "asks for less than the CPU cores that the QOS wants (QOSMinCpuNotSatisfied)",
    ),
    ("MaxGRESPerAccount", "the account's limit on GPUs per account is reached (MaxGRESPerAccount)"),
    ("SomethingOfSlurm99", "Slurm says SomethingOfSlurm99"),
]


@pytest.mark.parametrize(("reason", "words"), REASONS)
def test_a_reason_in_words(reason: str, words: str) -> None:
    assert explain_reason(reason) == words
