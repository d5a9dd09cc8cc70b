"""`after=RUN`: a job that waits in Slurm's queue for the success of other runs."""

from __future__ import annotations

import json
import time

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell
from tests.support.run_facts import attempt


def words_for_sbatch(shell: Shell) -> list[str]:
    return (shell.slurm.said("submitted_words") or "").split()


@pytest.fixture
def before(shell: Shell) -> RunDirectory:
    """A run whose job waits."""
    run = shell.submits("+cluster=1x8 run.name=first")
    shell.slurm.queue("4711", "PENDING")
    shell.slurm.next_job(4712)
    return run


@pytest.mark.parametrize("named", ["4711", "first/{run.run_id},first"])
def test_the_job_waits_for_the_success_of_a_run_that_is_no_part_of_it(
    named: str, before: RunDirectory, shell: Shell
) -> None:
    without = shell.types("plan --json +cluster=2x8")
    run = shell.submits(f"+cluster=2x8 after={named.format(run=before)}")
    assert json.loads(without.out)["run"] == str(run.path), "the same run with and without"
    assert words_for_sbatch(shell)[:2] == ["--parsable", "--dependency=afterok:4711"]
    assert "dependency" not in run.submit_script.read_text(), "a requeue or `resume` waits for nothing"


def test_a_sweep_waits_and_is_waited_for(before: RunDirectory, shell: Shell) -> None:
    sweep = shell.submits_sweep("-m +cluster=1x8 seed=1,2 after=first")
    assert "--dependency=afterok:4711" in words_for_sbatch(shell)
    shell.slurm.queue("4712_0", "PENDING")
    shell.slurm.queue("4712_1", "PENDING")
    shell.slurm.next_job(4713)
    shell.submits(f"+cluster=2x8 after={sweep.sweep_id}")
    assert "--dependency=afterok:4712_0:4712_1" in words_for_sbatch(shell)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("+cluster=2x8 after=failed", "after=failed: failed/3f9a1c07 is not finished, and no job of it is queued"),
        ("plan +cluster=2x8 after=failed", "`resume 3f9a1c07` continues it"),
        ("+cluster=2x8 after=,", "after=gpt-stdlib,3f9a1c07"),
        ("after=failed", "but this run would start at once"),
        ("-m +cluster=2x8 launch=interactive seed=1,2 after=failed", "launch=interactive"),
        ("+cluster=2x8 after=failed cluster.sbatch.dependency=afterok:1", "exclude each other"),
    ],
)
def test_what_cannot_be_waited_for_is_refused_before_anything_is_written(words: str, text: str, shell: Shell) -> None:
    shell.has_run("failed", job_ids=("12",), ledger=attempt(0, reason="failed", action="stop"))
    there = shell.left()
    shell.refuses(text, words)
    assert shell.left() == there and not words_for_sbatch(shell)


def test_what_waits_for_a_run_goes_on_waiting_when_it_is_submitted_again(before: RunDirectory, shell: Shell) -> None:
    lines = attempt(0, job_id="4711", reason="failed", action="stop", time_unix_s=time.time() + 60)
    before.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shell.slurm.queue("4711", "FAILED")
    with (shell.slurm.folder / "squeue.out").open("a") as file:
        file.write("80|afterok:4711(failed),afterany:47(unfulfilled)\n81_[0-3]|afterok:4711\n82|afterok:47111\n83|\n")
    assert shell.types(f"resume {before.run_id}").code == 0
    assert shell.slurm.said("updated") == (
        "update JobId=80 Dependency=afterok:4712,afterany:47\nupdate JobId=81 Dependency=afterok:4712\n"
    )
