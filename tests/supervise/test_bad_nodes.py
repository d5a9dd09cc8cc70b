from __future__ import annotations

import pytest

from slurm_train.supervise.decision import last_bad_node, node_of


@pytest.mark.parametrize(
    ("cause", "node"),
    [
        ("rank 3 on node2: Killed", "node2"),
        ("ranks 0-3 on node2: Killed", "node2"),
        ("node failure on node2", "node2"),
        ("node failure on node[2-3]", ""),
        ("no answer from node2 within 25 s", "node2"),
        ("no answer from node2, node3 within 25 s", ""),
        ("srun itself was killed by signal 9", ""),
        ("", ""),
    ],
)
def test_the_node_of_a_cause(cause: str, node: str) -> None:
    assert node_of(cause) == node


FAILED = {"reason": "failed", "failed_on": "node2", "first_step": 4, "last_step": 4}


@pytest.mark.parametrize(
    ("ledger", "node"),
    [
        ([], ""),
        ([FAILED], "node2"),
        ([{**FAILED, "last_step": 5}], ""),
        ([{**FAILED, "reason": "preempted"}], ""),
        ([FAILED, {"attempt": 1}], ""),
        ([{**FAILED, "failed_on": "node1"}, FAILED], "node2"),
    ],
)
def test_a_node_is_suspected_after_a_fruitless_failure_on_it(ledger: list[dict[str, object]], node: str) -> None:
    assert last_bad_node(ledger) == node
