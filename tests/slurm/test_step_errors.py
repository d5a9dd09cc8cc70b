from __future__ import annotations

import pytest

from slurm_train.slurm.step_errors import violent_end


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("srun: error: node1: task 0: Exited with exit code 1\n", ""),
        ("srun: error: node2: tasks 2-3: Terminated\nsrun: error: node1: task 1: Killed\n", "rank 1 on node1: Killed"),
        ("srun: error: node2: tasks 2-3: Aborted (core dumped)\n", "ranks 2-3 on node2: Aborted (core dumped)"),
        (
            "srun: error: node2: task 3: User defined signal 2\nsrun: error: node1: tasks 0-1: Terminated\n",
            "rank 3 on node2: User defined signal 2",
        ),
        ("srun: error: Node failure on node3\nsrun: error: node1: task 0: Killed\n", "node failure on node3"),
        ("error: no answer from node2 within 25 s, when asked for /runs/a\n", "no answer from node2 within 25 s"),
    ],
)
def test_the_first_violent_end_is_named(text: str, words: str) -> None:
    assert violent_end(text) == words
