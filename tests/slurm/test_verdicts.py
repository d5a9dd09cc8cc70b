"""The texts are what sbatch 22.05.8 printed."""

from __future__ import annotations

import pytest

from slurm_train.slurm.verdicts import Refusal, TestVerdict, read_verdict


def test_an_accepted_script_has_an_estimated_start() -> None:
    text = "sbatch: Job 5 to start at 2026-11-20T09:38:00 using 4 processors on nodes node[1-4] in partition main\n"
    assert read_verdict(0, text) == TestVerdict(
        is_accepted=True, start="2026-11-20T09:38:00", nodelist="node[1-4]", partition="main"
    )


def test_a_heterogeneous_job_is_estimated_in_other_words() -> None:
    text = "sbatch: Job 34 to start at 2026-11-20T09:52:18 using 6 processors on node2\n"
    assert read_verdict(0, text) == TestVerdict(is_accepted=True, start="2026-11-20T09:52:18", nodelist="node2")


def test_an_accepted_script_without_an_estimate() -> None:
    assert read_verdict(0, "") == TestVerdict(is_accepted=True)


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
        ("sbatch: error: the site says no\n", Refusal.OTHER, "the site says no"),
        ("", Refusal.OTHER, "sbatch gave no reason"),
    ],
)
def test_refusals_are_told_apart(text: str, refusal: Refusal, message: str) -> None:
    assert read_verdict(1, text) == TestVerdict(is_accepted=False, refusal=refusal, message=message)


def test_every_refusal_says_what_to_do() -> None:
    assert all(len(refusal.value) > 20 for refusal in Refusal)
