from __future__ import annotations

from slurm_train.slurm.accounting import Association, Qos, parse_associations, parse_qos


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


def test_lines_of_another_form_are_passed_over() -> None:
    assert parse_associations("You are not running a supported accounting_storage plugin\n\n||||| \n") == []
    assert parse_qos("a|b\n|0|00:00:00|||\n") == []
