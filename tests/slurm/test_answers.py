from __future__ import annotations

import pytest

from slurm_train.formatting import plain
from slurm_train.slurm.answers import Submitted, in_words, said, submitted_jobs

# From public reports.
STAMPEDE = """
-----------------------------------------------------------------
          Welcome to the Stampede3 Supercomputer
-----------------------------------------------------------------

--> Verifying valid submit host (login4)...OK
--> Checking available allocation (TG-AST090040)...OK
--> Verifying that quota for filesystem /work2/02661 is at  0.00% allocated...OK
"""


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        ("26\n", [Submitted("26")]),
        ("26;lab\n", [Submitted("26", "lab")]),
        ("  26  \n", [Submitted("26")]),
        ("26\r\n", [Submitted("26")]),
        ("\x1b[32m26\x1b[0m\n", [Submitted("26")]),
        ("Submitted batch job 26\n", [Submitted("26")]),
        ("Submitted batch job 26 on cluster lab\n", [Submitted("26", "lab")]),
        ("[INFO] submitted batch job 26.\n", [Submitted("26")]),
        ("Welcome, 3 messages\n26\nYour budget: 12 h\n", [Submitted("26")]),
        ("Submitted batch job 26\n26\n", [Submitted("26")]),
        (f"{STAMPEDE}Submitted batch job 26\n", [Submitted("26")]),
        ("sbatch: INFO: Note that 128 GB per node will require a node with more\n26\n", [Submitted("26")]),
        ("sbatch: This job will be charged to liu. Base Allocation:500,000.00 hours\n26\n", [Submitted("26")]),
        # The last one counts, where the queue does not say.
        ("1000\nchecked\n60060368\n", [Submitted("1000"), Submitted("60060368")]),
        ("Your job 26 is in the queue\n", []),
        ("", []),
    ],
)
def test_the_job_in_an_answer_of_sbatch(text: str, jobs: list[Submitted]) -> None:
    assert submitted_jobs(text) == jobs


def test_all_that_a_command_says_is_kept_stdout_first() -> None:
    stdout = "--> Verifying...FAILED\n\n    [*] Too many jobs.\n"
    stderr = "sbatch: error: lua: Name one:\nsbatch: error:   a, b\nsbatch: error: Batch job submission failed: No\n"
    lines = ["--> Verifying...FAILED", "    [*] Too many jobs.", "Name one:", "  a, b", "No"]
    assert said(stdout, stderr) == lines
    assert in_words(lines) == "".join(f"\n    {line}" for line in lines)
    assert in_words(lines[3:]) == "a, b; No"


def test_text_for_terminals_becomes_plain() -> None:
    assert plain("\x1b]0;title\x07\x1b[1;31mno\x1b[0m\r\nway\rout\tof") == "no\nway\nout     of"
